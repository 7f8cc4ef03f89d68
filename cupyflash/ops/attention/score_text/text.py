"""`Text`: the score and the mask of a call in the form that decides which kernels compute it."""

import functools
from typing import TYPE_CHECKING, NamedTuple

from .capture import FIRST_HEAD, HEADS, KEY, PIECES, QUERY, SEQUENCE, Capture

if TYPE_CHECKING:  # the modules of texts are imported when a call has one
    from .far import Far
    from .parts import Parts
    from .tree import Node

CPP_TYPES = {
    "float32": "float",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "int32": "int",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "bool": "bool",
}
KEY_TERMS = ("factor_of_query", "shift_of_query", "term_of_key")
RECORD = 64  # bytes, of which the size of the captures is a multiple


class Text(NamedTuple):
    """Hashable, so it is a part of a kernel's configuration and of the key of its cache.

    Attributes:
        score: the text of the score, or "".
        mask: that of the mask, or "".
        captures: what both read, in the order in which a call passes them.
        drops: dropout numbers weights by the captures of pieces.py, as one call of all would.
    """

    score: str
    mask: str
    captures: tuple[Capture, ...]
    drops: bool = False

    @property
    def score_tree(self) -> "Node | None":
        return _parsed(self.score, self.captures, False) if self.score else None

    @property
    def is_light(self) -> bool:
        """Whether the backward of Hopper has no number of each score in a register.

        That is its slope, or its part of the distance.
        """
        from .tree import only_adds

        divided = _in_parts(self, "bwd")
        if divided is None:
            return only_adds(self.score_tree)
        return divided.is_linear and bool(divided.far or "distance" not in divided.by_variable)

    @property
    def has_line(self) -> bool:
        """Whether the forward of Hopper adds a term that is linear far from the diagonal."""
        divided = self._forward_parts
        return bool(divided and divided.far and divided.far.slope)

    @property
    def has_key_terms(self) -> bool:
        """Whether the forward of Hopper adds a term of the key in the product of Q and K."""
        divided = self._forward_parts
        return bool(divided and divided.key_terms)

    @property
    def _forward_parts(self) -> "Parts | None":
        """The parts of a score in the forward; None beside a mask, where no product has a term."""
        return _in_parts(self, "fwd") if self.score and not self.mask else None

    @property
    def mask_tree(self) -> "Node | None":
        return _parsed(self.mask, self.captures, True) if self.mask else None

    def header(self, pass_: str) -> str:
        """The C++ that stands in front of a kernel, of the pass "fwd" or "bwd".

        The backward instantiates ``user_score`` with numbers that carry their derivative.
        """
        return _header(self, pass_)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str, captures: tuple[Capture, ...], mask: bool) -> "Node":
    from .parse import parse

    return parse(text, captures, mask)


@functools.lru_cache(maxsize=1024)
def _header(text: Text, pass_: str) -> str:
    from . import tanh

    if pass_ not in ("fwd", "bwd"):
        raise ValueError(f"header: the pass must be 'fwd' or 'bwd', got {pass_!r}")
    fields, size = [], 0
    for x in text.captures:
        size += 8 * (1 + x.rank)
        kind = f"Number<{x.dtype}>" if x.is_number else f"Capture<{CPP_TYPES[x.dtype]}, {x.rank}>"
        fields.append(f"  {kind} {x.name};")
    if size % RECORD:
        fields.append(f"  uint8_t padding[{RECORD - size % RECORD}];")
    tree = text.score_tree
    bounded = None if tree is None else tanh.taken_out(tree)
    divided = _in_parts(text, pass_)
    lines = [
        f"#define USER_SCORE {str(bool(text.score)).lower()}",
        f"#define USER_MASK {str(bool(text.mask)).lower()}",
        *["#define USER_TANH"] * (bounded is not None),
        *_part_macros(divided),
        *["#define USER_DROPOUT"] * text.drops,
        '#include "attention/text.cuh"',
        "struct Captures {",
        *fields,
        "};",
        "namespace text {",
    ]
    if tree is not None:
        lines += _function(tree, "user_score", "N", {"score": "N"}, text.score)
    if bounded is not None:
        numbers = {"score": "N", "bounded": "Tanh"}
        lines += _function(bounded[0], "tanh_argument", "N", {"score": "N"}, text.score)
        lines += _function(bounded[1], "score_of_tanh", "N", numbers, text.score)
    if divided is not None:
        numbers = {"score": "N", "parts": "Parts"}
        for variable, part in divided.by_variable.items():
            lines += _function(part, f"part_of_{variable}", "float", {}, text.score)
        lines += _function(divided.rest, "score_of_parts", "N", numbers, text.score)
        lines += _far_distances(divided.far) if divided.far else []
        if divided.far and divided.far.slope:
            lines += _function(divided.far.slope, "slope_of_distance", "float", {}, text.score)
        if divided.key_terms:
            for name, part in zip(KEY_TERMS, divided.key_terms):
                lines += _function(part, name, "float", {}, text.score)
    if text.mask_tree is not None:
        lines += _function(text.mask_tree, "user_mask", "bool", {}, text.mask)
    if text.drops:
        lines += _first_weight()
    return "\n".join([*lines, "}  // namespace text", ""])


@functools.lru_cache(maxsize=1024)
def _in_parts(text: Text, pass_: str) -> "Parts | None":
    from . import parts, tanh

    tree = text.score_tree
    return None if tree is None or tanh.taken_out(tree) else parts.taken_out(tree, pass_)


def _part_macros(divided: "Parts | None") -> list[str]:
    if divided is None:
        return []
    words = [x.upper() for x in divided.by_variable if not divided.is_cheap]
    words += ["SHIFT"] * divided.shifts + ["SLOPE"] * divided.is_linear
    words += ["LINE"] * bool(divided.far and divided.far.slope)
    words += ["TERM"] * bool(divided.key_terms)
    macros = [f"#define USER_PARTS ({' | '.join(f'int(TextParts::{x})' for x in words)})"]
    if divided.far:
        macros.append("#define USER_FAR")
    return macros


def _far_distances(far: "Far") -> list[str]:
    sides = {"behind": far.behind, "ahead": far.ahead}
    bounds = [(side, x.to_cpp()) for side, found in sides.items() for x in sorted(found or ())]
    return [
        "__device__ __forceinline__ FarDistances far_distances(const Captures& captures) {",
        "  FarDistances far = {};",
        *(f"  far.{side} = FarDistances::NEVER;" for side, x in sides.items() if x is None),
        *(f"  far.raise(far.{side}, {bound});" for side, bound in bounds),
        "  return far;",
        "}",
    ]


def _first_weight() -> list[str]:
    piece, head = (f"captures.{x.name}" for x in (PIECES, FIRST_HEAD))
    number = f"{piece}({SEQUENCE}, batch) * captures.{HEADS.name}() + {head}() + head"
    places = (number, f"{piece}({QUERY}, batch)", f"{piece}({KEY}, batch)")
    return [
        "__device__ __forceinline__ FirstWeight first_weight(int batch, int head, "
        "const Captures& captures) {",
        f"  return {{{', '.join(f'uint32_t({x})' for x in places)}}};",
        "}",
    ]


def _function(
    tree: "Node", name: str, returns: str, numbers: dict[str, str], text: str
) -> list[str]:
    """A function of the kernels; ``numbers`` are the types of its first arguments."""
    from .write import to_cpp

    parts, result = to_cpp(tree)
    short = name.removeprefix("user_")
    types = ", ".join(f"class {x}" for x in (*numbers.values(), "Place"))
    first = "".join(f"{kind} {x}, " for x, kind in numbers.items())
    return [
        *(f"// {line}" for line in f"{short}: {text}".splitlines()),
        f"template <{types}>\n__device__ __forceinline__ {returns} {name}({first}int batch, "
        "int head, Place query, Place key, const Captures& captures) {",
        *(f"  const auto {part} = {value};" for part, value in parts),
        f'#line 1 "{short}"',
        f"  return N({result});" if returns == "N" else f"  return {result};",
        '#line 1 "stub.cu"',
        "}",
    ]
