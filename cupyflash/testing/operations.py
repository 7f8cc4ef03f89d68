"""The tolerance rule for projections and transformer blocks: float64, and a framework's
separate operations.

The yardstick computes one operation after the other, as a framework does without fusion: the
residual, the norm, each product with its bias, the activation, each step of the rotary embedding.
Each is float32 inside, and its result is rounded to the dtype.
"""

from typing import Any

import numpy

from ..ops.block import reference as stack_reference
from ..ops.linear.options import Arrays, Options
from ..ops.linear.reference import project
from ..ops.norm import reference as norms
from .norms import LARGEST_SLOPE
from .tolerance import Expected, Result, dtype_name, numpy_dtype, to_numpy64

Array = numpy.ndarray
STACK_EPS = 1e-5  # eps of the norms of a stack
# The largest sum of magnitudes behind a result of a stack, in units of the largest result: products
# of unit vectors, sums of a few of them.
STACK_TERMS = 8.0


def expected_projection(arrays: Arrays, options: Options, down: Arrays | None = None) -> Expected:
    """`cupyflash.linear` or `cupyflash.qkv_projection` ("out"); with ``down`` an MLP.

    Args:
        arrays: of any library.
        down: of the second projection; its x does not count.
    """
    dtype = dtype_name(arrays.x)
    wide, narrow = _converted(arrays, wide=True), _converted(arrays, wide=False)
    rounded = lambda y: y.astype(numpy_dtype(dtype)).astype("float32")  # noqa: E731
    exact, yardstick = project(wide, options), project(narrow, options, rounded)
    terms = _terms(wide, options)
    if down is not None:
        wide = _converted(down._replace(x=None), wide=True)._replace(x=exact)
        narrow = _converted(down._replace(x=None), wide=False)._replace(x=yardstick)
        exact, yardstick = project(wide, Options()), project(narrow, Options(), rounded)
        terms = _terms(wide, Options())
    largest = float(terms.max()) if terms.size else 0.0
    return Expected({"out": Result(exact, yardstick, dtype, largest)})


def _converted(arrays: Arrays, wide: bool) -> Arrays:
    """NumPy arrays in float64, or in their own dtypes."""

    def convert(name: str, x: Any) -> Array | None:
        if x is None or name == "positions":
            return x if x is None else to_numpy64(x).astype("int64")
        values = to_numpy64(x)
        return values if wide else values.astype(numpy_dtype(dtype_name(x)))

    return Arrays(*(convert(name, x) for name, x in arrays._asdict().items()))


def _terms(arrays: Arrays, options: Options) -> Array:
    """Magnitudes behind each result."""
    x = arrays.x
    if arrays.norm_weight is not None:
        x = norms.norm(options.rms, x, arrays.norm_weight, arrays.norm_bias, options.eps)[0]
    terms = _sum_of_magnitudes(x, arrays.weight, arrays.bias)
    if arrays.gate_weight is not None:
        no_gate = arrays._replace(x=x, norm_weight=None, gate_weight=None, residual=None)
        gate = project(
            no_gate._replace(weight=arrays.gate_weight, bias=arrays.gate_bias), Options()
        )
        of_gate = _sum_of_magnitudes(x, arrays.gate_weight, arrays.gate_bias)
        up = numpy.abs(project(no_gate, Options()))
        activated = numpy.abs(norms.ACTIVATIONS[options.activation][0](gate))
        terms = activated * terms + LARGEST_SLOPE * of_gate * up
    else:
        terms = LARGEST_SLOPE * terms
    if arrays.cos is not None:
        terms = 2 * terms
    return terms if arrays.residual is None else terms + numpy.abs(arrays.residual)


def _sum_of_magnitudes(x: Array, weight: Array, bias: Array | None) -> Array:
    terms = numpy.abs(x) @ numpy.abs(weight).T
    return terms if bias is None else terms + numpy.abs(bias)


def expected_stack(
    blocks: list,
    x: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    tokens: Any = None,
    ends: dict[str, Any] | None = None,
) -> Expected:
    """out, logits (with tokens and ends) and the caches after a call; nothing is changed.

    Args:
        blocks: of `BlockWeights`, arrays of any library.
        k_cache: (layers, batch, max_length, heads, head_dim).
        ends: the arguments of `BlockStack` that logits need.
    """
    dtype = dtype_name(k_cache)
    lengths = to_numpy64(lengths).astype(int)
    wide = [type(block)(*map(to_numpy64, block)) for block in blocks]
    caches = [to_numpy64(y) for y in (k_cache, v_cache)]
    narrow = numpy_dtype(dtype)
    round_to = lambda y: y.astype(narrow).astype("float32")  # noqa: E731
    ends = {name: to_numpy64(y) for name, y in (ends or {}).items()}
    found = []
    for compute, rounded in (("float64", stack_reference.exact), ("float32", round_to)):
        as_computed = lambda y: y.astype(compute)  # noqa: B023, E731
        here = {name: as_computed(y) for name, y in ends.items()}
        if tokens is None:
            start = as_computed(to_numpy64(x))
        else:
            tables = (here["token_embedding"], here["position_embedding"])
            start = rounded(stack_reference.embed(to_numpy64(tokens).astype(int), lengths, *tables))
        stack = [type(block)(*map(as_computed, block)) for block in wide]
        out, *new = stack_reference.stack(
            start, stack, *map(as_computed, caches), lengths, STACK_EPS, rounded
        )
        results = {"out": out}
        for name, cache, values in zip(("k_cache", "v_cache"), caches, new):
            results[name] = cache.copy()
            for b, length in enumerate(lengths):
                results[name][:, b, length] = values[:, b]
        if ends:
            norm = stack_reference.norm(
                False, out, here["final_weight"], here["final_bias"], STACK_EPS
            )[0]
            results["logits"] = rounded(rounded(norm) @ here["head_weight"].T)
        found.append(results)
    exact, yardstick = found
    results = {}
    for name, right in exact.items():
        own = "float32" if name == "logits" else dtype
        terms = STACK_TERMS * float(numpy.abs(right).max())
        results[name] = Result(right, yardstick[name], own, terms, dtype)
    return Expected(results)
