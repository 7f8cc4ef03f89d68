"""Collectives of torch.distributed, and what becomes of them when a rank fails.

A rank that raises writes why into the store of the process group. On a CPU (gloo) the others look
there while they wait, so that all raise `RankError` with its number. On GPUs a collective is put on
a stream and nobody waits for it; there the watchdog of NCCL ends ranks that wait for another one
for longer than the timeout of the group.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import checkpoint

LOOK = 0.1  # seconds between two looks into the store
GRACE = 2.0  # seconds in which ranks that are left write into the store
_shards: dict[str, int] = collections.Counter()  # how many each group has had
# The error that ended a call within its collectives, by the identities of the groups of the call,
# which are kept so that no other group gets these. The ranks of such groups may wait at different
# collectives, and a later call would meet those of the earlier one.
_out_of_step: dict[tuple[int, ...], tuple[list[Any], str]] = {}

# torch 2.14 has new names for these, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankError(RuntimeError):
    """Another rank has failed or left, and the text has its number and what it raised; or ranks may
    be out of step since an earlier call that ended so.
    """


# torch raises this exception to end the recomputation of a checkpoint, on all ranks at the same
# place. Its name is private.
_RECOMPUTED = getattr(checkpoint, "_StopRecomputationError", RankError)


class Team(NamedTuple):
    """The ranks of a process group; ``group`` is None for one rank alone."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Team":
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    @property
    def device(self) -> torch.device:
        """The device from which the group sends small tensors that the host has made."""
        if self.group is None or "gloo" in dist.get_backend(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


class Failures:
    """The place in the store where the ranks of a shard write what they raised.

    Args:
        teams: whose ranks are numbered, the last team's number first.
        members: the numbers of all ranks in the default group.
    """

    def __init__(self, teams: Sequence[Team], members: Sequence[int]) -> None:
        self.rank, self.ranks = number(teams), len(members)
        name = ",".join(map(str, members))
        _shards[name] += 1  # the same on all ranks, as they make the same shards
        self.key = f"cupyflash.parallel/{name}/{_shards[name]}"
        self.groups = [team.group for team in teams]
        self.store = dist.distributed_c10d._get_default_store() if self.ranks > 1 else None

    @contextlib.contextmanager
    def reported(self, function: str) -> Iterator[None]:
        """A block with collectives: what it raises, the other ranks raise, too.

        Behind it the group serves no more, as ranks may not have ended the same collectives.
        """
        group = tuple(map(id, self.groups))
        if group in _out_of_step:
            fact = "ranks may be out of step since a call in which this one raised"
            raise RankError(f"{function}: {fact} (make another group): {_out_of_step[group][1]}")
        try:
            yield
        except _RECOMPUTED:
            raise
        except BaseException as error:
            if self.store is not None:
                text = f"{type(error).__name__}: {error}"
                _out_of_step.setdefault(group, (self.groups, text))
            if isinstance(error, RankError):
                raise
            if isinstance(error, _Lost):
                raise RankError(f"{function}: {self._cause(str(error))}") from error.__cause__
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Writes for the other ranks what this one raises."""
        self._write(f"raised {type(error).__name__}: {error}")

    def seen(self) -> bool:
        """Whether a rank has written; also when the store has gone, with the rank that holds it."""
        try:
            return self.store is not None and self.store.check([self.key])
        except (RuntimeError, dist.DistError):
            return True

    def _write(self, text: str) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError, dist.DistError):
                self.store.set(f"{self.key}/{self.rank}", text)
                self.store.set(self.key, "")

    def _cause(self, text: str) -> str:
        """The ranks that failed, else those that do not answer within `GRACE` seconds."""
        self._write("lost")
        end = time.monotonic() + GRACE
        silent = set(range(self.ranks))
        try:
            while silent and time.monotonic() < end:
                for rank in sorted(silent):
                    key = f"{self.key}/{rank}"
                    if self.store.check([key]):
                        silent.remove(rank)
                        found = self.store.get(key).decode()
                        if found != "lost":
                            return f"rank {rank} {found}"
                time.sleep(LOOK / 10)
        except (RuntimeError, dist.DistError):
            return f"the rank that holds the store, 0 by default, has left ({text})"
        if not silent:
            return f"a collective failed on all ranks ({text})"
        names = ", ".join(map(str, sorted(silent)))
        return f"rank {names} has left or does not answer ({text})"


class _Lost(Exception):
    """A collective that failed, or that is not worth waiting for."""


class Pending:
    """A collective that runs.

    Attributes:
        tensor: what arrives.
        finish: makes the result of it.
    """

    def __init__(
        self, tensor: Tensor, start: Callable[..., Any] | None, failures: Failures, *inputs: Any
    ) -> None:
        self.tensor, self.failures, self.inputs = tensor, failures, inputs
        self.finish: Callable[[Tensor], Tensor] = lambda tensor: tensor
        try:
            self.work = None if start is None else start(tensor, *inputs, async_op=True)
        except RuntimeError as error:
            raise _Lost(str(error)) from error

    def wait(self) -> Tensor:
        """The result; on a GPU the current stream waits and the host does not."""
        if self.work is not None:
            if self.tensor.device.type == "cpu":
                self._watch()
            try:
                self.work.wait()
            except RuntimeError as error:
                raise _Lost(str(error)) from error
            self.work = None
        return self.finish(self.tensor)

    def _watch(self) -> None:
        pause, look = 1e-5, time.monotonic() + LOOK
        while not self.work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
            if time.monotonic() > look:
                look += LOOK
                if self.failures.seen():
                    raise _Lost("another rank has failed")


def number(teams: Sequence[Team]) -> int:
    """The rank among all: that in the last team counts most."""
    rank = 0
    for team in reversed(teams):
        rank = rank * team.size + team.rank
    return rank


def all_to_all(
    x: Tensor, send: list[int], receive: list[int], team: Team, failures: Failures
) -> Pending:
    """Rows of x by rank, ``send`` of them for each, become ``receive`` rows from each."""
    if team.group is None:
        return Pending(x, None, failures)

    def start(out: Tensor, x: Tensor, async_op: bool) -> Any:
        return dist.all_to_all_single(out, x, receive, send, group=team.group, async_op=async_op)

    return Pending(x.new_empty((sum(receive), *x.shape[1:])), start, failures, x.contiguous())


def all_gather(x: Tensor, team: Team, failures: Failures) -> Pending:
    """(rows, ...) of each rank, as many of each, become (ranks * rows, ...)."""
    if team.group is None:
        return Pending(x, None, failures)

    def start(out: Tensor, x: Tensor, async_op: bool) -> Any:
        return _all_gather(out, x, group=team.group, async_op=async_op)

    return Pending(x.new_empty((team.size * len(x), *x.shape[1:])), start, failures, x.contiguous())


def reduce_scatter(x: Tensor, team: Team, failures: Failures) -> Pending:
    """(ranks * rows, ...) become (rows, ...): each rank gets the sum over ranks of its rows."""
    if team.group is None:
        return Pending(x, None, failures)
    rows = len(x) // team.size
    if x.device.type == "cpu":  # gloo sends all of x to all, and does not say when it has ended
        counts = [rows] * team.size
        pending = all_to_all(x, counts, counts, team, failures)
        pending.finish = lambda parts: parts.unflatten(0, (team.size, rows)).sum(0)
        return pending

    def start(out: Tensor, x: Tensor, async_op: bool) -> Any:
        return _reduce_scatter(out, x, group=team.group, async_op=async_op)

    return Pending(x.new_empty((rows, *x.shape[1:])), start, failures, x.contiguous())
