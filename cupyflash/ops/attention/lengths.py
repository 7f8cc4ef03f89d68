"""The checks of the values of cu_seqlens and seqused, where reading them waits for no GPU."""

from collections.abc import Mapping

from .names import caller_name
from .problem import Problem


def check_lengths(function: str, problem: Problem, values: Mapping[str, list[int]]) -> None:
    """The values of cu_seqlens and seqused: they are only read where that waits for no GPU."""
    shape = problem.shape
    for side, total, longest in (
        ("q", problem.total_q, shape.seqlen_q),
        ("k", problem.total_k, shape.seqlen_k),
    ):
        ends, used = values.get(f"cu_seqlens_{side}"), values.get(f"seqused_{side}")
        if ends is not None:
            _check_cu_seqlens(function, f"cu_seqlens_{side}", ends, total, longest)
        if used is not None:
            _check_seqused(function, f"seqused_{side}", used, longest, ends)


def _check_cu_seqlens(
    function: str, name: str, values: list[int], total: int, longest: int
) -> None:
    name = caller_name(function, name)
    lengths = [b - a for a, b in zip(values, values[1:])]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        fact = f"{name} must start with 0, not decrease and end with the {total} rows"
        raise ValueError(f"{function}: {fact}, got {values}")
    if max(lengths, default=0) > longest:
        fact = f"{name} must have no sequence longer than the maximum {longest}"
        raise ValueError(f"{function}: {fact}, got {values}")


def _check_seqused(
    function: str, name: str, values: list[int], rows: int, cu_seqlens: list[int] | None
) -> None:
    """``rows`` are those of each sequence, unless there are cu_seqlens."""
    if cu_seqlens is None:
        if values and not 0 <= min(values) <= max(values) <= rows:
            raise ValueError(f"{function}: {name} must be from 0 to {rows}, got {values}")
        return
    lengths = [b - a for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    if not all(0 <= value <= length for value, length in zip(values, lengths)):
        fact = f"{name} must be from 0 to the lengths {lengths} of the sequences"
        raise ValueError(f"{function}: {fact}, got {values}")
