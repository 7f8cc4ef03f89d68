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
from .config import AttentionKernel, FlashBwdPreprocess, FlashBwdSinks, Tile

structs = header("attention/params.cuh")
_postprocess = header("attention/flash_bwd_postprocess_simt.cu")

MIN_CAPABILITY = (6, 0)
HEAD_DIMS = (32, 64, 128, 256)  # sizes of the accumulators; others are rounded up
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
    block_n: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool


@dataclasses.dataclass(frozen=True)
class FlashBwdSimt(AttentionKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/flash_bwd_simt.cu"
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
class FlashBwdPostprocessSimt(AttentionKernel):
    """Backward, last: dQ from its float32 accumulator."""

    source: ClassVar[str] = "attention/flash_bwd_postprocess_simt.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
    threads: ClassVar[int] = _postprocess.THREADS
    block_m: ClassVar[int] = _postprocess.BLOCK_M

    dtype: str
    head_dim: int


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
    tile = (128, 64) if padded < 128 else (64, 128) if padded == 128 else (64, 64)
    several = features.softcap and features.alibi
    if features.bias or features.dropout or several:  # they need registers
        tile = (64, 64) if padded <= 128 else (64, 32)
    return FlashFwdSimt(dtype, padded, *tile, *features.with_bool_mask.switches)


def backward(
    dtype: str, head_dim: int, features: Features, capability: Capability
) -> tuple[FlashBwdPreprocess, FlashBwdSimt, FlashBwdPostprocessSimt]:
    """The backward kernels in launch order; the same for every GPU."""
    padded = backward_head_dim(dtype, head_dim, features)
    switches = features.with_bool_mask.switches
    # Two accumulators of 64 keys x 128 columns leave no registers for the other tiles; those of 64
    # columns leave none for the weights that softcap and dropout keep.
    widest = 32 if features.softcap or features.dropout else 64
    block_n = 64 if padded <= widest else 32
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        FlashBwdSimt(dtype, padded, block_n, *switches),
        FlashBwdPostprocessSimt(dtype, padded),
    )


def backward_head_dim(dtype: str, head_dim: int, features: Features) -> int:
    """The head dim of the accumulators of the backward."""
    # With 32 columns the derivatives of the softcap do not fit, which a bias gradient needs, nor do
    # the weights that dropout keeps, or a softcap beside the conversions of a 16-bit dtype.
    crowded = features.bias or dtype != "float32"
    narrowest = 64 if features.softcap and crowded or features.dropout else 32
    return max(narrowest, _padded(head_dim))


def candidates(
    head_dim: int, features: Features, capability: Capability, *, backward: bool
) -> tuple[Tile, ...]:
    """None: the kernels divide their threads for these tiles."""
    return ()


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every configuration that ``forward`` and ``backward`` can pick, each once."""
    if capability < MIN_CAPABILITY:
        return
    yield FlashBwdSinks()
    both = (False, True)
    for dtype in ITEM_SIZE:
        for head_dim in HEAD_DIMS:
            yield FlashBwdPreprocess(dtype, accum_dim=head_dim)
            yield FlashBwdPostprocessSimt(dtype, head_dim)
        biases = [0, 1, 2, KEY_MASK + 1]
        if dtype != "float32":  # there it is the dtype of q
            biases += [3, KEY_MASK + 2]
        for head_dim, *values in itertools.product(HEAD_DIMS, both, both, biases, both):
            features = Features(**dict(zip(SWITCHES, values)))
            problem = (dtype, head_dim, features, capability)
            yield forward(*problem)
            yield backward(*problem)[1]


def _padded(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if size >= head_dim)
