"""The cases of the kernel tests: a set in which every two values of two options meet."""

import dataclasses
import itertools
import random
from typing import Any

import numpy
import pytest
from targets import TARGETS, Target, compute_capability

from cupyflash.testing import STORAGES, Inputs, make_alibi_slopes

CPU_LENGTHS = [(1, 1), (1, 113), (31, 31), (20, 50), (50, 20), (10, 300)]
GPU_LENGTHS = [(1, 1), (113, 113), (1, 4097), (113, 1023), (1023, 113), (1023, 1023), (4097, 4097)]
BIASES = {  # axes that are not broadcast, dtype; None is that of q
    "mask": ("bqk", "bool"),
    "full": ("bhqk", None),
    "position": ("hqk", "float32"),
}
HEAD_DIMS = [8, 32, 40, 64, 96, 128, 160, 192, 256]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; ``alibi`` is the rank of the slopes, ``bias`` a key of `BIASES`."""

    dtype: str
    head_dim: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    causal: bool | str
    window: tuple[int | None, int | None] | None
    softcap: float
    alibi: int
    layout: str
    storage: str
    bias: str
    sinks: bool
    dropout: float

    @property
    def id(self) -> str:
        parts = [self.dtype, f"d{self.head_dim}", "x".join(map(str, self.lengths))]
        parts += ["h" + "/".join(map(str, self.heads)), self.layout, self.storage]
        parts += {True: ["causal"], False: []}.get(self.causal, [f"causal-{self.causal}"])
        parts += [f"window{self.window}".replace(" ", "")] if self.window else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap else []
        parts += [f"alibi{self.alibi}d"] if self.alibi else []
        parts += [f"bias-{self.bias}"] if self.bias else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"dropout{self.dropout:g}"] if self.dropout else []
        return "-".join(parts)

    def problem(self, target: Target) -> tuple[Inputs, dict[str, Any]]:
        """The inputs and the options of ``cupyflash.attention`` without the layout."""
        # The yardstick keeps all scores: one long sequence is enough for several processes.
        batch = 1 if self.lengths[0] * self.lengths[1] > 2**22 else 2
        inputs = target.inputs(
            self.dtype,
            batch=batch,
            seqlen_q=self.lengths[0],
            seqlen_k=self.lengths[1],
            heads_q=self.heads[0],
            heads_kv=self.heads[1],
            head_dim=self.head_dim,
            layout=self.layout,
            storage=self.storage,
        )
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        if self.alibi:
            options["alibi_slopes"] = make_alibi_slopes(
                self.heads[0],
                target.library,
                batch=batch if self.alibi == 2 else None,
                device=target.device,
            )
        rng = numpy.random.default_rng(4)
        if self.bias:
            axes, dtype = BIASES[self.bias]
            whole = (batch, self.heads[0], *self.lengths)
            shape = [size if axis in axes else 1 for axis, size in zip("bhqk", whole)]
            values = rng.standard_normal(shape, dtype="float32")
            if dtype == "bool":
                options["bias"] = target.array(values > -0.5)
            else:
                options["bias"] = target.array(values, dtype or self.dtype)
        if self.sinks:
            options["sinks"] = target.array(rng.standard_normal(self.heads[0], dtype="float32"))
        if self.dropout:
            options |= {"dropout_p": self.dropout, "dropout_seed": 2**45 + 17}
        return inputs, options


def factors(target: Target) -> dict[str, list]:
    """The values of each field of `Case` on this target."""
    return {
        "dtype": list(target.dtypes),
        "head_dim": HEAD_DIMS if target.full else [64, 128, 40],
        "lengths": GPU_LENGTHS if target.gpu and target.full else CPU_LENGTHS,
        "heads": [(2, 2), (4, 2), (3, 1)],
        "causal": [False, True, "top-left"],
        "window": [None, (37, 5), (None, 3), (0, 0), (16, None)],
        "softcap": [0.0, 5.0],
        "alibi": [0, 1, 2],
        "layout": ["bshd", "bhsd"],
        "bias": ["", *BIASES],
        "sinks": [False, True],
        "dropout": [0.0, 0.2],
        "storage": [x for x in STORAGES if x != "unaligned" or not target.aligned_only],
    }


def pairwise(values: dict[str, list], seed: int = 0) -> list[dict[str, Any]]:
    """Points such that any two values of two fields occur together in one of them; greedy."""
    rng = random.Random(seed)
    names = list(values)
    pairs = list(itertools.combinations(range(len(names)), 2))
    open_pairs = {
        (a, i, b, j)
        for a, b in pairs
        for i in range(len(values[names[a]]))
        for j in range(len(values[names[b]]))
    }
    points = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(40):
            point = [rng.randrange(len(values[name])) for name in names]
            point[a], point[b] = i, j
            gain = sum((x, point[x], y, point[y]) in open_pairs for x, y in pairs)
            best = max(best, (gain, point))
        point = best[1]
        open_pairs -= {(x, point[x], y, point[y]) for x, y in pairs}
        points.append({name: values[name][index] for name, index in zip(names, point)})
    return points


def matrix() -> pytest.MarkDecorator:
    """Parametrises a test over (target, case)."""
    parameters = []
    for target in TARGETS:
        cases = [Case(**point) for point in pairwise(factors(target))]
        parameters += [
            pytest.param(target, case, id=f"{target.name}-{case.id}")
            for case in (cases[:1] if target.missing else cases)
        ]
    return pytest.mark.parametrize(("target", "case"), parameters, indirect=["target"])


def libraries() -> list[Target]:
    """One target for each library and device, for kernels that come in no backends."""
    found: dict[tuple[str, str], Target] = {}
    for target in TARGETS:
        place = (target.library, target.device)
        dtypes = (*found[place].dtypes, *target.dtypes) if place in found else target.dtypes
        name = f"{target.library}-{target.device}"
        unique = tuple(dict.fromkeys(dtypes))
        found[place] = dataclasses.replace(target, name=name, backend=None, dtypes=unique)
    return list(found.values())


def each_library(library: str | None = None, device: str | None = None) -> pytest.MarkDecorator:
    """Parametrises a test over :func:`libraries`, those of one library or device if given."""
    chosen = [
        target
        for target in libraries()
        if library in (None, target.library) and device in (None, target.device)
    ] or select(library, device)
    return pytest.mark.parametrize("target", chosen, indirect=True, ids=lambda x: x.name)


def select(library: str | None = None, device: str | None = None) -> list[Target]:
    """The targets, those of one library or device if given; never empty."""
    reason = compute_capability()[1] or "no GPU tests of torch: it sees no GPU"
    return [
        target
        for target in TARGETS
        if library in (None, target.library) and device in (None, target.device)
    ] or [Target(f"{library}-gpu", "", "cuda", missing=reason)]


def each(library: str | None = None, device: str | None = None) -> pytest.MarkDecorator:
    """Parametrises a test over :func:`select`."""
    targets = select(library, device)
    return pytest.mark.parametrize("target", targets, indirect=True, ids=lambda x: x.name)
