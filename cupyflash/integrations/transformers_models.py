"""The check that a model of transformers may be loaded with, or set to, "cupy_attention".

transformers accepts any registered name for any model. One that multiplies its matrices itself
would silently go on doing so, with a mask made for somebody else; one that hands over an argument
which the attention function does not know would lose what that argument says. Both raise when they
are loaded. What a class of models does is read from the source of its module. So do models whose
heads are too wide for the kernels, and those whose configuration asks for the attention weights.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Set
from typing import Any

from ..ops.attention.checks import MAX_HEAD_DIM
from .transformers_mask import FUNCTION

# A name with "flash" in it sends many models through paths that are meant for flash-attn.
NAME = "cupy_attention"
MISNOMER = "cupyflash"
# Models switch from `NAME` to this one for continuous batching (transformers_continuous.py), which
# wants a name with "flash" and the version of flash-attn, 2 or 3, behind it.
CONTINUOUS = "cupy_flash_attention_2"

# These show whether a class of models calls the attention interface, or computes by itself.
SUPPORTED = ("attention_backend", "sdpa", "flash_attn", "flex_attn")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Before there was an interface, models had a dictionary of layers, one for each implementation.
ATTENTION_CLASSES = re.compile(r"^\w*ATTENTION_CLASSES\w* = ", re.MULTILINE)
ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\([^)]*nn\.Module", re.MULTILINE)


def check_when_loaded(base: type, known: Set[str]) -> None:
    """Make models raise that are loaded with, or set to, "cupy_attention" and would change by it.

    Args:
        base: `transformers.PreTrainedModel`, whose methods are wrapped, once.
        known: the names of all arguments that the attention function heeds or may leave aside.
    """
    if getattr(base, "_cupyflash_checks", False):
        return
    adjust, assign = base._check_and_adjust_attn_implementation, base.set_attn_implementation
    post_init = base.post_init

    @functools.wraps(adjust)
    def checked_adjust(self: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        _check_name(attn_implementation)
        if attn_implementation in (NAME, CONTINUOUS):
            _check_model(type(self), base, known)
            _check_wishes(type(self), self.config)
        if attn_implementation == CONTINUOUS:  # some models have a flash-attn of their own choice
            return attn_implementation
        return adjust(self, attn_implementation, *others, **options)

    @functools.wraps(assign)
    def checked_assign(self: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        requests = list(_requests(self.config, attn_implementation))
        for _, requested in requests:
            _check_name(requested)
        configs = {id(config): config for config, requested in requests if requested == NAME}
        for config in configs.values():
            _check_wishes(type(self), config)
        for module in self.modules():
            if attn_implementation == NAME or id(getattr(module, "config", None)) in configs:
                _check_heads(type(self), module)
                if isinstance(module, base):
                    _check_model(type(module), base, known)
        return assign(self, attn_implementation, *others, **options)

    @functools.wraps(post_init)
    def checked_post_init(self: Any) -> None:
        for module in self.modules():
            config = getattr(module, "config", self.config)
            if getattr(config, "_attn_implementation", None) == NAME:
                _check_heads(type(self), module)
        post_init(self)

    base._check_and_adjust_attn_implementation = checked_adjust
    base.set_attn_implementation = checked_assign
    base.post_init = checked_post_init
    base._cupyflash_checks = True


def hands_attention_over(model: type, base: type) -> bool:
    """Whether a class of models calls the attention interface, or has no attention of its own.

    A class calls the interface if two things hold: the model says that it supports an attention
    other than eager, and its module names the interface and has no dictionary of attention layers.
    """
    supports = any(getattr(model, f"_supports_{name}", False) for name in SUPPORTED)
    with_attention = False
    for calls, computes in map(_attention_in, _modules(model, base)):
        if calls and supports:
            return True
        with_attention |= calls or computes
    return not with_attention


def _check_name(requested: Any) -> None:
    if requested == MISNOMER:
        raise ValueError(
            f'attn_implementation: the name is "{NAME}", since transformers takes every name with '
            f'"flash" in it for flash-attn, got "{MISNOMER}"'
        )


def _check_model(model: type, base: type, known: Set[str]) -> None:
    handed = set().union(*map(_arguments_in, _modules(model, base)))
    if unknown := sorted(handed - known):
        raise ValueError(
            f"{model.__name__}: hands {unknown} to the attention interface, which {FUNCTION} does "
            f'not know, allowed is attn_implementation="eager", got "{NAME}"'
        )
    if hands_attention_over(model, base):
        return
    parts = f'{{"": "{NAME}", "vision_config": "eager"}}'
    raise ValueError(
        f"{model.__name__}: computes its attention itself and not through transformers' attention "
        'interface, allowed is attn_implementation="eager" (or "sdpa", where the model has it), '
        f'for this part alone with a dict such as {parts}, got "{NAME}"'
    )


def _check_wishes(model: type, config: Any) -> None:
    if getattr(config, "output_attentions", False):
        raise ValueError(
            f"{model.__name__}: output_attentions of {type(config).__name__} must be False, as "
            f'there are no attention weights with "{NAME}", allowed with them is '
            'attn_implementation="eager", got True'
        )


def _check_heads(model: type, module: Any) -> None:
    """Raises ValueError for a layer of attention with wider heads than the kernels have."""
    head_dim, layer = getattr(module, "head_dim", 0), type(module).__name__
    if "Attention" in layer and isinstance(head_dim, int) and head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f'{model.__name__}: head_dim of {layer} must be at most {MAX_HEAD_DIM} for "{NAME}", '
            'allowed is attn_implementation="sdpa" or "eager", for this part alone with a dict '
            f"that names it, got {head_dim}"
        )


def _modules(model: type, base: type) -> list[str]:
    """The names of the modules in which a class of models and its ancestors are defined."""
    return [x.__module__ for x in model.__mro__ if issubclass(x, base) and x is not base]


@functools.cache
def _arguments_in(module_name: str) -> frozenset[str]:
    """The keyword arguments of all calls of the attention interface in a module."""
    source = _source(module_name)
    nodes = list(ast.walk(ast.parse(source))) if INTERFACE in source else []
    functions = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and INTERFACE in ast.unparse(node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = [x for x in nodes if isinstance(x, ast.Call) and ast.unparse(x.func) in functions]
    return frozenset(keyword.arg for call in calls for keyword in call.keywords if keyword.arg)


@functools.cache
def _attention_in(module_name: str) -> tuple[bool, bool]:
    """Whether a module uses the attention interface, and whether it defines attention layers."""
    source = _source(module_name)
    calls = INTERFACE in source and not ATTENTION_CLASSES.search(source)
    return calls, ATTENTION_CLASS.search(source) is not None


def _source(module_name: str) -> str:
    """The text of a module; "" where it was typed in: the classes it inherits from decide."""
    try:
        return inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return ""


def _requests(config: Any, requested: Any) -> Iterator[tuple[Any, Any]]:
    """(configuration, implementation) of a model and its parts, for a request by name or dict."""
    own = requested.get("") if isinstance(requested, dict) else requested
    yield config, own
    for key in config.sub_configs:
        part = getattr(config, key, None)
        wanted = requested.get(key) if isinstance(requested, dict) else requested
        if part is not None and wanted is not None:
            yield from _requests(part, wanted)
