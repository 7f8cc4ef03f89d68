"""Kernel arguments of the projections: ctypes mirrors of ``cuda_src/common/linear_params.cuh``."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p

from ..attention.params import TensorMap


class RowNorm(ctypes.Structure):
    """The norm in the prologue of a kernel."""

    _fields_ = [
        ("eps", c_float),
        ("inverse_depth", c_float),
        ("rms", c_int32),
        ("wide", c_int32),
    ]


class Rotary(ctypes.Structure):
    """The rotary embedding of q and k."""

    _fields_ = [
        ("seqlen", c_int64),
        ("num_positions", c_int64),
        ("columns", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("interleaved", c_int32),
        ("wide", c_int32),
        ("wide_positions", c_int32),
    ]


class LinearParams(ctypes.Structure):
    """A projection with what comes before and after it."""

    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("gate_weight", c_void_p),
        ("bias", c_void_p),
        ("gate_bias", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("weight_stride", c_int64),
        ("gate_stride", c_int64),
        ("residual_stride", c_int64),
        ("out_stride", c_int64),
        ("rows", c_int64),
        ("columns", c_int32),
        ("depth", c_int32),
        ("norm", RowNorm),
        ("rotary", Rotary),
    ]


class LinearSm90Params(ctypes.Structure):
    """`LinearParams` behind the tensor maps of sm_90."""

    _fields_ = [
        ("x_map", TensorMap),
        ("weight_map", TensorMap),
        ("gate_weight_map", TensorMap),
        ("residual_map", TensorMap),
        ("out_map", TensorMap),
        ("base", LinearParams),
        ("padding", c_uint8 * (-ctypes.sizeof(LinearParams) % 64)),
    ]


class LinearFewSm90Params(ctypes.Structure):
    """The same for few rows, whose results are stored one by one."""

    _fields_ = [
        ("x_map", TensorMap),
        ("weight_map", TensorMap),
        ("gate_weight_map", TensorMap),
        ("base", LinearParams),
        ("stages", c_int32),
        ("padding", c_uint8 * (-(ctypes.sizeof(LinearParams) + 4) % 64)),
    ]


class MlpParams(ctypes.Structure):
    """A whole MLP of few rows."""

    _fields_ = [
        ("x", c_void_p),
        ("up_weight", c_void_p),
        ("gate_weight", c_void_p),
        ("up_bias", c_void_p),
        ("gate_bias", c_void_p),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("down_weight", c_void_p),
        ("down_bias", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("partials", c_void_p),
        ("counter", c_void_p),
        ("x_stride", c_int64),
        ("up_stride", c_int64),
        ("gate_stride", c_int64),
        ("down_stride", c_int64),
        ("residual_stride", c_int64),
        ("out_stride", c_int64),
        ("rows", c_int32),
        ("depth", c_int32),
        ("hidden", c_int32),
        ("columns", c_int32),
        ("norm", RowNorm),
    ]


class GateParams(ctypes.Structure):
    """The product of an activated gate and what it lets through, forward and backward."""

    _fields_ = [
        ("gate", c_void_p),
        ("up", c_void_p),
        ("dout", c_void_p),
        ("out", c_void_p),
        ("dgate", c_void_p),
        ("dup", c_void_p),
        ("size", c_int64),
    ]
