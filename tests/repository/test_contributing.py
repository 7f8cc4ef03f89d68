"""CONTRIBUTING and the pages that it links to: the worked example works, what they name exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from targets import FORCED, has
from tiny_kernel import has_nvrtc

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGE = (ROOT / "cupyflash" / "docs" / "adding_an_operation.md").read_text()
PAGES = CONTRIBUTING + PAGE + (ROOT / "tests" / "README.md").read_text()
LABELLED = re.compile(r"^\*\*`(\S+)`\*\* .+(?:\n.+)*\n\n```\w+\n((?:.*\n)+?)```$", re.MULTILINE)
LINE = re.compile(r"^\| `(\S+\.py)`(?:, `(\w+)`)? \| `(.+)` \|$", re.MULTILINE)
EXAMPLE = dict(LABELLED.findall(PAGE))  # the text of each file
NAME = "squared_relu"
TESTS = ("tests/runtime/test_params.py", "tests/jit/test_compile.py")
OTHER_ARCHS = "sm_75 or sm_86 or sm_89 or sm_100 or sm_120"  # to save time


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout with the files and the lines of the example."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("cupyflash", "cuda_src", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name in ("tests/conftest.py", *TESTS):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for name in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / name, tree)
    for name, text in EXAMPLE.items():
        assert not (tree / name).exists()
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    for name, of_list, line in LINE.findall(PAGE):
        path = tree / name
        place = rf"^(){of_list}\b.* = [\[{{]\n" if of_list else r"^( *)(?=from \.)"
        text, count = re.subn(place, rf"\g<0>{line}\n\g<1>", path.read_text(), count=1, flags=re.M)
        assert count == 1, (name, of_list)
        path.write_text(text)
    return tree


def test_the_example_has_four_small_files():
    assert [name.partition("/")[0] for name in EXAMPLE] == ["cuda_src", *["cupyflash"] * 2, "tests"]
    assert all(text.count("\n") < 150 for text in EXAMPLE.values())
    assert not any((ROOT / name).exists() for name in EXAMPLE)


def test_the_example_works(tree):
    """Its own test, and what test_params and test_compile make of it, in a process of the copy."""
    command = ["pytest", "-v", "-p", "no:cacheprovider", f"tests/linear/test_{NAME}.py", *TESTS]
    command += ["-k", f"{NAME} and not ({OTHER_ARCHS})"]
    changes = {"PYTHONPATH": str(tree), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=tree,
        env=os.environ | changes,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = [f"test_template_parameters[cupyflash.ops.linear.{NAME}.SquaredRelu]"]
    if not FORCED:
        wanted += ["test_wrong_calls[numpy-cpu]"]
    if not FORCED and has("torch"):
        wanted += ["test_torch_operator[torch-cpu]"]
    if has_nvrtc():
        wanted.append(f"test_layout[linear/{NAME}.cu]")
    if has_nvrtc() and not FORCED:
        wanted += [f"test_compile[{NAME}-{arch}-0]" for arch in ("sm_80", "sm_90a")]
    for name in wanted:
        assert f"{name} PASSED" in done.stdout


@pytest.mark.parametrize("tool", ["ruff check", "ruff format --check", "clang-format -Werror -n"])
def test_the_example_is_formatted(tree, tool):
    name, *options = tool.split()
    program = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if program is None:
        pytest.skip(f"{name} is not installed")
    files = [x for x in EXAMPLE if x.endswith(".cu") == (name == "clang-format")]
    done = subprocess.run([program, *options, *files], capture_output=True, text=True, cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_that_the_pages_name_exist(tree):
    folders = (tree, ROOT / "tests", ROOT / "bench")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    known = {f"/{path.as_posix()}/" for path in paths}
    named = re.findall(r"`([\w./]+(?:\.(?:py|pyi|cu|cuh|md|toml|h)|/))`", PAGES)
    assert len(named) > 80
    missing = [x for x in named if not any(y.endswith(f"/{x.rstrip('/')}/") for y in known)]
    assert missing == []


def folders_of(block):
    """Paths of folders, braces expanded, that lines of a tree begin with."""
    for line in block.splitlines():
        above, _, names = line.split("  ")[0].rstrip("/").partition("{")
        yield from (f"{above}{name}" for name in names.rstrip("}").split(","))


def test_the_tree_exists():
    (block,) = re.findall(r"## The tree\n\n```\n(.+?)^```$", CONTRIBUTING, re.M | re.DOTALL)
    assert len(block.splitlines()) == 13
    assert [x for x in folders_of(block) if not (ROOT / x).is_dir()] == []


def test_the_page_is_short():
    assert CONTRIBUTING.count("\n") <= 150
