"""The exact sums of text/exact_sum.cuh, on a CPU, against whole numbers of Python."""

import ctypes

import emulator
import numpy
import pytest

PROGRAM = """
#include "cuda.h"
#include "attention/text/exact_sum.cuh"
extern "C" float sum(const float* from, int size) {
  ExactSum sum = {};
  for (int i = 0; i < size; ++i) red_add(&sum, from[i]);
  return rounded(sum);
}
"""
TINIEST, LARGEST = 2.0**-149, float(numpy.finfo("float32").max)


@pytest.fixture(scope="module")
def program(emulated_kernels):
    if not emulator.COMPILER:
        pytest.skip("needs g++")
    folder = emulator.prepared(emulated_kernels)
    found = emulator.load(folder, PROGRAM, "attention/text/exact_sum.cuh")
    found.sum.restype = ctypes.c_float
    return found


def units(x) -> int:
    """A float32 as a whole number of 2^-149."""
    numerator, denominator = float(x).as_integer_ratio()
    return numerator * 2**149 // denominator


def nearest(total: int) -> numpy.float32:
    """The float32 next to so many units; of two, the even one."""
    drop = max(0, abs(total).bit_length() - 24)
    digits, rest = divmod(abs(total), 1 << drop)
    half = (1 << drop) // 2
    digits += drop > 0 and (rest > half or (rest == half and digits % 2))
    with numpy.errstate(over="ignore"):
        found = numpy.ldexp(numpy.float32(digits), drop - 149)
    return -found if total < 0 else found


def check(program, numbers):
    """The sum in several orders has the same bits, those of the exact sum."""
    rng = numpy.random.default_rng(len(numbers))
    right = nearest(sum(map(units, numbers)))
    for _ in range(3):
        rng.shuffle(numbers)
        found = numpy.float32(program.sum(numbers.ctypes.data_as(ctypes.c_void_p), len(numbers)))
        assert found.tobytes() == right.tobytes(), (found, right)


@pytest.mark.parametrize(
    ("numbers", "result"),
    [
        ([1e30, 1.0, -1e30], 1.0),
        ([1.0, -1e-30, -1.0], numpy.float32(-1e-30)),
        ([LARGEST, LARGEST, -LARGEST], LARGEST),
        ([LARGEST, LARGEST], float("inf")),
        ([-LARGEST, -(2.0**103)], -float("inf")),  # half of the last digit
        ([LARGEST, 2.0**102], LARGEST),
        ([TINIEST, -3 * TINIEST], -2 * TINIEST),
        ([2.0**-126, -TINIEST], 2.0**-126 - TINIEST),  # the largest denormal number
        ([2.0**-126 - TINIEST, TINIEST], 2.0**-126),
        ([1.0, 2.0**-24], 1.0),  # to even
        ([1.0, 2.0**-24, TINIEST], 1 + 2.0**-23),
        ([1 + 2.0**-23, 2.0**-24], 1 + 2.0**-22),
        ([-2.0, 2.0**-25, 2.0**-80], -2.0),
        ([0.0, -0.0], 0.0),
        ([-0.5, 0.5], 0.0),
        ([], 0.0),
        ([float("inf"), -1e30], float("inf")),
        ([-float("inf"), 1.0, LARGEST, LARGEST], -float("inf")),
    ],
)
def test_sum(program, numbers, result):
    numbers = numpy.array(numbers, "float32")
    for order in (numbers, numbers[::-1].copy()):
        found = program.sum(order.ctypes.data_as(ctypes.c_void_p), len(order))
        assert numpy.float32(found).tobytes() == numpy.float32(result).tobytes()
    if numpy.isfinite(numbers).all():
        check(program, numbers)


@pytest.mark.parametrize("numbers", [[1.0, float("nan")], [float("inf"), 1.0, -float("inf")]])
def test_nan(program, numbers):
    numbers = numpy.array(numbers, "float32")
    assert numpy.isnan(program.sum(numbers.ctypes.data_as(ctypes.c_void_p), len(numbers)))


@pytest.mark.parametrize("exponents", [(-149, 128), (-5, 5), (-149, -120), (110, 128)])
def test_random_numbers(program, exponents):
    """Of all sizes and both signs, so that limbs leave their range."""
    rng = numpy.random.default_rng(0)
    for size in (2, 3, 30, 3000):
        for sign in (1, -1, 0):
            numbers = numpy.ldexp(rng.uniform(0.5, 1, size), rng.integers(*exponents, size))
            numbers *= sign or rng.choice([-1, 1], size)
            check(program, numbers.astype("float32"))
