"""The arguments of `dispatch.forward` behind the tensors, in types that a torch operator takes."""

from typing import Any

from .extras import NO_EXTRAS, Extras
from .problem import Options

ARGUMENTS = ", ".join(
    [f"Tensor? {name}" for name in Extras._fields]
    + ["str function", "str causal", "float? scale", "SymInt[]? window", "float softcap"]
    + ["str layout", "SymInt[]? max_seqlens", "float dropout_p", "bool deterministic"]
)
NUM_EXTRAS = len(Extras._fields)
NUM_ARGUMENTS = len(ARGUMENTS.split(", "))


def split_backward(arguments: tuple) -> tuple[tuple, bool, Any]:
    """(`ARGUMENTS`, bias_grad, dlse) of the backward; torch leaves out a dlse of None."""
    dlse = arguments[NUM_ARGUMENTS + 1] if len(arguments) > NUM_ARGUMENTS + 1 else None
    return arguments[:NUM_ARGUMENTS], arguments[NUM_ARGUMENTS], dlse


def encode(options: tuple) -> tuple:
    """`Options` in types that an operator takes."""
    causal, scale, window, softcap, layout, max_seqlens, dropout_p = Options(*options)
    return (
        {False: "", True: "bottom-right"}.get(causal, str(causal)),
        scale,
        None if window is None else [-1 if x is None else x for x in window],
        softcap,
        layout,
        None if max_seqlens is None else list(max_seqlens),
        dropout_p,
    )


def decode(arguments: tuple) -> tuple[str, Options, Extras, bool]:
    """(function, options, extras, deterministic) of the operators' arguments behind the tensors."""
    function, causal, scale, window, softcap, layout, max_seqlens, *rest = arguments[NUM_EXTRAS:]
    dropout_p, deterministic = rest
    extras = arguments[:NUM_EXTRAS]
    return (
        function,
        Options(
            causal or False,
            scale,
            None if window is None else tuple(window),
            softcap,
            layout,
            None if max_seqlens is None else tuple(max_seqlens),
            dropout_p,
        ),
        NO_EXTRAS if all(x is None for x in extras) else Extras(*extras),
        deterministic,
    )
