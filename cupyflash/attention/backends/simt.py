"""Backend ``simt``: plain CUDA, any GPU, any strides and alignment, all three dtypes.

The readable backend, and the fallback for everything that the others cannot take.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import ITEM_SIZE, KernelConfig
from ...runtime.gpu import Capability
from ...runtime.structs import header
from ..problem import KEY_MASK, Access, Features
from .config import AttentionKernel, FlashBwdPreprocess, FlashBwdSinks

structs = header("attention/params.cuh")

MIN_CAPABILITY = (6, 0)
HEAD_DIMS = (32, 64, 128, 192, 256)  # sizes of the accumulators; others are rounded up
THREADS = header("attention/simt_tile.cuh").SIMT_THREADS
SWITCHES = ("softcap", "alibi", "bias", "dropout")  # of the features: template parameters
PACKED = ()  # packed sequences need no kernel of their own


@dataclasses.dataclass(frozen=True)
class FlashFwdSimt(AttentionKernel):
    """Forward: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/flash_fwd_simt.cu"
    params: ClassVar[type[structs.FlashFwdParams]] = structs.FlashFwdParams
    threads: ClassVar[int] = THREADS
    key_mask_header: ClassVar[str] = "attention/simt_key_mask.cuh"

    dtype: str
    head_dim: int
    block_m: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool


@dataclasses.dataclass(frozen=True)
class FlashBwdDkdvSimt(AttentionKernel):
    """Backward, dK and dV: a block computes ``block_n`` keys of one key head."""

    source: ClassVar[str] = "attention/flash_bwd_dkdv_simt.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
    tiles_of: ClassVar[str] = "k"
    threads: ClassVar[int] = THREADS
    key_mask_header: ClassVar[str] = "attention/simt_key_mask.cuh"

    dtype: str
    head_dim: int
    block_n: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool


@dataclasses.dataclass(frozen=True)
class FlashBwdDqSimt(AttentionKernel):
    """Backward, dQ: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/flash_bwd_dq_simt.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
    threads: ClassVar[int] = THREADS
    key_mask_header: ClassVar[str] = "attention/simt_key_mask.cuh"

    dtype: str
    head_dim: int
    block_m: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool


def supports(
    dtype: str,
    head_dim: int,
    access: Access,
    features: Features,
    capability: Capability,
    *,
    backward: bool,
) -> bool:
    """Whether this backend computes such a problem; access, features and pass do not matter."""
    return dtype in ITEM_SIZE and head_dim <= HEAD_DIMS[-1] and capability >= MIN_CAPABILITY


def forward(dtype: str, head_dim: int, features: Features, capability: Capability) -> FlashFwdSimt:
    """The forward kernel; the same for every GPU."""
    padded = _padded(head_dim)
    # 16-bit loads take a few registers more, and 64 rows x 256 columns leave none; nor do 64 x 128
    # for a bias or dropout.
    widest = 64 if features.bias or features.dropout else 256 if dtype == "float32" else 192
    block_m = 64 if padded <= widest else 32
    return FlashFwdSimt(dtype, padded, block_m, *features.with_bool_mask.switches)


def backward(
    dtype: str, head_dim: int, features: Features, capability: Capability
) -> tuple[FlashBwdPreprocess, FlashBwdDkdvSimt, FlashBwdDqSimt]:
    """The backward kernels in launch order; the same for every GPU."""
    padded, switches = _padded(head_dim), features.with_bool_mask.switches
    # Two accumulators of 64 rows x 192 columns are more than the registers of 128 threads; those of
    # 128 columns leave none for the derivative of the softcap, ALiBi, bias and dropout; nor does
    # one of 192 columns for the last two.
    block_n = 64 if padded <= (64 if any(switches) else 128) else 32
    block_m = 64 if padded <= (128 if features.bias or features.dropout else 256) else 32
    return (
        FlashBwdPreprocess(dtype, accum_dim=0),
        FlashBwdDkdvSimt(dtype, padded, block_n, *switches),
        FlashBwdDqSimt(dtype, padded, block_m, *switches),
    )


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every configuration that ``forward`` and ``backward`` can pick, each once."""
    if capability < MIN_CAPABILITY:
        return
    yield FlashBwdSinks()
    both = (False, True)
    for dtype in ITEM_SIZE:
        yield FlashBwdPreprocess(dtype, accum_dim=0)
        biases = [0, 1, 2, KEY_MASK + 1]
        if dtype != "float32":  # there it is the dtype of q
            biases += [3, KEY_MASK + 2]
        for head_dim, *values in itertools.product(HEAD_DIMS, both, both, biases, both):
            features = Features(**dict(zip(SWITCHES, values)))
            problem = (dtype, head_dim, features, capability)
            yield forward(*problem)
            yield from backward(*problem)[1:]


def _padded(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if size >= head_dim)
