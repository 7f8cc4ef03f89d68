"""Transformer blocks for one new token of a few sequences beside torch eager and torch.compile.

    python -m bench transformer --output transformer

GPT-2 small and xl, one block and (small) all twelve, batch 1, 4 and 8, 512 tokens in the cache.
Bytes are those of the weights and of the keys and values that are attended to, each read once: what
a token cannot do without. Clock and rounds are those of bench attention. Results are compared with
float64 first; an implementation that is wrong is reported and left out. The exit status is 1 if
cupyflash was wrong.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.lib import data, harness
from bench.lib.report import Row

IMPLS = ("cupyflash", "torch-eager", "torch-compile")
MODELS = {"small": (768, 12, 12), "xl": (1600, 25, 48)}  # width, heads, layers
CACHE = 512
PROTOCOL = harness.CLOCK + "; gbps counts weights, keys and values once"


@dataclasses.dataclass(frozen=True)
class BlockProblem:
    """``layers`` blocks of a model for one token of each sequence."""

    dtype: str
    model: str
    layers: int
    batch: int

    def __str__(self) -> str:
        return f"gpt2-{self.model} {self.dtype} layers={self.layers} B={self.batch} S={CACHE}"

    @property
    def bytes(self) -> int:
        """The bytes of weights, keys and values."""
        width = MODELS[self.model][0]
        weights = 12 * width * width + 13 * width
        item = 4 if self.dtype == "float32" else 2
        return item * self.layers * (weights + 2 * self.batch * CACHE * width)

    def row(self, **fields: Any) -> Row:
        """A row of a results file."""
        shape = {"model": self.model, "layers": self.layers, "batch": self.batch, "cache": CACHE}
        return {"op": "transformer_block", "problem": str(self), "dtype": self.dtype} | {
            **shape,
            **fields,
        }

    def tensors(self) -> tuple[Any, ...]:
        """(blocks, x, k_cache, v_cache); the new token is the last row of the caches."""
        import torch

        import cupyflash

        width, heads, _ = MODELS[self.model]
        device = data.DEVICE
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Any:
            values = torch.randn(shape, device=device, generator=generator)
            return (scale * values).to(getattr(torch, self.dtype))

        def linear(rows: int, columns: int) -> tuple[Any, Any]:
            return random(rows, columns, scale=columns**-0.5), random(rows, scale=0.1)

        def norm() -> tuple[Any, Any]:
            return 1 + random(width, scale=0.1), random(width, scale=0.1)

        blocks = [
            cupyflash.BlockWeights(
                *norm(),
                *linear(3 * width, width),
                *linear(width, width),
                *norm(),
                *linear(4 * width, width),
                *linear(width, 4 * width),
            )
            for _ in range(self.layers)
        ]
        caches = [random(self.layers, self.batch, CACHE, heads, width // heads) for _ in range(2)]
        return blocks, random(self.batch, width), *caches

    def call(self, impl: str, tensors: tuple[Any, ...]) -> Callable[[], Any]:
        """All blocks; the result is x."""
        import torch

        blocks, x, k_cache, v_cache = tensors
        if impl != "cupyflash":
            function = _torch_blocks
            if impl == "torch-compile":
                function = torch.compile(function, dynamic=False)
            heads = MODELS[self.model][1]

            def run() -> Any:
                with torch.no_grad():
                    return function(blocks, x, k_cache, v_cache, heads)

            return run
        import cupyflash

        stack = cupyflash.BlockStack(blocks, heads=MODELS[self.model][1])
        lengths = torch.full((self.batch,), CACHE - 1, dtype=torch.int32, device=x.device)
        return lambda: stack(x, k_cache, v_cache, lengths)


def _torch_blocks(blocks: list, x: Any, k_cache: Any, v_cache: Any, heads: int) -> Any:
    """The blocks in plain torch; the last row of the caches is that of the new token."""
    from torch.nn import functional

    batch, width = x.shape
    for layer, w in enumerate(blocks):
        normal = functional.layer_norm(x, (width,), w.ln1_weight, w.ln1_bias)
        qkv = functional.linear(normal, w.qkv_weight, w.qkv_bias).view(batch, 3, heads, -1)
        k_cache[layer, :, -1], v_cache[layer, :, -1] = qkv[:, 1], qkv[:, 2]
        attended = functional.scaled_dot_product_attention(
            qkv[:, 0, :, None], k_cache[layer].transpose(1, 2), v_cache[layer].transpose(1, 2)
        )
        x = x + functional.linear(attended.reshape(batch, width), w.proj_weight, w.proj_bias)
        normal = functional.layer_norm(x, (width,), w.ln2_weight, w.ln2_bias)
        hidden = functional.linear(normal, w.up_weight, w.up_bias)
        hidden = functional.gelu(hidden, approximate="tanh")
        x = x + functional.linear(hidden, w.down_weight, w.down_bias)
    return x


def problems(dtypes: Sequence[str], batches: Sequence[int]) -> Iterator[BlockProblem]:
    """One block of each model, and all of the small one."""
    for dtype, batch in itertools.product(dtypes, batches):
        for model in MODELS:
            yield BlockProblem(dtype, model, 1, batch)
        yield BlockProblem(dtype, "small", MODELS["small"][2], batch)


def checked_call(problem: BlockProblem, impl: str) -> Callable[[], Any]:
    """One implementation, after its result was compared with float64."""

    def wide(tensor: Any) -> Any:
        return tensor.double()

    blocks, x, *caches = problem.tensors()
    double = [type(block)(*map(wide, block)) for block in blocks]
    exact = problem.call("torch-eager", (double, wide(x), *map(wide, caches)))()
    del double
    eager = problem.call("torch-eager", problem.tensors())()
    call = problem.call(impl, (blocks, x, *caches))
    found = call()
    harness.assert_right(found, exact, eager)
    return call


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("transformer", __doc__, impls=IMPLS, dtypes=True)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8])
    options = parser.parse_args(arguments)
    run = harness.Run("transformer", PROTOCOL, arguments, options)
    for problem in run.each(problems(options.dtype, options.batch)):
        run.compare_bytes(problem, options.impls, checked_call)
    return run.finish(harness.table_of_bytes(run))
