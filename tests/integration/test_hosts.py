"""Several hosts: each plans by itself and finds the same plan, and a plan of the first can be sent to the others."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from processes import quickly

ROOT = Path(__file__).parents[2]
HOST = """
import json, os, sys
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import jaxsub
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def loss(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
w, x = jnp.eye(16) * .9 + .01, np.linspace(0, 1, 1024 * 16, dtype=np.float32).reshape(1024, 16)
whole, split = (NamedSharding(mesh, P(*spec)) for spec in ((), ("d",)))
wx = [jax.make_array_from_callback(a.shape, s, lambda i, a=np.asarray(a): a[i]) for a, s in ((w, whole), (x, split))]
budget = jaxsub.measure(loss, *wx).temp_bytes // 2
own = jaxsub.sublinear(loss, budget=budget, cache=False, progress=False).plan(*wx)

# Send the plan of process 0 to all: first how long it is, then the bytes.
text = np.frombuffer(own.to_json().encode(), np.uint8)
length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
mine = np.resize(text, length) if jax.process_index() == 0 else np.zeros(length, np.uint8)
sent = jaxsub.Plan.from_json(bytes(np.asarray(multihost_utils.broadcast_one_to_all(mine), np.uint8)).decode())

step = jaxsub.jit(jax.value_and_grad(jaxsub.sublinear(loss, plan=sent)), out_shardings=whole)
value, gradient = step(*wx)
told = {
    "devices": [jax.device_count(), jax.local_device_count()],
    "budget": budget,
    "own": json.loads(own.to_json()),
    "sent": json.loads(sent.to_json()),
    "regions": sent.n_regions,
    "temp_bytes": sent.measurement.temp_bytes,
    "error": float(jnp.abs(np.asarray(gradient) - jax.grad(loss)(w, jnp.asarray(x))).max()),
}
print("TOLD " + json.dumps(told), flush=True)
multihost_utils.sync_global_devices("done")
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_on_two_hosts():
    """Run `HOST` in two processes of two CPU devices each, and return what each told."""
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": "/nonexistent", **quickly(2)}
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", textwrap.dedent(HOST), address]
    hosts = [
        subprocess.Popen([*command, str(i)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=300) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    return [json.loads(out.split("TOLD ", 1)[1]) for out, _ in outputs]


def test_two_hosts_find_one_plan():
    """Both processes find the same plan to the byte, but for how long its compile took; the one sent is process 0's."""
    first, second = run_on_two_hosts()
    assert first["devices"] == second["devices"] == [4, 2]
    assert first["own"] == first["sent"] == second["sent"]
    for told in (first, second):
        told["own"]["measurement"].pop("compile_seconds")
        assert told["regions"] > 0
        assert told["temp_bytes"] <= told["budget"]
        assert told["error"] < 1e-6
    assert first["own"] == second["own"]
