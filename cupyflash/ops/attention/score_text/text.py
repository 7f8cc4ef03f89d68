"""`Text`: the score and the mask of a call in the form that decides which kernels compute it."""

import functools
from typing import TYPE_CHECKING, NamedTuple

from .capture import FIRST_HEAD, HEADS, KEY, PIECES, QUERY, SEQUENCE, Capture

if TYPE_CHECKING:  # the modules of texts are imported when a call has one
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
    if pass_ not in ("fwd", "bwd"):
        raise ValueError(f"header: the pass must be 'fwd' or 'bwd', got {pass_!r}")
    fields, size = [], 0
    for x in text.captures:
        size += 8 * (1 + x.rank)
        kind = f"Number<{x.dtype}>" if x.is_number else f"Capture<{CPP_TYPES[x.dtype]}, {x.rank}>"
        fields.append(f"  {kind} {x.name};")
    if size % RECORD:
        fields.append(f"  uint8_t padding[{RECORD - size % RECORD}];")
    lines = [
        f"#define USER_SCORE {str(bool(text.score)).lower()}",
        f"#define USER_MASK {str(bool(text.mask)).lower()}",
        *["#define USER_DROPOUT"] * text.drops,
        '#include "attention/text.cuh"',
        "struct Captures {",
        *fields,
        "};",
        "namespace text {",
    ]
    if text.score_tree is not None:
        lines += _function(text.score_tree, "score", text.score)
    if text.mask_tree is not None:
        lines += _function(text.mask_tree, "mask", text.mask)
    if text.drops:
        lines += _first_weight()
    return "\n".join([*lines, "}  // namespace text", ""])


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


def _function(tree: "Node", name: str, text: str) -> list[str]:
    from .write import to_cpp

    parts, result = to_cpp(tree)
    of_score = name == "score"
    head = f"template <{'class N, ' * of_score}class Place>\n__device__ __forceinline__ "
    head += "N" if of_score else "bool"
    arguments = "N score, " * of_score + "int batch, int head, Place query, Place key, "
    return [
        *(f"// {line}" for line in f"{name}: {text}".splitlines()),
        f"{head} user_{name}({arguments}const Captures& captures) {{",
        *(f"  const auto {part} = {value};" for part, value in parts),
        f'#line 1 "{name}"',
        f"  return N({result});" if of_score else f"  return {result};",
        '#line 1 "stub.cu"',
        "}",
    ]
