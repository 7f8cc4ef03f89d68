"""Numbers of 8 bits on their way to the tensor cores (widen() in narrow.cuh), on the CPU."""

import ctypes

import emulator
import numpy
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

PROGRAM = """
#include "cuda.h"
#include "decode/narrow.cuh"
template <int KIND, int ARCH>
void widen_all(const uint32_t* from, uint32_t* to) {
  for (int i = 0; i < 64; ++i) widen<KIND, ARCH>(from[i], to[2 * i], to[2 * i + 1]);
}
extern "C" void int8_90(const uint32_t* from, uint32_t* to) { widen_all<INT8, 90>(from, to); }
extern "C" void int8_75(const uint32_t* from, uint32_t* to) { widen_all<INT8, 75>(from, to); }
extern "C" void e4m3_90(const uint32_t* from, uint32_t* to) { widen_all<E4M3, 90>(from, to); }
extern "C" void e4m3_75(const uint32_t* from, uint32_t* to) { widen_all<E4M3, 75>(from, to); }
"""


@pytest.fixture(scope="module")
def program(emulated_kernels):
    if not emulator.COMPILER:
        pytest.skip("needs g++")
    folder = emulator.prepared(emulated_kernels)
    return emulator.load(folder, PROGRAM, "decode/narrow.cuh")


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_every_number(program, kind, arch):
    """float16 has each number of 8 bits; what is not a number stays so."""
    dtype = numpy.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn
    numbers = numpy.arange(256).astype("uint8").view(dtype)
    found = numpy.zeros(256, "float16")
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (numbers, found))
    getattr(program, f"{kind}_{arch}")(*pointers)
    numpy.testing.assert_array_equal(found, numbers.astype("float32"))
