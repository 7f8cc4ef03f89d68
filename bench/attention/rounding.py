"""How the online softmax rounds: the rescale of a maximum that stays, with and without an FMA.

    python -m bench rounding

It follows `RowState` of softmax.cuh in NumPy, in float32, over rows of standard normal scores. The
exponentials and the sum of a tile are exact here, so that every error is that of the running
statistics. "rounded": both products of a maximum with the scale are rounded, as the kernels do it.
"FMA": the second product goes into a fused multiply-add, which does not round it.
"""

from collections.abc import Sequence

import numpy

from bench.lib import harness, report

LENGTHS = [512 * 4**i for i in range(4)]
HEAD_DIM = TILE = 128
ROWS, WARP_ROWS = 128, 16
PROTOCOL = (
    f"{ROWS} rows of standard normal q and k, head dim {HEAD_DIM}, tiles of {TILE} keys; "
    "lse_error: root mean square; rows, warps: share of the rescales that are exactly 1, of one "
    f"row and of all {WARP_ROWS} rows of a warp, the first tile not counted"
)


def online(scores: numpy.ndarray, fma: bool) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The LSE of each row (log2), and the rescales (tiles - 1, rows), of scores (rows, keys)."""
    scale = numpy.float32(numpy.log2(numpy.e) / HEAD_DIM**0.5)
    rescales = []
    largest = scores[:, :1].max(1)
    total = numpy.zeros_like(largest)
    for first in range(0, scores.shape[1], TILE):
        tile = scores[:, first : first + TILE]
        new = numpy.maximum(largest, tile.max(1))
        offset = new * scale
        # A product of two float32 numbers is exact in float64.
        product = largest.astype("float64") * scale if fma else largest * scale
        rescale = numpy.exp2(numpy.float64(product) - offset).astype("float32")
        weights = numpy.exp2(tile * numpy.float64(scale) - offset[:, None])
        total = total * rescale + weights.sum(1).astype("float32")
        largest = new
        rescales.append(rescale)
    return (largest * scale) + numpy.log2(total.astype("float64")), numpy.array(rescales[1:])


def measure(seqlen: int, fma: bool) -> report.Row:
    rng = numpy.random.default_rng(seqlen)
    q, k = (rng.standard_normal((n, HEAD_DIM), "float32") for n in (ROWS, seqlen))
    scores = q @ k.T
    lse, rescales = online(scores, fma)
    exact = scores * numpy.float64(numpy.float32(numpy.log2(numpy.e) / HEAD_DIM**0.5))
    exact = numpy.logaddexp2.reduce(exact, axis=1)
    is_one = rescales == 1
    warps = is_one.reshape(len(is_one), -1, WARP_ROWS).all(-1)
    error = numpy.sqrt(numpy.square(lse - exact).mean()) * numpy.log(2)
    return {
        "op": "rounding",
        "seqlen": seqlen,
        "impl": "FMA" if fma else "rounded",
        "lse_error": float(f"{error:.2g}"),
        "rows": round(float(is_one.mean()), 3),
        "warps": round(float(warps.mean()), 3),
    }


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("rounding", __doc__, repeats=None, output=False)
    parser.add_argument("--seqlen", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args(arguments)
    run = harness.Run("rounding", PROTOCOL, arguments, options, timed=False, on_gpu=False)
    titles = ("error of the LSE", "rescales that are 1", "skipped by a warp")
    table = report.new_table("keys", "products", right=titles)
    for seqlen in run.each(options.seqlen):
        for fma in (True, False):
            row = measure(seqlen, fma)
            run.rows.append(row)
            shares = (f"{100 * row[key]:.0f} %" for key in ("rows", "warps"))
            table.add_row(str(seqlen), row["impl"], f"{row['lse_error']:.1e}", *shares)
    return run.finish(table)
