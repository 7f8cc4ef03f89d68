"""The wheel, and what importing costs."""

import ast
import email
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from places import ROOT

import cupyflash
from cupyflash import packages

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
PROJECT = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}


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
def checkout(tmp_path_factory):
    """A copy of the sources and the tests, into which setuptools may write."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("cupyflash", "cuda_src", "tests"):
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in PROJECT:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout):
    return built("wheel", checkout, "*.whl")


def built(kind, folder, pattern):
    """The path of a "wheel" or an "sdist" of the sources in a folder."""
    python(BUILD.format(kind), folder / "dist", cwd=folder)
    (path,) = (folder / "dist").glob(pattern)
    return path


def test_wheel_is_pure_and_small(wheel):
    assert wheel.name == f"cupyflash-{cupyflash.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 1.2e6


def test_wheel_contains_every_source(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == sources("cupyflash") | {f"cupyflash/{x}" for x in sources("cuda_src")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_is_what_the_wheel_is_made_from(checkout, wheel, tmp_path):
    """No test is in it, and a wheel that is built from it alone has the same files."""
    with tarfile.open(built("sdist", checkout, "*.tar.gz")) as archive:
        # Python has a filter since 3.12, 3.11.4 and 3.10.12.
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (folder,) = tmp_path.iterdir()
    found = {x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()}
    made = {x for x in found if ".egg-info/" in x or x in ("PKG-INFO", "setup.cfg")}
    assert found - made == sources("cupyflash") | sources("cuda_src") | PROJECT
    again = built("wheel", folder, "*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


def requirements(wheel):
    """{extra: its requirements}; the extra "" is what every installation needs."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [x for x in archive.namelist() if x.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = line.partition("; extra == ")
        found.setdefault(marker.strip('"'), set()).add(Requirement(requirement))
    return found


def test_torch_comes_with_the_extras_torch_and_test(wheel):
    found = requirements(wheel)
    assert found[""] == {Requirement("numpy")}
    assert {x for x, of in found.items() if any(y.name == "torch" for y in of)} == {"torch"}
    (ours,) = [x for x in found["test"] if x.name == "cupyflash"]
    assert "torch" in ours.extras


def test_pip_lines_name_what_the_extras_bring(wheel):
    found = requirements(wheel)
    for extra, lines in packages.EXTRAS.items():
        of_others = {x for x in found[extra] if x.name != "cupyflash"}
        assert {Requirement(line) for line in lines} == of_others, extra


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
    (seen,) = (x for x in tree.body if isinstance(x, ast.If) and isinstance(x.test, ast.Name))
    read = [node for node in seen.body if isinstance(node, ast.ImportFrom) and node.level]
    found = [(node.module, alias.asname) for node in read for alias in node.names]
    table = [(module, x) for module, names in cupyflash.MODULES.items() for x in names.split()]
    assert found == table and all(y.name == y.asname for x in read for y in x.names)


@pytest.mark.parametrize("name", cupyflash.__all__)
def test_public_names(name):
    value = getattr(cupyflash, name)
    assert value.__name__ == name and name in dir(cupyflash)
    assert pickle.loads(pickle.dumps(value)) is value


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
    """Less than 2.5 times NumPy's (processor time); no GPU library before a GPU array comes."""
    code = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "import numpy\n"
        "middle = time.process_time()\n"
        "import cupyflash\n"
        "cupyflash.attention\n"
        "ratio = (time.process_time() - middle) / (middle - start)\n"
        "x = numpy.ones((1, 2, 1, 8), 'float32')\n"
        "cupyflash.attention(x, x, x)\n"
        "print(ratio, *sorted({'torch', 'cupy', 'rich'} & set(sys.modules)))"
    )
    runs = [python(code, cwd=ROOT).split() for _ in range(8)]  # other processes slow it down
    assert [loaded for _, *loaded in runs] == [[]] * 8
    assert min(float(ratio) for ratio, *_ in runs) < 2.5
