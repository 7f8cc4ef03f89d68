"""The kernels of the backend ``simt``, and which ones a problem has."""

import dataclasses
from typing import ClassVar

from ....runtime.structs import header
from ..capture_gradients import CapturesKernel
from ..kernels import AttentionKernel, FlashBwdPreprocess
from ..kind import Features, Kind

_postprocess = header("attention/simt/flash_bwd_postprocess_simt.cu")

HEAD_DIMS = (32, 64, 128, 256)  # sizes of the accumulators; others are rounded up
THREADS = header("attention/simt/tile.cuh").SIMT_THREADS


@dataclasses.dataclass(frozen=True)
class FlashFwdSimt(AttentionKernel):
    """Forward: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/simt/flash_fwd_simt.cu"
    threads: ClassVar[int] = THREADS

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool


@dataclasses.dataclass(frozen=True)
class FlashBwdSimt(AttentionKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/simt/flash_bwd_simt.cu"
    tiles_of: ClassVar[str] = "k"
    threads: ClassVar[int] = THREADS

    dtype: str
    head_dim: int
    block_n: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessSimt(AttentionKernel):
    """Backward, last: dQ from its float32 accumulator."""

    source: ClassVar[str] = "attention/simt/flash_bwd_postprocess_simt.cu"
    threads: ClassVar[int] = _postprocess.THREADS
    block_m: ClassVar[int] = _postprocess.BLOCK_M

    dtype: str
    head_dim: int


@dataclasses.dataclass(frozen=True)
class FlashBwdCapturesSimt(CapturesKernel):
    """Backward: the gradients of captures; a block owns ``block_n`` keys of a key head."""

    source: ClassVar[str] = "attention/simt/flash_bwd_captures_simt.cu"
    threads: ClassVar[int] = THREADS

    dtype: str
    block_m: int
    block_n: int
    bias: int
    dropout: bool


def forward_kernel(kind: Kind) -> FlashFwdSimt:
    """The forward kernel; the same for every GPU."""
    features, padded = kind.features, padded_head_dim(kind.head_dim)
    tile = (128, 64) if padded < 128 else (64, 128) if padded == 128 else (64, 64)
    several = features.softcap and features.alibi
    if features.bias or features.dropout or features.text or several:  # they need registers
        tile = (64, 64) if padded <= 128 else (64, 32)
    switches = features.with_bool_mask.switches
    return FlashFwdSimt(kind.dtype, padded, *tile, *switches, text=features.text)


def backward_kernels(
    kind: Kind,
) -> tuple[FlashBwdPreprocess, FlashBwdSimt, FlashBwdPostprocessSimt]:
    """The backward kernels in launch order; the same for every GPU."""
    dtype, head_dim, features, _ = kind
    padded = backward_head_dim(dtype, head_dim, features)
    switches = features.with_bool_mask.switches
    # Two accumulators of 64 keys x 128 columns leave no registers for the other tiles; those of 64
    # columns leave none for the weights that softcap and dropout keep.
    widest = 32 if features.softcap or features.dropout or features.text else 64
    block_n = 64 if padded <= widest else 32
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        FlashBwdSimt(dtype, padded, block_n, *switches, text=features.text),
        FlashBwdPostprocessSimt(dtype, padded),
    )


def captures_kernel(kind: Kind) -> FlashBwdCapturesSimt:
    """The kernel for a problem whose captures learn; the same for every GPU and head dim.

    A key mask alone is what the other kernels of the pass take it for: `Features.bias` says so.
    """
    features = kind.features
    return FlashBwdCapturesSimt(
        kind.dtype, 64, 64, features.bias, features.dropout, text=features.text
    )


def backward_head_dim(dtype: str, head_dim: int, features: Features) -> int:
    """The head dim of the accumulators of the backward."""
    # The kernels for 32 columns have no registers for the weights that dropout keeps, nor for a
    # softcap beside a bias (the bias gradient needs its derivatives) or beside the conversions of a
    # 16-bit dtype.
    crowded = features.bias or dtype != "float32"
    softcap = features.softcap or features.writes_scores  # it has a derivative, too
    narrowest = 64 if softcap and crowded or features.dropout else 32
    return max(narrowest, padded_head_dim(head_dim))


def padded_head_dim(head_dim: int) -> int:
    """The size of the accumulators for this head dim."""
    return next(size for size in HEAD_DIMS if size >= head_dim)
