"""The search of ``cupyflash tune``: candidates are compiled, checked, and timed in turn.

A candidate whose kernel spills is skipped. The others must give right results before they are
timed, compared with float64 by the rule of the tests: all results of a small problem, and of the
problem itself those of the last queries, in the first and the last group of heads.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy

import cupyflash

from .. import jit
from ..jit import compiler, pool
from ..ops.attention import tuning
from ..ops.attention.backends import choose
from ..ops.attention.checks import check
from ..ops.attention.kernels import Tile
from ..ops.attention.options import Options
from ..ops.attention.planning import backward_plan, forward_plan
from ..runtime.config import KernelConfig
from ..runtime.gpu import capability_of
from ..runtime.lookup import library_of
from ..testing import Inputs, cast, to_library
from ..testing.problem import Problem
from ..testing.timing import Rounds
from .check_attention import FirstAndLastHeads

RESULTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}
OF_QUERIES = ("out", "lse", "dq")
LEAST_ROUNDS, MOST_ROUNDS = 5, 40  # a slow candidate leaves after the first number
SLOW = 1.1  # times the fastest median
WORTH = 1.01  # times as fast as the built-in choice: less may be noise
# This number of keys gives enough tiles for most GPUs, the last one partial.
SMALL_SEQLEN, SMALL_BATCH, SMALL_HEADS = 577, 2, 16
LAST_QUERIES = 64
NUMBERS = 2**20 + 7  # random ones, which large arrays repeat


@dataclasses.dataclass
class Candidate:
    """A tile and its kernel.

    Attributes:
        note: why it was skipped, or "".
        wrong: the message of the check that its results failed, or "".
        ms: median; None if it was not timed.
    """

    tile: Tile
    config: KernelConfig
    registers: int = 0
    note: str = ""
    wrong: str = ""
    ms: float | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search; the built-in choice is the first of the candidates.

    Attributes:
        key: in the tuning file.
        rounds: how often each of the fastest was timed.
    """

    key: str
    candidates: list[Candidate]
    rounds: int

    @property
    def built_in(self) -> Candidate:
        """The tile that plans have without a tuning file."""
        return self.candidates[0]

    @property
    def best(self) -> Candidate:
        """The fastest; the built-in choice unless that is slower by more than noise."""
        timed = [x for x in self.candidates if x.ms is not None]
        fastest = min(timed, key=lambda x: x.ms)
        return fastest if self.built_in.ms >= WORTH * fastest.ms else self.built_in


class Call:
    """One candidate on the arrays of a problem: ``tile`` instead of the choice of the plan."""

    def __init__(
        self, problem: Problem, direction: str, x: Inputs, results: tuple, tile: Tile
    ) -> None:
        library, options = library_of(x.q), _plan_options(problem)
        arrays = {"q": x.q, "k": x.k, "v": x.v}
        if direction == "bwd":
            arrays |= {"dout": x.dout, "out": results[0]}
        views = {name: library.view(array) for name, array in arrays.items()}
        head = "tune", check("tune", views, options), library
        if direction == "fwd":
            plan = forward_plan(*head, views["q"], options, tile)
            pointers = [library.pointer(array) for array in arrays.values()]
            self.run = lambda: plan(x.q, list(pointers), True)
        else:
            plan = backward_plan(*head, views, options, "", False, tile)
            pointers = [library.pointer(array) for array in (x.dout, x.q, x.k, x.v, *results)]
            self.run = lambda: plan(x.q, x.k, x.v, [*pointers, 0])[:3]


def search(
    problem: Problem,
    direction: str,
    seconds: float,
    advance: Callable[[str], None] = lambda text: None,
) -> Found:
    """Try the candidates for so many seconds; a few rounds in any case.

    Args:
        direction: the pass, "fwd" or "bwd".
        advance: called with a text after every step.

    Raises:
        NotImplementedError: no backend computes it, or it has one kernel only.
        ValueError: wrong numbers.
    """
    end = time.monotonic() + seconds
    values = _inputs(problem)
    x = _on_gpu(values)
    results = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **problem.options)
    views = {name: library_of(x.q).view(getattr(x, name)) for name in "qkv"}
    backward = direction == "bwd"
    checked = check("tune", views, _plan_options(problem))
    kind = checked.kind(capability_of(checked.device))
    backend = choose("tune", kind, checked.access, backward=backward)
    key = tuning.key_of(backend, kind, backward)
    configs = tuning.candidates(backend, kind, backward)
    if not configs:
        raise NotImplementedError(f"tune: there must be several kernels to choose from, got {key}")
    found = [Candidate(*item) for item in configs.items()]
    advance("compiling")
    _compile(found, compiler.target_arch(kind.capability), seconds / 2)
    calls, wrong_of = {}, _Checks(problem, direction, values)
    for candidate in found:
        if candidate.note and candidate is not found[0]:
            continue
        advance(f"checking {label(candidate.tile)}")
        call = Call(problem, direction, x, results, candidate.tile)
        candidate.wrong = wrong_of(call, candidate.tile)
        if not candidate.wrong:
            calls[candidate.tile] = call.run
    if found[0].wrong:
        raise RuntimeError(f"tune: the built-in choice must be right, got {found[0].wrong}")
    medians, rounds = _medians(calls, end, advance)
    for candidate in found:
        candidate.ms = medians.get(candidate.tile)
    return Found(key, found, rounds)


def _medians(
    calls: dict[Tile, Callable[[], Any]], end: float, advance: Callable[[str], None]
) -> tuple[dict[Tile, float], int]:
    """The milliseconds of each call, and the number of rounds until the clock says ``end``."""
    clock, due, rounds, medians = Rounds(calls), list(calls), 0, {}
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.monotonic() < end):
        clock.run(due)
        rounds += 1
        advance(f"round {rounds}")
        medians = {tile: timing.ms for tile, timing in clock.timings().items()}
        if rounds >= LEAST_ROUNDS:
            limit = SLOW * min(medians.values())
            due = [tile for tile in due if medians[tile] <= limit]
    return medians, rounds


def label(tile: Tile) -> str:
    """A tile as a text: "128×112, 2, 2"."""
    return ", ".join(["×".join(map(str, tile[:2])), *map(str, tile[2:])])


def _compile(candidates: list[Candidate], arch: str, seconds: float) -> None:
    """Compile as many candidates as this time allows, in parallel; the first one in any case."""
    tasks = {(x.config, arch): x for x in candidates}
    lacking = [x for x in pool.missing(list(tasks)) if x[0] is not candidates[0].config]
    while lacking and pool.forecast(lacking, min(pool.cores(), len(lacking))) > seconds:
        tasks.pop(lacking.pop()).note = "no time to compile it"
    for candidate, built in zip(tasks.values(), jit.build_all(list(tasks), progress=False)):
        candidate.registers, candidate.note = built.registers, tuning.fault(built)


class _Checks:
    """Compares results of candidates with float64, which NumPy computes on the CPU."""

    def __init__(self, problem: Problem, direction: str, x: Inputs) -> None:
        self.names, group = RESULTS[direction], problem.heads // problem.heads_kv
        self.direction = direction
        sizes = {"batch": SMALL_BATCH, "seqlen": min(problem.seqlen, SMALL_SEQLEN)}
        heads = {"heads_kv": SMALL_HEADS, "heads": SMALL_HEADS * group}
        self.small = dataclasses.replace(problem, **sizes, **heads)
        values = _inputs(self.small)
        self.x = _on_gpu(values)
        self.results = cupyflash.attention(
            self.x.q, self.x.k, self.x.v, return_lse=True, **problem.options
        )
        self.small_exact = _exact(self.small, values)
        last = slice(-LAST_QUERIES, None)
        of_last = dataclasses.replace(x, q=x.q[:, last], dout=x.dout[:, last])
        self.exact = _exact(problem, of_last)

    def __call__(self, call: Call, tile: Tile) -> str:
        """The message about results that are wrong, or ""."""
        small = Call(self.small, self.direction, self.x, self.results, tile)
        of_small = dict(zip(self.names, small.run()))
        of_last = {
            n: x[..., -LAST_QUERIES:] if n == "lse" else x[:, -LAST_QUERIES:]
            for n, x in zip(self.names, call.run())
            if n in OF_QUERIES
        }
        found = [*self.small_exact.compare(**of_small), *self.exact.compare(**of_last)]
        return next((x.failure for x in found if x.failure), "")


def _exact(problem: Problem, x: Inputs) -> FirstAndLastHeads:
    heads = problem.heads, problem.heads_kv
    return FirstAndLastHeads(x, problem.batch, heads, packed=False, **problem.options)


def _plan_options(problem: Problem) -> Options:
    return Options(causal=problem.causal, softcap=problem.softcap)


def _inputs(problem: Problem) -> Inputs:
    """Standard normal NumPy arrays; those with more than so many numbers repeat them."""
    rng, arrays = numpy.random.default_rng(0), []
    for shape in problem.shapes:
        numbers = rng.standard_normal(min(NUMBERS, math.prod(shape)), "float32")
        arrays.append(numpy.resize(cast(numbers, problem.dtype, "numpy"), shape))
    return Inputs(*arrays, dtype=problem.dtype)


def _on_gpu(x: Inputs) -> Inputs:
    arrays = (to_library(y, "cupy") for y in (x.q, x.k, x.v, x.dout))
    return Inputs(*arrays, dtype=x.dtype)
