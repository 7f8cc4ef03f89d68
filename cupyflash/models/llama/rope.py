"""The angles of the rotary embedding: their table, and what config.json says of them.

Sources: RoFormer, arXiv:2104.09864; linear scaling, arXiv:2306.15595; "llama3", arXiv:2407.21783.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy

from ...runtime.checks import MOST_FLOAT32

FREE = ("rope_theta", "partial_rotary_factor")
# The numbers that each kind needs; those of "llama3" by the fields of `Rope`.
KINDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original",
    },
}


class Rope(NamedTuple):
    """The frequencies of the rotary embedding.

    Attributes:
        theta: pair i of a head of d columns turns by ``theta ** (-2 i / d)`` a token.
        kind: "default"; "linear", which divides every frequency by ``factor``; or "llama3", which
            divides those of wavelengths above ``original / low``, leaves those below ``original /
            high`` and joins the two between.
        factor: how many times longer than trained a context may become.
        original: of "llama3", the tokens of the context before.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], max_positions: int, place: str) -> "Rope":
        """What ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``, of config.json say.

        Args:
            fields: those of config.json.
            max_positions: the length of the context.
            place: the name of the file, for errors.

        Raises:
            ValueError: a number that is missing or none.
            NotImplementedError: another kind, or a number that is not known.
        """
        given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"Llama: rope_scaling in {place} must be an object, got {given!r}")
        given = {name: value for name, value in given.items() if value is not None}
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        if not isinstance(kind, str) or kind not in KINDS:
            fact = f"the kind of rope in {place} must be {', '.join(KINDS)}"
            raise NotImplementedError(f"Llama: {fact}, got {kind!r}")
        for name in FREE:
            if fields.get(name) is not None:
                given.setdefault(name, fields[name])
        if given.pop("partial_rotary_factor", 1.0) != 1:
            fact = f"partial_rotary_factor in {place} must be 1"
            raise NotImplementedError(f"Llama: {fact}, got another")
        if "original_max_position_embeddings" in KINDS[kind]:
            outer = fields.get("original_max_position_embeddings")
            length = outer or given.get("original_max_position_embeddings") or max_positions
            given["original_max_position_embeddings"] = length
        names = {"rope_theta": "theta", **KINDS[kind]}
        if unknown := sorted(given.keys() - names.keys()):
            fact = f"rope of kind {kind!r} in {place} has {', '.join(names)}"
            raise NotImplementedError(f"Llama: {fact}, got {', '.join(unknown)}")
        given.setdefault("rope_theta", 10000.0)
        for name in names:
            _require_number(place, name, given.get(name))
        rope = cls(kind=kind, **{field: given[name] for name, field in names.items()})
        if kind == "llama3" and rope.high <= rope.low:
            fact = f"high_freq_factor in {place} must be above low_freq_factor"
            raise ValueError(f"Llama: {fact}, got {rope.high} and {rope.low}")
        return rope

    def frequencies(self, head_dim: int) -> numpy.ndarray:
        """Radians a token of each pair, float32 (head_dim / 2)."""
        exponents = numpy.arange(0, head_dim, 2, dtype="float32") / numpy.float32(head_dim)
        plain = (1 / (self.theta ** exponents.astype("float64")).astype("float32")).astype(
            "float32"
        )
        if self.kind == "linear":
            return plain / numpy.float32(self.factor)
        if self.kind == "default":
            return plain
        wavelengths = 2 * math.pi / plain.astype("float64")
        # The share of the plain frequency is 1 for short wavelengths, and 0 for long ones.
        share = (self.original / wavelengths - self.low) / (self.high - self.low)
        share = share.clip(0, 1)
        return (plain * (share + (1 - share) / self.factor)).astype("float32")

    def angles(self, head_dim: int, positions: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """cos and sin of each position and pair, float32 (positions, head_dim / 2).

        An angle is a product in float32, because the models were trained with those.
        """
        rows = numpy.arange(positions, dtype="float32")
        angles = numpy.multiply.outer(rows, self.frequencies(head_dim))
        return numpy.cos(angles), numpy.sin(angles)


def _require_number(place: str, name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MOST_FLOAT32:
        raise ValueError(f"Llama: {name} in {place} must be a positive number, got {value!r}")
