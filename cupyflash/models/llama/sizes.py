"""Shapes of published models, for random weights."""

import dataclasses

from .config import LlamaConfig
from .rope import Rope

_LLAMA3 = Rope(theta=500000.0, kind="llama3", factor=32.0, low=1.0, high=4.0, original=8192)
_1B = LlamaConfig(
    layers=16, width=2048, heads=32, heads_kv=8, head_dim=64, inner=8192, vocab_size=128256,
    max_positions=131072, eps=1e-5, rope=_LLAMA3, tied=True, eos_token_ids=(128001,),
    dtype="bfloat16",
)  # fmt: skip
SIZES = {
    "llama-3.2-1b": _1B,
    "llama-3.1-8b": dataclasses.replace(
        _1B, layers=32, width=4096, head_dim=128, inner=14336, tied=False,
        rope=_LLAMA3._replace(factor=8.0),
    ),
    "mistral-7b": LlamaConfig(
        layers=32, width=4096, heads=32, heads_kv=8, head_dim=128, inner=14336, vocab_size=32000,
        max_positions=32768, eps=1e-5, windows=(4096,) * 32, eos_token_ids=(2,), dtype="bfloat16",
    ),
    "qwen2.5-0.5b": LlamaConfig(
        layers=24, width=896, heads=14, heads_kv=2, head_dim=64, inner=4864, vocab_size=151936,
        max_positions=32768, rope=Rope(1e6), qkv_bias=True, tied=True, eos_token_ids=(151643,),
        dtype="bfloat16",
    ),
    "qwen3-0.6b": LlamaConfig(
        layers=28, width=1024, heads=16, heads_kv=8, head_dim=128, inner=3072, vocab_size=151936,
        max_positions=40960, rope=Rope(1e6), head_norms=True, tied=True,
        eos_token_ids=(151645, 151643), dtype="bfloat16",
    ),
}  # fmt: skip
