"""All ranks check before anything is sent: an error of one rank is an error of all.

Ranks exchange one number each. If they differ, or a rank has an error, they exchange texts.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .transport import Failures, RankError, Team, all_gather

ERRORS = (TypeError, ValueError, NotImplementedError)  # what checks raise
FINE = 0


def agree(
    function: str,
    teams: Sequence[Team],
    failures: Failures,
    facts: str,
    error: Exception | None = None,
) -> None:
    """Raises on all ranks if one has an error, or if the ranks do not have the same facts.

    Args:
        facts: what must be the same on all ranks, in words.
        error: what the checks of this rank raised, or a function of the caller's own in them.

    Raises:
        TypeError, ValueError, NotImplementedError: what a rank raised, with its number; ValueError
            with the number of the first rank whose facts are not those of rank 0.
        RankError: a rank has failed or left, or raised anything else.
    """
    known, kind = isinstance(error, ERRORS), FINE
    if error is not None:
        kind = 1 + [isinstance(error, x) for x in (*ERRORS, Exception)].index(True)
    digest = hashlib.sha256(facts.encode()).digest()[:7]
    with failures.reported(function):
        row = [[kind, int.from_bytes(digest, "little")]]
        rows = torch.tensor(row, dtype=torch.int64, device=teams[0].device)
        for team in teams:
            rows = all_gather(rows, team, failures).wait()
        rows = rows.tolist()
        if all(row == [FINE, rows[0][1]] for row in rows):
            return
        text = str(error) if known else f"raised {type(error).__name__}: {error}"
        texts = [facts if error is None else text]
        for team in teams:
            gathered = [[""] for _ in range(team.size)]
            dist.all_gather_object(gathered, texts, group=team.group)
            texts = [text for some in gathered for text in some]
    if error is not None:
        raise error
    for rank, (kind, _) in enumerate(rows):
        if kind > len(ERRORS):
            raise RankError(f"{function}: rank {rank} {texts[rank]}")
        if kind:
            text = texts[rank].removeprefix(f"{function}: ")
            raise ERRORS[kind - 1](f"{function}: rank {rank}: {text}")
    rank = next(rank for rank, row in enumerate(rows) if row != rows[0])
    raise ValueError(
        f"{function}: all ranks must have the same, got on rank 0 {texts[0]}, on rank {rank} "
        f"{texts[rank]}"
    )
