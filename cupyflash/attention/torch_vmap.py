"""How `torch.func.vmap` maps the operators: the mapped axis is folded into the batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .extras import Extras
from .torch_arguments import NUM_EXTRAS, split_backward

# Axes of the optional tensors that may have a batch axis, the first one then.
RANKS = {"alibi_slopes": 2, "bias": 4, "seqused_q": 1, "seqused_k": 1}
NOT_BUILT = {
    "cu_seqlens_q": "of packed sequences",
    "cu_seqlens_k": "of packed sequences",
    "dropout_seed": "with dropout",
}


def forward_rule(call: Callable) -> Callable:
    """The vmap rule of ``call(q, k, v, *extras, ...)`` -> (out, lse).

    Raises:
        NotImplementedError: packed sequences; dropout; sinks that are mapped.
    """

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        return _mapped(call, info.batch_size, in_dims, arguments, 3)

    return rule


def backward_rule(call: Callable) -> Callable:
    """The vmap rule of ``call(dout, q, k, v, out, lse, *extras, ..., bias_grad, dlse)``.

    Raises:
        NotImplementedError: as the forward, and with sinks or a gradient of the bias: the kernels
            add these up over the batch.
    """

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        tensors, (rest, bias_grad, dlse) = arguments[:6], split_backward(arguments[6:])
        if bias_grad or Extras(*rest[:NUM_EXTRAS]).sinks is not None:
            raise _not_built("of the gradient of bias or sinks")
        dims = (*in_dims[:6], None if dlse is None else in_dims[len(arguments) - 1], *in_dims[6:])
        arguments = (*tensors, dlse, *rest, bias_grad)
        return _mapped(last_at_6, info.batch_size, dims, arguments, 7)

    def last_at_6(*arguments: Any) -> Any:
        return call(*arguments[:6], *arguments[7:], arguments[6])

    return rule


def _mapped(
    call: Callable, size: int, in_dims: tuple, arguments: tuple, num_tensors: int
) -> tuple[Any, Any]:
    """(results, their mapped axes) for ``size`` entries of the mapped axes ``in_dims``."""
    end = num_tensors + NUM_EXTRAS
    extras, dims = Extras(*arguments[num_tensors:end]), Extras(*in_dims[num_tensors:end])
    for name, what in NOT_BUILT.items():
        if getattr(extras, name) is not None:
            raise _not_built(what)
    if dims.sinks is not None:
        raise _not_built("over sinks")
    tensors = [  # the last one of the backward, dlse, may be None
        None if x is None else _mapped_first(x, dim, size)
        for x, dim in zip(arguments[:num_tensors], in_dims)
    ]
    batch = tensors[0].shape[1]
    folded = [None if x is None else x.flatten(0, 1) for x in tensors]
    for name, rank in RANKS.items():
        x, dim = getattr(extras, name), getattr(dims, name)
        if x is not None and not (dim is None and _broadcast_over_batch(x, rank)):
            x = _mapped_first(x, dim, size)
            x = x.reshape(size, *[1] * (rank + 1 - x.dim()), *x.shape[1:])
            x = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
            extras = extras._replace(**{name: x})
    results = call(*folded, *extras, *arguments[end:])
    kind = type(results)
    return kind(x.unflatten(0, (size, batch)) for x in results), kind(0 for _ in results)


def _mapped_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """With the mapped axis in front; a copy for each entry where none is mapped, as not every
    kernel takes a stride of 0.
    """
    return x.expand(size, *x.shape).contiguous() if dim is None else x.movedim(dim, 0)


def _broadcast_over_batch(x: Tensor, rank: int) -> bool:
    return x.dim() < rank or (rank == RANKS["bias"] and x.shape[0] == 1)


def _not_built(what: str) -> NotImplementedError:
    return NotImplementedError(f"cupyflash: torch.func.vmap {what} is not built")
