"""Kernel arguments of the steps of decoding: mirrors of ``cuda_src/common/decode_params.cuh``."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from ..attention.params import Strides


class EmbeddingParams(ctypes.Structure):
    """Rows of two tables, added."""

    _fields_ = [
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("token_weight", c_void_p),
        ("position_weight", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("columns", c_int32),
        ("vocabulary", c_int32),
        ("context", c_int32),
    ]


class CacheAppendParams(ctypes.Structure):
    """Keys and values into their places in a cache."""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("rows", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("columns", c_int32),
        ("batch", c_int32),
        ("max_length", c_int32),
    ]


class FlashDecodeParams(ctypes.Structure):
    """Attention of a few new tokens of each sequence to a cache, which they enter."""

    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("out", c_void_p),
        ("positions", c_void_p),
        ("parts", c_void_p),
        ("counters", c_void_p),
        ("q_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("k_cache_strides", Strides),
        ("v_cache_strides", Strides),
        ("out_strides", Strides),
        ("seqlen", c_int32),
        ("heads_kv", c_int32),
        ("group", c_int32),
        ("head_dim", c_int32),
        ("max_length", c_int32),
        ("splits", c_int32),
        ("scale_log2", c_float),
    ]


class SampleParams(ctypes.Structure):
    """Tokens from logits; the fields up to ``seed`` differ between equal-shaped calls."""

    _fields_ = [
        ("logits", c_void_p),
        ("positions", c_void_p),
        ("tokens", c_void_p),
        ("next_tokens", c_void_p),
        ("ends", c_void_p),
        ("seed", c_uint64),
        ("stride", c_int64),
        ("columns", c_int32),
        ("top_k", c_int32),
        ("top_p", c_uint32),
        ("limit", c_int32),
        ("scale", c_float),
    ]
