"""A small GPT (pre-norm, learned positions, tied embeddings) whose attention is an argument."""

import contextlib
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyflash

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of a model and of the batches it is trained with."""

    layers: int
    width: int
    heads: int
    seqlen: int
    batch: int
    vocabulary: int = 256

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    def __str__(self) -> str:
        model = f"{self.layers} layers, width {self.width}, {self.heads} heads"
        return f"{model}, batch {self.batch} x {self.seqlen}"


class Block(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = size.heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        x = x + self.projection(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (batch, seqlen + 1) -> mean loss of predicting each from those before it."""

    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.seqlen, size.width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("projection.weight", "mlp.2.weight"))
                std = 0.02 / (math.sqrt(2 * size.layers) if residual else 1)
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, seqlen, heads, head_dim) as three lines of torch."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cupyflash.attention(q, k, v, causal=True)


# Name -> attention, and the backend that SDPA is held to.
IMPLEMENTATIONS: dict[str, tuple[Attention, SDPBackend | None]] = {
    "eager": (eager, None),
    "sdpa": (sdpa, None),
    "sdpa-flash": (sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": (sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-math": (sdpa, SDPBackend.MATH),
    "cupyflash": (ours, None),
}


def held(name: str) -> contextlib.AbstractContextManager:
    """The context in which the implementation is what its name says."""
    backend = IMPLEMENTATIONS[name][1]
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


def autocast(device: str) -> torch.autocast:
    """bfloat16 on a GPU, float32 on the CPU."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def make_model(size: Size, name: str, device: str) -> tuple[GPT, torch.optim.AdamW]:
    """Model and optimizer; the weights are the same whatever the attention."""
    torch.manual_seed(0)
    model = GPT(size, IMPLEMENTATIONS[name][0]).to(device)
    return model, torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
