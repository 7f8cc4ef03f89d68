"""Models of transformers with random weights of published sizes, and what they are timed with."""

import inspect
import time
from typing import Any

import torch

from bench.lib import data

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5}
CONFIGS = {  # the name of a size for `random_model`: class and fields of transformers
    "llama-3.1-8b": (
        "LlamaConfig",
        LLAMA | {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "head_dim": 128,
        },
    ),
    "llama-3.2-1b": (
        "LlamaConfig",
        LLAMA | {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "small": ("GPT2Config", {}),
    "tiny": (
        "GPT2Config",
        {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 256, "vocab_size": 512},
    ),
}  # fmt: skip
LONGEST = 2**14  # positions that a model must have, unless it has embeddings of them


def config_of(name: str, layers: int | None = None) -> Any:
    """The config of a size, with fewer layers if wanted; no token ends a text."""
    import transformers

    kind, fields = CONFIGS[name]
    more = {"eos_token_id": None, "bos_token_id": None}
    if kind == "GPT2Config":
        more |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        more["max_position_embeddings"] = LONGEST
    if layers:
        more["n_layer" if kind == "GPT2Config" else "num_hidden_layers"] = layers
    return getattr(transformers, kind)(**fields | more)


def random_peer(config: Any, dtype: str, attention: str = "sdpa") -> Any:
    """A model with random weights on `bench.lib.data.DEVICE`."""
    import transformers

    torch.manual_seed(0)
    with torch.device(data.DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    return model.eval()


def bytes_of(name: str, dtype: str) -> tuple[int, int]:
    """Bytes of weights that a token reads, and of its keys and values."""
    import transformers

    config, item = config_of(name), getattr(torch, dtype).itemsize
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    numbers = sum(x.numel() for x in model.parameters())
    if not config.tie_word_embeddings:  # of the table of tokens a step reads a row
        numbers -= model.get_input_embeddings().weight.numel()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return item * numbers, 2 * item * config.num_hidden_layers * heads * width


class Peer:
    """Decoding of transformers with static caches, compiled with CUDA graphs if wanted."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self.plain, self.model, self.caches = model, model, {}
        if compiled:
            torch.compiler.reset()
            self.model = torch.compile(model, mode="reduce-overhead", dynamic=False)
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def decode_ms(self, given: torch.Tensor, steps: int) -> float:
        """Milliseconds of a step after prompts (batch, length), greedy."""
        cache = self._empty_cache(given.shape[0], given.shape[1] + steps + 2)
        # Prompts have a shape of their own, for which nothing is compiled.
        logits = self.plain(given, logits_to_keep=1, **{self.cache_name: cache}).logits
        for step in range(steps + 2):
            if step == 2:
                synchronize()
                begin = time.perf_counter()
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            logits = self.model(token, **{self.cache_name: cache}).logits
        synchronize()
        return 1e3 * (time.perf_counter() - begin) / steps

    def _empty_cache(self, batch: int, length: int) -> Any:
        import transformers

        if (batch, length) not in self.caches:
            self.caches.clear()
            cache = transformers.StaticCache(config=self.plain.config, max_cache_len=length)
            self.caches[batch, length] = cache
        self.caches[batch, length].reset()
        return self.caches[batch, length]


@torch.no_grad()
def prefill_ms(model: Any, given: torch.Tensor) -> float:
    """Milliseconds until the logits after prompts (batch, length)."""
    synchronize()
    begin = time.perf_counter()
    model(given, use_cache=False, logits_to_keep=1)
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def compile_layers(model: Any, **options: Any) -> None:
    """Compile the layers of a model of transformers, all by one graph, for prompts of one length.

    For the 32 layers of an 8B model as one graph, Inductor took longer than the minutes of a run.

    Args:
        options: of torch.compile.
    """
    torch.compiler.reset()
    layers = next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList))
    for layer in layers:
        layer.compile(dynamic=False, **options)


def synchronize() -> None:
    """Wait for the device."""
    if data.DEVICE == "cuda":
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give back what a model that is gone has left behind."""
    import gc

    gc.collect()
    if data.DEVICE == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
