"""Attention of one new token to a KV cache, which it enters, beside SDPA's backends.

    python -m bench decode
    python -m bench decode --bars --seconds 400 --output decode_bars
    python -m bench decode --batch 1 --length 32768 131072 --output decode_long
    python -m bench decode --model 32/8 --batch 32 --length 512 --longest 131072 --output ragged

Heads of GPT-2 small, Llama 3 8B, Qwen 2.5 7B and Gemma 2 9B, or of the numbers that the name gives
(of q, and of k and v, of 128); batch 1, 8 and 32; 512 and 8192 tokens in the cache. The peers write
the token into the cache and run SDPA on it, or with --attend-only just that; cupyflash does both in
one launch, with a cache of 8 bits in two. FlashAttention-3 (the module `flash_attn_interface`) only
attends. Several tokens, pages and sequences of two lengths are for it and cupyflash alone, and 8
bits for cupyflash. With --bars the shapes are those of `bars.py`, which then compares their times
with bounds. After --seconds no cell begins any more, and one that takes too long is broken off; the
results file has those before. Bytes are those of the keys and values, each read once, and of their
scales. Clock and rounds are those of bench attention. Results are compared with float64 first,
those of the first and the last sequence, and of three tokens; an implementation that is wrong is
reported and left out. The exit status is 1 if cupyflash was wrong.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from bench.decode import bars
from bench.lib import data, harness
from bench.lib.deadline import Deadline
from bench.lib.providers import PROVIDERS
from bench.lib.report import Row

IMPLS = ("cupyflash", "sdpa-cudnn", "sdpa-flash", "sdpa-math", "flash-attn-3")
HEADS = {  # of q, of k and v, head dim
    "gpt2-small": (12, 12, 64),
    "llama3-8b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "gemma2-9b": (16, 8, 256),
}
ON_DEMAND = {"32/8": (32, 8, 128), "64/8": (64, 8, 128), "32/4": (32, 4, 128)}
# Caches of 8 bits: the largest number, and the scale of all tokens, with which 16 bits are exact.
NARROW = {"int8": (127, 2**-5), "float8_e4m3fn": (448, 2**-7)}
PROTOCOL = harness.CLOCK + "; gbps counts keys and values once"


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """New tokens of ``batch`` sequences, ``length`` with them.

    Attributes:
        page: keys of a page of the cache; 0 is a contiguous cache.
        longest: the length of the last sequence; 0 is that of all.
        attend_only: the peers find the keys in the cache.
        cache: the dtype of a cache of 8 bits with a scale for each token and head, or "".
        splits: `num_splits` of cupyflash.
    """

    dtype: str
    model: str
    batch: int
    length: int
    tokens: int = 1
    page: int = 0
    longest: int = 0
    attend_only: bool = False
    cache: str = ""
    splits: int = 0

    def __str__(self) -> str:
        text = f"{self.model} {self.dtype} B={self.batch} S={self.length}"
        others = {"N": self.tokens - 1 and self.tokens, "page": self.page, "longest": self.longest}
        others |= {"cache": self.cache, "splits": self.splits}
        return " ".join((text, *(f"{name}={x}" for name, x in others.items() if x)))

    @property
    def heads(self) -> tuple[int, int, int]:
        """The heads of q, the heads of k and v, and the head dim."""
        return (HEADS | ON_DEMAND)[self.model]

    @property
    def lengths(self) -> list[int]:
        """That of each sequence."""
        return [self.length] * (self.batch - 1) + [self.longest or self.length]

    @property
    def is_plain(self) -> bool:
        """Whether SDPA computes it in one call."""
        return self.tokens == 1 and not (self.page or self.longest or self.cache or self.splits)

    @property
    def bytes(self) -> int:
        """The bytes of keys and values, and of their scales."""
        _, heads_kv, head_dim = self.heads
        row = head_dim + 4 if self.cache else head_dim * (4 if self.dtype == "float32" else 2)
        return 2 * sum(self.lengths) * heads_kv * row

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

        q = random(self.tokens, heads_q)
        rows = [random(self.tokens, heads_kv) for _ in range(2)]
        rows += [random(max(self.lengths), heads_kv) for _ in range(2)]
        return q, *(map(self._of_8_bits, rows) if self.cache else rows)

    def _of_8_bits(self, x: Any) -> Any:
        """Rows that a cache of 8 bits has exactly, each with the largest number in front."""
        largest, scale = NARROW[self.cache]
        x[..., 0] = largest * scale
        return (self._narrow(x).to(x.dtype) * scale).to(x.dtype)

    def _narrow(self, x: Any) -> Any:
        """The numbers of 8 bits that stand for these."""
        import torch

        largest, scale = NARROW[self.cache]
        numbers = (x / scale).clamp(-largest, largest)
        numbers = numbers.round() if self.cache == "int8" else numbers
        return numbers.to(getattr(torch, self.cache))

    def ends(self) -> "DecodeProblem":
        """The first and the last sequence."""
        return dataclasses.replace(self, batch=min(2, self.batch))

    def at_ends(self, x: Any) -> Any:
        """A copy of what belongs to `ends`."""
        return x[:: max(1, self.batch - 1)].clone()

    @property
    def seen_tokens(self) -> list[int]:
        """The new tokens whose results are compared."""
        return sorted({0, self.tokens // 2, self.tokens - 1})

    def call(self, impl: str, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        """The tokens enter the caches and attend to them: (batch, tokens, heads_q, head_dim)."""
        q, k, v, k_cache, v_cache = tensors
        if impl == "cupyflash":
            return self._ours(tensors)
        if impl == "flash-attn-3":
            return self._flash_attn_3(tensors)
        provider = PROVIDERS[impl]
        attention = provider.load()
        if not self.is_plain:
            return lambda: self._one_by_one(attention, tensors)
        views = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]

        def append() -> None:
            k_cache[:, -1:], v_cache[:, -1:] = k, v

        def run() -> Any:
            if not self.attend_only:
                append()
            with provider.scope():
                return attention(*views, False).transpose(1, 2)

        append()  # with the new token in the cache, whoever calls first
        return run

    def _ours(self, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        import torch

        import cupyflash

        q, k, v, *caches = tensors
        positions = self._int32([n - self.tokens for n in self.lengths])
        options = {"num_splits": self.splits}
        if self.cache:
            shape, (_, scale) = caches[0].shape[:3], NARROW[self.cache]
            caches = [self._narrow(x) for x in caches]
            scales = [torch.full(shape, scale, device=q.device) for _ in caches]
            caches = [*caches, *scales]
        if self.page:
            caches, options["page_table"] = self._paged(caches)
        options |= dict(zip(("k_scale", "v_scale"), caches[2:]))
        caches = caches[:2]
        return lambda: cupyflash.attention_with_cache(q, k, v, *caches, positions, **options)

    def _flash_attn_3(self, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        from flash_attn_interface import flash_attn_with_kvcache

        q, k, v, *caches = tensors
        for cache, new in zip(caches, (k, v)):
            for b, length in enumerate(self.lengths):
                cache[b, length - self.tokens : length] = new[b]
        options = {"cache_seqlens": self._int32(self.lengths), "causal": True}
        if self.page:
            caches, options["page_table"] = self._paged(caches)
        return lambda: flash_attn_with_kvcache(q, *caches, **options)

    def _int32(self, numbers: list[int]) -> Any:
        import torch

        return torch.tensor(numbers, dtype=torch.int32, device=data.DEVICE)

    def _paged(self, caches: list[Any]) -> tuple[list[Any], Any]:
        """The caches in pages of a random order, and their table."""
        import torch

        per_sequence = -(-caches[0].shape[1] // self.page)
        order = torch.randperm(self.batch * per_sequence).to(caches[0].device)
        table = order.reshape(self.batch, per_sequence).to(torch.int32)
        return [self._in_pages(x, order) for x in caches], table

    def _in_pages(self, cache: Any, order: Any) -> Any:
        """The pages of a contiguous cache; those of a sequence in this order."""
        import torch

        padding = -cache.shape[1] % self.page
        behind = (0, 0) * (cache.dim() - 2)
        padded = torch.nn.functional.pad(cache, (*behind, 0, padding))
        pages = padded.reshape(-1, self.page, *cache.shape[2:])
        placed = torch.empty_like(pages)
        placed[order] = pages
        return placed

    def _one_by_one(self, attention: Callable, tensors: tuple[Any, ...]) -> Any:
        """The results of `seen_tokens`, a token of a sequence after the other."""
        import torch

        q, k, v, *caches = tensors
        out = torch.empty_like(q[:, self.seen_tokens])
        for b, length in enumerate(self.lengths):
            for cache, new in zip(caches, (k, v)):
                cache[b, length - self.tokens : length] = new[b]
            for number, i in enumerate(self.seen_tokens):
                seen = (x[b : b + 1, : length - self.tokens + i + 1] for x in caches)
                views = [x.transpose(1, 2) for x in (q[b : b + 1, i : i + 1], *seen)]
                out[b, number] = attention(*views, False)[0, :, 0]
        return out


def checked_call(problem: DecodeProblem, impl: str) -> Callable[[], Any]:
    """One implementation, after its result was compared with float64."""
    tensors, ends = problem.tensors(), problem.ends()
    few = [problem.at_ends(x) for x in tensors]
    exact = ends.call("sdpa-math", tuple(x.double() for x in few))()
    eager = ends.call("sdpa-math", tuple(few))()
    call = problem.call(impl, tensors)
    found = problem.at_ends(call())[:, problem.seen_tokens]
    harness.assert_right(found, exact, eager)
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
    parser.add_argument("--cache", choices=tuple(NARROW), default="", help="of 8 bits")
    parser.add_argument("--splits", type=int, default=0, help="num_splits of cupyflash")
    parser.add_argument("--bars", action="store_true", help="the shapes of bars.py instead")
    help_text = "after these nothing goes on"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=help_text)
    options = parser.parse_args(arguments)
    deadline = Deadline(options.seconds)
    run = harness.Run("decode", PROTOCOL, arguments, options)
    each = (options.dtype, options.model, options.batch, options.length, options.tokens)
    rest = (options.longest, options.attend_only, options.cache, options.splits)
    problems = [DecodeProblem(*sizes, *rest) for sizes in itertools.product(*each, options.page)]
    if options.bars:
        problems = bars.problems(DecodeProblem)
    alone = [x for x in ("cupyflash", "flash-attn-3") if x in options.impls]
    for problem in run.each(problems):
        impls = options.impls if problem.is_plain else alone
        compare = functools.partial(run.compare_bytes, problem, impls, checked_call)
        run.within(deadline, str(problem), compare)
    tables = [harness.table_of_bytes(run)]
    if options.bars:
        tables.append(bars.table(run.rows, run.fields["copy_gbps"]))
    return run.finish(*tables)
