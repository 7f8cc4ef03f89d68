"""Texts of scores and masks for the tests of kernels, with the same functions in torch."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cupyflash.ops.attention.score_text.capture import Capture
from cupyflash.ops.attention.score_text.parse import parse
from cupyflash.ops.attention.score_text.tree import Node, TextError, only_adds

CPP_TYPES = {"float32": "float", "float16": "half_t", "int32": "int", "int64": "int64_t"}
CPP_TYPES["bool"] = "bool"


class Text(NamedTuple):
    """A text as the kernels get it: the stub of a test, so that kernels alone are tested."""

    score: str
    mask: str
    captures: tuple[Capture, ...]

    @property
    def mask_tree(self) -> Node:
        """What the plan asks whether sequences share the mask."""
        return parse(self.mask, self.captures, mask=True)

    @property
    def is_light(self) -> bool:
        """What the plan asks before it chooses a tile."""
        try:
            return only_adds(parse(self.score, self.captures, mask=False))
        except TextError:  # C++ that is no text
            return False

    has_line = has_key_terms = False

    def header(self, pass_: str) -> str:
        fields, size = [], 0
        for x in self.captures:
            number = x.dtype in ("float", "int")
            of = f"{CPP_TYPES[x.dtype]}, {x.rank}" if not number else x.dtype
            fields.append(f"{'Number' if number else 'Capture'}<{of}> {x.name};")
            size += 8 * (1 + x.rank)
        fields += [f"uint8_t padding[{-size % 64}];"] if size % 64 else []
        names = "".join(f"const auto& {x.name} = captures.{x.name};\n" for x in self.captures)
        of_all = "int batch, int head, int query, int key, const Captures& captures"
        score = f"template <class N> __device__ __forceinline__ N user_score(N score, {of_all})"
        mask = f"__device__ __forceinline__ bool user_mask({of_all})"
        functions = [
            f'{head} {{\n{names}return\n#line 1 "text"\n{_floats(text)};\n}}\n'
            for head, text in ((score, self.score), (mask, self.mask))
            if text
        ]
        return (
            f"#define USER_SCORE {str(bool(self.score)).lower()}\n"
            f"#define USER_MASK {str(bool(self.mask)).lower()}\n"
            '#include "attention/text.cuh"\n'
            f"struct Captures {{ {' '.join(fields)} }};\n"
            f'namespace text {{\n{"".join(functions)}}}\n#line 1 "stub.cu"\n'
        )


def _floats(text: str) -> str:
    return re.sub(r"\d\.\d+", r"\g<0>f", text)


class Case(NamedTuple):
    """A text and the same function in torch.

    Attributes:
        arrays: by the names of the captures; Python numbers are numbers of the call.
        score: of (score, batch, head, query, key, arrays), None for a mask alone.
        mask: of (batch, head, query, key, arrays), or None.
    """

    text: Text
    arrays: dict[str, Any]
    score: Callable | None = None
    mask: Callable | None = None


def _case(score: str, mask: str, arrays: dict[str, Any], *functions: Callable | None) -> Case:
    captures = tuple(
        Capture(name, str(x.dtype).removeprefix("torch."), x.ndim)
        if isinstance(x, torch.Tensor)
        else Capture(name, type(x).__name__, 0)
        for name, x in arrays.items()
    )
    return Case(Text(score, mask, captures), arrays, *functions)


def temperature() -> Case:
    """One number of all scores, in an array of rank 0."""
    factor = {"factor": torch.tensor(0.7)}
    return _case("score * factor()", "", factor, lambda s, b, h, q, k, c: s * c["factor"])


def cases(heads: int, queries: int, keys: int) -> dict[str, Case]:
    """The texts by name, for so many heads, queries and keys at the most."""
    seeded = torch.Generator().manual_seed(7)
    slopes = torch.rand(heads, generator=seeded) * 0.3
    table = torch.randn(heads, 255, generator=seeded)
    documents = torch.arange(max(queries, keys), dtype=torch.int32) * 5 // (queries + keys)
    gates = torch.rand(max(queries, keys), generator=seeded).half()
    bias = torch.randn(keys, queries, generator=seeded).T  # strides that are not those of rows

    def near(query, key):
        return torch.clamp(key - query, -127, 127) + 127

    return {
        "identity": _case("score", "", {}, lambda s, b, h, q, k, c: s),
        "alibi": _case(
            "score - slopes(head) * abs(query - key)",
            "",
            {"slopes": slopes},
            lambda s, b, h, q, k, c: s - c["slopes"][h] * (q - k).abs(),
        ),
        "softcap": _case(
            "cap() * tanh(divide(score, cap()))",
            "",
            {"cap": 5.0},
            lambda s, b, h, q, k, c: 5.0 * torch.tanh(s / 5.0),
        ),
        "table": _case(
            "score + table(head, clamp(key - query, -127, 127) + 127)",
            "",
            {"table": table},
            lambda s, b, h, q, k, c: s + c["table"][h, near(q, k)],
        ),
        "documents": _case(
            "",
            "documents(query) == documents(key)",
            {"documents": documents},
            None,
            lambda b, h, q, k, c: c["documents"][q] == c["documents"][k],
        ),
        "gate": _case(
            "score * gates(query) + gates(key)",
            "",
            {"gates": gates},
            lambda s, b, h, q, k, c: s * c["gates"][q] + c["gates"][k],
        ),
        "causal": _case(
            "", "key <= query", {}, None, lambda b, h, q, k, c: (k <= q) & (b >= 0) & (h >= 0)
        ),
        "both": _case(
            "where(query >= key, score + bias(query, key), sin(score) - 0.5)",
            "key < limit() || query % 3 != 0",
            {"bias": bias, "limit": 9},
            lambda s, b, h, q, k, c: torch.where(q >= k, s + c["bias"][q, k], torch.sin(s) - 0.5),
            lambda b, h, q, k, c: (k < 9) | (q % 3 != 0) | (h < 0) | (b < 0),
        ),
    }
