"""What of a problem decides which kernels can compute it."""

import enum
from typing import NamedTuple


class Access(enum.IntEnum):
    """How a kernel can read the tensors of a problem; each way includes those before it."""

    ELEMENT = 0
    VECTOR = 1  # every pointer and stride is a multiple of 16 bytes
    TENSOR_MAP = 2  # and no stride is zero, negative or too large for a tensor map


SHORT = 1536
# The tensor-core kernels compute tanh with an absolute error near 1e-7, which the softcap
# multiplies; beyond this one the error of a score would show in the weights of 16-bit results.
MAX_FAST_SOFTCAP = 4096.0


class Features(NamedTuple):
    """What a problem needs beside plain attention.

    Attributes:
        masked: some query does not see every key, because of a causal mask or a window.
        short: no sequence has more than `SHORT` queries.
        bias: 0 for none, 1 in the dtype of q, 2 bool, 3 float32.
        bias_boxes: a tensor map can describe the bias, which is in the dtype of q.
        wide_softcap: the softcap is above `MAX_FAST_SOFTCAP`.
    """

    softcap: bool = False
    alibi: bool = False
    masked: bool = False
    short: bool = False
    bias: int = 0
    dropout: bool = False
    bias_boxes: bool = False
    wide_softcap: bool = False
