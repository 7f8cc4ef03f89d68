"""A Python function becomes a tree: it is called once with stand-ins that write down its text.

Arrays of NumPy, CuPy and JAX cannot be indexed by stand-ins. So the function is called through a
copy in which its closure and its globals name stand-ins of these arrays; so are functions that it
calls. torch hands its own operations over to the stand-ins.
"""

import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, TracebackType
from typing import Any, NamedTuple

from ....runtime import loaded
from . import tree
from .parse import require_result
from .recorder import Recorder
from .stand_in import ArrayStandIn, Elements, StandIn, is_array
from .tree import Capture, Node, TextError

ARGUMENTS = ("score", "batch", "head", "query", "key")
CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST")
PACKAGE = __name__.rpartition(".")[0]


class Traced(NamedTuple):
    """What a function says.

    Attributes:
        values: the arrays and numbers of the captures.
    """

    tree: Node
    captures: tuple[Capture, ...]
    values: tuple[Any, ...]


def trace(function: Callable, mask: bool, keywords: dict[str, Any]) -> Traced:
    """Calls the function with stand-ins for (score,) batch, head, query and key.

    Args:
        keywords: arrays and numbers that the function takes by keyword.

    Raises:
        TextError: it does what a text cannot say.
    """
    names = {id(x): name for name, x in keywords.items() if is_array(x)}
    names |= {id(x): name for name, x in _variables(function) if is_array(x)}
    recorder = Recorder(names, _is_literal)
    copies: dict[int, Any] = {}
    known = {name: _named(recorder, name, x) for name, x in keywords.items()}
    arguments = [StandIn(recorder, tree.name(x)) for x in ARGUMENTS[mask:]]
    result = _copy(recorder, function, copies)(*arguments, **known)
    if result is None:
        fact = "the function returns nothing"
        raise TextError(TypeError, f"{fact}, allowed is {'a condition' if mask else 'a score'}")
    if isinstance(result, tuple | list):
        raise TextError(TypeError, f"a function returns one score, got {len(result)} results")
    plain = isinstance(result, int | float)
    node = require_result(tree.literal(result) if plain else recorder.node(result), mask)
    captures, values = zip(*recorder.captures.values()) if recorder.captures else ((), ())
    return Traced(node, tuple(captures), tuple(values))


def _named(recorder: Recorder, name: str, x: Any) -> Any:
    """The stand-in that a function gets for a keyword, or x itself if it needs none."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        return StandIn(recorder, tree.read(recorder.add(name, type(x).__name__, 0, x), []))
    return ArrayStandIn(recorder, x) if _needs_stand_in(x) else x


def _needs_stand_in(x: Any) -> bool:
    torch = loaded.torch
    if torch is not None and isinstance(x, torch.Tensor):
        return False
    return is_array(x) and not isinstance(x, StandIn | Elements | ArrayStandIn) and x.ndim > 0


def _copy(recorder: Recorder, x: Any, copies: dict[int, Any]) -> Any:
    """A stand-in for an array; a copy with stand-ins for a function that reads arrays; else x."""
    if id(x) in copies:
        return copies[id(x)]
    if isinstance(x, functools.partial):
        args = [_copy(recorder, y, copies) for y in x.args]
        keywords = {name: _copy(recorder, y, copies) for name, y in x.keywords.items()}
        return functools.partial(_copy(recorder, x.func, copies), *args, **keywords)
    if _needs_stand_in(x):
        return ArrayStandIn(recorder, x)
    if not isinstance(x, FunctionType) or not any(_needs_stand_in(y) for _, y in _variables(x)):
        return x
    cells = tuple(CellType() for _ in x.__closure__ or ())
    changed = dict(x.__globals__)
    copy = FunctionType(x.__code__, changed, x.__name__, x.__defaults__, cells)
    copies[id(x)] = copy
    copy.__kwdefaults__ = x.__kwdefaults__
    for name in _names(x.__code__) & changed.keys():
        changed[name] = _copy(recorder, changed[name], copies)
    for cell, old in zip(cells, x.__closure__ or ()):
        try:
            cell.cell_contents = _copy(recorder, old.cell_contents, copies)
        except ValueError:  # a variable without a value
            continue
    copy.__defaults__ = tuple(_copy(recorder, y, copies) for y in x.__defaults__ or ()) or None
    return copy


def _variables(x: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(name, value) of the variables that a function and those that it calls may read."""
    seen = set() if seen is None else seen
    if isinstance(x, functools.partial):
        yield from x.keywords.items()
        yield from _variables(x.func, seen)
        for y in x.args:
            yield "", y
            yield from _variables(y, seen)
    if not isinstance(x, FunctionType) or id(x) in seen:
        return
    seen.add(id(x))
    code = x.__code__
    found = [(name, x.__globals__[name]) for name in _names(code) & x.__globals__.keys()]
    found.sort(key=lambda pair: pair[0])  # one name of an array with two is always the same
    for name, cell in zip(code.co_freevars, x.__closure__ or ()):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # a variable without a value
            continue
    names = code.co_varnames[: code.co_argcount]
    defaults = x.__defaults__ or ()
    found += zip(names[len(names) - len(defaults) :], defaults)
    for name, value in found:
        yield name, value
        if isinstance(value, FunctionType | functools.partial):
            yield from _variables(value, seen)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> set[str]:
    """The names that a function, or one within it, looks up in the module."""
    inside = (x for x in code.co_consts if isinstance(x, CodeType))
    return {*code.co_names}.union(*map(_names, inside))


@functools.lru_cache(maxsize=4096)
def _literals(code: CodeType) -> frozenset:
    """(type, value) of the numbers that stand in a function's code."""
    found = (x.argval for x in dis.get_instructions(code) if x.opname in CONSTANTS)
    return frozenset((type(x), x) for x in found if isinstance(x, int | float))


def _is_literal(x: int | float) -> bool:
    """Whether the code that runs now has this number in it."""
    return (type(x), x) in _literals(_callers_frame().f_code)


def _callers_frame() -> Any:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith((PACKAGE, "torch.")):
        frame = frame.f_back
    return frame


def place_of(error: BaseException) -> str:
    """The line of the caller's code that raised an error, with carets below the place."""
    found, step = "", error.__traceback__
    while step is not None:
        name, code = step.tb_frame.f_globals.get("__name__", ""), step.tb_frame.f_code
        if not name.startswith((PACKAGE, "torch.", "numpy.")):
            line = linecache.getline(code.co_filename, step.tb_lineno).rstrip()
            found = f"{code.co_filename}:{step.tb_lineno}\n  {line.lstrip()}{_carets(step, line)}"
        step = step.tb_next
    return found


def _carets(step: TracebackType, line: str) -> str:
    """The line of carets below a line of code; Python 3.10 does not know the columns."""
    positions = getattr(step.tb_frame.f_code, "co_positions", None)
    if positions is None:
        return ""
    _, end_line, begin, end = next(itertools.islice(positions(), step.tb_lasti // 2, None))
    if begin is None or end is None:
        return ""
    end = end if end_line == step.tb_lineno else len(line)
    begin, end = (len(line.encode()[:x].decode(errors="ignore")) for x in (begin, end))
    indent = len(line) - len(line.lstrip())
    return f"\n  {' ' * (begin - indent)}{'^' * max(1, end - begin)}"
