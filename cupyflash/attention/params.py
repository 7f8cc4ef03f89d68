"""Kernel arguments: ctypes mirrors of the structs in ``cuda_src/common/params.cuh``.

ctypes lays a structure out as the C++ compiler does. The compile stub asserts the size of each
struct, and ``tests/test_params.py`` compares names and order with the header.
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p

ACCUM_ROW_ALIGN = 128  # as in params.cuh

TensorMap = c_uint8 * 128  # a CUtensorMap


class Strides(ctypes.Structure):
    """Element strides of a (batch, row, head, head_dim) tensor with a contiguous last dimension."""

    _fields_ = [("batch", c_int64), ("row", c_int64), ("head", c_int64)]

    def __iter__(self) -> Iterator[int]:
        return iter((self.batch, self.row, self.head))


class BiasStrides(ctypes.Structure):
    """Element strides of a (batch, heads_q, seqlen_q, seqlen_k) bias; 0 on axes of length 1."""

    _fields_ = [("batch", c_int64), ("head", c_int64), ("row", c_int64), ("col", c_int64)]

    def __iter__(self) -> Iterator[int]:
        return iter((self.batch, self.head, self.row, self.col))


class AttentionShape(ctypes.Structure):
    """Shapes and score function, shared by forward and backward."""

    _fields_ = [
        ("batch", c_int32),
        ("heads_q", c_int32),
        ("heads_kv", c_int32),
        ("seqlen_q", c_int32),
        ("seqlen_k", c_int32),
        ("head_dim", c_int32),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("top_left", c_int32),
        ("heads_per_section", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("dropout_threshold", c_int32),
        ("dropout_scale", c_float),
    ]


class FlashFwdParams(ctypes.Structure):
    """Forward; the leading pointers are the only fields that differ between equal-shaped calls."""

    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("alibi_slopes", c_void_p),
        ("bias", c_void_p),
        ("sinks", c_void_p),
        ("dropout_seed", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("q_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("out_strides", Strides),
        ("lse_batch_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("alibi_batch_stride", c_int64),
        ("bias_strides", BiasStrides),
        ("shape", AttentionShape),
    ]


class FlashBwdParams(ctypes.Structure):
    """Backward: one struct for preprocess, main kernel and postprocess."""

    _fields_ = [
        ("dout", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("dq", c_void_p),
        ("dk", c_void_p),
        ("dv", c_void_p),
        ("dlse", c_void_p),
        ("lse_log2", c_void_p),
        ("delta", c_void_p),
        ("dq_accum", c_void_p),
        ("dq_semaphore", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("alibi_slopes", c_void_p),
        ("bias", c_void_p),
        ("sinks", c_void_p),
        ("dropout_seed", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("dbias", c_void_p),
        ("dsinks", c_void_p),
        ("dout_strides", Strides),
        ("q_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("out_strides", Strides),
        ("dq_strides", Strides),
        ("dk_strides", Strides),
        ("dv_strides", Strides),
        ("lse_batch_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("alibi_batch_stride", c_int64),
        ("bias_strides", BiasStrides),
        ("dbias_strides", BiasStrides),
        ("accum_rows", c_int64),
        ("shape", AttentionShape),
    ]


class PackedTile(ctypes.Structure):
    """A tile of a packed sequence."""

    _fields_ = [("batch", c_int32), ("block", c_int32)]


def _padding(*fields: type) -> type[ctypes.Array]:
    """What alignas(64) adds behind ``fields``; ctypes has no _align_ before Python 3.13."""
    return c_uint8 * (-sum(map(ctypes.sizeof, fields)) % 64)


class FlashFwdSm90Params(ctypes.Structure):
    """`FlashFwdParams` between the tensor maps of sm_90."""

    _fields_ = [
        ("q_map", TensorMap),
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        ("out_map", TensorMap),
        ("base", FlashFwdParams),
        ("sequence_maps", c_void_p),
        ("packed_tiles", c_void_p),
        ("tile_counter", c_void_p),
        ("partial_out", c_void_p),
        ("partial_sums", c_void_p),
        ("partial_rows", c_int64),
        ("num_splits", c_int32),
        ("padding", _padding(FlashFwdParams, *[c_void_p] * 6, c_int32)),
        ("bias_map", TensorMap),
    ]


class FlashBwdSm90Params(ctypes.Structure):
    """`FlashBwdParams` between the tensor maps of sm_90."""

    _fields_ = [
        ("q_map", TensorMap),
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        ("dout_map", TensorMap),
        ("base", FlashBwdParams),
        ("sequence_maps", c_void_p),
        ("packed_tiles", c_void_p),
        ("tile_counter", c_void_p),
        ("padding", _padding(FlashBwdParams, *[c_void_p] * 3)),
        ("bias_map", TensorMap),
    ]


class SequenceMapsParams(ctypes.Structure):
    """Tensor maps of packed sequences."""

    _fields_ = [
        ("maps", TensorMap * 4),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("sequence_maps", c_void_p),
        ("packed_tiles", c_void_p),
        ("shape", AttentionShape),
        ("max_tiles", c_int32),
        ("tile_rows", c_int32),
        ("tiles_of_keys", c_int32),
        ("padding", _padding(*[c_void_p] * 6, AttentionShape, *[c_int32] * 3)),
    ]
