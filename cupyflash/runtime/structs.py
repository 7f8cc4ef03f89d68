"""Argument structs and constants of kernels, read from the headers that define them.

A header of ``cuda_src`` is their only definition. From its text `header` makes the ctypes
structures that the host fills in, so that nothing is written twice. ctypes lays a structure out as
the C++ compiler does: the compiled program asserts its size, and ``test_params.py`` asserts
the offset and the size of each field.

It reads structs of numbers, pointers, other structs and arrays of these, ``constexpr int`` and
``constexpr float`` constants that are arithmetic of numbers and other constants, and enumerations.
"""

import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..jit import sources

NUMBERS = {
    "int": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# A base class is not read: it has no bytes, or those that the host puts in front of the fields.
_STRUCT = re.compile(r"^struct (?:alignas\((\d+)\) )?(\w+)(?: : [\w, ]+)? \{(.*?)^\};", re.M | re.S)
_FUNCTION = re.compile(r"[^;{}]*\{(?:[^{}]|\{[^{}]*\})*\}")  # with its body
_FIELD = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)\])?")
_ARGUMENT = re.compile(r"\(\s*const (?:__grid_constant__ )?(\w+) params\s*\)")
_CONSTANT = re.compile(r"^constexpr (?:int|float) (\w+) =\s+([^;]+);", re.M)
_ENUM = re.compile(r"^enum (?:class )?(\w+) (?:: \w+ )?\{(.*?)\};", re.M | re.S)


class Struct(ctypes.Structure):
    """Base of the structures of `Header`; iterating over one yields the values of its fields."""

    alignment = 8  # the largest that a struct has without alignas

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name, _ in self._fields_])


class Header:
    """A header below ``cuda_src`` and all that it includes. Its definitions are attributes.

    A struct becomes a ctypes structure, a constant a number, an enumeration the tuple of its names.

    Raises:
        AttributeError: there is no struct, constant or enumeration of this name.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for path in sources.included(self._path):
            kind, *found = _definitions(path).get(name, ("",))
            if kind:
                value = getattr(self, f"_{kind}")(name, *found)
                setattr(self, name, value)
                return value
        raise AttributeError(f"{self._path}: has no struct, constant or enum {name}")

    def _struct(self, name: str, aligned: str | None, body: str) -> type[Struct]:
        alignment, fields = int(aligned or Struct.alignment), []
        for line in _FUNCTION.sub("", _COMMENT.sub("", body)).split(";"):
            if line.strip():
                kind, pointer, field, count = self._field(name, line.strip())
                kind = ctypes.c_void_p if pointer else self._type(kind)
                _pad(fields, getattr(kind, "alignment", 1))
                fields.append((field, kind * self._constant("", count) if count else kind))
        if alignment > Struct.alignment:
            _pad(fields, alignment)
        return _structure(name, alignment, tuple(fields))

    def _constant(self, _: str, text: str) -> int | float:
        """The value of a constant expression, which C++ and Python write alike except for ``/``."""
        expression = re.sub(r"(?<=[\d.])f\b", "", text).replace("/", "//")
        names = {name: getattr(self, name) for name in re.findall(r"\b[A-Z]\w*", expression)}
        return eval(expression, {"__builtins__": {}}, names)

    def _enum(self, _: str, body: str) -> tuple[str, ...]:
        names = _COMMENT.sub("", body).split(",")
        return tuple(name.split("=")[0].strip() for name in names if name.strip())

    def _field(self, struct: str, line: str) -> tuple[str, ...]:
        match = _FIELD.fullmatch(" ".join(line.split()).replace(" *", "* "))
        if match is None:
            raise ValueError(f"{self._path}: cannot read the field {line!r} of {struct}")
        return match.groups()

    def _type(self, name: str) -> type:
        return NUMBERS.get(name) or getattr(self, name)


@functools.cache
def header(path: str) -> Header:
    """The header at this path below ``cuda_src``; it is read when an attribute of it is used."""
    return Header(path)


@functools.cache
def argument_of(source: str) -> type[Struct]:
    """The struct that the kernel of a source file takes by value."""
    text = _COMMENT.sub("", (sources.root() / source).read_text(encoding="utf-8"))
    return getattr(header(source), _ARGUMENT.search(text)[1])


@functools.cache
def _definitions(path: Path) -> dict[str, tuple]:
    """The definitions of a file by name: (kind, the parts of its text)."""
    text = path.read_text(encoding="utf-8")
    constants = {name: ("constant", value) for name, value in _CONSTANT.findall(text)}
    enums = {name: ("enum", body) for name, body in _ENUM.findall(text)}
    structs = {name: ("struct", aligned, body) for aligned, name, body in _STRUCT.findall(text)}
    return constants | enums | structs


@functools.cache
def _structure(name: str, alignment: int, fields: tuple[tuple[str, type], ...]) -> type[Struct]:
    """The type of a struct, one for all headers that include it."""
    return type(name, (Struct,), {"_fields_": list(fields), "alignment": alignment})


def _pad(fields: list[tuple[str, type]], alignment: int) -> None:
    """Adds the padding of alignas after these fields; ctypes cannot align before Python 3.13."""
    if not fields or alignment <= Struct.alignment:
        return
    struct = type("Fields", (ctypes.Structure,), {"_fields_": fields})
    last = getattr(struct, fields[-1][0])
    end = last.offset + last.size
    if end % alignment:
        fields.append((f"padding_{end}", ctypes.c_uint8 * (-end % alignment)))


def bytes_behind(struct: type[ctypes.Structure], name: str) -> bytes:
    """Zeros from the end of a field to the end of the struct."""
    field = getattr(struct, name)
    return bytes(ctypes.sizeof(struct) - field.offset - field.size)
