"""Self-attention by cupyflash with what `bench.problem.Problem` does not know of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bench.problem import Problem
from bench.providers import Call, Provider

TILE = 128
RUNS = 50  # of a deterministic backward, all with the same bits


def visited_tiles(seqlen: int, window: int | None = None) -> int:
    """Causal tiles of TILE queries x TILE keys that hold a key seen, with the window or without."""
    left = seqlen if window is None else window
    tiles = range(-(-seqlen // TILE))
    return sum(tile - max(0, tile * TILE - left) // TILE + 1 for tile in tiles)


@dataclasses.dataclass(frozen=True)
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
            alone = (dataclasses.replace(problem, seqlen=length) for length in self.lengths)
            return sum(sequence.flops(direction) for sequence in alone)
        share = visited_tiles(problem.seqlen, self.window) / visited_tiles(problem.seqlen)
        return problem.flops(direction) * share

    def checked(self, direction: str) -> Callable[[], Any]:
        """The call of a pass, once its results are known to be right.

        Raises:
            AssertionError: they are not, or a deterministic backward gives other bits.
        """
        from bench.correctness import Check

        tensors = self.problem.tensors()
        provider = Provider("cupyflash", lambda: self._attention(tensors[0].device))
        call = Call(provider, tensors, self.problem.causal)
        window = None if self.window is None else (self.window, 0)
        Check(self.problem, tensors, self.lengths, window=window)(call, direction)
        if direction == "fwd":
            return call.forward
        if self.deterministic:
            assert_repeatable(call.backward)
        return call.backward

    def _attention(self, device: Any) -> Callable[[Any, Any, Any, bool], Any]:
        import torch

        import cupyflash

        left_right = (-1, -1) if self.window is None else (self.window, 0)
        options = {"window_size": left_right, "deterministic": self.deterministic}
        if not self.lengths:
            return lambda q, k, v, causal: cupyflash.flash_attn_func(
                q, k, v, causal=causal, **options
            )
        cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        packing = (cu_seqlens, cu_seqlens, max(self.lengths), max(self.lengths))

        def packed(q: Any, k: Any, v: Any, causal: bool) -> Any:
            rows = (x.squeeze(0) for x in (q, k, v))
            out = cupyflash.flash_attn_varlen_func(*rows, *packing, causal=causal, **options)
            return out.unsqueeze(0)

        return packed


def packed(problem: Problem, lengths: Sequence[int]) -> Variant:
    """Sequences of these lengths with the dtype, heads and mask of a problem."""
    return Variant(dataclasses.replace(problem, batch=1, seqlen=sum(lengths)), tuple(lengths))


def assert_repeatable(backward: Callable[[], Sequence[Any]]) -> None:
    """Raise AssertionError if one of RUNS backwards differs from the first in a bit."""
    import torch

    first = [gradient.view(torch.uint8) for gradient in backward()]
    for run in range(2, RUNS + 1):
        for name, expected, gradient in zip(("dq", "dk", "dv"), first, backward(), strict=True):
            same = torch.equal(expected, gradient.view(torch.uint8))
            assert same, f"{name}: run {run} of {RUNS} differs from the first in a bit"
