"""The cost of options: cupyflash with an option beside cupyflash without, and a target for each.

    python -m bench extras --only varlen window

Check and clock are those of bench attention; both sides of a ratio are timed in turn. A ratio whose
target is below 1 is one of rates and must reach it; one whose target is above 1 is one of times for
the same work and must not pass it. The mean of two rates is the reference of a head dim between.

* GQA has the heads and so the FLOPs of its reference; only keys and values are fewer.
* Packed sequences count the FLOPs of each sequence, none for padding. The long-tailed ones are
  compared with a dense batch of about as many tokens whose sequences all have the length at which
  the average FLOP of the packed batch is done: sum of n^3 / sum of n^2, since a sequence of n
  tokens costs n^2.
* A window counts the share of the causal FLOPs that its 128 x 128 tiles are of the causal tiles.
* A deterministic backward is also run 50 times, which must give the same bits.

Exit status 1 if a check failed; a target that is missed is marked.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from rich.table import Table

from bench.lib import data, harness, report
from bench.lib.correctness import Check
from bench.lib.providers import PROVIDERS, Call
from bench.lib.report import Row
from cupyflash.testing.problem import Problem

HIDDEN, TOKENS = 2048, 65536
WINDOW = 1024
TILE = 128
RUNS = 50  # of a deterministic backward, all with the same bits


def visited_tiles(seqlen: int, window: int | None = None) -> int:
    """Causal tiles of TILE queries x TILE keys that hold a key seen, with the window or without."""
    left = seqlen if window is None else window
    tiles = range(-(-seqlen // TILE))
    return sum(tile - max(0, tile * TILE - left) // TILE + 1 for tile in tiles)


@dataclass(frozen=True)
class Variant:
    """One call.

    Attributes:
        problem: of packed sequences, the batch of one that holds them all.
        lengths: of packed sequences, which go through `cupyflash.flash_attn_varlen_func`.
        window: keys seen left of the diagonal, None for all; causal only.
        deterministic: the backward.
    """

    problem: Problem
    lengths: tuple[int, ...] = ()
    window: int | None = None
    deterministic: bool = False

    def flops(self, direction: str) -> float:
        """Operations of the "fwd" or "bwd" pass; with a window, the share of tiles it visits."""
        problem = self.problem
        if self.lengths:
            alone = (replace(problem, seqlen=length) for length in self.lengths)
            return sum(sequence.flops(direction) for sequence in alone)
        share = visited_tiles(problem.seqlen, self.window) / visited_tiles(problem.seqlen)
        return problem.flops(direction) * share

    def checked(self, direction: str) -> Callable[[], Any]:
        """The call of a pass, once its results are known to be right.

        Raises:
            AssertionError: they are not, or a deterministic backward gives other bits.
        """
        tensors = data.of_problem(self.problem)
        call = self.call(tensors)
        window = None if self.window is None else (self.window, 0)
        Check(self.problem, tensors, self.lengths, window=window)(call, direction)
        if direction == "fwd":
            return call.forward
        if self.deterministic:
            assert_repeatable(call.backward)
        return call.backward

    def call(self, tensors: Sequence[Any]) -> Call:
        left_right = (-1, -1) if self.window is None else (self.window, 0)
        options = {"window": left_right, "deterministic": self.deterministic}
        ours = PROVIDERS["cupyflash"]
        return Call(ours, tensors, self.problem.causal, lengths=self.lengths, **options)


def packed(problem: Problem, lengths: Sequence[int]) -> Variant:
    """Sequences of these lengths with the dtype, heads and mask of a problem."""
    return Variant(replace(problem, batch=1, seqlen=sum(lengths)), tuple(lengths))


def assert_repeatable(backward: Callable[[], Sequence[Any]]) -> None:
    """Raise AssertionError if one of RUNS backwards differs from the first in a bit."""
    import torch

    first = [gradient.view(torch.uint8) for gradient in backward()]
    for run in range(2, RUNS + 1):
        for name, expected, gradient in zip(("dq", "dk", "dv"), first, backward(), strict=True):
            same = torch.equal(expected, gradient.view(torch.uint8))
            assert same, f"{name}: run {run} of {RUNS} differs from the first in a bit"


@dataclass(frozen=True)
class Comparison:
    """A variant beside its references, whose rates are averaged; ``target`` as said above."""

    what: str
    variant: Variant
    references: tuple[Variant, ...]
    target: float
    passes: tuple[str, ...] = ("fwd", "bwd")


def dense(head_dim: int, causal: bool, batch: int = 4, seqlen: int = 4096) -> Problem:
    heads = HIDDEN // head_dim
    return Problem("bfloat16", head_dim, batch, seqlen, heads, heads, causal)


def long_tailed_lengths() -> list[int]:
    """64 sequences between 16 and 16384 tokens, log-normal, about TOKENS in all."""
    sizes = numpy.random.default_rng(0).lognormal(sigma=1.5, size=64)
    return numpy.rint(sizes * TOKENS / sizes.sum()).clip(16, 16384).astype(int).tolist()


def dense_like(lengths: Sequence[int]) -> Problem:
    """The dense batch that long-tailed sequences are measured by, a multiple of 128 tokens long."""
    mean = sum(n**3 for n in lengths) / sum(n**2 for n in lengths)
    seqlen = 128 * round(mean / 128)
    return dense(128, True, round(sum(lengths) / seqlen), seqlen)


def comparisons() -> list[Comparison]:
    """All of them, those of a mask together."""
    found = []
    for causal, mask in ((False, "full"), (True, "causal")):
        plain = {d: Variant(dense(d, causal)) for d in (64, 96, 128, 192, 256)}
        mha = replace(plain[128].problem, heads=32, heads_kv=32)
        gqa = replace(mha, heads_kv=8)
        float16 = replace(plain[128].problem, dtype="float16")
        found += [
            Comparison(f"GQA 32/8, {mask}", Variant(gqa), (Variant(mha),), 0.97),
            Comparison(f"float16, {mask}", Variant(float16), (plain[128],), 0.97),
            Comparison(f"D=96, {mask}", plain[96], (plain[64], plain[128]), 0.95),
            Comparison(f"D=192, {mask}", plain[192], (plain[128], plain[256]), 0.95),
        ]
        for d in (64, 128, 256):
            fixed = replace(plain[d], deterministic=True)
            what = f"deterministic D={d}, {mask}"
            found.append(Comparison(what, fixed, (plain[d],), 1.1, ("bwd",)))
    for batch, seqlen in ((16, 1024), (4, 4096)):
        equal = dense(128, True, batch, seqlen)
        what = f"varlen {batch} x {seqlen}, causal"
        found.append(Comparison(what, packed(equal, [seqlen] * batch), (Variant(equal),), 0.95))
    lengths = long_tailed_lengths()
    like = dense_like(lengths)
    what = f"varlen long-tailed / {like.batch} x {like.seqlen}, causal"
    found.append(Comparison(what, packed(like, lengths), (Variant(like),), 0.85))
    long = Variant(dense(128, True, 1, 16384))
    windowed = replace(long, window=WINDOW)
    found.append(Comparison(f"window {WINDOW} of 16384, causal", windowed, (long,), 1.15))
    return found


def measure(run: harness.Run, comparison: Comparison, direction: str) -> None:
    """Add the row of one pass; none, with a note, if a call fails or is wrong."""
    where, variants = f"{direction} {comparison.what}", (comparison.variant, *comparison.references)
    try:
        calls = {str(variant): variant.checked(direction) for variant in variants}
    except Exception as error:  # whatever goes wrong with one must not end the run
        run.notes.left_out(comparison.what, error, direction)
        return
    timings, rates = run.timer.compare(calls), []
    for variant, timing in zip(variants, timings.values(), strict=True):
        run.notes.late("cupyflash", timing, where)
        rates.append(variant.flops(direction) / timing.ms / 1e9)
    rate, reference = rates[0], statistics.mean(rates[1:])
    own = timings[str(comparison.variant)]
    row = comparison.variant.problem.row(
        ms=round(own.ms, 5),
        tflops=round(rate, 2),
        reference_tflops=round(reference, 2),
        ratio=round(rate / reference if comparison.target < 1 else reference / rate, 4),
        target=comparison.target,
        quartiles_ms=[round(ms, 5) for ms in own.quartiles],
        repeats=own.repeats,
        sm_mhz=run.timer.sm_mhz,
    )
    run.rows.append({"op": "extras", "what": comparison.what, "pass": direction, **row})


def met(row: Row) -> bool:
    return row["ratio"] >= row["target"] if row["target"] < 1 else row["ratio"] <= row["target"]


def extras_table(rows: list[Row]) -> Table:
    figures = ("ms", "TFLOP/s", "reference TFLOP/s", "ratio", "target")
    table = report.new_table("what", "pass", right=figures)
    for row in rows:
        figures = (f"{row['ms']:.3f}", f"{row['tflops']:.0f}", f"{row['reference_tflops']:.0f}")
        target = f"{'>=' if row['target'] < 1 else '<='} {row['target']:.2f}"
        verdict = target if met(row) else f"missed {target}"
        style = "" if met(row) else "bold"
        table.add_row(
            row["what"], row["pass"], *figures, f"{row['ratio']:.3f}", verdict, style=style
        )
    return table


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("extras", __doc__, output=False)
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these in a name")
    options = parser.parse_args(arguments)
    chosen = [x for x in comparisons() if any(name in x.what for name in options.only)]
    if not chosen:
        parser.error(f"--only: no name holds any of {options.only}")
    from bench.lib.timing import PROTOCOL

    lengths = long_tailed_lengths()
    run = harness.Run("extras", PROTOCOL, arguments, options, lengths=lengths)
    quartiles = numpy.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]).astype(int).tolist()
    run.notes.say(
        f"long-tailed: {len(lengths)} sequences, {sum(lengths)} tokens; least, quartiles, most: "
        f"{', '.join(map(str, quartiles))}"
    )
    cells = [(x, direction) for x in chosen for direction in x.passes]
    for comparison, direction in run.each(cells):
        measure(run, comparison, direction)
    reached, left_out = sum(map(met, run.rows)), len(cells) - len(run.rows)
    summary = f"{reached} of {len(run.rows)} targets met, {left_out} not run"
    run.finish(extras_table(run.rows), summary)
    return int(bool(run.notes.wrong))
