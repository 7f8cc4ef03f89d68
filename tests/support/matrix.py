"""All parametrisations of tests are made here: the targets and the cases that a test runs on."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest
from targets import TARGETS, Target, compute_capability


def pairwise(values: dict[str, list]) -> list[dict[str, Any]]:
    """Points such that any two values of two fields occur together in one of them; greedy."""
    places = _pairwise(tuple(map(len, values.values())))
    return [{name: values[name][index] for name, index in zip(values, point)} for point in places]


@functools.cache
def _pairwise(sizes: tuple[int, ...]) -> list[list[int]]:
    """The places of the values in their lists, for fields of so many values."""
    rng = random.Random(0)
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    open_pairs = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    points = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(40):
            point = [rng.randrange(size) for size in sizes]
            point[a], point[b] = i, j
            gain = sum((x, point[x], y, point[y]) in open_pairs for x, y in pairs)
            best = max(best, (gain, point))
        point = best[1]
        open_pairs -= {(x, point[x], y, point[y]) for x, y in pairs}
        points.append(point)
    return points


def covering(case: type, values: dict[str, list]) -> list:
    """Instances of a dataclass, by the values of its fields: any two values meet in one of them."""
    return [case(**point) for point in pairwise(values)]


def case_id(case: Any) -> str:
    """The fields of a dataclass as words for ``pytest -k``, without those that are off.

    The dtype stands alone, a flag is its name, anything else a name and a value: "rows-2x8".
    """
    words = []
    for name, value in vars(case).items():
        parts = value if isinstance(value, tuple) else (value,)
        text = "x".join(f"{x:g}" if isinstance(x, float) else str(x) for x in parts)
        if name == "dtype":
            words.append(text)
        elif value not in (None, "", (), 0):
            words.append(name if value is True else f"{name}-{text}")
    return "-".join(words)


def each_case(
    cases: Callable[[Target], list], targets: Iterable[Target] | None = None
) -> pytest.MarkDecorator:
    """Parametrises a test over (target, case).

    Args:
        cases: gives the cases of a target; of a target that is missing, one is made to be left out.
        targets: by default :func:`libraries`.
    """
    parameters = [
        pytest.param(target, case, id=f"{target.name}-{case_id(case)}")
        for target in (libraries() if targets is None else targets)
        for case in cases(target)[: 1 if target.missing else None]
    ]
    return pytest.mark.parametrize(("target", "case"), parameters, indirect=["target"])


def libraries(library: str | None = None, device: str | None = None) -> list[Target]:
    """One target for each library and device, for kernels that come in no backends.

    Those of one library or device if given; never empty.
    """
    found: dict[tuple[str, str], Target] = {}
    for target in select(library, device):
        place = (target.library, target.device)
        dtypes = (*found[place].dtypes, *target.dtypes) if place in found else target.dtypes
        name = target.name if target.missing else f"{target.library}-{target.device}"
        unique = tuple(dict.fromkeys(dtypes))
        found[place] = dataclasses.replace(target, name=name, backend=None, dtypes=unique)
    return list(found.values())


def select(library: str | None = None, device: str | None = None) -> list[Target]:
    """The targets, those of one library or device if given; never empty.

    A target with emulated kernels stands for a GPU, though its tensors are on the CPU.
    """
    reason = compute_capability()[1] or "no GPU tests of torch: it sees no GPU"
    return [
        target
        for target in TARGETS
        if library in (None, target.library)
        and (device in (None, target.device) or (device == "cuda" and target.backend))
    ] or [Target(f"{library}-gpu", "", "cuda", missing=reason)]


def each(library: str | None = None, device: str | None = None) -> pytest.MarkDecorator:
    """Parametrises a test over :func:`select`."""
    return _each(select(library, device))


def each_marked(names: Iterable[str], same: Container[str]) -> list:
    """Parameters, of which those in ``same`` do not run again with a forced backend."""
    mark = pytest.mark.no_backend
    return [pytest.param(name, marks=mark if name in same else ()) for name in names]


def each_library(library: str | None = None, device: str | None = None) -> pytest.MarkDecorator:
    """Parametrises a test over :func:`libraries`."""
    return _each(libraries(library, device))


def _each(targets: list[Target]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("target", targets, indirect=True, ids=lambda x: x.name)
