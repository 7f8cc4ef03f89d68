"""The limits that CONTRIBUTING names: lines of files and functions, files of folders, named places.

Files and functions that are still longer are listed here. An entry that is no longer needed fails,
so the lists only shrink.
"""

import ast
import re

import pytest
from places import ROOT

PYTHON, CUDA, FUNCTION, PAGE = 300, 350, 60, 150
FOLDERS = {"cuda_src": 22, "tests": 25, "bench": 18}  # files in each folder of the tree
SOURCES = (".py", ".pyi", ".cu", ".cuh", ".h", ".md")
ELSEWHERE = re.compile(r"(?<![\w.$])(?:/(?:work|tmp|home|root)/|\.\./shared|\.probe/)")


def files(folder, *suffixes):
    return [(x.relative_to(ROOT).as_posix(), x.read_text(encoding="utf-8"))
            for x in sorted((ROOT / folder).rglob("*")) if x.suffix in suffixes]  # fmt: skip


def functions(text):
    """(name, lines without the docstring) of each function of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield node.name, lines


def test_files_are_short():
    limits = {"cuda_src": (CUDA, ".cu", ".cuh"), "cupyflash": (PYTHON, ".py", ".pyi")}
    found = {
        name
        for folder, (limit, *suffixes) in limits.items()
        for name, text in files(folder, *suffixes)
        if text.count("\n") > limit
    }
    assert found == set()


@pytest.mark.parametrize("tree", FOLDERS)
def test_folders_are_small(tree):
    """A folder's own files: sources, pages and headers, not results or what a run leaves behind."""
    found = {}
    for path in (ROOT / tree).rglob("*"):
        if path.suffix in SOURCES:
            found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path.name)
    assert {folder: len(x) for folder, x in found.items() if len(x) > FOLDERS[tree]} == {}
    assert sum(map(len, found.values())) > FOLDERS[tree]  # it has looked at the tree


def test_pages_of_notes_are_short():
    pages = [*files("bench/notes", ".md"), ("", (ROOT / "CONTRIBUTING.md").read_text())]
    assert [name for name, text in pages if text.count("\n") > PAGE] == []


def test_pages_name_no_place_outside_the_repository():
    pages = [x for folder in ("bench", "cupyflash/docs") for x in files(folder, ".md")]
    named = {f"{name}: {x}" for name, text in pages for x in ELSEWHERE.findall(text)}
    assert named == set()


@pytest.mark.parametrize("text", ["`/work/a.log`", "see ../shared/a.md", "python .probe/a.py"])
def test_a_place_outside_is_seen(text):
    assert ELSEWHERE.search(text) and not ELSEWHERE.search("forward/work/ and tmp/a")


def test_functions_are_short():
    found = {
        f"{path} {name}"
        for path, text in files("cupyflash", ".py")
        for name, lines in functions(text)
        if lines > FUNCTION
    }
    assert found == set()


@pytest.mark.parametrize("lines", [3, 60, 61])
def test_lines_of_a_function(lines):
    """A docstring is not counted, a signature is."""
    body = "    pass\n" * (lines - 1)
    text = f"def f():\n    '''One.\n\n    Two.\n    '''\n{body}"
    assert list(functions(text)) == [("f", lines)]
