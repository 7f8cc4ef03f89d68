"""`Score` and `Mask`: what a caller writes, as a function or as text, with what it reads."""

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy

from ....runtime.checks import short
from ....runtime.lookup import library_of
from . import tree
from .built_in import softcap_of
from .encode import encode_text, joined
from .parse import parse
from .remembered import remembered
from .stand_in import is_array, is_host_number
from .text import CPP_TYPES, Text
from .tiles import FoundTiles
from .trace import place_of, trace
from .tree import Capture, Node, TextError
from .write import nodes, to_text

MOST_BYTES = 1024  # of the captures of a call, in the argument of a kernel


class _Written:
    """What `Score` and `Mask` share.

    Attributes:
        text: the expression, over the variables of the class and the captures.
        captures: name, dtype and rank of what it reads.
        given: these arrays and numbers, in the same order.
        alone: the `Text` of a call that has nothing else.
        encoded: the same as a string.
        softcap: the cap of a score that is the option of this name, or None.
    """

    IS_MASK = False
    softcap: float | None = None

    def __init__(self, source: str | Callable, /, **captures: Any) -> None:
        function = f"cupyflash.{type(self).__name__}"
        if isinstance(source, str):
            self._parse(function, source, captures)
        elif callable(source):
            self._trace(function, source, captures)
        else:
            fact = "allowed are a function of "
            fact += f"({', '.join(x for x in tree.NAMES if not (self.IS_MASK and x == 'score'))}) "
            raise TypeError(f"{function}: {fact}and a text, got {_kind(source)}")
        _check_captures(function, self.captures)
        named = list(zip(self.captures, self.given))
        self.given = tuple(x if is_array(x) else _number(function, of, x) for of, x in named)
        texts = ("", self.text) if self.IS_MASK else (self.text, "")
        self.alone = Text(*texts, self.captures)
        self.encoded = encode_text(self.alone)
        self.reads_host = any(of.is_number and is_array(x) for of, x in named)
        if not (self.IS_MASK or self.reads_host):
            self.softcap = softcap_of(self.alone.score_tree, self.captures, self.given)

    def _parse(self, function: str, source: str, captures: dict[str, Any]) -> None:
        self.text = source
        self.given = tuple(_value(x) for x in captures.values())
        self.captures = tuple(map(functools.partial(_capture, function), captures, self.given))
        try:
            node = parse(source, self.captures, self.IS_MASK)
        except TextError as error:
            raise _error(function, error, source) from None
        read = _names_read(node)
        for name in captures:
            if name not in read:
                fact = "the text must read each array and number that it gets"
                raise ValueError(f"{function}: {fact}, got {name} beside\n  {source}")

    def _trace(self, function: str, source: Callable, captures: dict[str, Any]) -> None:
        try:
            traced = trace(source, self.IS_MASK, captures)
            self.text = to_text(traced.tree)
        except TextError as error:
            raise _traced_error(function, error) from None
        except IndexError as error:  # of NumPy, or of what is like it
            fact = "give arrays that an object holds by keyword, Score(function, table=table)"
            raise TypeError(f"{function}: {fact}, got {error}, in {place_of(error)}") from error
        except TypeError as error:
            self._require_arguments(function, source, captures)
            raise error
        read = _names_read(traced.tree)
        used = [i for i, x in enumerate(traced.captures) if x.name in read]
        self.captures = tuple(traced.captures[i] for i in used)
        self.given = tuple(traced.values[i] for i in used)

    def _require_arguments(self, function: str, source: Callable, captures: dict) -> None:
        """Raises TypeError if the function does not take the arguments that it gets."""
        names = [x for x in tree.NAMES if not (self.IS_MASK and x == "score")]
        with contextlib.suppress(ValueError):  # a function without a signature
            signature = inspect.signature(source)
            try:
                signature.bind(*names, **captures)
            except TypeError as error:
                fact = f"a function must take ({', '.join((*names, *captures))})"
                raise TypeError(f"{function}: {fact}, got {signature}: {error}") from None

    @property
    def values(self) -> tuple:
        """What the text reads, with the numbers that arrays without axes have now."""
        if not self.reads_host:
            return self.given
        function, named = f"cupyflash.{type(self).__name__}", zip(self.captures, self.given)
        return tuple(_number(function, of, x) if of.is_number else x for of, x in named)

    def cuda(self, pass_: str) -> str:
        """The C++ that the kernels of a pass include, for this text alone.

        Args:
            pass_: "fwd" or "bwd", whose numbers carry their derivative by the score.

        Raises:
            ValueError: another pass.
        """
        return self.alone.header(pass_)

    def __repr__(self) -> str:
        return f"cupyflash.{type(self).__name__}({self.text!r})"


class Score(_Written):
    """A score that replaces ``scale * q k^T``, for ``score=`` of `cupyflash.attention`.

    Args:
        source: a function of (score, batch, head, query, key) that returns a number, or the same as
            a text in C++. The function is called once, with stand-ins that write down the text:
            it has no `if` on them, but where(condition, a, b) of torch or NumPy. Numbers and arrays
            that it reads are arguments of the kernels, so others compile nothing; numbers that
            stand in the code itself are compiled in. ``score`` is a float32 number, the others are
            integers: the sequence, the head of q, and the places of query and key in their
            sequence. -inf masks.
        captures: arrays and numbers, by the names under which a text reads them, or which a
            function takes by keyword. An element of an array is ``name(i, j)`` in a text,
            ``name[i, j]`` or ``name[i][j]`` in a function. Arrays are float32, float16, bfloat16,
            int32, int64, uint8 or bool, in the library and on the device of q. Indices are
            integers from 0; one outside of its array is an error on a CPU, and on a GPU reads what
            lies there.

    A text is code, which the kernels run: never take one from a stranger.

    Raises:
        TypeError, ValueError, NotImplementedError: the text, or the part of it that a function has
            written down, with the place of the error.
    """


class Mask(_Written):
    """A mask, for ``mask=`` of `cupyflash.attention`: True where the query sees the key.

    Args:
        source: as for `Score`, but a condition of (batch, head, query, key).
        captures: as for `Score`.
    """

    IS_MASK = True
    found: FoundTiles | None = None

    def tiles(self) -> "Mask":
        """The same mask, which remembers its tiles: those that are empty, and those that are full.

        A GPU finds them in the first call of each kernel, and later calls use them, those of other
        layers for example. On Hopper it also keeps a bit for each score of the other tiles, for a
        kernel at most 128 MiB. Each call of this mask must have the same lengths, and none may
        follow a change of what the mask reads: make a new one then.
        """
        mask = copy.copy(self)
        mask.found = FoundTiles()
        return mask


def written(
    function: str, score: Any, mask: Any, names: tuple[str, str] = ("score", "mask")
) -> tuple[Text, tuple]:
    """The text of a call, and the arrays and numbers that it reads, then perhaps found tiles.

    Args:
        score: a `Score`, a function, or None.
        mask: a `Mask`, a function, or None.
        names: those of the two arguments, for errors.

    Raises:
        TypeError, ValueError, NotImplementedError: as `Score`.
    """
    score = made(function, names[0], Score, score)
    mask = made(function, names[1], Mask, mask)
    if mask is None:
        return score.alone, score.values
    found = () if mask.found is None else (mask.found,)
    if score is None:
        return mask.alone, (*mask.values, *found)
    text, values = _joined(function, score, mask)
    return text, (*values, *found)


def made(function: str, name: str, kind: type[_Written], x: Any) -> Any:
    """The `Score` or `Mask` of an argument, or None.

    Raises:
        TypeError, ValueError, NotImplementedError: as the class.
    """
    if x is None or isinstance(x, kind):
        return x
    if isinstance(x, _Written) or not callable(x):
        fact = f"{name} must be a function or a cupyflash.{kind.__name__}"
        hint = " (an array of scores to add, or a Boolean one, is bias=)" if library_of(x) else ""
        hint = f" (write cupyflash.{kind.__name__}({name}))" if isinstance(x, str) else hint
        raise TypeError(f"{function}: {fact}, got {_kind(x)}{hint}")
    return remembered(kind, x)


def _joined(function: str, score: Score, mask: Mask) -> tuple[Text, tuple]:
    """Both with one list of captures, in which an array that both read stands once."""
    given, of_mask = dict(zip(score.captures, score.given)), mask.values
    named = zip(mask.captures, mask.given)
    shared = tuple(x.name for x, value in named if not x.is_number and given.get(x) is value)
    text, own = _joined_text(score.alone, mask.alone, shared)
    values = (*score.values, *itertools.compress(of_mask, own))
    _check_captures(function, text.captures)
    return text, values


_joined_text = functools.lru_cache(maxsize=256)(joined)


def _names_read(node: Node) -> set[str]:
    return {x.value.name for x in nodes(node) if x.op == "capture"}


def _value(x: Any) -> Any:
    """An array, or a plain number."""
    x = x.item() if isinstance(x, numpy.generic) else x
    return int(x) if isinstance(x, bool) else x


def _number(function: str, capture: Capture, x: Any) -> int | float:
    """The number that the kernels get, of a Python number or an array without axes.

    Raises:
        TypeError: a complex number.
        ValueError: an integer of more than 32 bits.
    """
    x = x.item() if is_array(x) else x
    if isinstance(x, complex):
        raise TypeError(f"{function}: {capture.name} must be a real number, got {x}")
    if capture.dtype == "float":
        return tree.in_float32(x)
    if not -(2**31) <= x < 2**31:
        raise ValueError(f"{function}: {capture.name} must fit 32 bits, got {x}")
    return x


def _capture(function: str, name: str, x: Any) -> Capture:
    """The capture of this name; ValueError or TypeError for one that a text cannot read."""
    if name in tree.RESERVED or not name.isascii() or "__" in name or name.startswith("_"):
        raise ValueError(f"{function}: a capture cannot have this name, got {name!r}")
    if isinstance(x, int | float):
        return Capture(name, type(x).__name__, 0)
    if not is_array(x):
        fact = f"{name} must be an array or a number"
        raise TypeError(f"{function}: {fact}, got {_kind(x)}")
    if x.ndim == 0 and is_host_number(x):
        return Capture(name, "float" if "float" in str(x.dtype) else "int", 0)
    return Capture(name, str(x.dtype).removeprefix("torch."), x.ndim)


def _check_captures(function: str, captures: Any) -> None:
    for capture in captures:
        if not capture.is_number and capture.dtype not in CPP_TYPES:
            fact = f"{capture.name} must be {', '.join(CPP_TYPES)}"
            hint = " (write it .astype('float32'), or .float() of torch)"
            got = capture.dtype + hint * (capture.dtype == "float64")
            raise TypeError(f"{function}: {fact}, got {got}")
    size = sum(8 * (1 + x.rank) for x in captures)
    if size > MOST_BYTES:
        fact = f"captures take 8 bytes and 8 for each axis, {MOST_BYTES} at most"
        raise ValueError(f"{function}: {fact}, got {size}")


def _error(function: str, error: TextError, text: str) -> Exception:
    """The error with the line of the text and carets under the place."""
    message = f"{function}: {error.fact}, in\n{error.within(text)}"
    return error.kind(message)


def _traced_error(function: str, error: TextError) -> Exception:
    where = place_of(error)
    return error.kind(f"{function}: {error.fact}" + f", in {where}" * bool(where))


def _kind(x: Any) -> str:
    return short(x) if isinstance(x, str) or library_of(x) else f"a {type(x).__name__}"
