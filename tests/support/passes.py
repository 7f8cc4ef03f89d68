"""Forward and backward of a problem as a user of each library runs them, and functions of torch."""

from collections.abc import Callable
from typing import Any

import cupyflash
from cupyflash.testing import Inputs


def forward_backward(inputs: Inputs, **options: Any) -> dict[str, Any]:
    """Results by name: out, lse, dq, dk, dv, and dbias and dsinks where there are any.

    Through autograd for torch, `attention_backward` otherwise; dropout needs a seed.
    """
    options["layout"] = inputs.layout
    qkv = inputs.q, inputs.k, inputs.v
    learned = {name: options[name] for name in ("bias", "sinks") if options.get(name) is not None}
    learned = {name: x for name, x in learned.items() if not str(x.dtype).endswith("bool")}
    names = ["dq", "dk", "dv", *(f"d{name}" for name in learned)]
    if type(inputs.q).__module__.partition(".")[0] == "torch":
        import torch

        leaves = [x.detach().requires_grad_() for x in (*qkv, *learned.values())]
        options |= dict(zip(learned, leaves[3:]))
        out, lse = cupyflash.attention(*leaves[:3], return_lse=True, **options)
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
        return {"out": out.detach(), "lse": lse, **dict(zip(names, gradients, strict=True))}
    out, lse = cupyflash.attention(*qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(
        inputs.dout, *qkv, out, lse, bias_grad="bias" in learned, **options
    )
    given = [x for x in gradients if x is not None]
    return {"out": out, "lse": lse, **dict(zip(names, given, strict=True))}


def explicit_gradients(inputs, *, deterministic=False, **options):
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = cupyflash.attention(*qkv, return_lse=True, **options)
    return cupyflash.attention_backward(
        inputs.dout, *qkv, out, lse, deterministic=deterministic, **options
    )


def leaves(inputs: Inputs) -> list[Any]:
    """q, k, v of torch that want a gradient, in their own storage."""
    return [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def results(function: Callable, inputs: Inputs, *qkv: Any) -> dict[str, Any]:
    """out, dq, dk and dv by name, of a function of tensors q, k and v, by autograd."""
    import torch

    qkv = qkv or leaves(inputs)
    out = function(*qkv)
    gradients = torch.autograd.grad(out, qkv, inputs.dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients)))


def one_graph(function: Callable, **options: Any) -> Callable:
    """torch.compile without a break in the graph; nothing is kept from tests before."""
    import torch

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def without_gradient(*tensors: Any) -> tuple[Any, ...]:
    """Copies of tensors, by a function whose backward returns None for each of them."""
    import torch

    class WithoutGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> tuple[Any, ...]:
            return tuple(x.clone() for x in tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
            return (None,) * len(gradients)

    return WithoutGradient.apply(*tensors)
