"""The rungs of the ladder: attention from the scores in memory to the newest kernels.

Each is a `Provider`, from the first idea to the last; those of other libraries are at the end.
"""

import functools
from collections.abc import Callable

from bench.lib.providers import PROVIDERS, Provider, ours

BASELINES = {  # rung: function of cupyflash.ops.baselines
    "naive": "naive_attention",
    "fused": "fused_attention",
    "flash-attention-1": "flash_attention_1",
}
QUADRATIC = ("naive", "sdpa-math")  # their memory grows as the square of the length
FLOAT32_ONLY = ("cupyflash-fp16x3",)


def _load_baseline(name: str) -> Callable:
    from cupyflash.ops import baselines

    function = getattr(baselines, BASELINES[name])
    return lambda q, k, v, causal: function(q, k, v, causal=causal)


def _load_triton() -> Callable:
    from bench.attention.triton_attention import attention

    return lambda q, k, v, causal: attention(q, k, v, causal)[0]


RUNGS = {name: Provider(name, functools.partial(_load_baseline, name)) for name in BASELINES} | {
    provider.name: provider
    for provider in (
        PROVIDERS["cupyflash-simt"],
        ours("cupyflash-fp16x3", "fp16x3"),
        PROVIDERS["cupyflash-sm80"],
        PROVIDERS["cupyflash-sm90"],
        Provider("triton", _load_triton),
        *(PROVIDERS[f"sdpa-{name}"] for name in ("flash", "cudnn", "efficient", "math")),
    )
}
OURS = (*BASELINES, "triton", *(name for name in RUNGS if name.startswith("cupyflash")))


def of_dtype(dtype: str) -> list[str]:
    """The rungs of a dtype; one that cannot do a problem raises its own error."""
    return [name for name in RUNGS if dtype == "float32" or name not in FLOAT32_ONLY]
