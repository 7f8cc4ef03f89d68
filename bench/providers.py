"""The providers of attention in a benchmark: cupyflash, PyTorch's SDPA backends, FlashAttention.

A provider is bound to the tensors of a problem as a `Call`, with nothing but the user's own call
inside. All read the same (batch, seqlen, heads, head_dim) memory; SDPA gets transposed views.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Tensors = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        load: imports the library and returns f(q, k, v, causal) -> out; ImportError if absent.
        scope: what each call, forward and backward, runs within.
        layout: of the tensors that f takes, "bshd" or "bhsd".
        learned: tensors behind f whose gradients a backward computes, too.
    """

    name: str
    load: Callable[[], Callable[[Any, Any, Any, bool], Any]]
    scope: Callable[[], AbstractContextManager] = contextlib.nullcontext
    layout: str = "bshd"
    learned: Tensors = ()


def is_ours(impl: str) -> bool:
    return impl.startswith("cupyflash")


class Call:
    """A provider on the tensors of a problem.

    ``forward`` runs without a graph, as inference does. ``backward`` is the whole backward pass of
    a forward that ran under autograd once, at the first need.
    """

    def __init__(self, provider: Provider, tensors: Tensors, causal: bool) -> None:
        self.provider, self.causal = provider, causal
        self.attention = provider.load()
        self.q, self.k, self.v, self.dout = map(self.to_layout, tensors)

    def to_layout(self, tensor: Any) -> Any:
        """A (batch, seqlen, heads, head_dim) tensor as the provider takes it, or back."""
        return tensor if self.provider.layout == "bshd" else tensor.transpose(1, 2)

    def forward(self) -> Any:
        with self.provider.scope():
            return self.attention(self.q, self.k, self.v, self.causal)

    @functools.cached_property
    def graph(self) -> tuple[Any, Tensors]:
        """The output of a forward under autograd, and the inputs it depends on."""
        leaves = tuple(x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        with self.provider.scope():
            return self.attention(*leaves, self.causal), leaves

    def backward(self, dout: Any = None) -> Tensors:
        """dq, dk, dv and the learned for the ``dout`` of the problem, or another in its layout."""
        import torch

        out, leaves = self.graph
        dout = self.dout if dout is None else dout
        with self.provider.scope():
            inputs = (*leaves, *self.provider.learned)
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)


def _load_cupyflash() -> Callable:
    import cupyflash

    return lambda q, k, v, causal: cupyflash.attention(q, k, v, causal=causal)


def _force_backend(backend: str) -> AbstractContextManager:
    from cupyflash import environment

    return environment.override(backend=backend)


def _load_sdpa() -> Callable:
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped, **options
        )

    return attention


def _sdpa_backend(name: str) -> AbstractContextManager:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, name))


def _load_flash_attn(module: str) -> Callable:
    function = importlib.import_module(module).flash_attn_func

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        out = function(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out  # versions 3 and 4 may return the LSE too

    return attention


def _ours(name: str, backend: str) -> Provider:
    return Provider(name, _load_cupyflash, functools.partial(_force_backend, backend))


def _sdpa(name: str, backend: str) -> Provider:
    return Provider(name, _load_sdpa, functools.partial(_sdpa_backend, backend), "bhsd")


def _flash_attn(name: str, module: str) -> Provider:
    return Provider(name, functools.partial(_load_flash_attn, module))


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cupyflash", _load_cupyflash),
        _ours("cupyflash-sm90", "sm90"),
        _ours("cupyflash-sm80", "sm80"),
        _ours("cupyflash-simt", "simt"),
        _sdpa("sdpa-flash", "FLASH_ATTENTION"),
        _sdpa("sdpa-cudnn", "CUDNN_ATTENTION"),
        _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION"),
        _sdpa("sdpa-math", "MATH"),
        _flash_attn("flash-attn-2", "flash_attn"),
        _flash_attn("flash-attn-3", "flash_attn_interface"),
        _flash_attn("flash-attn-4", "flash_attn.cute"),
    )
}
