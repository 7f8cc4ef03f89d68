"""Scores and masks of the caller's own, beside plain attention, our options, and FlexAttention.

    python -m bench scores
    python -m bench scores --only scores masks --seconds 240
    python -m bench scores --compile       no GPU: its kernels for Hopper go into the cache

One sequence of 16384 tokens, 2048 hidden, bfloat16, head dim 128 (group d64: 64); the irregular
documents have 32768. Group boolean has 16384 tokens in sequences of 512 to 16384 tokens, each with
a mask of its own, head dims of 64, 128 and 256, and sometimes fewer heads. A mask counts the FLOPs
of the scores that are seen. A rate stands beside that of attention without a function (causal
beside masks), of the option that does the same, and of FlexAttention, which torch.compile compiles
and whose mask is made before the clock starts. Results are compared first with float64, which is
the function itself run by torch.

| group | what |
|---|---|
| scores, d64 | ALiBi, a table by distance, a gate by query and key, softcap |
| masks | documents, window, prefix LM, block-causal documents of many lengths |
| dense | a Boolean array that the mask reads, beside the same array as ``bias`` |
| boolean | a Boolean bias as a text, whose calls find its tiles, beside kernels that read it |
| gradient | the table with its gradient, also deterministic |
| first | seconds of the first call of a text, with an empty cache and in a second process |
| tiles | a call that finds the tiles of its mask, beside one that has them |
| host | host time of a small call |
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from bench.lib import data, harness
from bench.lib.deadline import Deadline
from bench.lib.report import Row
from bench.scores import times
from bench.scores.calls import Prepared
from bench.scores.page import draw as draw
from bench.scores.page import scores_table, times_table
from bench.scores.problems import BUILT_IN, IMPLS, OURS, PLAIN, Case, cases
from cupyflash import jit

OF_CASES = ("scores", "masks", "gradient", "dense", "boolean", "d64")
GROUPS = (*OF_CASES, "tiles", "host", "first")
ARCH = "sm_90a"

Step = tuple[str, Callable[[], None]]  # where it is, for the notes, and what it does


def measure(run: harness.Run, case: Case, direction: str, impls: Sequence[str]) -> None:
    """Add rows of a pass of a case, of each that can, and is right."""
    prepared = _prepared(case)
    flops = case.flops(direction, prepared.arrays)
    of_pass = ("fwd", "bwd").index(direction)
    able = [x for x in impls if x != BUILT_IN or case.built_in]

    def row_of(impl: str, ms: float) -> Row:
        work = case.problem.flops(direction) if impl == PLAIN else flops
        named = {"op": "scores", "group": case.group, "what": case.name, "impl": impl}
        target = {"target": case.targets[of_pass], "target_tflops": case.rates[of_pass]}
        fields = case.problem.row(ms=round(ms, 5), tflops=round(work / ms / 1e9, 2))
        return {**named, "pass": direction, **fields, "beside": case.beside, **target}

    def checked(impl: str) -> Callable[[], Any]:
        return prepared.checked(impl, direction)

    run.compare(f"{direction} {case.name} D={case.head_dim}", able, checked, row_of)


@functools.lru_cache(maxsize=1)
def _prepared(case: Case) -> Prepared:
    return Prepared(case)


def steps(run: harness.Run, groups: Sequence[str], impls: Sequence[str]) -> Iterator[Step]:
    """What a run does, one after the other."""
    for group in groups:
        for case in cases():
            for direction in case.passes if case.group == group else ():
                step = functools.partial(measure, run, case, direction, impls)
                yield f"{direction} {case.name} D={case.head_dim}", step
        if group == "tiles":
            for tokens in times.TILES:
                yield f"tiles of {tokens} tokens", functools.partial(times.tiles, run, tokens)
        elif group not in OF_CASES:
            yield group, functools.partial({"host": times.host, "first": times.first}[group], run)


def compile_kernels(groups: Sequence[str], jobs: int | None) -> int:
    """Compile what these groups launch on a GPU of Hopper, without one."""
    import torch

    from bench.lib import dry_run
    from bench.lib.launches import configurations

    def nothing(shape: tuple[int, ...], dtype: str, source: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    no_values = mock.patch.object(data, "random", nothing)
    with dry_run.hopper(), no_values, configurations() as found:
        for call in _calls(groups):
            try:
                call()
            except NotImplementedError as error:
                print(error)
    built = jit.build_all(list(dict.fromkeys((x, ARCH) for x in found.values())), jobs, True)
    for one in built:
        print(f"{one.seconds:6.1f} s {one.spill_bytes:4} bytes spilled {one.path.parent.name}")
    return 0


def _calls(groups: Sequence[str]) -> Iterator[Callable[[], Any]]:
    """The calls of cupyflash that these groups time."""
    for case in cases():
        impls = (OURS, PLAIN, *([BUILT_IN] if case.built_in else []))
        for impl in impls if case.group in groups else ():
            prepared = _prepared(case)
            call = prepared.call(impl)
            for direction in case.passes:
                of_pass = call.forward if direction == "fwd" else call.backward
                yield functools.partial(prepared.planned, impl, of_pass)
    if "tiles" in groups:
        for tokens in times.TILES:
            yield from times.tiles_calls(tokens).values()
    if "host" in groups:
        for direction in times.HOST_PASSES:
            yield from times.host_calls(direction).values()


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("scores", __doc__, repeats=15, impls=IMPLS)
    add = parser.add_argument
    add("--only", nargs="+", choices=GROUPS, metavar="GROUP", default=GROUPS)
    add("--seconds", type=float, default=540.0, help="after these nothing goes on")
    add("--compile", action="store_true", help="only compile, which needs no GPU")
    add("--jobs", type=int, help="processes that compile; default one a core")
    options = parser.parse_args(arguments)
    if options.compile:
        return compile_kernels(options.only, options.jobs)
    from bench.lib.timing import PROTOCOL

    deadline = Deadline(options.seconds)
    run = harness.Run("scores", PROTOCOL, arguments, options)
    for where, step in run.each(steps(run, options.only, options.impls)):
        run.within(deadline, where, step)
    run.draw(draw)
    return run.finish(scores_table(run.rows), times_table(run.rows))
