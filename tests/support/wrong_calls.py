"""Wrong calls, made from a right one: each argument in turn gets values that it cannot have.

A test names a public function, the arguments of a call that works, and the kind of each argument;
`wrong_calls` yields the others. Every one of them must be refused in the same way, on a CPU and on
a GPU: TypeError, ValueError or NotImplementedError before anything is launched, with the name of
the function, the fact, what is allowed and what was given.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

REFUSED = (TypeError, ValueError, NotImplementedError)

NO_NUMBERS = ("text", b"1", [1.0], {}, object(), 1j, numpy.ones(2), numpy.ones((1, 1)))
# The kinds of an option, and values that no option of the kind can have.
NUMBER = (*NO_NUMBERS, math.nan, math.inf, -math.inf, numpy.float32("nan"), True)
INTEGER = (*NO_NUMBERS, math.nan, math.inf, 1.5, numpy.float64(2.5), -(2**70), 2**70, True)
FLAG = ("text", 2, -1, 0.5, [True], (), {}, object(), numpy.ones(2, bool))
NOT_IN_FLOAT32 = (1e-46, 1e39)  # there they are 0 and infinity
CHOICE = ("no such choice", "", 3, 0.5, ["text"], {}, object())


def array(x: Any, *, optional: bool = False, dtypes: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Values that an array argument like x cannot have.

    Args:
        x: of the right call.
        optional: None is allowed.
        dtypes: other dtypes that are wrong; default int32, float64 and complex64.
    """
    ours = type(x)
    cast = (lambda dtype: x.to(getattr(_torch(), dtype))) if _is_torch(x) else x.astype
    wrong = [cast(dtype) for dtype in dtypes or ("int32", "float64", "complex64")]
    wrong += ["text", 3, 1.5, [1.0, 2.0], {}, object(), ours, x[None][None], x.reshape(-1)[0]]
    if not optional:
        wrong.append(None)
    if _is_torch(x):
        wrong += [numpy.ones(tuple(x.shape), "float32"), x.to("meta")]
        if x.is_cuda:
            wrong.append(x.cpu())
    elif ours is not numpy.ndarray:
        wrong.append(numpy.ones(x.shape, "float32"))
    if x.ndim > 1:
        wrong.append(x[..., :0])
    return tuple(wrong)


def wrong_calls(
    good: dict[str, Any], kinds: dict[str, tuple[Any, ...]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is wrong, the arguments of the call) for each argument of ``kinds`` and each value."""
    for name, values in kinds.items():
        for value in values:
            yield f"{name}={describe(value)}", {**good, name: value}


def describe(value: Any) -> str:
    """A short name of a value: arrays by library, dtype and shape."""
    if not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__module__}:{value.dtype}{tuple(value.shape)}"
    return repr(value)[:40]


def check_refused(
    function: Callable, good: dict[str, Any], kinds: dict[str, tuple[Any, ...]], least: int = 30
) -> None:
    """That the right call works and every wrong one is refused with a message of the usual form.

    Args:
        least: so many wrong calls there must be.
    """
    function(**good)
    count, bad = 0, []
    for what, arguments in wrong_calls(good, kinds):
        count += 1
        try:
            function(**arguments)
        except REFUSED as error:
            text = str(error)
            if not (text.startswith(f"{function.__name__}: ") and "got" in text):
                bad.append(f"{what}: {type(error).__name__}: {text[:200]}")
        except Exception as error:
            bad.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        else:
            bad.append(f"{what}: no error")
    assert count >= least, f"{count} wrong calls, expected {least}"
    if bad:
        pytest.fail(f"{len(bad)} of {count} wrong calls of {function.__name__}:\n" + "\n".join(bad))


def _is_torch(x: Any) -> bool:
    return type(x).__module__ == "torch"


def _torch() -> Any:
    import torch

    return torch
