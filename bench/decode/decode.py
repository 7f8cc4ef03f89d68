"""Attention of one new token to a KV cache, which it enters, beside SDPA's backends.

    python -m bench decode
    python -m bench decode --batch 1 --length 32768 131072 --output decode_long

Heads of GPT-2 small, Llama 3 8B, Qwen 2.5 7B and Gemma 2 9B; batch 1, 8 and 32; 512 and 8192 tokens
in the cache. The peers write the token into the cache and run SDPA on it, cupyflash does both in
one launch. Bytes are those of the keys and values, each read once. Clock and rounds are those of
bench attention. Results are compared with float64 first; an implementation that is wrong is
reported and left out. The exit status is 1 if cupyflash was wrong.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.lib import data, harness
from bench.lib.providers import PROVIDERS
from bench.lib.report import Row

IMPLS = ("cupyflash", "sdpa-cudnn", "sdpa-flash", "sdpa-math")
HEADS = {  # of q, of k and v, head dim
    "gpt2-small": (12, 12, 64),
    "llama3-8b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "gemma2-9b": (16, 8, 256),
}
PROTOCOL = harness.CLOCK + "; gbps counts keys and values once"


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """One token of ``batch`` sequences, ``length`` with it."""

    dtype: str
    model: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} B={self.batch} S={self.length}"

    @property
    def bytes(self) -> int:
        """The bytes of keys and values."""
        _, heads_kv, head_dim = HEADS[self.model]
        item = 4 if self.dtype == "float32" else 2
        return item * 2 * self.batch * self.length * heads_kv * head_dim

    def row(self, **fields: Any) -> Row:
        """A row of a results file."""
        shape = {"model": self.model, "batch": self.batch, "length": self.length}
        return {"op": "attention_with_cache", "problem": str(self), "dtype": self.dtype} | {
            **shape,
            **fields,
        }

    def tensors(self) -> tuple[Any, ...]:
        """(q, k, v, k_cache, v_cache): the last row of the caches is the new one's."""
        heads_q, heads_kv, head_dim = HEADS[self.model]
        source = data.generator(0)

        def random(length: int, heads: int) -> Any:
            shape = (self.batch, length, heads, head_dim)
            return data.random(shape, self.dtype, source)

        new = [random(1, heads) for heads in (heads_q, heads_kv, heads_kv)]
        return *new, *(random(self.length, heads_kv) for _ in range(2))

    def call(self, impl: str, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        """The token enters the caches and attends to them: out (batch, 1, heads_q, head_dim)."""
        import torch

        q, k, v, k_cache, v_cache = tensors
        if impl == "cupyflash":
            import cupyflash

            last = torch.full((self.batch,), self.length - 1, dtype=torch.int32, device=q.device)
            return lambda: cupyflash.attention_with_cache(q, k, v, k_cache, v_cache, last)
        provider = PROVIDERS[impl]
        attention = provider.load()
        views = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]

        def run() -> Any:
            k_cache[:, -1:], v_cache[:, -1:] = k, v
            with provider.scope():
                return attention(*views, False).transpose(1, 2)

        return run


def problems(
    dtypes: Sequence[str], batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[DecodeProblem]:
    """All of them."""
    for dtype, model, batch, length in itertools.product(dtypes, HEADS, batches, lengths):
        yield DecodeProblem(dtype, model, batch, length)


def checked_call(problem: DecodeProblem, impl: str) -> Callable[[], Any]:
    """One implementation, after its result was compared with float64."""
    tensors = problem.tensors()
    exact = problem.call("sdpa-math", tuple(x.double() for x in tensors))()
    eager = problem.call("sdpa-math", problem.tensors())()
    call = problem.call(impl, tensors)
    harness.assert_right(call(), exact, eager)
    return call


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("decode", __doc__, impls=IMPLS, dtypes=True)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--length", nargs="+", type=int, default=[512, 8192])
    options = parser.parse_args(arguments)
    run = harness.Run("decode", PROTOCOL, arguments, options)
    for problem in run.each(problems(options.dtype, options.batch, options.length)):
        run.compare_bytes(problem, options.impls, checked_call)
    return run.finish(harness.table_of_bytes(run))
