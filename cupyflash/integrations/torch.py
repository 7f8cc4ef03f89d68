"""cupyflash behind torch's own attention functions, through torch's hook for flash attention.

`register` once; between ``torch.nn.attention.activate_flash_attention_impl("cupyflash")`` and
``torch.nn.attention.restore_flash_attention_impl()`` these kernels then run
`torch.nn.functional.scaled_dot_product_attention`, wherever torch chooses its flash backend
(float16 or bfloat16, no mask), and `torch.nn.attention.varlen.varlen_attn`.

To import this module defines all operators ``torch.ops.cupyflash``, which a program of torch.export
or torch.jit names; otherwise the first call of each function that has some defines them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..jit import compiler
from ..ops.attention import dispatch, torch_plain, torch_text  # noqa: F401
from ..ops.attention.options import DROPOUT_P, NO_EXTRAS, Extras, plain_options
from ..ops.decode import torch_ops as of_caches  # noqa: F401
from ..ops.group_norm import torch_ops as of_group_norm  # noqa: F401
from ..ops.linear import torch_ops as of_linear  # noqa: F401
from ..ops.norm import torch_ops as of_norm  # noqa: F401
from ..runtime.lookup import library_of

NAME = "cupyflash"


def register() -> None:
    """Add "cupyflash" to what `torch.nn.attention.activate_flash_attention_impl` knows.

    Raises:
        ImportError: a torch without the hook.
    """
    register_impl = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is None:
        raise ImportError(
            "cupyflash.integrations.torch.register: needs torch 2.11 or newer, for "
            f"torch.nn.attention.register_flash_attention_impl, got {torch.__version__}; "
            "pip install 'torch>=2.11'"
        )
    register_impl(NAME, register_fn=Activation)


class Activation:
    """The operators of torch's flash backend, replaced until `remove`.

    torch puts cuDNN in front of its flash backend on some GPUs; here flash is the first choice.
    """

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        if dispatch_key == "CUDA":
            if not torch.cuda.is_available():
                fact = "replaces operators of torch on a GPU, and needs one"
                raise RuntimeError(f"cupyflash.integrations.torch: {fact}, got a torch without")
            compiler.nvrtc()  # the error that names the pip line, before anything is replaced
            x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)  # torch sets its own order at the first choice
        self.order = torch._C._get_sdp_priority_order()
        flash = int(SDPBackend.FLASH_ATTENTION)
        torch._C._set_sdp_priority_order([flash, *(x for x in self.order if x != flash)])
        self.library = torch.library.Library("aten", "IMPL")
        for name, function in OPERATORS.items():
            if hasattr(torch.ops.aten, name):  # not every torch has all of them
                self.library.impl(name, function, dispatch_key)

    def remove(self) -> None:
        self.library._destroy()
        torch._C._set_sdp_priority_order(self.order)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_forward``: (batch, seqlen, heads, head_dim), or packed.

    ``num_splits`` is a hint that changes no result; keys are not split here.
    """
    function = "_flash_attention_forward"
    for name, x in {"alibi_slopes": alibi_slopes, "seqused_k": seqused_k}.items():
        if x is not None and library_of(query).wants_gradient(query, key, value):
            fact = f"{name} has no backward in torch, no tensor may require a gradient with it"
            raise NotImplementedError(f"{function}: {fact}, got one that does")
    if block_table is not None:
        raise NotImplementedError(f"{function}: block_table (paged keys) is not built in cupyflash")
    layout = "bshd" if cum_seq_q is None else "thd"
    window = (window_size_left, window_size_right)
    lengths = None if cum_seq_q is None else (max_q, max_k)
    options = {"causal": is_causal, "scale": scale, "window": window, "layout": layout}
    options |= {"max_seqlens": lengths, "dropout_p": dropout_p}
    extras = Extras(cum_seq_q, cum_seq_k, alibi_slopes, seqused_k=seqused_k)
    return _forward(function, (query, key, value), options, extras, return_debug_mask)


def flash_attention_forward_inplace(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: ``out`` is written, LSE returned."""
    result, lse, *_ = flash_attention_forward(*arguments, **options)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``."""
    layout = "bshd" if cum_seq_q is None else "thd"
    window = (window_size_left, window_size_right)
    lengths = None if cum_seq_q is None else (max_q, max_k)
    options = {"causal": is_causal, "scale": scale, "window": window, "layout": layout}
    options |= {"max_seqlens": lengths, "dropout_p": dropout_p}
    tensors = (grad_out, query, key, value, out, logsumexp)
    extras = Extras(cum_seq_q, cum_seq_k)
    return _backward("_flash_attention_backward", tensors, options, extras, rng_state)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int | None, ...]:
    """``aten::_scaled_dot_product_flash_attention``: (batch, heads, seqlen, head_dim)."""
    options = {"causal": is_causal, "scale": scale, "layout": "bhsd", "dropout_p": dropout_p}
    out, lse, *random = _forward(
        "_scaled_dot_product_flash_attention", (query, key, value), options, NO_EXTRAS,
        return_debug_mask,
    )  # fmt: skip
    return out, lse, None, None, query.shape[2], key.shape[2], *random


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    options = {"causal": is_causal, "scale": scale, "layout": "bhsd", "dropout_p": dropout_p}
    tensors = (grad_out, query, key, value, out, logsumexp)
    function = "_scaled_dot_product_flash_attention_backward"
    return _backward(function, tensors, options, NO_EXTRAS, philox_seed)


OPERATORS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}


def _forward(
    function: str,
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    extras: Extras,
    return_debug_mask: bool,
) -> tuple[Tensor, ...]:
    """(out, lse, rng_state, unused, debug_attn_mask), as torch's flash operators return them."""
    if return_debug_mask:
        raise NotImplementedError(f"{function}: return_debug_mask is not built in cupyflash")
    query, library = tensors[0], library_of(tensors[0])
    options = plain_options(function, **options)
    arrays = dispatch.prepared(function, library, dispatch.TENSORS, (*tensors, *extras), options)
    out, lse = dispatch.forward(function, library, arrays, (options, True))
    out = _as_promised(out, query)
    rng_state = query.new_empty(2, dtype=torch.uint64)
    if options[DROPOUT_P]:
        rng_state.view(torch.int64)[:1] = Extras(*arrays[3:]).dropout_seed
    return out, lse, rng_state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _backward(
    function: str,
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    extras: Extras,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, *others = tensors
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = plain_options(function, deterministic=deterministic, **options)
    if options[DROPOUT_P]:
        extras = extras._replace(dropout_seed=seed.view(torch.int64)[:1])
    arrays = (dout, *others, None, *extras)
    gradients = dispatch.backward(function, library_of(others[0]), arrays, (options, False))[:3]
    return tuple(map(_as_promised, gradients, others))


def _as_promised(result: Tensor, like: Tensor) -> Tensor:
    """The result with the strides that torch's meta functions promise: those of ``empty_like``.

    Compiled graphs rely on these. A result of `dispatch` has them, unless the strides of the input
    do not tell the order of its axes, as where one is expanded; then it is copied.
    """
    steps = [step for size, step in zip(like.shape, like.stride()) if size > 1]
    if 0 in steps or len({*steps}) < len(steps):
        return torch.empty_like(like).copy_(result)
    return result
