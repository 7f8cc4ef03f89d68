"""Kernel arguments of the norms: ctypes mirrors of ``cuda_src/common/norm_params.cuh``."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint8, c_uint32, c_void_p

from ..attention.params import TensorMap

ROW_AXES = 4  # as in norm_params.cuh


class RowStrides(ctypes.Structure):
    """Element strides of the axes of the rows, outermost first."""

    _fields_ = [("axis", c_int64 * ROW_AXES)]


class NormShape(ctypes.Structure):
    """Rows of ``columns`` numbers each."""

    _fields_ = [
        ("rows", c_int64),
        ("sizes", c_int64 * ROW_AXES),
        ("axes", c_int32),
        ("columns", c_int32),
        ("inverse_columns", c_float),
        ("eps", c_float),
    ]


class NormFwdParams(ctypes.Structure):
    """LayerNorm or RMSNorm, forward."""

    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("residual_out", c_void_p),
        ("stats", c_void_p),
        ("x_strides", RowStrides),
        ("residual_strides", RowStrides),
        ("out_strides", RowStrides),
        ("shape", NormShape),
    ]


class NormBwdParams(ctypes.Structure):
    """LayerNorm or RMSNorm, backward."""

    _fields_ = [
        ("dout", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("stats", c_void_p),
        ("dresidual", c_void_p),
        ("dx", c_void_p),
        ("partials", c_void_p),
        ("dweight", c_void_p),
        ("dbias", c_void_p),
        ("counter", c_void_p),
        ("dout_strides", RowStrides),
        ("x_strides", RowStrides),
        ("dresidual_strides", RowStrides),
        ("dx_strides", RowStrides),
        ("shape", NormShape),
        ("splits", c_int64),
    ]


class SumPartialsParams(ctypes.Structure):
    """The last step of the gradients of weight and bias."""

    _fields_ = [
        ("partials", c_void_p),
        ("first", c_void_p),
        ("second", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
    ]


class GroupStrides(ctypes.Structure):
    """Element strides of samples, channels and positions."""

    _fields_ = [("batch", c_int64), ("channel", c_int64), ("position", c_int64)]


class Divisor(ctypes.Structure):
    """What a kernel divides by: see `divisor`."""

    _fields_ = [("multiplier", c_uint32), ("shift", c_int32)]


class GroupNormShape(ctypes.Structure):
    """Groups of ``channels`` x ``positions`` numbers each."""

    _fields_ = [
        ("batch", c_int64),
        ("groups", c_int32),
        ("channels", c_int32),
        ("positions", c_int32),
        ("inverse_size", c_float),
        ("eps", c_float),
        ("packs", Divisor),
    ]


class ChannelTiling(ctypes.Structure):
    """Which channels a block has, channels last."""

    _fields_ = [
        ("tiles", c_int32),
        ("groups", c_int32),
        ("parts", c_int32),
        ("channels", c_int32),
    ]


class GroupNormFwdParams(ctypes.Structure):
    """GroupNorm, forward."""

    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("stats", c_void_p),
        ("partials", c_void_p),
        ("x_strides", GroupStrides),
        ("out_strides", GroupStrides),
        ("shape", GroupNormShape),
        ("unit_blocks", c_int32),
        ("shares", c_int32),
        ("tiling", ChannelTiling),
    ]


class GroupRing(ctypes.Structure):
    """How blocks share the samples, channels last, one read."""

    _fields_ = [
        ("slices", c_int32),
        ("teams", c_int32),
        ("blocks", c_int32),
        ("span", c_int32),
        ("slots", c_int32),
        ("sample_slots", c_int32),
        ("flight", c_int32),
        ("runs", c_int32),
    ]


class GroupNormFwdRingBase(ctypes.Structure):
    """GroupNorm, forward, channels last, one read."""

    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("stats", c_void_p),
        ("told", c_void_p),
        ("found", c_void_p),
        ("rounds", c_void_p),
        ("x_strides", GroupStrides),
        ("out_strides", GroupStrides),
        ("shape", GroupNormShape),
        ("ring", GroupRing),
    ]


class GroupNormFwdRingParams(ctypes.Structure):
    """The same with tensor maps of what is read."""

    _fields_ = [
        ("maps", TensorMap * 1),
        ("base", GroupNormFwdRingBase),
        ("padding", c_uint8 * (-ctypes.sizeof(GroupNormFwdRingBase) % 64)),
    ]


class GroupNormBwdRingBase(ctypes.Structure):
    """GroupNorm, backward, channels last, one read."""

    _fields_ = [
        ("dout", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("stats", c_void_p),
        ("dx", c_void_p),
        ("partials", c_void_p),
        ("told", c_void_p),
        ("found", c_void_p),
        ("rounds", c_void_p),
        ("dout_strides", GroupStrides),
        ("x_strides", GroupStrides),
        ("dx_strides", GroupStrides),
        ("shape", GroupNormShape),
        ("ring", GroupRing),
    ]


class GroupNormBwdRingParams(ctypes.Structure):
    """The same with tensor maps of what is read."""

    _fields_ = [
        ("maps", TensorMap * 2),
        ("base", GroupNormBwdRingBase),
        ("padding", c_uint8 * (-ctypes.sizeof(GroupNormBwdRingBase) % 64)),
    ]


class GroupNormBwdParams(ctypes.Structure):
    """GroupNorm, backward."""

    _fields_ = [
        ("dout", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("stats", c_void_p),
        ("dx", c_void_p),
        ("dweight", c_void_p),
        ("dbias", c_void_p),
        ("counters", c_void_p),
        ("partials", c_void_p),
        ("pieces", c_void_p),
        ("means", c_void_p),
        ("dout_strides", GroupStrides),
        ("x_strides", GroupStrides),
        ("dx_strides", GroupStrides),
        ("shape", GroupNormShape),
        ("unit_blocks", c_int32),
        ("shares", c_int32),
        ("tiling", ChannelTiling),
    ]


def divisor(n: int) -> Divisor:
    """For quotients by n of numbers from 0 to 2^31 - 1, by one multiplication."""
    shift = (n - 1).bit_length()
    return Divisor((1 << 32) * ((1 << shift) - n) // n + 1, shift)
