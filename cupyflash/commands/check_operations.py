"""The operations beside attention that ``cupyflash check`` verifies and times.

Each is computed as a user would, on shapes of real models, and compared as the tests do: with
float64, an error being allowed twice that of the same formula in the same dtype, plus rounding
(:mod:`cupyflash.testing`). Tokens are compared one by one.
"""

import functools
from collections.abc import Callable, Iterator

from . import check_norms, check_projections, check_steps
from .check_problem import Maker, Operation


def operations(library: str, bfloat16: str) -> Iterator[tuple[str, Callable[[], Operation]]]:
    """(what it is, a function that makes it) for each; smaller problems where that is the CPU.

    Args:
        library: "numpy" or "cupy".
        bfloat16: what stands for it, where a library lacks it.
    """
    make = Maker(library)
    size = 1 if library == "cupy" else 8
    for maker, *arguments in (
        (check_norms.rms_norm, bfloat16, 1024 // size, 4096),
        (check_norms.rms_norm, "float16", 1024 // size, 4096, 0.1),
        (check_norms.layer_norm, "float16", 4096 // size, 768),
        (check_norms.group_norm, "float16", (8 // size, 320, 32, 32), "silu", "NCHW"),
        (check_norms.group_norm, "float32", (8 // size, 256, 32, 32), "gelu", "NHWC"),
        (check_projections.linear, "float16", 4, 768, 3072),
        (check_projections.linear, "float16", 512 // size, 768, 3072),
        (check_projections.linear, "float32", 64, 768, 768),
        (check_projections.mlp, "float16", 4, 768, 3072, False),
        (check_projections.mlp, bfloat16, 512 // size, 1024, 2816, True),
        (check_projections.qkv_projection, bfloat16, 2, (16, 4), 64),
        (check_projections.qkv_projection, bfloat16, 512 // size, (16, 4), 64),
        (check_steps.decode, bfloat16, (32, 8), 128, (100, 1000)),
        (check_steps.decode, "float16", (12, 12), 64, (30000 // size, 3)),
        (check_steps.diffusion, "float16", (32 // size, 16, 1024)),
        (check_steps.diffusion, "float32", (32 // size, 16, 1024)),
        (check_steps.sampling, 8, 50257),
        (check_steps.blocks, "float16", 2, (12, 64)),
    ):
        name = " ".join(map(str, (maker.__name__, *arguments)))
        yield name, functools.partial(maker, make, *arguments)
