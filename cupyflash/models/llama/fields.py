"""The fields of config.json: which model they describe, and which of them it must not have."""

from typing import Any, NamedTuple

from ..checkpoint import (
    HARMLESS,
    MOST,
    MOST_LAYERS,
    refuse_unknown,
    require_count,
    require_eps,
    require_tokens,
)
from ..place import DTYPES
from .rope import Rope

FUNCTION = "Llama"
# The fields of these models that change no logits.
HARMLESS_HERE = HARMLESS | {"is_llama_config", "max_window_layers", "pretraining_tp"}
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
        "original_max_position_embeddings")  # fmt: skip


class Architecture(NamedTuple):
    """What a model has beside the fields of all.

    Attributes:
        model_type: its name in transformers.
        biases: of which projections config.json may ask for: "attention_bias", "mlp_bias".
        qkv_bias: whether q, k and v always have one.
        head_norms: whether the heads of q and k are normalised.
        windows: "": none; "all": ``sliding_window`` is of all layers; "some": of those that
            ``layer_types`` or ``max_window_layers`` names, if ``use_sliding_window`` is true.
        heads_kv: whether ``num_key_value_heads`` must be there, and not be that of q by default.
        head_dim: where it is not given; 0: width / heads.
    """

    model_type: str
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False
    head_norms: bool = False
    windows: str = ""
    heads_kv: bool = True
    head_dim: int = 0


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", ("attention_bias", "mlp_bias"), heads_kv=False),
    "MistralForCausalLM": Architecture("mistral", windows="all"),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", ("attention_bias",), head_norms=True, windows="some", head_dim=128
    ),
}
WINDOW = 4096  # of transformers, where sliding_window is not given


class Fields:
    """The fields of a JSON file, of which it remembers those that were read.

    Args:
        place: the name of the file, for errors.
    """

    def __init__(self, given: Any, place: str) -> None:
        if not isinstance(given, dict):
            raise ValueError(f"{FUNCTION}: {place} must hold an object, got {type(given).__name__}")
        self.given, self.place, self.read = given, place, set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value; the default where there is none, or null."""
        self.read.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, most: int = MOST) -> int:
        """An integer from 1 to ``most``; without a default it must be there."""
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{FUNCTION}: {self.place} must have {name}, found none")
        return require_count(FUNCTION, f"{name} in {self.place}", value, most)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            fact = f"{name} in {self.place} must be true or false"
            raise ValueError(f"{FUNCTION}: {fact}, got {value!r}")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token or a list of them."""
        value = self.get(name, [])
        return require_tokens(FUNCTION, f"{name} in {self.place}", value)


def read(given: Any, place: str) -> dict[str, Any]:
    """The arguments of `LlamaConfig` from the fields of config.json.

    Raises:
        ValueError: not of one of `ARCHITECTURES`, or a value is missing or wrong.
        NotImplementedError: a field that changes the result in a way that is not built.
    """
    fields = Fields(given, place)
    kind = _architecture(fields)
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    max_positions = fields.count("max_position_embeddings")
    biases = {name: fields.flag(name) for name in kind.biases}
    attention_bias = biases.get("attention_bias", False)
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        fact = f"hidden_act in {place} must be silu"
        raise NotImplementedError(f"{FUNCTION}: {fact}, got {activation!r}")
    if not fields.flag("is_causal", True):
        fact = f"is_causal in {place} must be true"
        raise NotImplementedError(f"{FUNCTION}: {fact}, got False")
    eps = fields.get("rms_norm_eps", 1e-6)
    fields.read.update(ROPE)
    arguments = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "heads_kv": fields.count("num_key_value_heads", None if kind.heads_kv else heads),
        "head_dim": fields.count("head_dim", kind.head_dim or width // heads),
        "inner": fields.count("intermediate_size"),
        "vocab_size": fields.count("vocab_size"),
        "max_positions": max_positions,
        "eps": require_eps(FUNCTION, f"rms_norm_eps in {place}", eps),
        "rope": Rope.from_fields(fields.given, max_positions, place),
        "qkv_bias": kind.qkv_bias or attention_bias,
        "proj_bias": attention_bias,
        "mlp_bias": biases.get("mlp_bias", False),
        "head_norms": kind.head_norms,
        "tied": fields.flag("tie_word_embeddings"),
        "windows": _windows(fields, kind, layers),
        "eos_token_ids": fields.tokens("eos_token_id"),
        "dtype": fields.get("dtype", fields.get("torch_dtype", "float32")),
    }
    if arguments["dtype"] not in DTYPES:
        fact = f"dtype in {place} must be {', '.join(DTYPES)}"
        raise ValueError(f"{FUNCTION}: {fact}, got {arguments['dtype']!r}")
    refuse_unknown(FUNCTION, fields.given, place, fields.read | HARMLESS_HERE)
    return arguments


def _architecture(fields: Fields) -> Architecture:
    """The row of `ARCHITECTURES` that ``architectures`` names, or else ``model_type``."""
    names, model_type = fields.get("architectures"), fields.get("model_type")
    by_type = {kind.model_type: name for name, kind in ARCHITECTURES.items()}
    if names is None:
        names = [by_type.get(model_type, model_type)]
    alone = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    kind = ARCHITECTURES.get(names[0]) if alone else None
    if kind is None or model_type not in (None, kind.model_type):
        fact = f"architectures and model_type in {fields.place} must be those of"
        allowed = ", ".join(ARCHITECTURES)
        raise ValueError(f"{FUNCTION}: {fact} {allowed}, got {names!r} and {model_type!r}")
    return kind


def _windows(fields: Fields, kind: Architecture, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; () where none has one."""
    if kind.windows == "all":
        # A window of null is none, and a field that is not there is a window all the same.
        if fields.given.get("sliding_window", WINDOW) is None:
            fields.read.add("sliding_window")
            return ()
        return (fields.count("sliding_window", WINDOW),) * layers
    if kind.windows == "":
        return ()
    used, types = fields.flag("use_sliding_window"), fields.get("layer_types")
    fields.read.add("sliding_window")
    used = used and fields.given.get("sliding_window", WINDOW) is not None
    if types is None:
        first = fields.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            fact = f"max_window_layers in {fields.place} must be an integer"
            raise ValueError(f"{FUNCTION}: {fact}, got {first!r}")
        types = ["sliding_attention" if used and i >= first else "full_attention"
                 for i in range(layers)]  # fmt: skip
    known = ("full_attention", "sliding_attention") if used else ("full_attention",)
    of_each = isinstance(types, list) and len(types) == layers
    if not of_each or any(x not in known for x in types):
        fact = f"layer_types in {fields.place} must be {' or '.join(known)} of each of "
        raise NotImplementedError(f"{FUNCTION}: {fact}{layers} layers, got {types!r}")
    if "sliding_attention" not in types:
        return ()
    window = fields.count("sliding_window", WINDOW)
    return tuple(window if x == "sliding_attention" else None for x in types)
