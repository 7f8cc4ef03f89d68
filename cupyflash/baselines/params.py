"""Kernel arguments of the baselines: ctypes mirrors of ``cuda_src/common/baseline_params.cuh``."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class VectorAddParams(ctypes.Structure):
    """out = a + b."""

    _fields_ = [("a", c_void_p), ("b", c_void_p), ("out", c_void_p), ("size", c_int64)]


class BaselineAttentionParams(ctypes.Structure):
    """Attention of contiguous arrays."""

    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("scores", c_void_p),
        ("rows", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("causal", c_int32),
        ("scale", c_float),
    ]
