"""Which models of transformers hand their attention over, and errors for those that do not.

transformers accepts any registered name for any model. One that multiplies its matrices itself
would go on doing so, with a mask made for somebody else.
"""

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

SUPPORTED = ("attention_backend", "sdpa", "flash_attn", "flex_attn")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# A dictionary of layers, one for each implementation, as before there was an interface.
ATTENTION_CLASSES = re.compile(r"^\w*ATTENTION_CLASSES\w* = ", re.MULTILINE)
ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\([^)]*nn\.Module", re.MULTILINE)


def check_when_loaded(base: type, name: str, misnomer: str) -> None:
    """Make models raise that are loaded with, or set to, an implementation that they do not call.

    Args:
        base: `transformers.PreTrainedModel`, whose methods are wrapped, once.
        name: the registered name.
        misnomer: what users may write instead of it.
    """
    if getattr(base, "_cupyflash_checks", False):
        return
    adjust, assign = base._check_and_adjust_attn_implementation, base.set_attn_implementation

    @functools.wraps(adjust)
    def checked_adjust(self: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        _check_name(attn_implementation, name, misnomer)
        if attn_implementation == name:
            _check_model(type(self), base, name)
        return adjust(self, attn_implementation, *others, **options)

    @functools.wraps(assign)
    def checked_assign(self: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        requests = list(_requests(self.config, attn_implementation))
        for _, requested in requests:
            _check_name(requested, name, misnomer)
        configs = [id(config) for config, requested in requests if requested == name]
        for module in self.modules():
            everywhere = attn_implementation == name
            if isinstance(module, base) and (everywhere or id(module.config) in configs):
                _check_model(type(module), base, name)
        return assign(self, attn_implementation, *others, **options)

    base._check_and_adjust_attn_implementation = checked_adjust
    base.set_attn_implementation = checked_assign
    base._cupyflash_checks = True


def hands_attention_over(model: type, base: type) -> bool:
    """Whether a class of models calls the attention interface, or has no attention of its own.

    The first takes two witnesses: the model says that it supports another attention than eager, and
    its module calls the interface and picks no layers of its own by the name of an implementation.
    """
    supports = any(getattr(model, f"_supports_{name}", False) for name in SUPPORTED)
    with_attention = False
    for ancestor in model.__mro__:
        if issubclass(ancestor, base) and ancestor is not base:
            calls, computes = _attention_in(ancestor.__module__)
            if calls and supports:
                return True
            with_attention |= calls or computes
    return not with_attention


def _check_name(requested: Any, name: str, misnomer: str) -> None:
    if requested == misnomer:
        raise ValueError(
            f'attn_implementation: the name is "{name}", since transformers takes every name with '
            f'"flash" in it for flash-attn, got "{misnomer}"'
        )


def _check_model(model: type, base: type, name: str) -> None:
    if hands_attention_over(model, base):
        return
    parts = f'{{"": "{name}", "vision_config": "eager"}}'
    raise ValueError(
        f"{model.__name__}: computes its attention itself and not through transformers' attention "
        'interface, allowed is attn_implementation="eager" (or "sdpa", where the model has it), '
        f'for this part alone with a dict such as {parts}, got "{name}"'
    )


@functools.cache
def _attention_in(module_name: str) -> tuple[bool, bool]:
    """Whether a module uses the attention interface, and whether it defines attention layers."""
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return False, False  # typed in by the user; the classes that it inherits from are looked at
    calls = INTERFACE in source and not ATTENTION_CLASSES.search(source)
    return calls, ATTENTION_CLASS.search(source) is not None


def _requests(config: Any, requested: Any) -> Iterator[tuple[Any, Any]]:
    """(configuration, implementation) of a model and its parts, as a name or a dict asks for it."""
    own = requested.get("") if isinstance(requested, dict) else requested
    yield config, own
    for key in config.sub_configs:
        part = getattr(config, key, None)
        wanted = requested.get(key) if isinstance(requested, dict) else requested
        if part is not None and wanted is not None:
            yield from _requests(part, wanted)
