"""Kernel arguments of the diffusion step: mirrors of ``cuda_src/common/diffusion_params.cuh``."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p


class DiffusionCoefficients(ctypes.Structure):
    """One row of the table of a sampler."""

    _fields_ = [
        ("x_to_x0", c_float),
        ("model_to_x0", c_float),
        ("x0_to_x", c_float),
        ("x_to_x", c_float),
        ("model_to_x", c_float),
        ("noise_to_x", c_float),
    ]


class DiffusionStepParams(ctypes.Structure):
    """One update; the fields up to ``step`` differ between equal-shaped calls."""

    _fields_ = [
        ("x", c_void_p),
        ("model", c_void_p),
        ("noise", c_void_p),
        ("out", c_void_p),
        ("steps", c_void_p),
        ("coefficients", c_void_p),
        ("thresholds", c_void_p),
        ("seeds", c_void_p),
        ("seed", c_uint64),
        ("step", c_uint64),
        ("batch", c_int64),
        ("sample_size", c_int64),
        ("steps_stride", c_int64),
        ("num_steps", c_int32),
        ("wide_steps", c_int32),
        ("clip", c_float),
    ]
