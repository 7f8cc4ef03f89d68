"""The check before the clock: a provider's results on the tensors that will be timed.

128 query rows at a random place of a random sequence and key head are compared with float64 by the
rule of cupyflash.testing: at most twice the error of PyTorch in the same dtype, plus rounding. The
gradient of the output is zero outside those rows, so that dq, dk and dv of a long sequence can be
checked at the cost of a short one. Everything else must at least be finite.
"""

import random
from typing import Any

from bench.lib.providers import Call, trained
from cupyflash.testing import Expected, Inputs, expected
from cupyflash.testing.problem import Problem

ROWS = 128


class Check:
    """The float64 results of a slice of a problem, computed once for all providers.

    Args:
        lengths: of the sequences packed into a batch of one.
        options: of `cupyflash.attention` besides causal; a bias has rank 4. The gradients of those
            with one are checked too.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: tuple[Any, ...],
        lengths: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        import torch

        rng = random.Random(str(problem))
        group = problem.heads // problem.heads_kv
        begin, end = 0, problem.seqlen
        end_k = problem.keys
        if lengths:
            (chosen,) = rng.choices(range(len(lengths)), lengths)  # that of a random token
            begin = sum(lengths[:chosen])
            end = end_k = begin + lengths[chosen]
        first = rng.randrange(begin, max(begin + 1, end - ROWS + 1))
        if options.get("window") and not problem.causal:  # a window aligns bottom-right
            first = max(begin, end - ROWS)
        last = min(end, first + ROWS)
        seen = last if problem.causal else end_k  # keys; causal aligns bottom-right
        b, head = rng.randrange(problem.batch), rng.randrange(problem.heads_kv)
        rows = (slice(b, b + 1), slice(first, last), slice(head * group, (head + 1) * group))
        keys = (slice(b, b + 1), slice(begin, seen), slice(head, head + 1))
        q, k, v, dout = tensors
        inputs = Inputs(q[rows], k[keys], v[keys], dout[rows], problem.dtype)
        self.slices = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
        self.gradients = ["dq", "dk", "dv", *(f"d{name}" for name in trained(options))]
        if "bias" in options:
            whole = (problem.batch, problem.heads, problem.seqlen, problem.keys)
            place = (rows[0], rows[2], rows[1], keys[1])
            shape = options["bias"].shape
            self.slices["dbias"] = tuple(s if n > 1 else slice(None) for s, n in zip(place, shape))
            options["bias"] = options["bias"].detach().expand(whole)[place]
        if "sinks" in options:
            self.slices["dsinks"] = rows[2]
            options["sinks"] = options["sinks"].detach()[rows[2]]
        self.expected: Expected = expected(inputs, causal=problem.causal, **options)
        self.dout = torch.zeros_like(dout)
        self.dout[rows] = dout[rows]

    def __call__(self, call: Call, direction: str) -> None:
        """Raise AssertionError, saying by how much, if a result of the pass is wrong."""
        if direction == "fwd":
            results = {"out": call.forward()}
        else:
            gradients = call.backward(call.to_layout(self.dout))
            results = {"out": call.graph[0], **dict(zip(self.gradients, gradients, strict=True))}
        for name, result in results.items():
            result = call.to_layout(result) if name in ("out", "dq", "dk", "dv") else result
            assert bool(result.isfinite().all()), f"{name}: not finite everywhere"
            (found,) = self.expected.compare(**{name: result[self.slices[name]]})
            assert not found.failure, found.failure
