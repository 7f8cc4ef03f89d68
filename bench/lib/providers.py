"""The providers of attention in a benchmark: cupyflash, PyTorch's SDPA backends, FlashAttention.

A provider is bound to the tensors of a problem as a `Call`, with nothing but the user's own call
inside. All read the same (batch, seqlen, heads, head_dim) memory; SDPA gets transposed views.

Options are those of `cupyflash.attention`, and ``lengths`` of the sequences packed into a batch of
one. A provider translates them when it is loaded, and refuses those that it does not have.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from bench.lib import data

Tensors = tuple[Any, ...]
# The names of options in FlashAttention's packages.
FLASH_ATTN_NAMES = {"scale": "softmax_scale", "window": "window_size", "softcap": "softcap"}
# torch.nn.attention.varlen is FlashAttention-2; SDPA has the same kernels for everything else.
VARLEN_ONLY = "torch-varlen is for packed sequences and windows; sdpa-flash does the rest"


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        load: imports the library and returns f(q, k, v, causal) -> out with the options that it is
            given; ImportError if absent, NotImplementedError for an option that the library lacks.
        scope: what each call, forward and backward, runs within.
        layout: of the tensors that f takes, "bshd" or "bhsd".
    """

    name: str
    load: Callable[..., Callable[[Any, Any, Any, bool], Any]]
    scope: Callable[[], AbstractContextManager] = contextlib.nullcontext
    layout: str = "bshd"


def is_ours(impl: str) -> bool:
    return impl.startswith("cupyflash")


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are tensors with a gradient."""
    return {name: x for name, x in options.items() if getattr(x, "requires_grad", False)}


class Call:
    """A provider on the tensors of a problem.

    ``forward`` runs without a graph, as inference does, and no option wants a gradient, since some
    backends refuse that even then. ``backward`` is the whole backward pass of a forward that ran
    under autograd once, at the first need.
    """

    def __init__(self, provider: Provider, tensors: Tensors, causal: bool, **options: Any) -> None:
        self.provider, self.causal = provider, causal
        self.options, self.trained = options, trained(options)
        detached = {name: x.detach() for name, x in self.trained.items()}
        self.attention = provider.load(**options | detached)
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
        attention = self.provider.load(**self.options) if self.trained else self.attention
        with self.provider.scope():
            return attention(*leaves, self.causal), leaves

    def backward(self, dout: Any = None) -> Tensors:
        """dq, dk, dv and those of the options for the problem's ``dout`` or one in its layout."""
        import torch

        out, leaves = self.graph
        dout = self.dout if dout is None else dout
        with self.provider.scope():
            return torch.autograd.grad(
                out, (*leaves, *self.trained.values()), dout, retain_graph=True
            )


def _refuse(library: str, options: dict[str, Any]) -> None:
    """Raise NotImplementedError if any options are left."""
    if options:
        raise NotImplementedError(f"{library} has no {', '.join(options)}")


@functools.lru_cache(maxsize=1)
def _packing(lengths: Sequence[int]) -> tuple[Any, Any, int, int]:
    """The packing of queries and of keys, as FlashAttention takes it."""
    import torch

    ends = torch.tensor([0, *lengths]).cumsum(0).to(data.DEVICE, torch.int32)
    return ends, ends, max(lengths), max(lengths)


def _packed(function: Callable, lengths: Sequence[int], **options: Any) -> Callable:
    """A batch of one through a function of packed sequences."""
    packing = _packing(tuple(lengths))

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        rows = (x.squeeze(0) for x in (q, k, v))  # the gradient of x[0] is a copy among zeros
        out = function(*rows, *packing, causal=causal, **options)
        return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

    return attention


def _flash_attn_options(library: str, options: dict[str, Any]) -> dict[str, Any]:
    _refuse(library, {name: x for name, x in options.items() if name not in FLASH_ATTN_NAMES})
    return {FLASH_ATTN_NAMES[name]: x for name, x in options.items()}


def _load_cupyflash(lengths: Sequence[int] = (), **options: Any) -> Callable:
    import cupyflash

    if lengths:
        deterministic = options.pop("deterministic", False)
        options = _flash_attn_options("cupyflash.flash_attn_varlen_func", options)
        function = cupyflash.flash_attn_varlen_func
        return _packed(function, lengths, deterministic=deterministic, **options)
    return lambda q, k, v, causal: cupyflash.attention(q, k, v, causal=causal, **options)


def _force_backend(backend: str) -> AbstractContextManager:
    from cupyflash import environment

    return environment.override(backend=backend)


def _load_sdpa(
    bias: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    lengths: Sequence[int] = (),
    **others: Any,
) -> Callable:
    from torch.nn.functional import scaled_dot_product_attention

    _refuse("SDPA", others)
    if window and (lengths or bias is not None):
        raise NotImplementedError("SDPA has no window beside a bias or in packed sequences")

    def attention(q: Any, k: Any, v: Any, causal: bool, mask: Any = bias) -> Any:
        if window:
            mask, causal = _window_mask(q.shape[2], *window, causal), False
        grouped = q.shape[1] != k.shape[1]
        options = {"is_causal": causal, "enable_gqa": grouped, "scale": scale}
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, **options)

    return _jagged(attention, lengths) if lengths else attention


@functools.lru_cache(maxsize=1)
def _window_mask(seqlen: int, left: int, right: int, causal: bool) -> Any:
    """A window as a bool mask, which is how SDPA takes it."""
    import torch

    rows = torch.arange(seqlen, device=data.DEVICE)
    distance = rows - rows[:, None]
    return (distance >= -left) & (distance <= (0 if causal else right))


def _jagged(attention: Callable, lengths: Sequence[int]) -> Callable:
    """Packed sequences as a nested tensor, which is how SDPA takes them; nothing is copied."""
    import torch

    offsets = _packing(tuple(lengths))[0]
    bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}

    def packed(q: Any, k: Any, v: Any, causal: bool) -> Any:
        rows = (x.transpose(1, 2).squeeze(0) for x in (q, k, v))
        nested = (torch.nested.nested_tensor_from_jagged(x, offsets, **bounds) for x in rows)
        out = attention(*(x.transpose(1, 2) for x in nested), causal)
        return out.transpose(1, 2).values().unsqueeze(0).transpose(1, 2)

    return packed


def _sdpa_backend(name: str) -> AbstractContextManager:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, name))


def _load_torch_varlen(
    lengths: Sequence[int] = (),
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    **others: Any,
) -> Callable:
    from torch.nn.attention.varlen import varlen_attn

    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # before 2.13 unasked
    _refuse("torch-varlen", others)
    if not lengths and window == (-1, -1):
        raise NotImplementedError(VARLEN_ONLY)

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        packing = _packing(tuple(lengths) or (q.shape[1],) * q.shape[0])
        rows = (x.flatten(0, 1) for x in (q, k, v))
        options = {"scale": scale, "window_size": (window[0], 0) if causal else window}
        if takes_groups:
            options["enable_gqa"] = q.shape[2] != k.shape[2]
        return varlen_attn(*rows, *packing, **options).view_as(q)

    return attention


def _load_flash_attn(module: str, lengths: Sequence[int] = (), **options: Any) -> Callable:
    library = importlib.import_module(module)
    options = _flash_attn_options(module, options)
    if lengths:
        return _packed(library.flash_attn_varlen_func, lengths, **options)

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        out = library.flash_attn_func(q, k, v, causal=causal, **options)
        return out[0] if isinstance(out, tuple) else out  # versions 3 and 4 may return the LSE too

    return attention


def ours(name: str, backend: str) -> Provider:
    """A forced backend of cupyflash."""
    return Provider(name, _load_cupyflash, functools.partial(_force_backend, backend))


def _sdpa(name: str, backend: str) -> Provider:
    return Provider(name, _load_sdpa, functools.partial(_sdpa_backend, backend), "bhsd")


def _flash_attn(name: str, module: str) -> Provider:
    return Provider(name, functools.partial(_load_flash_attn, module))


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cupyflash", _load_cupyflash),
        ours("cupyflash-sm90", "sm90"),
        ours("cupyflash-sm80", "sm80"),
        ours("cupyflash-simt", "simt"),
        _sdpa("sdpa-flash", "FLASH_ATTENTION"),
        _sdpa("sdpa-cudnn", "CUDNN_ATTENTION"),
        _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION"),
        _sdpa("sdpa-math", "MATH"),
        Provider("torch-varlen", _load_torch_varlen),
        _flash_attn("flash-attn-2", "flash_attn"),
        _flash_attn("flash-attn-3", "flash_attn_interface"),
        _flash_attn("flash-attn-4", "flash_attn.cute"),
    )
}
