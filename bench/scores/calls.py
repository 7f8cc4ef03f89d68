"""The calls of a case: ours with the function, ours without, FlexAttention; and their check."""

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

from bench.lib import data
from bench.lib.correctness import ROWS, Check
from bench.lib.providers import PROVIDERS, Call, Provider, trained
from bench.scores.problems import BUILT_IN, FLEX, OURS, PLAIN, Arrays, Case
from cupyflash.ops.attention.sm90 import boolean_bias
from cupyflash.testing import Inputs


class Prepared:
    """A case with its tensors.

    Attributes:
        tensors: q, k, v, dout.
        arrays: those that the function reads.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.problem = case, case.problem
        self.tensors = data.of_problem(self.problem)
        self.arrays = case.arrays(self.problem)

    @functools.cached_property
    def check(self) -> "FunctionCheck":
        return FunctionCheck(self)

    @functools.cached_property
    def plain_check(self) -> Check:
        return Check(self.problem, self.tensors)

    def checked(self, impl: str, direction: str) -> Callable[[], Any]:
        """The call of a pass, once its results are known to be right.

        Raises:
            AssertionError: they are not.
        """
        call = self.call(impl)
        check = self.plain_check if impl == PLAIN else self.check
        self.planned(impl, functools.partial(check, call, direction))
        return call.forward if direction == "fwd" else call.backward

    def planned(self, impl: str, call: Callable[[], Any]) -> Any:
        """Makes a first call, whose plans have a Boolean bias as a text for `OURS` alone."""
        can_be_text = boolean_bias.can_be_text

        def is_text(problem: Any) -> bool:
            return impl == OURS and can_be_text(problem.features)

        with mock.patch.object(boolean_bias, "is_text", is_text):
            return call()

    def call(self, impl: str) -> Call:
        ours, causal = PROVIDERS["cupyflash"], self.problem.causal
        if impl == PLAIN:
            return Call(ours, self.tensors, causal)
        if impl == BUILT_IN:
            options = self.case.built_in(self.problem, self.arrays)
            return Call(ours, self.tensors, causal, **options)
        load, layout = (_load_flex, "bhsd") if impl == FLEX else (_load_ours, "bshd")
        provider = Provider(impl, functools.partial(load, self.case), layout=layout)
        return Call(provider, self.tensors, causal, **_named(self.arrays))


def _named(arrays: Arrays) -> dict[str, Any]:
    """As the gradients of `cupyflash.testing.scores` are called, without their d."""
    return {str(i): x for i, x in enumerate(arrays)}


def _load_ours(case: Case, **arrays: Any) -> Callable:
    import cupyflash

    function = case.make(*arrays.values())
    if case.as_bias:  # in another shape than that of the option, which has a plan of its own
        (seen,) = arrays.values()
        bias = seen[:, None].expand(-1, case.problem.heads, -1, -1)
        return lambda q, k, v, causal: cupyflash.attention(q, k, v, bias=bias)
    options: dict[str, Any] = {"score": None if case.is_mask else cupyflash.Score(function)}
    options["mask"] = cupyflash.Mask(function).tiles() if case.is_mask else None
    options["deterministic"] = case.deterministic
    return lambda q, k, v, causal: cupyflash.attention(q, k, v, **options)


def _load_flex(case: Case, **arrays: Any) -> Callable:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.deterministic:
        raise NotImplementedError("FlexAttention has no deterministic gradients of arrays")
    function, tokens = case.make(*arrays.values()), case.tokens
    options: dict[str, Any] = {"score_mod": None if case.is_mask else function}
    if case.is_mask:
        batch = case.batch if case.batch > 1 else None
        made = create_block_mask(function, batch, None, tokens, tokens, data.DEVICE)
        options["block_mask"] = made
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, causal: compiled(q, k, v, **options)


class FunctionCheck(Check):
    """The check of `bench.lib`, whose float64 comes from the function itself, under torch."""

    def __init__(self, prepared: Prepared) -> None:
        import torch

        from cupyflash.testing.scores import expected_scores

        case, problem = prepared.case, prepared.problem
        rng = random.Random(case.name)
        head, first = rng.randrange(problem.heads), rng.randrange(max(1, problem.seqlen - ROWS))
        q, k, v, dout = prepared.tensors
        heads = slice(head, head + 1)
        rows = (slice(None), slice(first, first + ROWS), heads)
        keys = (slice(None), slice(None), heads)
        inputs = Inputs(q[rows], k[keys], v[keys], dout[rows], problem.dtype)

        def moved(*arrays: Any) -> Callable:
            function = case.make(*arrays)
            if case.is_mask:
                return lambda b, h, q, k: function(b, h + head, q + first, k)
            return lambda s, b, h, q, k: function(s, b, h + head, q + first, k)

        kind = {"mask" if case.is_mask else "score": moved}
        with torch.device(data.DEVICE):
            self.expected = expected_scores(inputs, arrays=prepared.arrays, **kind)
        self.slices = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
        arrays = _named(trained(_named(prepared.arrays)))
        self.gradients = ["dq", "dk", "dv", *(f"d{name}" for name in arrays)]
        self.slices |= dict.fromkeys(self.gradients[3:], ...)
        self.dout = torch.zeros_like(dout)
        self.dout[rows] = dout[rows]
