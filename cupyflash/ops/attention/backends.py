"""The backends, and which of them computes a problem.

A backend is a folder of the same name here and in ``cuda_src/attention``. Nothing outside of it
names its classes. It has the functions of `Backend`, so a new one is a folder of each name and a
row of `BACKENDS`.
"""

from collections.abc import Iterator
from typing import Protocol

from ... import environment
from ...runtime.config import KernelConfig
from ...runtime.gpu import Capability, Card
from .fp16x3 import backend as fp16x3
from .kernels import Tile
from .kind import MAX_FAST_SOFTCAP, Access, Kind
from .passes import Pass, Wanted
from .problem import Problem
from .simt import backend as simt
from .sm80 import backend as sm80
from .sm90 import backend as sm90


class Backend(Protocol):
    """The functions of a backend. A `Kind` is all that the choice of its kernels depends on."""

    def supports(self, kind: Kind, access: Access, *, backward: bool) -> bool:
        """Whether it computes a pass of such problems, whose tensors can be read this way."""

    def priority(self, kind: Kind, *, backward: bool) -> int:
        """The backend with the highest number, of those that support a problem, computes it.

        One with a negative number does so only where CUPYFLASH_BACKEND forces it.
        """

    def pads(self, kind: Kind) -> bool:
        """Whether its kernels take a v of fewer columns than q and k only with more columns."""

    def forward(self, problem: Problem, kind: Kind, card: Card, tile: Tile | None = None) -> Pass:
        """The launches of the forward; ``tile`` is one of the candidates, else the built-in one."""

    def backward(
        self, problem: Problem, kind: Kind, card: Card, wanted: Wanted, tile: Tile | None = None
    ) -> Pass:
        """The launches of the backward."""

    def forward_candidates(self, kind: Kind) -> dict[Tile, KernelConfig]:
        """The main kernel by the tiles that it may have, the built-in one first; {} of one only."""

    def backward_candidates(self, kind: Kind) -> dict[Tile, KernelConfig]:
        """The main kernel of the backward, as `forward_candidates` gives that of the forward."""

    def kernels(self, kind: Kind, *, backward: bool) -> Iterator[KernelConfig]:
        """Every kernel that a pass of such problems can launch, for warm-up."""

    def configurations(self, capability: Capability) -> Iterator[KernelConfig]:
        """Every kernel that it can launch on such a GPU, each once, for warm-up and tests."""


BACKENDS: dict[str, Backend] = {"sm90": sm90, "sm80": sm80, "fp16x3": fp16x3, "simt": simt}

_ACCESS = {
    Access.ELEMENT: "not 16-byte aligned",
    Access.VECTOR: "16-byte aligned, zero, negative or huge strides",
    Access.TENSOR_MAP: "16-byte aligned",
}


def in_order(kind: Kind, *, backward: bool) -> list[str]:
    """The names of all backends, the fastest for such a problem first."""
    of_name = {name: x.priority(kind, backward=backward) for name, x in BACKENDS.items()}
    return sorted(of_name, key=of_name.__getitem__, reverse=True)


def choose(function: str, kind: Kind, access: Access, *, backward: bool) -> str:
    """The name of the first backend that supports the problem, or of the forced one.

    Raises:
        NotImplementedError: none does, or the forced one does not; or a text of the score beside an
            option that it takes the place of.
    """
    _refuse_options_beside_text(function, kind)
    forced = environment.current().backend
    for name in [forced] if forced else in_order(kind, backward=backward):
        backend = BACKENDS[name]
        if not forced and backend.priority(kind, backward=backward) < 0:
            continue
        if backend.supports(kind, access, backward=backward):
            return name
    dtype, head_dim, features, capability = kind
    got = f"{dtype}, head_dim {head_dim}, {_ACCESS[access]}, compute capability {capability}"
    got += f", a softcap above {MAX_FAST_SOFTCAP:g}" if features.wide_softcap else ""
    if forced:
        raise NotImplementedError(
            f"{function}: the backend {forced} (CUPYFLASH_BACKEND) does not support {got}"
        )
    raise NotImplementedError(
        f"{function}: needs a GPU of compute capability {simt.MIN_CAPABILITY} or newer, got {got}"
    )


def reads_pages(problem: Problem, card: Card) -> bool:
    """Whether the backend that serves a problem of keys in pages reads these where they lie."""
    kind = problem.kind(card.capability)
    name = environment.current().backend or in_order(kind, backward=False)[0]
    supported = BACKENDS[name].supports(kind, problem.access, backward=False)
    return supported and not problem.needs_padding


def _refuse_options_beside_text(function: str, kind: Kind) -> None:
    features = kind.features
    if features.text and features.text.score and (features.softcap or features.alibi):
        got = "softcap" if features.softcap else "alibi_slopes"
        fact = (
            "a score of your own takes the place of softcap and alibi_slopes, so write them into it"
        )
        raise NotImplementedError(f"{function}: {fact}, got {got}")


def pads(problem: Problem, card: Card, *, backward: bool) -> bool:
    """Whether the arrays of a problem must be copied into ones with more columns."""
    shape, kind = problem.shape, problem.kind(card.capability)
    if not problem.needs_padding:
        return False
    empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k)
    if empty or not kind.features.head_dim_v:
        return True
    name = environment.current().backend or in_order(kind, backward=backward)[0]
    supported = BACKENDS[name].supports(kind, problem.access, backward=backward)
    return not supported or BACKENDS[name].pads(kind)
