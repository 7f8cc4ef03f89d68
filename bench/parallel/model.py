"""A model of the time and of the memory of a move, which bench parallel prints beside its figures.

The model takes the time of one GPU as measured, and adds what a move cannot hide. It leaves out
launches, the time of the host, clocks under a power limit and uneven links.
"""

import math

from bench.parallel.problems import Case
from bench.parallel.providers import SLACK
from cupyflash.parallel import choice
from cupyflash.parallel.exchange import share
from cupyflash.parallel.tokens import Band, Tokens

LINK = 350e9  # bytes a second from a GPU to the others of its host, of 450
LATENCY = 25e-6  # seconds of a move
MULTIPROCESSORS, TILE = 132, 128  # of Hopper; queries of a tile
ITEM = 2  # bytes of an element


def seconds(case: Case, ranks: int, move: str, forward: float, both: float) -> tuple[float, float]:
    """(forward, both passes) in seconds, of what one GPU takes for as much.

    Args:
        move: "heads", "keys", or "whole", for keys of a division that leaves sequences whole: then
            all wait for the rank that has most work.
    """
    slack = SLACK * (move == "whole")
    if move == "heads":
        heads = case.heads, case.heads_kv
        sent = choice.heads_bytes(ranks, heads, (case.head_dim, case.head_dim), ITEM)
        extra = case.tokens * sent / LINK + 2 * LATENCY
        return forward + extra, both + 2 * extra
    tokens = Tokens.of(case.lengths(ranks), ranks, slack=slack)
    if slack:
        work = [tokens.work(rank, Band(case.window, 0)) for rank in range(ranks)]
        forward, both = (x * max(work) * ranks / sum(work) for x in (forward, both))
    if tokens.apart:
        return forward, both
    groups = case.heads_kv // _heads_at_once(case, ranks, slack)
    one = _travelling(case, ranks, slack) * _row(case) / groups / LINK + LATENCY
    tiles = case.tokens * case.heads / TILE
    tail = _tail(tiles / groups) / _tail(tiles)
    times = []
    for work, back in ((forward, 0), (both - forward, 1)):
        part = work * tail / groups
        # The next keys travel beside a group, and back with the gradients of the one before.
        beside = sum(max(part, one * (1 + back * (i > 0))) for i in range(groups - 1))
        times.append(one + beside + max(part, back * one * (groups > 1)) + back * one)
    return times[0], sum(times)


def auto(case: Case, ranks: int) -> str:
    """The move that "auto" makes."""
    dims = case.head_dim, case.head_dim
    return choice.choose(ranks, (case.heads, case.heads_kv), dims, ITEM, share=_seen(case, ranks))


def memory(case: Case, ranks: int, move: str) -> int | None:
    """Bytes of a rank for both passes beyond q, k, v and dout; None where no formula is known."""
    if case.kind != "causal":
        return None
    q = case.tokens * case.heads * case.head_dim * ITEM
    k = case.tokens * case.heads_kv * case.head_dim * ITEM
    if move == "heads":
        # q, k, v, out and dout by heads; dq, dk and dv, and dq in float32; out of this rank, and
        # the memory that q, k and v go through.
        k *= max(1, ranks // case.heads_kv)
        return 8 * q + 6 * k
    # out, dq, dk and dv; the keys of all calls, which two parts of a sequence see, and slots for
    # as many gradients; of a group dq, also in float32, dk and dv.
    rows = int(k * (ranks + 0.5))
    groups = case.heads_kv // _heads_at_once(case, ranks)
    return 2 * q + 2 * k + 4 * rows + (3 * q + 2 * rows) // groups


def _heads_at_once(case: Case, ranks: int, slack: float = 0.0) -> int:
    dims, tokens = (case.head_dim, case.head_dim), _travelling(case, ranks, slack)
    return choice.heads_at_once(int(tokens), case.heads_kv, dims, ITEM, choice.LEAST_COPIED)


def _travelling(case: Case, ranks: int, slack: float = 0.0) -> float:
    """Keys that a rank gets from others."""
    return case.tokens * (ranks - 1) * _seen(case, ranks, slack)


def _row(case: Case) -> int:
    """Bytes of a key and its value, of all heads."""
    return 2 * case.heads_kv * case.head_dim * ITEM


def _seen(case: Case, ranks: int, slack: float = 0.0) -> float:
    """The share of the keys of others that a rank sees."""
    if (case.window is None and not slack) or ranks == 1:
        return 1.0
    return share(Tokens.of(case.lengths(ranks), ranks, slack=slack), Band(case.window, 0))


def _tail(tiles: float) -> float:
    """How much longer a launch takes because its last tiles leave multiprocessors idle."""
    rounds = tiles / MULTIPROCESSORS
    return math.ceil(rounds) / rounds
