"""The parts that the forward and the backward of the backend ``sm90`` share."""

from ....runtime.structs import header
from ..problem import BIAS_KINDS, KEY_MASK, Features

WARPGROUP = header("ptx/warpgroup.cuh").WARPGROUP  # threads
# The kinds of bias of which TMA loads tiles, without and with a key mask.
BIAS_BY_TMA = (
    BIAS_KINDS.index("DTYPE_OF_Q_BY_TMA"),
    BIAS_KINDS.index("KEY_MASK_AND_DTYPE_OF_Q_BY_TMA"),
)
# (head dim, that of v and out) of the kernels that take v as narrow as it is.
NARROW_V = ((192, 128),)


def narrow_head_dim(head_dim: int, features: Features) -> int | None:
    """The head dim of the kernels that take v as narrow as it is, or None."""
    if any(features.switches):
        return None
    found = (size for size, v in NARROW_V if v == features.head_dim_v and v < head_dim <= size)
    return next(found, None)


def bias_kind(features: Features) -> int:
    """The kind of bias of kernels that have TMA load it where it can."""
    return BIAS_BY_TMA[features.bias >= KEY_MASK] if features.bias_by_tma else features.bias


def shared_columns(width: int) -> int:
    """Columns of a tile in shared memory: one TMA tile of 32, or whole ones of 64."""
    return 32 if width <= 32 else -(-width // 64) * 64
