"""One pass of one problem: check every provider, then time those that are right."""

from collections.abc import Sequence

import torch
from rich.console import Console

from bench.correctness import Check
from bench.problem import Problem
from bench.providers import PROVIDERS, Call
from bench.report import Row
from bench.timing import Timer, Timing


class Notes:
    """What was left out and why; the same reason is told once.

    Attributes:
        wrong: the implementations that failed a check.
    """

    def __init__(self, out: Console) -> None:
        self.out = out
        self.told: set[tuple[str, str]] = set()
        self.wrong: set[str] = set()

    def left_out(self, impl: str, error: Exception, where: str) -> None:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first_line}"
        if isinstance(error, AssertionError):
            self.wrong.add(impl)
            reason = f"WRONG RESULT: {first_line}"
        if (impl, reason) not in self.told:
            self.told.add((impl, reason))
            self.say(f"{impl} left out from {where} on: {reason}")

    def late(self, name: str, timing: Timing, where: str) -> None:
        """Say so if launch cost may be in the time."""
        if timing.late > timing.repeats // 4:
            self.say(f"{name}: host late in {timing.late} of {timing.repeats} runs of {where}")

    def say(self, text: str) -> None:
        self.out.print(text, markup=False, soft_wrap=True)


def measure(
    problem: Problem, direction: str, names: Sequence[str], timer: Timer, notes: Notes
) -> list[Row]:
    """A row for each provider that can do this and does it right.

    Args:
        direction: "fwd" or "bwd".
        names: of the providers.
    """
    where = f"{direction} {problem}"
    tensors = problem.tensors()
    check, calls = Check(problem, tensors), {}
    for name in names:
        try:
            call = Call(PROVIDERS[name], tensors, problem.causal)
            check(call, direction)
            calls[name] = call.forward if direction == "fwd" else call.backward
        except Exception as error:  # whatever a library raises where it cannot do this
            notes.left_out(name, error, where)
            torch.cuda.empty_cache()  # what ran out of memory has left it in pieces
    rows = []
    for name, timing in timer.compare(calls).items():
        notes.late(name, timing, where)
        tflops = problem.flops(direction) / timing.ms / 1e9
        row = problem.row(impl=name, ms=round(timing.ms, 5), tflops=round(tflops, 2))
        extra = {"repeats": timing.repeats, "sm_mhz": timer.sm_mhz}
        rows.append({"op": "attention", "pass": direction, **row, **extra})
    return rows
