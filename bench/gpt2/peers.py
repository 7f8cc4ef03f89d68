"""GPT-2 of transformers on the weights of ours: prefill, and greedy loops without generate().

The loops do no more than must be done for a token (a forward, an argmax on the GPU), so they are
faster than ``generate()``, which checks and prepares much on the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import torch

from bench.lib import data
from cupyflash.models.gpt2 import Gpt2
from cupyflash.models.gpt2.weights import block_tensors

PEERS = {  # implementation of attention, and whether compiled
    "transformers-eager": ("eager", False),
    "transformers-sdpa": ("sdpa", False),
    "transformers-compile": ("sdpa", True),
}


@dataclasses.dataclass
class Peer:
    """A model of transformers; compiled ones have CUDA graphs and static caches, which are kept, as
    a graph knows the addresses of its cache.
    """

    model: Any
    compiled: bool
    caches: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)

    @property
    def plain(self) -> Any:
        """The model as it is without torch.compile."""
        return getattr(self.model, "_orig_mod", self.model)

    def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, vocabulary) after the last tokens."""
        with torch.no_grad():
            return self.model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]

    def decode(self, tokens: torch.Tensor, steps: int, mark: Callable[[], None]) -> torch.Tensor:
        """New tokens (batch, steps); ``mark`` is called when the first has been computed."""
        cache = self.empty_cache(len(tokens), tokens.shape[1] + steps)
        found = []
        with torch.no_grad():
            # The cache by its place, since transformers 5.24 has given it another name.
            # Prompts have a shape of their own, for which nothing is compiled.
            logits = self.plain(tokens, cache, logits_to_keep=1).logits
            for step in range(steps):
                token = logits[:, -1].argmax(-1, keepdim=True)
                found.append(token.clone())
                if step == 0:
                    mark()
                if step + 1 < steps:
                    logits = self.model(token.clone(), cache).logits
        return torch.cat(found, 1)

    def empty_cache(self, batch: int, length: int) -> Any:
        """An empty cache of the kind that suits the model."""
        import transformers

        config = self.model.config
        if not self.compiled:
            return transformers.DynamicCache(config=config)
        cache = self.caches.get((batch, length))
        if cache is None:
            cache = transformers.StaticCache(config=config, max_cache_len=length)
            self.caches[batch, length] = cache
        cache.reset()
        return cache


def make_peer(name: str, ours: Gpt2) -> Peer:
    """One of `PEERS` with the weights of our model."""
    attention, compiled = PEERS[name]
    model = to_transformers(ours, attention)
    if compiled:
        torch.compiler.reset()
        model = torch.compile(model, mode="reduce-overhead", dynamic=False)
    return Peer(model, compiled)


def to_transformers(ours: Gpt2, attention: str = "eager") -> Any:
    """A GPT2LMHeadModel with the weights of our model, on `bench.lib.data.DEVICE`."""
    import transformers

    c = ours.config
    config = transformers.GPT2Config(
        vocab_size=c.vocabulary, n_positions=c.context, n_embd=c.width, n_layer=c.layers,
        n_head=c.heads, n_inner=c.inner, layer_norm_epsilon=c.eps, eos_token_id=None,
        bos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention)
    weights = ours.weights
    tensors = {"wte.weight": weights.token_embedding, "wpe.weight": weights.position_embedding}
    tensors |= {f"ln_f.{x}": y for x, y in zip(("weight", "bias"), weights.final_norm)}
    for layer, block in enumerate(weights.blocks):
        for field, tensor in block_tensors(c, layer).items():
            x = getattr(block, field)
            tensors[tensor.name] = x.T if tensor.transposed else x
    state = {f"transformer.{name}": _to_torch(x) for name, x in tensors.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.to(data.DEVICE).eval()


def _to_torch(x: Any) -> torch.Tensor:
    """By way of the host: the two models share no memory."""
    values = x if isinstance(x, numpy.ndarray) else x.get()
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.astype("float32")).to(torch.bfloat16)
    return torch.from_numpy(numpy.ascontiguousarray(values))
