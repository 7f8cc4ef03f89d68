"""cupyflash as torch's flash backend. Who imports this is skipped where torch is missing."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
integration = pytest.importorskip("cupyflash.integrations.torch")

attention = torch.nn.attention
flash_sdpa = torch.ops.aten._scaled_dot_product_flash_attention

needs_hook = pytest.mark.skipif(
    not hasattr(attention, "activate_flash_attention_impl"), reason="torch without the hook"
)


@contextlib.contextmanager
def active(target):
    if target.gpu:
        integration.register()
        attention.activate_flash_attention_impl("cupyflash")
        undo = attention.restore_flash_attention_impl
    else:
        undo = integration.Activation("CPU").remove
    try:
        yield
    finally:
        undo()


def sdpa(target):
    """What SDPA runs; on a GPU SDPA itself."""
    if target.gpu:
        return torch.nn.functional.scaled_dot_product_attention
    return lambda *qkv, **options: flash_sdpa(*qkv, **options)[0]


def names_of_calls(monkeypatch):
    """A list that gets the names of the functions that are computed here."""
    names = []
    dispatch = integration.dispatch
    for name in ("forward", "backward"):
        function = getattr(dispatch, name)

        def counted(*arguments, function=function, **options):
            names.append(arguments[0])
            return function(*arguments, **options)

        monkeypatch.setattr(dispatch, name, counted)
    return names
