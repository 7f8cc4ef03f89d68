"""The wheel, and what importing costs."""

import ast
import email
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def python(code, *arguments, cwd, **options):
    """Output of a script in a fresh interpreter that finds only what ``cwd`` holds."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources(folder):
    """Paths of the files below a folder of the checkout, caches left out."""
    files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
    hidden = lambda part: part.startswith(".") or part == "__pycache__"
    return {path.as_posix() for path in files if not any(map(hidden, path.parts))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("cupyflash", "cuda_src"):
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    python(BUILD, folder, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_is_pure_and_small(wheel):
    assert wheel.name == f"cupyflash-{cupyflash.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 1e6


def test_wheel_contains_every_source(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == sources("cupyflash") | {f"cupyflash/{x}" for x in sources("cuda_src")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_only_the_torch_extra_needs_torch(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [x for x in archive.namelist() if x.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    requirements = metadata.get_all("Requires-Dist")
    assert [x for x in requirements if "extra ==" not in x] == ["numpy"]
    assert [x for x in requirements if "torch" in x] == ['torch>=2.7; extra == "torch"']


def test_wheel_works_without_cupy_and_torch(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys, numpy; sys.modules.update(cupy=None, torch=None)\n"
        "import cupyflash\n"
        "from cupyflash.jit import sources\n"
        "q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 9, 2, 8), 'float32')\n"
        "out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)\n"
        "dq, dk, dv = cupyflash.attention_backward(out, q, k, v, out, lse, causal=True)\n"
        "print(sources.root(), out.shape, dk.shape)"
    )
    folder = tmp_path / "cupyflash" / "cuda_src"
    assert python(code, cwd=tmp_path) == f"{folder} (1, 9, 2, 8) (1, 9, 2, 8)\n"


def test_type_checkers_see_the_public_names():
    """The imports that only they read are those of the table."""
    tree = ast.parse(Path(cupyflash.__file__).read_text(encoding="utf-8"))
    read = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    found = [(node.module, alias.asname) for node in read for alias in node.names]
    table = [(module, x) for module, names in cupyflash.MODULES.items() for x in names.split()]
    assert found == table and all(y.name == y.asname for x in read for y in x.names)


@pytest.mark.parametrize("name", cupyflash.__all__)
def test_public_names(name):
    value = getattr(cupyflash, name)
    assert value.__name__ == name and name in dir(cupyflash)
    assert pickle.loads(pickle.dumps(value)) is value


def test_names_of_folders_stay_functions():
    """Whatever is imported first; each in a fresh interpreter, as an import happens once."""
    check = "; import cupyflash; assert isfunction(cupyflash.linear), cupyflash.linear\n"
    check += "from cupyflash import linear, attention; assert isfunction(attention)\n"
    check += "from cupyflash.linear import kernels; import cupyflash.attention.backends\n"
    check += "assert isfunction(cupyflash.attention) and isfunction(cupyflash.linear)\n"
    for first in (
        "import cupyflash.linear",
        "import cupyflash.linear.kernels",
        "from cupyflash.linear import kernels",
        "from cupyflash import linear",
        "from cupyflash import *",
        "import cupyflash.precompile",
    ):
        python(f"from inspect import isfunction; {first}{check}", cwd=ROOT)


def test_other_names():
    code = "import cupyflash; print(cupyflash.jit.arch_of((9, 0)), *cupyflash.precompile.TOPICS)"
    assert python(code, cwd=ROOT).startswith("sm_90a norm ")
    assert not hasattr(cupyflash, "nothing")
    with pytest.raises(AttributeError, match="module 'cupyflash' has no attribute 'nothing'"):
        _ = cupyflash.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'cupyflash'"):
        from cupyflash import nothing  # noqa: F401
    text = python("import cupyflash; help(cupyflash)", cwd=ROOT)
    assert "attention(" in text and "class BlockStack" in text


def test_import_is_light():
    """Under 0.2 s (of processor time) beyond NumPy; no GPU library before a GPU array comes."""
    code = (
        "import sys, time, numpy\n"
        "start = time.process_time()\n"
        "import cupyflash\n"
        "cupyflash.attention\n"
        "seconds = time.process_time() - start\n"
        "x = numpy.ones((1, 2, 1, 8), 'float32')\n"
        "cupyflash.attention(x, x, x)\n"
        "print(seconds, *sorted({'torch', 'cupy', 'rich'} & set(sys.modules)))"
    )
    runs = [python(code, cwd=ROOT).split() for _ in range(8)]  # other processes slow it down
    assert [loaded for _, *loaded in runs] == [[]] * 8
    assert min(float(seconds) for seconds, *_ in runs) < 0.2
