"""The work of a rank in bench parallel: it compares results with one process, then times calls."""

import dataclasses
import datetime
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.lib.harness import assert_right
from bench.lib.providers import is_ours
from bench.parallel import model
from bench.parallel.exact import exact
from bench.parallel.problems import Case
from bench.parallel.providers import Function, alone, provider, shard_of
from cupyflash.parallel import peers

ONE = "cupyflash-one-gpu"
PASSES = ("fwd", "fwd+bwd")
SLOW = 400e12  # operations a second of a slow implementation, to tell whether there is time
LEAST_SECONDS = 0.05  # of calls one after another between two looks at the clock
MOST_SECONDS = 10.0  # of all timed calls of a row, where one call is shorter
LONG = 1.0  # seconds of a call that needs one call before it, not two; `MOST_SECONDS`: none


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run, the same on all ranks.

    Attributes:
        device: "cuda", or "cpu" in tests.
        checked: tokens of a GPU in the comparison with one process.
        end: no measurement begins that would not have ended when `time.monotonic` shows this.
    """

    device: str
    dtype: torch.dtype
    cases: tuple[Case, ...]
    impls: tuple[str, ...]
    repeats: int
    checked: int
    end: float


def run(rank: int, ranks: int, settings: Settings, store: str, queue: Any) -> None:
    """Puts (kind, content) into the queue: rows, and notes of what was left out."""
    backend = "nccl" if settings.device == "cuda" else "gloo"
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device(settings.device, rank if settings.device == "cuda" else None)
    if settings.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=ranks, timeout=timeout
    )
    for case in settings.cases:
        Measured(case, rank, ranks, device, settings, queue).run()
    dist.barrier()
    if rank == 0:
        queue.put(("end", None))
    dist.destroy_process_group()


class Measured:
    """The measurements of one case."""

    def __init__(
        self,
        case: Case,
        rank: int,
        ranks: int,
        device: torch.device,
        settings: Settings,
        queue: Any,
    ) -> None:
        self.case, self.rank, self.ranks, self.device = case, rank, ranks, device
        self.settings, self.queue = settings, queue
        self.alone_ms: dict[str, float] = {}
        self.right: list[tuple[str, Tensor, Tensor]] = []

    def run(self) -> None:
        one, times = self.case.share_of_one(self.ranks)
        if not self.time_for("fwd"):
            self.note("all", TimeoutError("no time is left"))
            return
        self.measure(ONE, alone(one, 1, self.device), one, times)
        for name in self.settings.impls:
            if not is_ours(name) and self.estimate("fwd+bwd") > MOST_SECONDS:
                self.note(name, TimeoutError(f"a call takes more than {MOST_SECONDS:g} s"))
                continue
            shard = shard_of(name, self.case, self.ranks)
            try:
                # Torch's own cannot be entered twice: the inner one would leave the outer one off.
                if self.everywhere(functools.partial(self.check, name), name):
                    with provider(name, self.case, shard) as function:
                        mine = dataclasses.replace(self.case, tokens=len(shard))
                        self.measure(name, function, mine)
            except Exception as error:  # on all ranks, before anything is sent
                self.note(name, error)

    def measure(self, name: str, function: Function, case: Case, times: float = 1.0) -> None:
        """Adds a row for each pass there is time for."""
        q, k, v, dout = self.inputs(case, case.tokens, seed=self.rank)

        def forward() -> None:
            with torch.no_grad():
                function(q, k, v)

        def both() -> None:
            torch.autograd.grad(function(q, k, v), (q, k, v), dout)

        for direction, call in zip(PASSES, (forward, both), strict=True):
            repeats = self.time_for(direction)
            if not repeats:
                self.note(name, TimeoutError(f"no time is left for {direction}"))
                return
            self.forget_peak()
            ms = self.everywhere(functools.partial(self.clock, call, direction, repeats), name)
            if ms is None:
                return
            ms *= times
            self.alone_ms.setdefault(direction, ms)
            peak = self.slowest([self.peak()])[0]
            if self.rank == 0:
                self.queue.put(("row", self.row(name, direction, ms, peak)))

    def row(self, name: str, direction: str, ms: float, peak: float) -> dict[str, Any]:
        """A row of the results, with what the model expects of ours."""
        flops = self.case.flops(self.ranks, direction) / self.ranks
        fields = {"tflops": round(flops / ms / 1e9, 1), "ms": round(ms, 4)}
        fields["share"] = round(self.alone_ms[direction] / ms, 4)
        move = name.removeprefix("cupyflash-")
        if move in ("heads", "keys", "whole") and self.ranks > 1:
            fields["auto"] = move != "whole" and model.auto(self.case, self.ranks) == move
            if len(self.alone_ms) == len(PASSES):
                one = (self.alone_ms[x] for x in PASSES)
                wanted = model.seconds(self.case, self.ranks, move, *(1e-3 * x for x in one))
                wanted = 1e3 * wanted[PASSES.index(direction)]
                fields["model"] = round(self.alone_ms[direction] / wanted, 4)
            formula = model.memory(self.case, self.ranks, move)
            if direction == "fwd+bwd" and formula is not None:
                fields["formula_gib"] = round(formula / 2**30, 3)
        if direction == "fwd+bwd" and peak and name != ONE:
            fields["gib"] = round(peak / 2**30, 3)
        return self.case.row(self.ranks, impl=name, **{"pass": direction}, **fields)

    def forget_peak(self) -> None:
        """From here on `peak` counts."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the implementation before has left in pieces
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def peak(self) -> float:
        """Bytes beyond the inputs, with the memory that GPUs write for each other."""
        if self.device.type != "cuda":
            return 0.0
        shared = sum(x.memory.numel() for x in peers.found.values() if x and x.memory is not None)
        return torch.cuda.max_memory_allocated() - self.before + shared

    def inputs(self, case: Case, tokens: int, seed: int) -> list[Tensor]:
        """q, k, v, which want a gradient, and dout."""
        source = torch.Generator(self.device).manual_seed(seed)
        heads = (case.heads, case.heads_kv, case.heads_kv, case.heads)
        made = [
            torch.randn(
                tokens, h, case.head_dim, generator=source, device=self.device,
                dtype=self.settings.dtype,
            )
            for h in heads
        ]  # fmt: skip
        return [x.requires_grad_() for x in made[:3]] + made[3:]

    def check(self, name: str) -> bool:
        """Few tokens beside float64, with the usual rule and the errors of one process."""
        tokens = min(self.case.tokens, self.settings.checked)
        case = dataclasses.replace(self.case, tokens=tokens)
        whole = self.inputs(case, tokens * self.ranks, seed=0)
        shard = shard_of(name, case, self.ranks)
        mine = [shard.take(x.detach()) for x in whole]
        with provider(name, case, shard) as function:
            found = _results(function, *mine)
        if not self.right:  # once for all implementations
            one = alone(case, self.ranks, self.device)
            in_dtype = _results(one, *(x.detach() for x in whole))
            right = exact(case, self.ranks, *whole)
            self.right = list(zip(("out", "dq", "dk", "dv"), right, in_dtype, strict=True))
        for x, (what, in_float64, yardstick) in zip(found, self.right, strict=True):
            assert_right(x, shard.take(in_float64), shard.take(yardstick), what)
        return True

    def everywhere(self, call: Callable[[], Any], name: str) -> Any:
        """The result of the call, or None if any rank fails."""
        error, result = None, None
        try:
            result = call()
        except Exception as raised:  # whatever a library raises
            error = raised
        wrong = torch.tensor([int(error is not None)], device=self.device)
        dist.all_reduce(wrong)
        if error is not None:
            self.note(name, error)
        return None if wrong.item() else result

    def time_for(self, direction: str) -> int:
        """How many calls there is time for, the same on all ranks; 0 for none."""
        left = self.settings.end - time.monotonic()
        known = torch.tensor([left], device=self.device)
        dist.all_reduce(known, op=dist.ReduceOp.MIN)
        one = self.estimate(direction)
        if known.item() < one * (1 + self.warm_up(direction)):
            return 0
        return max(1, min(self.settings.repeats, int(MOST_SECONDS / one)))

    def estimate(self, direction: str) -> float:
        """Seconds of a call."""
        return self.case.flops(self.ranks, direction) / self.ranks / SLOW

    def warm_up(self, direction: str) -> int:
        """Calls before those that are timed."""
        one = self.estimate(direction)
        return (one < LONG) + (one < MOST_SECONDS)

    def clock(self, call: Callable[[], None], direction: str, repeats: int) -> float:
        """ms of a call on the slowest rank, median; short ones follow each other, as in a model."""
        for _ in range(self.warm_up(direction)):
            call()
        calls = 1
        if self.estimate(direction) < LEAST_SECONDS:
            calls = math.ceil(LEAST_SECONDS / self.slowest([self.seconds(call, 1)])[0])
        times = self.slowest([self.seconds(call, calls) for _ in range(repeats)])
        return 1e3 * statistics.median(times) / calls

    def seconds(self, call: Callable[[], None], calls: int) -> float:
        """The time of this many calls, one after another."""
        self.synchronize()
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def slowest(self, times: list[float]) -> list[float]:
        """The longest of each time among the ranks."""
        found = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, name: str, error: Exception) -> None:
        self.queue.put(("note", (name, error.__class__, str(error), str(self.case), self.rank)))


def _results(function: Function, *tensors: Tensor) -> list[Tensor]:
    q, k, v, dout = tensors
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
