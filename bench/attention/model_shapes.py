"""The attention of published models: heads, head dims and lengths from their configurations.

A batch is one that fits a training step or a request; lengths are the models' own.
"""

import dataclasses
import math
from typing import Any

from bench.lib import data
from bench.lib.data import random
from cupyflash.testing.problem import Problem

# Documents packed into one sequence, as in fine-tuning.
DOCUMENTS = (3100, 2047, 1200, 700, 512, 333, 200, 100)
# Sentences packed into a batch, as encoders are served: 16384 tokens.
SENTENCES = tuple(64 + 28 * i for i in range(32)) + (448,)

PAIR, PADDING = "pair bias, trained", "padding mask"


@dataclasses.dataclass(frozen=True)
class Model:
    """One kind of attention of a model.

    Attributes:
        options: numbers, as `cupyflash.attention` takes them, and ``lengths``.
        bias: PAIR, (1, heads, seqlen, keys) with a gradient; or PADDING, bool (batch, 1, 1, keys).
        sinks: one logit a head, with a gradient.
    """

    name: str
    problem: Problem
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    bias: str = ""
    sinks: bool = False

    def __str__(self) -> str:
        shape, lengths = self.problem, self.options.get("lengths")
        of = lambda x, y: str(x) if x == y else f"{x}/{y}"  # noqa: E731
        batch = f"{len(lengths)} packed in" if lengths else f"{shape.batch} x"
        parts = [
            f"{batch} {of(shape.seqlen, shape.keys)}",
            f"{of(shape.heads, shape.heads_kv)} heads",
            f"D={of(shape.head_dim, shape.dim_v)}",
        ]
        parts += ["causal"] if shape.causal else []
        if "window" in self.options:
            parts.append("window {}".format(max(self.options["window"])))
        if "softcap" in self.options:
            parts.append(f"softcap {self.options['softcap']:g}")
        return ", ".join(parts + [self.bias] * bool(self.bias) + ["sinks"] * self.sinks)

    def make_options(self) -> dict[str, Any]:
        """The options with their tensors, standard normal."""
        import torch

        shape, found = self.problem, dict(self.options)
        if self.bias == PAIR:
            sizes = (1, shape.heads, shape.seqlen, shape.keys)
            found["bias"] = random(sizes, shape.dtype, 1).requires_grad_()
        elif self.bias == PADDING:  # a sequence has from a quarter of the tokens to all of them
            lengths = torch.linspace(shape.keys // 4, shape.keys, shape.batch).round()
            mask = torch.arange(shape.keys) < lengths[:, None]
            found["bias"] = mask[:, None, None].to(data.DEVICE)
        if self.sinks:  # each about as heavy as all the keys that a query sees
            seen = min(shape.keys, sum(self.options.get("window", (shape.keys, 0))) + 1)
            sinks = random((shape.heads,), shape.dtype, 2) + math.log(seen)
            found["sinks"] = sinks.requires_grad_()
        return found


def model(
    name: str,
    batch: int,
    seqlen: int,
    heads: int,
    head_dim: int,
    *,
    heads_kv: int | None = None,
    causal: bool = False,
    keys: int | None = None,
    head_dim_v: int | None = None,
    bias: str = "",
    sinks: bool = False,
    **options: Any,
) -> Model:
    """A model in bfloat16; packed sequences are a batch of one."""
    heads_kv = heads_kv or heads
    shape = Problem("bfloat16", head_dim, batch, seqlen, heads, heads_kv, causal, keys, head_dim_v)
    return Model(name, shape, options, bias, sinks)


MODELS = (
    # Language
    model("GPT-2", 8, 1024, 12, 64, causal=True),
    model("Llama 3 8B", 1, 8192, 32, 128, heads_kv=8, causal=True),
    model("Llama 3 70B on 8 GPUs", 1, 8192, 8, 128, heads_kv=1, causal=True),
    model("Llama 3 8B, documents", 1, 8192, 32, 128, heads_kv=8, causal=True, lengths=DOCUMENTS),
    model("Qwen2.5 7B", 2, 4096, 28, 128, heads_kv=4, causal=True),
    model("Mistral 7B", 1, 16384, 32, 128, heads_kv=8, causal=True, window=(4095, 0)),
    model("Gemma 2 9B", 1, 8192, 16, 256, heads_kv=8, causal=True, softcap=50.0),
    model("Gemma 3 12B, local", 1, 8192, 16, 256, heads_kv=8, causal=True, window=(1023, 0)),
    model("Gemma 3 12B, global", 1, 8192, 16, 256, heads_kv=8, causal=True),
    model("gpt-oss, full", 1, 8192, 64, 64, heads_kv=8, causal=True, sinks=True),
    model("gpt-oss, local", 1, 8192, 64, 64, heads_kv=8, causal=True, sinks=True, window=(127, 0)),
    model("Falcon 7B", 4, 2048, 71, 64, heads_kv=1, causal=True),
    model("Phi-3.5 mini", 1, 8192, 32, 96, causal=True),
    model("DeepSeek-V3 on 8 GPUs", 1, 4096, 16, 192, causal=True, head_dim_v=128),
    model("T5 large", 16, 512, 16, 64, bias=PAIR, scale=1.0),
    model("BGE-M3", 16, 1024, 16, 64, bias=PADDING),
    model("ModernBERT, global", 1, sum(SENTENCES), 12, 64, lengths=SENTENCES),
    model("ModernBERT, local", 1, sum(SENTENCES), 12, 64, lengths=SENTENCES, window=(64, 64)),
    # Vision
    model("ViT-B/16", 128, 197, 12, 64),
    model("CLIP ViT-L/14 at 336", 32, 577, 16, 64),
    model("SigLIP so400m at 384", 16, 729, 16, 72),
    model("Swin-B, 64 images", 4096, 49, 4, 32, bias=PAIR),
    model("SAM ViT-B, global", 1, 4096, 12, 64, bias=PAIR),
    # Diffusion and video
    model("SD 1.5, self", 4, 4096, 8, 40),
    model("SD 1.5, cross", 4, 4096, 8, 40, keys=77),
    model("SDXL, self", 4, 4096, 10, 64),
    model("SDXL, cross", 4, 4096, 10, 64, keys=77),
    model("SD 3 medium", 2, 4429, 24, 64),
    model("Flux", 1, 4608, 24, 128),
    model("Wan 2.1 1.3B", 1, 32760, 12, 128),
    # Speech
    model("Whisper large, encoder", 8, 1500, 20, 64),
    model("Whisper large, cross", 8, 448, 20, 64, keys=1500),
    # Science and tables
    model("AlphaFold 3, triangle", 384, 384, 4, 32, bias=PAIR),
    model("Evoformer, MSA rows", 128, 256, 8, 32, bias=PAIR),
    model("ESM-2 650M", 16, 1024, 20, 64),
    model("Molecules", 64, 256, 8, 32),
    model("TabPFN v2, rows", 20, 1024, 6, 32),
    model("FT-Transformer", 1024, 29, 8, 24),
)
