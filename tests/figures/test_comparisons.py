"""What the examples' comparisons rest on: records that are resumed, peers as their sources describe them, tables."""

import importlib
import json
import sys
from itertools import combinations, product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from matplotlib.figure import Figure

import jaxsub
from jaxsub.core.measurement import Measurement

pytestmark = pytest.mark.once
EXAMPLES = Path(jaxsub.__file__).parent.parent / "examples"
sys.path[:0] = [str(EXAMPLES / folder) for folder in ("", "paper", "peers", "league", "benchmarks")]

import batches  # noqa: E402
import by_hand as hands  # noqa: E402
import drawing  # noqa: E402
import frontiers  # noqa: E402
import peers  # noqa: E402
import records  # noqa: E402
from measuring import by_hand, traced_flops, within  # noqa: E402

FIGURES = {"paper": ("lstm", "resnet", "speed", "recursion"), "peers": ("frontiers", "batches")}
STORED = [path for folder in FIGURES for path in sorted((EXAMPLES / "results" / folder).glob("*.json"))]


def cells_that_count(calls, keys):
    return [records.Cell(key, lambda key=key: calls.append(key) or {"bytes": 1}) for key in keys]


def test_a_stopped_run_goes_on_where_it_stood(tmp_path):
    """Cells in the file are not measured again, unless other versions measured them."""
    path, calls = tmp_path / "figure.json", []
    records.fill(path, cells_that_count(calls, "ab"))
    assert set(records.fill(path, cells_that_count(calls, "abc"))) == set("abc")
    assert calls == ["a", "b", "c"]
    stored = records.load(path)
    stored["b"]["versions"]["jax"] = "0.1"
    path.write_text(json.dumps(stored), "utf-8")
    records.fill(path, cells_that_count(calls, "abc"))
    assert calls == ["a", "b", "c", "b"]
    records.fill(path, cells_that_count(calls, "ac"), is_anew=True)
    assert calls[4:] == ["a", "c"]


def test_no_cell_is_begun_after_the_minutes_given(tmp_path):
    """What is left out is measured by the next run."""
    calls = []
    assert records.fill(tmp_path / "figure.json", cells_that_count(calls, "ab"), minutes=0) == {}
    assert calls == []


def test_cells_are_picked_by_how_their_keys_begin():
    """All of them where nothing is asked for."""
    cells = cells_that_count([], ("cpu/vgg/plain", "cpu/unet/plain", "h100/vgg/plain"))
    assert [cell.key for cell in records.picked(cells, ["cpu/vgg", "h100"])] == ["cpu/vgg/plain", "h100/vgg/plain"]
    assert len(records.picked(cells, ())) == 3


def test_every_two_choices_of_a_decoder_meet():
    """Of the decoders that are compared with plans by hand: depths, words, scan or not, dtype and what a loss adds."""
    choices = ("layers", "words", "is_scanned", "dtype", "is_tied", "smoothing", "z_loss", "is_masked")
    for a, b in combinations(choices, 2):
        met = {(getattr(d, a), getattr(d, b)) for d in hands.DECODERS}
        assert met == set(product(*({getattr(d, name) for d in hands.DECODERS} for name in (a, b)))), (a, b)


def test_a_cell_is_behind_by_hand_if_it_is_refused_or_recomputes_more():
    """By more than half a percent; the table says it in bold."""
    cells = {"equal": {"flops": 1.0}, "less": {"flops": 0.9}, "more": {"flops": 1.006}, "refused": {"least_bytes": 9}}
    measured = {key: {"by_hand_bytes": 8, "by_hand_flops": 1.0, "bytes": 8, "planner": "", **cell}
                for key, cell in cells.items()}  # fmt: skip
    assert [fault.split(":")[0] for fault in hands.behind(measured)] == ["more", "refused"]


@pytest.mark.parametrize("n_blocks", [9, 16, 32])
def test_nothing_is_written_by_hand_twice(n_blocks):
    """Labels are keys of results; wrapping changes no gradient."""
    ways = list(by_hand(n_blocks, is_convolutional=False))
    assert len({way.label for way in ways}) == len(ways) >= 8


@pytest.mark.parametrize("length", [6, 16])
def test_the_nested_scan_is_a_scan(length):
    """The same value and gradient, in loops of nearly the root of its length, each step executed at most thrice."""
    x, ws = jnp.ones(4), jnp.linspace(0.1, 1, length * 16).reshape(length, 4, 4) / 4

    def loss(scan):
        return lambda ws: jnp.sum(scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    plain, nested = loss(jax.lax.scan), loss(peers.nested_scan)
    for a, b in zip(jax.value_and_grad(plain)(ws), jax.value_and_grad(nested)(ws), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert 1.4 < traced_flops(nested, (ws,)) / traced_flops(plain, (ws,)) < 1.7


def test_products_of_a_compiled_text_are_counted():
    """2 x elements x contracted length, batched or not."""
    text = """
      %a.1 = bf16[8,128,64]{2,1,0} parameter(0)
      ROOT %dot.2 = f32[8,128,32]{2,1,0} dot(%a.1, %b.1), lhs_batch_dims={0}, lhs_contracting_dims={2}
      %c = f32[10,20]{1,0} parameter(1)
      %dot.3.remat = f32[20,5]{1,0} dot(%c, %d), lhs_contracting_dims={0}, rhs_contracting_dims={0}
    """
    assert peers.dot_flops(text) == 2 * 8 * 128 * 32 * 64 + 2 * 20 * 5 * 10


@pytest.mark.parametrize("planner", [peers.EqualFlops(4), peers.Knapsack(0.5)], ids=["Alpa", "PyTorch"])
def test_peers_plan_the_same_function(planner):
    """Gradients stay what they are; nothing of ours, no barrier, is left in a peer's plan."""
    loss, args = zoo.BY_NAME["chain"].toy()
    plan = jaxsub.plan(loss, *args, planner=planner, verify=False, progress=False)
    assert plan.n_regions
    assert not plan.barriers
    if isinstance(planner, peers.EqualFlops):
        assert plan.n_regions == planner.layers - 1  # the last one is not wrapped
    ours = jax.grad(jaxsub.sublinear(loss, plan=plan))(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.grad(loss)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_peers_that_are_ahead_are_answered_in_their_own_memory():
    """Between two budgets of ours a peer may seem ahead: there we are asked for as much as it needs, no less."""
    network = frontiers.QUICK[0]
    name = f"cpu/{network.name}"
    found = {"peer/plain": (1e6, 1e3), "jaxsub/0.2": (2e5, 1.2e3), "jaxsub/0.5": (5e5, 1e3),
             "peer/between": (300_010, 1.1e3), "peer/worse": (4e5, 1.3e3), "peer/below": (1e5, 2e3)}  # fmt: skip
    measured = {f"{name}/{key}": {"bytes": n_bytes, "flops": flops} for key, (n_bytes, flops) in found.items()}
    asked = [cell.key for cell in frontiers.answers(measured, network, "cpu")]
    assert asked == [f"{name}/jaxsub/0.3001", f"{name}/jaxsub/0.1"]
    assert frontiers.ahead(*frontiers.relative(measured, name)) == ["between", "below"]
    assert list(frontiers.answers({}, network, "cpu")) == []


@pytest.mark.parametrize("bytes_at", [lambda n: 100 + 7 * n, lambda n: 100 + 7 * n + n % 5], ids=["line", "crooked"])
def test_the_largest_batch_fits_and_the_next_does_not(bytes_at, monkeypatch):
    """Found with few batches tried, none compiled twice; where none fits, none is told."""
    network, compiled = batches.NETWORKS[0].resized(batch=16), []

    def measured(network, way, batch, plan):
        compiled.append(batch)
        return Measurement(bytes_at(batch), 0, 0, 0, 1.0 * batch, 0.0, "cpu"), plan

    monkeypatch.setattr(batches, "measured", measured)
    found = batches.searched(network, batches.WAYS[0], 1000)
    assert bytes_at(found["batch"]) == found["bytes"] <= 1000 < bytes_at(found["batch"] + 1)
    assert len(compiled) == len(set(compiled)) == len(found["tried"]) <= 7
    assert batches.searched(network, batches.WAYS[0], 50)["batch"] == 0


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_tables_and_pictures_need_only_the_results(path, capsys, tmp_path):
    """Of every figure whose results are kept, in whatever state they are; of peers' pictures, seconds each, two."""
    module, stored = importlib.import_module(path.stem), records.load(path)
    module.table(stored)
    assert capsys.readouterr().out
    if path.stem == "frontiers":
        networks = sorted({key.split("/")[1] for key in stored if "/jaxsub/" in key})
        module.draw({key: found for key, found in stored.items() if key.split("/")[1] in networks[::8]}, tmp_path)
        assert len(list(tmp_path.glob("*.png"))) == len(networks[::8])
    else:
        module.draw(stored, tmp_path / "picture.png")
        assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("path", [*STORED, EXAMPLES / "results" / "league" / "league.json"], ids=lambda path: path.stem)
def test_labels_neither_overprint_nor_leave_the_picture(path, monkeypatch, tmp_path):
    """Of every picture of results, and labels name points beyond the axes; of peers' pictures, two."""
    module, stored, faults, labels = importlib.import_module(path.stem), records.load(path), [], []

    def look_over(figure, _):
        faults.extend(drawing.overprinting(figure))
        labels.extend(text.get_text() for ax in figure.axes for text in ax.texts)

    monkeypatch.setattr(module, "save", look_over)
    wanted = [key for key in stored if path.stem != "frontiers" or key.split("/")[1] in ("lstm", "vgg-19")]
    module.draw({key: stored[key] for key in wanted}, tmp_path)
    assert faults == []
    if path.stem == "frontiers":
        assert "recursive halving, at 1.89: above" in labels


def test_labels_that_overprint_are_found():
    """Two labels in one place, and one outside of the picture, are."""
    ax = Figure().subplots()
    for place in ((0.5, 0.5), (0.5, 0.5), (9.0, 0.5)):
        ax.text(*place, "a label")
    assert drawing.overprinting(ax.figure) == ["a label: over a label", "a label: leaves the picture"]


def test_a_strategy_looks_the_same_in_all_pictures():
    """What pictures call the same strategy has one colour and marker; those that meet are told apart."""
    assert drawing.look("jaxsub, 1/8 of plain") == drawing.look("jaxsub") == drawing.look("√n memory")
    assert drawing.look("plain") == drawing.look("no optimization") == drawing.look("no checkpoints")
    assert drawing.look("sublinear plan") == drawing.look("Chen et al., greedy")
    together = ("jaxsub", "plain", "Chen et al., greedy", "every 4", "every 4, nested", "dots_saveable",
                "Alpa, 3 layers", "PyTorch, 25% saved", "XLA's own, in 20%")  # fmt: skip
    assert len({drawing.look(name)["color"] for name in together}) == len(together)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_breaks_a_promise_is_told(path):
    """What was measured keeps them; with ten times the memory it would not."""
    module, stored = importlib.import_module(path.stem), records.load(path)
    if path.stem != "frontiers":  # where a peer is ahead the table says so
        assert list(module.broken(stored)) == []
    larger = {key: _scaled(figures, 10) if _is_ours(key) else figures for key, figures in stored.items()}
    assert list(module.broken(larger))


def _is_ours(key):
    return key.endswith("sublinear plan") or any(part in key for part in ("jaxsub", " of ", "recursion", "resnet/"))


def _scaled(figures, times):
    """Figures of a plan that needs so many times the memory, or fits so many times fewer images."""
    changed = {what: times * figures[what] for what in ("bytes", "units") if isinstance(figures.get(what), int | float)}
    if "batch" in figures:
        changed["batch"] = figures["batch"] // times
    if "seconds" in figures:
        changed["bytes"] = {label: n * times ** (label != "plain") for label, n in figures["bytes"].items()}
    return figures | changed


def test_a_table_is_kept_as_it_is_printed(tmp_path, capsys):
    """The file beside the results says what the command says."""
    records.keep_table(lambda measured: print("\nbytes", *measured), {"a": {}, "b": {}}, tmp_path / "table.txt")
    assert capsys.readouterr().out == "\nbytes a b\n"
    assert (tmp_path / "table.txt").read_text("utf-8") == "bytes a b\n"


def test_a_broken_promise_ends_a_check(capsys):
    """With its words; elsewhere it is only printed."""
    sentences = records.over_budget("cpu/50/jaxsub", 3 * 2**20, 2**20)
    records.tell(sentences, is_check=False)
    assert "BROKEN: cpu/50/jaxsub: 3.0 MiB under a budget of 1.0 MiB" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"BROKEN: cpu/50/jaxsub: 3\.0 MiB under a budget of 1\.0 MiB"):
        records.tell(sentences, is_check=True)
    records.tell([], is_check=True)
    assert records.over_budget("cpu/50/jaxsub", 2**20, 2**20) == []


def test_layers_of_equal_flops_are_found_whatever_the_stages_weigh():
    """Where no division is within 10 % of equal, the nearest to it is taken; bytes decide between those alike."""
    flops, crossing = np.array([5.0, 1, 1, 5, 1, 1]), [9.0, 9, 1, 9, 9, 0]
    assert peers._divided(flops, crossing, 2, 7) == [3, 6]
    assert peers._divided(flops, crossing, 2, 6.9) == []


def test_flops_of_a_plan_in_slices_are_those_of_all_slices():
    """A compiler counts a loop's body once: the gradient of a loss in slices that recompute nothing is as much work."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    args = [jax.ShapeDtypeStruct((64, 64), "float32")] * 12, jax.ShapeDtypeStruct((8192, 64), "float32")
    found = within(loss, args, 2**20)
    plain = {"flops": jaxsub.measure(loss, *args).flops}
    assert found["flops"] < plain["flops"] / 4
    assert frontiers.flops_ratio(found, plain) == 1
