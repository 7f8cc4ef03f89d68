"""How mma.sync rounds: float16 products into a float32 accumulator, as backend fp16x3 uses it.

Part of ``python -m bench precision``. `measure` asks a function mma(c, a, b), which is one warp's
chain of mma.sync.m16n8k16, and whose model in NumPy the tests have.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy

from bench.lib.report import new_table

LAST = 2.0**-23  # the last place of 1.5
K = 16  # products of one mma.sync
STEPS = 1024  # of the long sum
TILE = 8  # of them in an accumulator of its own
SOURCE = """
#include "ptx/mma.cuh"

// out = c + the sum of a[i] b[i]: the chain of `steps` products, every row and column the same.
extern "C" __global__ void chain(float c, const uint32_t* a, const uint32_t* b, int steps,
                                 float* out) {
  const int pair = threadIdx.x % 4;  // of neighbouring elements
  float d[4] = {c, c, c, c};
  for (int i = 0; i < 8 * steps; i += 8) {
    const uint32_t rows[4] = {a[i + pair], a[i + pair], a[i + pair + 4], a[i + pair + 4]};
    mma_m16n8k16<half_t, TENSOR_CORE>(d, rows, b[i + pair], b[i + pair + 4]);
  }
  if (threadIdx.x == 0) *out = d[0];
}
"""
Mma = Callable[[float, numpy.ndarray, numpy.ndarray], float]


@functools.cache
def _kernel(arch: int) -> Any:
    import cupy

    from cupyflash.jit import sources

    options = ("-std=c++17", f"-I{sources.root()}", f"-DTENSOR_CORE={arch}")
    return cupy.RawKernel(SOURCE, "chain", options)


def mma(c: float, a: numpy.ndarray, b: numpy.ndarray) -> float:
    """c + a[i] . b[i], one mma.sync after the other; a and b (steps, K) are float16 numbers."""
    import cupy

    arch = min(80, int(cupy.cuda.Device().compute_capability))
    a, b = (cupy.asarray(x, "float16") for x in (a, b))
    out = cupy.empty(1, "float32")
    _kernel(arch)((1,), (32,), (numpy.float32(c), a, b, numpy.int32(len(a)), out))
    return float(out[0])


def measure(mma: Mma) -> dict[str, Any]:
    """How an mma adds its products to the accumulator.

    Returns:
        rounding: "to nearest", "towards zero" or "down", of 3/4 of the last place of the
            accumulator.
        extra_bits: how many bits below the last place u the products keep until they are added up:
            the largest n <= 7 for which u/2 + u/4 + ... + u/2^n + u/2^n is u.
        at_once: how many neighbouring products are added up before the sum is rounded; 1 where they
            keep no bits.
        drift: the relative error of a sum of STEPS * K positive products in one accumulator.
        drift_of_tiles: the same with a new accumulator for every TILE steps, the results of which
            float32 additions join, as backend fp16x3 does it.
    """

    def places(c: float, terms: dict[int, float]) -> float:
        """The last places by which terms {index: last places} change c."""
        a, b = numpy.zeros((1, K)), numpy.full((1, K), 2.0**-12)
        for index, value in terms.items():
            a[0, index] = value * LAST * 2.0**12
        return (mma(c, a, b) - c) / LAST

    def keeps(bits: int) -> bool:
        halves = [2.0**-i for i in range(1, bits + 1)]
        return places(1.5, dict(enumerate([*halves, halves[-1]]))) == 1

    ends = places(1.5, {0: 0.75}), places(-1.5, {0: -0.75})
    names = {(0, 0): "towards zero", (1, -1): "to nearest", (0, -1): "down", (1, 0): "up"}
    a, b = numpy.random.default_rng(0).uniform(0.5, 1, (2, STEPS, K)).astype("float16")
    exact = (a.astype("float64") * b).sum()
    tiles = [mma(0.0, a[i : i + TILE], b[i : i + TILE]) for i in range(0, STEPS, TILE)]
    sums = {"drift": mma(0.0, a, b), "drift_of_tiles": numpy.float32(tiles).cumsum()[-1]}
    return {
        "rounding": names[ends],
        "extra_bits": next((bits - 1 for bits in range(1, 8) if not keeps(bits)), 7),
        "at_once": next((n for n in (16, 8, 4, 2) if places(1.5, {0: 0.5, n - 1: 0.5}) == 1), 1),
        **{name: float(f"{float(x) / exact - 1:.2g}") for name, x in sums.items()},
    }


def table(found: dict[str, Any]) -> Any:
    """What `measure` found: question | answer."""
    table = new_table("mma.sync, float16 products into a float32 accumulator", right=("",))
    table.add_row("it rounds", found["rounding"])
    table.add_row("bits below the last place that the products keep", str(found["extra_bits"]))
    table.add_row("products that are added up at once", str(found["at_once"]))
    table.add_row(f"sum of {STEPS * K} products, one accumulator", f"{found['drift']:+.1e}")
    what = f"the same, a new accumulator for every {TILE * K} products"
    table.add_row(what, f"{found['drift_of_tiles']:+.1e}")
    return table
