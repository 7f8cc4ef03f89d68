"""Imports run downwards only: commands, models, integrations -> topics -> runtime -> jit."""

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
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path):
    """(line, folder or module below the package) of what a file imports of the package."""
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
            if first == "cupyflash":
                found = below[0] if below and below[0] in LEVEL else "__init__"
                yield node.lineno, found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda x: str(x.relative_to(ROOT)))
def test_imports_run_downwards(path):
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for line, there in imported(path):
        allowed = there == here or LEVEL[there] < LEVEL[here]
        assert allowed, f"{path}:{line}: {here} imports {there}, which is not below it"
