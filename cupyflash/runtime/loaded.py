"""The array libraries that the caller has imported: ``loaded.torch``, say, or None.

Code that torch.compile traces must not touch ``sys.modules``: Dynamo would walk over all entries,
which takes up to 170 ms, runs imports that other modules have put off, and fails where these add
entries. An attribute of a module is read, not traced.
"""

import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # type checkers do not see the class of this module
    torch: Any
    cupy: Any
    jax: Any

FunctionT = TypeVar("FunctionT", bound=Callable)

_unmarked: set[CodeType] = set()  # of `untraced` functions; torch is not there yet


class _Loaded(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in ("torch", "cupy", "jax"):
            raise AttributeError(name)
        module = sys.modules.get(name)
        if name == "torch" and module is not None:
            _mark(module)
            self.torch = module  # an attribute that the next call finds in a tenth of the time
        return module


def untraced(function: FunctionT) -> FunctionT:
    """Has Dynamo leave this function alone, and all that it calls, unless it traces the caller.

    Dynamo traces a function together with those that it calls, and these ask `compiling`. But it
    gives up a function for good, as one that was once called without tensors, and then goes on to
    trace each function that it calls by itself, where `compiling` has been asked before: checks,
    launches, and the NumPy of the CPU, which torch would compute with other last bits.
    """
    _unmarked.add(function.__code__)
    if module := sys.modules.get("torch"):
        _mark(module)
    return function


def _mark(torch: Any) -> None:
    """Tells Dynamo, whose part in torch's C library needs no import of ``torch._dynamo``.

    These names are private: torch 2.7 to 2.14 has them. Without them Dynamo may trace such a call.
    """
    try:
        eval_frame = torch._C._dynamo.eval_frame
        skip = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)
        for code in list(_unmarked):
            eval_frame.set_code_exec_strategy(code, skip)
            _unmarked.discard(code)
    except AttributeError:
        _unmarked.clear()


sys.modules[__name__].__class__ = _Loaded
