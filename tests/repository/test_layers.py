"""Imports run downwards only: commands, models, integrations -> topics -> runtime -> jit.

Nothing in the package imports what only a checkout has: benchmarks and tests.
"""

import ast
import graphlib
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(cupyflash.__file__).parent
LAYERS = (  # the lowest first; modules of one line are siblings that do not import each other
    ("environment", "packages", "wheel"),
    ("jit",),
    ("runtime",),
    ("ops.attention", "ops.norm", "ops.diffusion", "ops.baselines", "ops.transfer"),
    ("ops.linear", "ops.decode", "ops.group_norm"),
    ("ops.block", "ops"),
    ("machine", "parallel", "precompile"),
    ("__init__",),
    ("testing", "models", "integrations"),
    ("commands",),
    ("__main__",),
)
CHECKOUT = ("bench", "tests")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path):
    """(line, module) of what a file imports of the package, or of `CHECKOUT`."""
    package = path.relative_to(ROOT.parent).parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_checkers = [x for x in ast.walk(tree) if isinstance(x, ast.If)]
    for_checkers = [x for x in for_checkers if ast.unparse(x.test) == "TYPE_CHECKING"]
    skipped = {node for block in for_checkers for x in block.body for node in ast.walk(x)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            modules = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules = [f"{base}.{x.name}" for x in node.names]
        else:
            continue
        for module in modules:
            if module.partition(".")[0] in ("cupyflash", *CHECKOUT):
                yield node.lineno, module


def layer_of(module):
    """The name in `LAYERS` of a module; of a name that the package exports, "__init__"."""
    _, *below = module.split(".")
    names = [".".join(below[:2]), *below[:1]]
    return next((name for name in names if name in LEVEL), "__init__")


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda x: str(x.relative_to(ROOT)))
def test_imports_run_downwards(path):
    here = layer_of(module_of(path))
    for line, module in imported(path):
        first = module.partition(".")[0]
        assert first not in CHECKOUT, f"{path}:{line}: {first} is no part of the package"
        there = layer_of(module)
        allowed = there == here or LEVEL[there] < LEVEL[here]
        assert allowed, f"{path}:{line}: {here} imports {there}, which is not below it"


def test_no_module_imports_itself_through_others():
    """Imports inside functions count, too; `graphlib` raises a CycleError that names the circle."""
    modules = {module_of(path): path for path in ROOT.rglob("*.py") if path.parent != ROOT}
    graph = {}
    for name, path in modules.items():
        named = {x if x in modules else x.rpartition(".")[0] for _, x in imported(path)}
        graph[name] = named & modules.keys() - {name}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules)


@pytest.mark.parametrize("text", ["from bench import gpt2", "def f():\n    import bench.gpt2"])
def test_imports_of_the_checkout_are_seen(tmp_path, monkeypatch, text):
    path = tmp_path / "cupyflash" / "commands" / "gpt2.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", path.parent.parent)
    with pytest.raises(AssertionError, match="bench is no part of the package"):
        test_imports_run_downwards(path)


def test_test_files_import_no_test_file():
    """What they share lies in `support`, so a change of a test makes no other one run again."""
    found = []
    for path in sorted((ROOT.parent / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name} imports {x}" for x in names if x.startswith("test_")]
    assert found == []
