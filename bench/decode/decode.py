"""Attention of one new token to a KV cache, which it enters, beside SDPA's backends.

    python -m bench decode
    python -m bench decode --batch 1 --length 32768 131072 --output decode_long
    python -m bench decode --model 32/8 --batch 32 --length 512 --longest 131072 --output ragged

Heads of GPT-2 small, Llama 3 8B, Qwen 2.5 7B and Gemma 2 9B, or of the numbers that the name gives
(of q, and of k and v, of 128); batch 1, 8 and 32; 512 and 8192 tokens in the cache. The peers write
the token into the cache and run SDPA on it, or with --attend-only just that; cupyflash does both in
one launch. Several tokens, pages and sequences of two lengths are for cupyflash alone. Bytes are
those of the keys and values, each read once. Clock and rounds are those of
bench attention. Results are compared with float64 first; an implementation that is wrong is
reported and left out. The exit status is 1 if cupyflash was wrong.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
ON_DEMAND = {"32/8": (32, 8, 128), "64/8": (64, 8, 128), "32/4": (32, 4, 128)}
PROTOCOL = harness.CLOCK + "; gbps counts keys and values once"


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """New tokens of ``batch`` sequences, ``length`` with them.

    Attributes:
        page: keys of a page of the cache; 0 is a contiguous cache.
        longest: the length of the last sequence; 0 is that of all.
        attend_only: the peers find the keys in the cache.
    """

    dtype: str
    model: str
    batch: int
    length: int
    tokens: int = 1
    page: int = 0
    longest: int = 0
    attend_only: bool = False

    def __str__(self) -> str:
        text = f"{self.model} {self.dtype} B={self.batch} S={self.length}"
        others = {"N": self.tokens - 1 and self.tokens, "page": self.page, "longest": self.longest}
        return " ".join((text, *(f"{name}={x}" for name, x in others.items() if x)))

    @property
    def heads(self) -> tuple[int, int, int]:
        """Those of q, those of k and v, their dimension."""
        return (HEADS | ON_DEMAND)[self.model]

    @property
    def lengths(self) -> list[int]:
        """That of each sequence."""
        return [self.length] * (self.batch - 1) + [self.longest or self.length]

    @property
    def is_plain(self) -> bool:
        """Whether SDPA computes it in one call."""
        return self.tokens == 1 and not self.page and not self.longest

    @property
    def bytes(self) -> int:
        """The bytes of keys and values."""
        _, heads_kv, head_dim = self.heads
        item = 4 if self.dtype == "float32" else 2
        return item * 2 * sum(self.lengths) * heads_kv * head_dim

    def row(self, **fields: Any) -> Row:
        """A row of a results file."""
        shape = dataclasses.asdict(self)
        return {"op": "attention_with_cache", "problem": str(self), **shape, **fields}

    def tensors(self) -> tuple[Any, ...]:
        """(q, k, v, k_cache, v_cache): the last rows of a sequence are those of the new tokens."""
        heads_q, heads_kv, head_dim = self.heads
        source = data.generator(0)

        def random(length: int, heads: int) -> Any:
            shape = (self.batch, length, heads, head_dim)
            return data.random(shape, self.dtype, source)

        new = [random(self.tokens, heads) for heads in (heads_q, heads_kv, heads_kv)]
        return *new, *(random(max(self.lengths), heads_kv) for _ in range(2))

    def call(self, impl: str, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        """The tokens enter the caches and attend to them: (batch, tokens, heads_q, head_dim)."""
        q, k, v, k_cache, v_cache = tensors
        if impl == "cupyflash":
            return self._ours(tensors)
        provider = PROVIDERS[impl]
        attention = provider.load()
        if not self.is_plain:
            return lambda: self._one_by_one(attention, tensors)
        views = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]
        k_cache[:, -1:], v_cache[:, -1:] = k, v  # with the new token, whoever calls first

        def run() -> Any:
            if not self.attend_only:
                k_cache[:, -1:], v_cache[:, -1:] = k, v
            with provider.scope():
                return attention(*views, False).transpose(1, 2)

        return run

    def _ours(self, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        import torch

        import cupyflash

        q, k, v, *caches = tensors
        int32 = {"dtype": torch.int32, "device": q.device}
        positions = torch.tensor([n - self.tokens for n in self.lengths], **int32)
        options = {}
        if self.page:
            per_sequence = -(-caches[0].shape[1] // self.page)
            order = torch.randperm(self.batch * per_sequence).to(q.device)
            caches = [self._in_pages(x, order) for x in caches]
            options["page_table"] = order.reshape(self.batch, per_sequence).to(torch.int32)
        return lambda: cupyflash.attention_with_cache(q, k, v, *caches, positions, **options)

    def _in_pages(self, cache: Any, order: Any) -> Any:
        """The pages of a contiguous cache; those of a sequence in this order."""
        import torch

        padding = -cache.shape[1] % self.page
        padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, padding))
        pages = padded.reshape(-1, self.page, *cache.shape[2:])
        placed = torch.empty_like(pages)
        placed[order] = pages
        return placed

    def _one_by_one(self, attention: Callable, tensors: tuple[Any, ...]) -> Any:
        """The result, a token of a sequence after the other."""
        import torch

        q, k, v, *caches = tensors
        out = torch.empty_like(q)
        for b, length in enumerate(self.lengths):
            for cache, new in zip(caches, (k, v)):
                cache[b, length - self.tokens : length] = new[b]
            for i in range(self.tokens):
                seen = (x[b : b + 1, : length - self.tokens + i + 1] for x in caches)
                views = [x.transpose(1, 2) for x in (q[b : b + 1, i : i + 1], *seen)]
                out[b, i] = attention(*views, False)[0, :, 0]
        return out


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
    parser.add_argument("--model", nargs="+", choices=(*HEADS, *ON_DEMAND), default=[*HEADS])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--length", nargs="+", type=int, default=[512, 8192])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--page", nargs="+", type=int, default=[0])
    parser.add_argument("--longest", type=int, default=0)
    parser.add_argument("--attend-only", action="store_true")
    options = parser.parse_args(arguments)
    run = harness.Run("decode", PROTOCOL, arguments, options)
    each = (options.dtype, options.model, options.batch, options.length, options.tokens)
    for sizes in run.each(itertools.product(*each, options.page)):
        problem = DecodeProblem(*sizes, options.longest, options.attend_only)
        impls = options.impls if problem.is_plain else ["cupyflash"]
        run.compare_bytes(problem, impls, checked_call)
    return run.finish(harness.table_of_bytes(run))
