"""The tolerance rule for stacks of transformer blocks.

The yardstick is what a framework computes with one operation after the other: float32 inside each
of them, its result rounded to the dtype.
"""

import dataclasses
from typing import Any

import numpy

from cupyflash.testing.norms import numpy_dtype, to_numpy64
from cupyflash.testing.tolerance import assert_close_to_float64
from cupyflash.transformer import reference

Array = numpy.ndarray
EPS = 1e-5
# The largest sum of magnitudes behind a result, in units of the largest result: products of unit
# vectors, sums of a few of them.
TERMS = 8.0


@dataclasses.dataclass(frozen=True)
class ExpectedStack:
    """Results by name: (float64, yardstick, dtype)."""

    results: dict[str, tuple[Array, Array, str]]

    def check(self, **actual: Any) -> None:
        """Check any of the results; raises AssertionError."""
        for name, result in actual.items():
            exact, baseline, dtype = self.results[name]
            found = str(result.dtype).removeprefix("torch.")
            wanted = "float32" if name == "logits" else dtype
            assert found == wanted, f"{name}: dtype must be {wanted}, got {found}"
            terms = TERMS * float(numpy.abs(exact).max())
            assert_close_to_float64(to_numpy64(result), exact, baseline, dtype, name, terms=terms)


def expected_stack(
    blocks: list,
    x: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    tokens: Any = None,
    ends: dict[str, Any] | None = None,
) -> ExpectedStack:
    """out, logits (with tokens and ends) and the caches after a call; nothing is changed.

    Args:
        blocks: of `BlockWeights`, arrays of any library.
        k_cache: (layers, batch, max_length, heads, head_dim).
        ends: the arguments of `BlockStack` that logits need.
    """
    dtype = str(k_cache.dtype).removeprefix("torch.")
    lengths = to_numpy64(lengths).astype(int)
    wide = [type(block)(*map(to_numpy64, block)) for block in blocks]
    caches = [to_numpy64(y) for y in (k_cache, v_cache)]
    narrow = numpy_dtype(dtype)
    round_to = lambda y: y.astype(narrow).astype("float32")  # noqa: E731
    ends = {name: to_numpy64(y) for name, y in (ends or {}).items()}
    found = []
    for compute, rounded in (("float64", reference.exact), ("float32", round_to)):
        as_computed = lambda y: y.astype(compute)  # noqa: B023, E731
        here = {name: as_computed(y) for name, y in ends.items()}
        if tokens is None:
            start = as_computed(to_numpy64(x))
        else:
            tables = (here["token_embedding"], here["position_embedding"])
            start = rounded(reference.embed(to_numpy64(tokens).astype(int), lengths, *tables))
        stack = [type(block)(*map(as_computed, block)) for block in wide]
        out, *new = reference.stack(start, stack, *map(as_computed, caches), lengths, EPS, rounded)
        results = {"out": out}
        for name, cache, values in zip(("k_cache", "v_cache"), caches, new):
            results[name] = cache.copy()
            for b, length in enumerate(lengths):
                results[name][:, b, length] = values[:, b]
        if ends:
            norm = reference.norm(False, out, here["final_weight"], here["final_bias"], EPS)[0]
            results["logits"] = rounded(rounded(norm) @ here["head_weight"].T)
        found.append(results)
    exact, baseline = found
    return ExpectedStack({name: (exact[name], baseline[name], dtype) for name in exact})
