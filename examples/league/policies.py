"""What people write by hand for language models, as data: sizes of models, and what each policy saves.

MaxText's policies (`layers/decoders.py`, August 2026) are `jax.checkpoint` round the scan's body, or each layer, with
`save_only_these_names`. AXLearn's default saves what matches `.*([qkvo]_proj|context)`, which are the same values as
one of MaxText's. Levanter's are whole layers, and nested scans. The other two are JAX's own.
"""

from dataclasses import dataclass

QKV = ("query_proj", "key_proj", "value_proj")
MLP = ("mlpwi_0", "mlpwi_1", "mlpwo")

NAMES = {
    "maxtext save_out_proj": ("out_proj",),
    "maxtext save_qkv_proj": QKV,
    "maxtext save_dot_except_mlp": (*QKV, "out_proj"),
    "maxtext save_dot_except_mlpwi": (*QKV, "out_proj", "mlpwo"),
    "maxtext save_dot_with_context_except_mlp, axlearn": (*QKV, "context", "out_proj"),
    "maxtext minimal": (*QKV, "out_proj", *MLP),
    "maxtext minimal_with_context": (*QKV, "context", "out_proj", *MLP),
}
"""Policies by the `checkpoint_name`s that they save beside what the region reads."""

WHOLE = "maxtext full, levanter True"
NESTED = "levanter nested"
JAX = ("dots_saveable", "dots_with_no_batch_dims_saveable")
PLAIN = "nothing"
POLICIES = (PLAIN, WHOLE, *NAMES, *JAX, NESTED)


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder's sizes, the batch it is trained with, how its layers run, and of how many experts its MLPs are.

    Over several devices heads, hidden layers and words are split `tensor` ways, and all weights over the rest (FSDP).
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    words: int
    batch: int
    length: int
    is_scanned: bool = True
    attention: str = "cudnn"
    experts: int = 0
    dtype: str = "bfloat16"
    tensor: int = 1


LLAMA_7B = dict(width=4096, layers=32, heads=32, kv_heads=32, head_width=128, mlp=11008, words=32_000)
SIZES = {
    "llama3.2-1b": Size(2048, 16, 32, 8, 64, 8192, 128_256, batch=4, length=4096),
    "llama2-7b": Size(**LLAMA_7B, batch=4, length=4096),
    "llama2-7b unscanned": Size(**LLAMA_7B, batch=4, length=4096, is_scanned=False),
    "llama3-8b": Size(4096, 32, 32, 8, 128, 14336, 128_256, batch=2, length=8192),
    "llama3-8b, fsdp x tensor": Size(4096, 32, 32, 8, 128, 14336, 128_256, batch=2, length=8192, tensor=2),
    "gemma2-9b": Size(3584, 42, 16, 8, 256, 14336, 256_128, batch=2, length=4096, attention="xla"),
    "mixture of 8": Size(2048, 16, 16, 8, 128, 4096, 32_000, batch=4, length=4096, experts=8),
    "toy": Size(64, 4, 4, 2, 16, 192, 2048, batch=2, length=64, attention="xla"),
}
