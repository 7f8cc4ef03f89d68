"""What a text reads, by name: light, as every call of attention imports it."""

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The kind of a node. An operation on two kinds gives the greater one."""

    BOOL = 0
    INT = 1
    FLOAT = 2


class Capture(NamedTuple):
    """An array or a number that a text reads.

    Attributes:
        dtype: of an array "float32", "float16", "bfloat16", "int32", "int64", "uint8" or "bool"; of
            a number, which has rank 0, "float" or "int".
        learns: it has a gradient.
    """

    name: str
    dtype: str
    rank: int
    learns: bool = False

    @property
    def kind(self) -> Kind:
        if self.dtype.startswith(("float", "bfloat")):
            return Kind.FLOAT
        return Kind.BOOL if self.dtype == "bool" else Kind.INT

    @property
    def is_number(self) -> bool:
        return self.dtype in ("float", "int")


# What a text reads of pieces.py. No name of a caller's own has two underscores.
QUERY, KEY, SEQUENCE = range(3)  # the rows of `PIECES`
PIECES = Capture("pieces__", "int32", 2)
FIRST_HEAD = Capture("first_head__", "int", 0)
HEADS = Capture("heads__", "int", 0)
