"""Imports run downwards only: commands, models, integrations -> topics -> runtime -> jit.

Nothing in the package imports what only a checkout has: benchmarks and tests.
"""

import ast
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(cupyflash.__file__).parent
LAYERS = (  # the lowest first; modules of one line are siblings that do not import each other
    ("environment", "packages", "wheel"),
    ("jit",),
    ("runtime",),
    ("attention", "norm", "diffusion", "baselines"),
    ("linear", "decode", "group_norm"),
    ("machine", "precompile"),
    ("__init__",),
    ("testing", "models", "integrations"),
    ("commands",),
    ("__main__",),
)
CHECKOUT = ("bench", "tests")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path):
    """(line, folder or module below the package, or of `CHECKOUT`) of what a file imports."""
    package = path.relative_to(ROOT.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules = [f"{base}.{x.name}" for x in node.names]
        else:
            continue
        for module in modules:
            first, *below = module.split(".")
            if first in CHECKOUT:
                yield node.lineno, first
            if first == "cupyflash":
                found = below[0] if below and below[0] in LEVEL else "__init__"
                yield node.lineno, found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda x: str(x.relative_to(ROOT)))
def test_imports_run_downwards(path):
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for line, there in imported(path):
        assert there not in CHECKOUT, f"{path}:{line}: {there} is no part of the package"
        allowed = there == here or LEVEL[there] < LEVEL[here]
        assert allowed, f"{path}:{line}: {here} imports {there}, which is not below it"


@pytest.mark.parametrize("text", ["from bench import gpt2", "def f():\n    import bench.gpt2"])
def test_imports_of_the_checkout_are_seen(tmp_path, monkeypatch, text):
    path = tmp_path / "cupyflash" / "commands" / "gpt2.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", path.parent.parent)
    with pytest.raises(AssertionError, match="bench is no part of the package"):
        test_imports_run_downwards(path)
