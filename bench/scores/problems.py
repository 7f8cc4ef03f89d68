"""What bench scores times: scores and masks, with the option that does the same where there is one.

A `make` takes arrays and returns a function as `cupyflash.Score`, `cupyflash.Mask` and
FlexAttention take it, and as the check in float64 calls it with whole tensors.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy

from bench.lib import data
from cupyflash.testing.problem import Problem

HIDDEN, TOKENS, LONG = 2048, 16384, 32768
BIASES = (512, 1024, 2048, 4096, 8192, 16384)  # tokens of a sequence with a Boolean bias
CAP, REACH, WINDOW, DOCUMENT, BLOCK = 30.0, 127, 1024, 1024, 512
OURS, PLAIN, BUILT_IN, FLEX = "cupyflash", "cupyflash-plain", "cupyflash-option", "flex"
IMPLS = (OURS, PLAIN, BUILT_IN, FLEX)
Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A score or a mask on one problem.

    Attributes:
        make: of the arrays, the function.
        arrays: of the problem; those that learn want a gradient.
        fewer: there are so many times fewer heads.
        as_bias: the array is a Boolean bias in both calls of ours, which is a text in the one and
            read by the kernels in the other.
        built_in: of the problem and the arrays, the options of a `bench.lib.providers.Call` of
            cupyflash that do the same without a function, or None.
        causal: what is compared with is causal.
        sparse: FLOPs are those of the scores that are seen.
        beside: the call whose rate is the unit of the targets.
        targets: of both passes, as a share of that rate; None for a pass that is not timed.
        rates: of both passes, TFLOP/s to reach.
    """

    name: str
    group: str
    make: Callable[..., Callable]
    arrays: Callable[[Problem], Arrays] = lambda problem: ()
    head_dim: int = 128
    tokens: int = TOKENS
    batch: int = 1
    fewer: int = 1
    as_bias: bool = False
    is_mask: bool = False
    built_in: Callable[[Problem, Arrays], dict[str, Any]] | None = None
    causal: bool = False
    sparse: bool = False
    deterministic: bool = False
    beside: str = PLAIN
    targets: tuple[float | None, float | None] = (0.9, 0.85)
    rates: tuple[float | None, float | None] = (None, None)

    @property
    def problem(self) -> Problem:
        heads = HIDDEN // self.head_dim // self.fewer
        shape = (self.head_dim, self.batch, self.tokens, heads, heads, self.causal)
        return Problem("bfloat16", *shape)

    @property
    def passes(self) -> tuple[str, ...]:
        named = zip(("fwd", "bwd"), self.targets)
        return tuple(direction for direction, target in named if target is not None)

    def flops(self, direction: str, arrays: Arrays) -> float:
        """Operations of a pass, those of the scores that are seen where the mask is sparse."""
        problem = self.problem
        if not self.sparse:
            return problem.flops(direction)
        whole = dataclasses.replace(problem, causal=False).flops(direction)
        return whole * seen(self.make(*arrays), problem.seqlen) / problem.seqlen**2


def seen(mask: Callable, seqlen: int) -> int:
    """How many pairs of a query and a key the mask lets pass."""
    import torch

    keys, zero = torch.arange(seqlen, device=data.DEVICE), torch.zeros((), device=data.DEVICE).int()
    queries = keys[:, None].split(1024)
    return sum(int(mask(zero, zero, rows, keys).sum()) for rows in queries)


# ---- arrays ----


def _slopes(problem: Problem) -> Arrays:
    """2^(-8 (h + 1) / heads), as arXiv:2108.12409 has them."""
    import torch

    heads = torch.arange(1, problem.heads + 1, device=data.DEVICE)
    return (2.0 ** (-8.0 / problem.heads * heads.float()),)


def _table(problem: Problem) -> Arrays:
    return (data.random((problem.heads, 2 * REACH + 1), "float32", 1),)


def _trained_table(problem: Problem) -> Arrays:
    return tuple(x.requires_grad_() for x in _table(problem))


def _gates(problem: Problem) -> Arrays:
    """Of queries a factor, of keys a term."""
    source = data.generator(1)
    return tuple(data.random((1, problem.seqlen), "float32", source) for _ in range(2))


def _documents(problem: Problem) -> Arrays:
    import torch

    return (torch.arange(problem.seqlen, device=data.DEVICE, dtype=torch.int32) // DOCUMENT,)


def _prompt(problem: Problem) -> Arrays:
    """The length of the prompt, a quarter."""
    import torch

    return (torch.tensor([problem.seqlen // 4], device=data.DEVICE, dtype=torch.int32),)


def irregular_lengths(seqlen: int) -> list[int]:
    """Of documents, log-normal, as in `bench extras`."""
    sizes = numpy.random.default_rng(0).lognormal(sigma=1.0, size=12)
    ends = numpy.rint(sizes.cumsum() * seqlen / sizes.sum()).astype(int).tolist()
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def _irregular(problem: Problem) -> Arrays:
    """The document of each token, and its block of BLOCK tokens within that."""
    import torch

    lengths = torch.tensor(irregular_lengths(problem.seqlen))
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    block = torch.cat([torch.arange(int(n)) // BLOCK for n in lengths])
    return tuple(x.to(data.DEVICE, torch.int32) for x in (document, block))


def _half(problem: Problem) -> Arrays:
    """A Boolean array of which half is True."""
    return (data.random((problem.seqlen, problem.seqlen), "float32", 1) > 0,)


def _half_of_each(problem: Problem) -> Arrays:
    """The same for each sequence."""
    return (data.random((problem.batch, problem.seqlen, problem.seqlen), "bfloat16", 1) > 0,)


# ---- scores and masks ----


def _alibi(slopes: Any) -> Callable:
    return lambda s, b, h, q, k: s - slopes[h] * abs(q - k)


def _by_distance(table: Any) -> Callable:
    import torch

    return lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -REACH, REACH) + REACH]


def _gate(factor: Any, term: Any) -> Callable:
    import torch

    return lambda s, b, h, q, k: s * torch.sigmoid(factor[b, q]) + term[b, k]


def _softcap() -> Callable:
    import torch

    return lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)


def _in_document(document: Any) -> Callable:
    return lambda b, h, q, k: (document[q] == document[k]) & (k <= q)


def _prefix(prompt: Any) -> Callable:
    return lambda b, h, q, k: (k < prompt[0]) | (k <= q)


def _window() -> Callable:
    return lambda b, h, q, k: (k <= q) & (q - k < WINDOW)


def _block_causal(document: Any, block: Any) -> Callable:
    return lambda b, h, q, k: (document[q] == document[k]) & (block[k] <= block[q])


def _dense(seen: Any) -> Callable:
    return lambda b, h, q, k: seen[q, k]


def _dense_of_each(seen: Any) -> Callable:
    return lambda b, h, q, k: seen[b, q, k]


# ---- the same by options ----


def _packed(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    return {"lengths": (DOCUMENT,) * (problem.seqlen // DOCUMENT)}


SCORES = {  # the function, its arrays, and the option that does the same
    "ALiBi": (_alibi, _slopes, lambda problem, arrays: {"alibi_slopes": arrays[0]}),
    "distance table": (_by_distance, _table, None),
    "gate": (_gate, _gates, None),
    "softcap": (_softcap, lambda problem: (), lambda problem, arrays: {"softcap": CAP}),
}


def cases() -> list[Case]:
    found = []
    for head_dim, group in ((128, "scores"), (64, "d64")):
        least = 0.8 if head_dim == 64 else 0.9
        for name, (make, arrays, option) in SCORES.items():
            targets = (0.8 if name == "softcap" else least, 0.85)
            case = Case(name, group, make, arrays, head_dim, built_in=option, targets=targets)
            found.append(case)
    of_mask = {"group": "masks", "is_mask": True, "causal": True, "sparse": True}
    beside = {**of_mask, "beside": BUILT_IN, "targets": (0.9, 0.9)}
    window = {"window": (WINDOW - 1, 0)}
    found += [
        Case("documents", make=_in_document, arrays=_documents, built_in=_packed, **beside),
        Case("window", make=_window, built_in=lambda problem, arrays: window, **beside),
        Case("prefix LM", make=_prefix, arrays=_prompt, targets=(0.9, 0.9), **of_mask),
        Case(
            "block-causal documents", make=_block_causal, arrays=_irregular, tokens=LONG,
            targets=(0.0, 0.0), rates=(600.0, 400.0), **of_mask,
        ),
        Case(
            "dense mask", "dense", _dense, _half, is_mask=True, beside=BUILT_IN,
            built_in=lambda problem, arrays: {"bias": arrays[0][None, None]}, targets=(1.3, 1.3),
        ),
    ]  # fmt: skip
    whole = itertools.product((64, 128, 256), BIASES, (1,))
    for head_dim, tokens, fewer in (*whole, *itertools.product((64, 128), BIASES[3::2], (4, 8))):
        batch, heads = TOKENS // tokens, HIDDEN // head_dim // fewer
        case = Case(
            f"Boolean {batch}x{heads}x{tokens}", "boolean", _dense_of_each,
            _half_of_each, head_dim, tokens, batch, fewer, as_bias=True, is_mask=True,
            beside=BUILT_IN, targets=(1.0, 1.0),
            built_in=lambda problem, arrays: {"bias": arrays[0][:, None]},
        )  # fmt: skip
        found.append(case)
    trained = Case("trained table", "gradient", _by_distance, _trained_table, targets=(None, 0.75))
    fixed = {"name": "trained table, deterministic", "deterministic": True, "targets": (None, 0.6)}
    return [*found, trained, dataclasses.replace(trained, **fixed)]
