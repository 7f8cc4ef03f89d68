"""Kernel arguments of a decode stack: mirrors of ``cuda_src/common/transformer_params.cuh``."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p

MAX_BATCH = 8  # as in transformer_params.cuh
MAX_LAYERS = 64


class BlockPointers(ctypes.Structure):
    """The weights of a block."""

    _fields_ = [
        ("ln1_weight", c_void_p),
        ("ln1_bias", c_void_p),
        ("qkv_weight", c_void_p),
        ("qkv_bias", c_void_p),
        ("proj_weight", c_void_p),
        ("proj_bias", c_void_p),
        ("ln2_weight", c_void_p),
        ("ln2_bias", c_void_p),
        ("up_weight", c_void_p),
        ("up_bias", c_void_p),
        ("down_weight", c_void_p),
        ("down_bias", c_void_p),
    ]


class CacheStrides(ctypes.Structure):
    """Element strides of a cache."""

    _fields_ = [("layer", c_int64), ("batch", c_int64), ("row", c_int64), ("head", c_int64)]


class DecodeStackParams(ctypes.Structure):
    """One token of each sequence through a stack of blocks."""

    _fields_ = [
        ("x", c_void_p),
        ("tokens", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("lengths", c_void_p),
        ("out", c_void_p),
        ("logits", c_void_p),
        ("next_tokens", c_void_p),
        ("layers", c_void_p),
        ("final_weight", c_void_p),
        ("final_bias", c_void_p),
        ("head_weight", c_void_p),
        ("token_embedding", c_void_p),
        ("position_embedding", c_void_p),
        ("barrier", c_void_p),
        ("residual", c_void_p),
        ("hidden", c_void_p),
        ("attended", c_void_p),
        ("qkv", c_void_p),
        ("segment_sums", c_void_p),
        ("best", c_void_p),
        ("launches", c_void_p),
        ("k_strides", CacheStrides),
        ("v_strides", CacheStrides),
        ("x_stride", c_int64),
        ("copy_words", c_int64),
        ("num_layers", c_int32),
        ("batch", c_int32),
        ("width", c_int32),
        ("hidden_width", c_int32),
        ("segments", c_int32),
        ("segment", c_int32),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("max_length", c_int32),
        ("vocab", c_int32),
        ("positions", c_int32),
        ("splits", c_int32),
        ("advance", c_int32),
        ("eps", c_float),
        ("scale_log2", c_float),
        ("heads_inverse", c_uint32),
        ("head_dim_inverse", c_uint32),
        ("splits_inverse", c_uint32),
    ]
