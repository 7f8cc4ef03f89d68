"""Machines as people have them: homes that cannot be written, full disks, forks, cleaners of /tmp.

Each case runs in a process of its own. One that runs as root has no capabilities, so that folders
without permission to write are closed to it as to everybody else.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_kernel
from places import PYTHONPATH
from tiny_kernel import needs_nvrtc

pytestmark = [
    needs_nvrtc,
    pytest.mark.skipif(os.name == "nt", reason="POSIX permissions"),
]
ROOT = os.name != "nt" and os.geteuid() == 0
PLAIN = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if ROOT else []
plain_user = pytest.mark.skipif(
    ROOT and not shutil.which("setpriv"), reason="root can write anywhere, and there is no setpriv"
)
NEEDS_FOLDER = "CuPy must be able to create the folder of its own kernels"
CUPY_CACHES = ("CUPY_CACHE_DIR", "CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "CUPYFLASH_TUNING")

SCALE = """
from cupyflash import jit
from tiny_kernel import Scale
def build(factor=2):
    built, compiled = jit.builder.find_or_compile(Scale(factor=factor), "sm_80")
    assert jit.cache.read_entry(built.path.parent) == built
    print(built.path, compiled, flush=True)
    return built.path
"""


@pytest.fixture
def folder(tmp_path):
    with tiny_kernel.workspace(tmp_path) as path:
        yield path


@pytest.fixture
def home(tmp_path):
    """A home that cannot be written."""
    path = tmp_path / "home"
    path.mkdir(mode=0o555)
    return path


def run(arguments, folder, prefix=(), **variables):
    """Run Python; the variables that name caches are unset unless they are given."""
    inherited = {name: x for name, x in os.environ.items() if name not in CUPY_CACHES}
    return subprocess.run(
        [*prefix, sys.executable, *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder), "COLUMNS": "1000"}
        | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_script(code, folder, prefix=(), **variables):
    """`run` a script with the sources of ``tiny_kernel``; its output in lines, and its errors."""
    script = folder / "script.py"
    script.write_text(tiny_kernel.HEADER + SCALE + code)
    variables = {"CUPYFLASH_CACHE_DIR": folder / "cache", "TMPDIR": folder / "tmp"} | variables
    done = run([script], folder, prefix, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


IMPORT_LATER = """
import os, warnings
from cupyflash.jit import compiler
for attempt in range(2):
    try:
        compiler.nvrtc()
    except ImportError as error:
        print(error)
os.environ["CUPY_CACHE_DIR"] = os.environ["TMPDIR"] + "/cupy"
build()
"""


@plain_user
@pytest.mark.parametrize("below", ["", "absent"])
def test_home_that_cannot_be_written(folder, home, below):
    """CuPy's import fails half-way and for good, so we say before what is wrong with its folder."""
    variables = {"HOME": home / below, "CUPYFLASH_CACHE_DIR": ""}
    output, errors = run_script(IMPORT_LATER, folder, PLAIN, **variables)
    for line in output[:2]:
        assert NEEDS_FOLDER in line and f"Permission denied: '{home}" in line
        assert line.endswith("set CUPY_CACHE_DIR to a folder that you can write to")
    path, compiled = output[2].split()
    assert compiled == "True" and Path(path).is_relative_to(folder / "tmp")
    (warning,) = [line for line in errors.splitlines() if "Warning" in line]
    assert "RuntimeWarning: cupyflash: cannot keep compiled kernels ([Errno 13]" in warning
    assert "set CUPYFLASH_CACHE_DIR to a folder that you can write to" in warning


@plain_user
def test_commands_in_a_home_that_cannot_be_written(folder, home):
    warmup = ["-m", "cupyflash", "warmup", "--arch", "sm_80"]
    done = run(warmup, folder, PLAIN, HOME=home)
    assert done.returncode == 1 and "pip install" not in done.stderr
    assert done.stderr.startswith(f"cupyflash warmup: {NEEDS_FOLDER}, {home}/.cupy/kernel_cache")
    info = run(["-m", "cupyflash", "info"], folder, PLAIN, HOME=home)
    assert (info.returncode, info.stderr) == (0, "")
    assert "to mend: set CUPY_CACHE_DIR to a folder that you can write to" in info.stdout
    assert "pip install" not in info.stdout
    done = run(warmup, folder, PLAIN, HOME=home, CUPY_CACHE_DIR=folder / "cupy")
    assert done.returncode == 1
    assert done.stderr.startswith("cupyflash warmup: the cache folder must be one that you can")
    assert f"{home}/.cache/cupyflash ([Errno 13] Permission denied: '{home}/.cache'" in done.stderr


WITHOUT_CUPY = """
import sys
sys.modules["cupy"] = None
from cupyflash.runtime.gpu import capability_of
capability_of(0)
"""


def test_first_question_about_a_gpu_names_what_is_missing(folder):
    """Calls with tensors of torch come here before anything else imports CuPy."""
    done = run(["-c", WITHOUT_CUPY], folder)
    assert "ImportError: cupyflash: compiling a kernel needs CuPy and NVRTC" in done.stderr


@plain_user
def test_home_of_somebody_else_is_no_damaged_tuning_file(folder, home):
    """There is one warning, about kernels; nobody knows of a tuning file there."""
    home.chmod(0o000)
    code = """
from cupyflash.runtime import tuning
print(tuning._read(__import__("cupyflash").environment.current().tuning_file, 0))
"""
    variables = {"HOME": home, "CUPYFLASH_CACHE_DIR": "", "CUPY_CACHE_DIR": folder / "cupy"}
    assert run_script(code, folder, PLAIN, **variables) == (["{}"], "")
    given = {**variables, "CUPYFLASH_TUNING": home / "tuning.json"}
    output, errors = run_script(code, folder, PLAIN, **given)
    assert output == ["{}"] and "is ignored: it cannot be read ([Errno 13]" in errors


CLEANED = """
import os, shutil
first = build()
private = first.parent.parent
shutil.rmtree(private)
second = build()
private = second.parent.parent
for folder, _, files in os.walk(private):  # a cleaner may also leave the folders
    for name in files:
        os.unlink(os.path.join(folder, name))
assert build() == second
if os.geteuid() == 0:  # somebody else has taken the name
    os.chown(private, 54321, -1)
    assert build() != second
"""


def test_private_folder_is_made_anew(folder):
    """Cleaners of temporary files remove it while the process goes on."""
    (folder / "cache").write_text("a file, where even root cannot create a folder\n")
    output, errors = run_script(CLEANED, folder)
    assert len(output) == (4 if ROOT else 3) and all(line.endswith(" True") for line in output)
    assert errors.count("RuntimeWarning") == 1


FORKED = """
import os, shutil
path = build()
child = os.fork()
if child == 0:
    sys.exit(0 if build() == path else 1)  # with its atexit functions
assert os.waitpid(child, 0)[1] == 0 and path.exists()
build()
build(factor=3)
child = os.fork()
if child == 0:
    shutil.rmtree(path.parent.parent)  # as if its parent ended first
    build(factor=4)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_child_leaves_the_folder_of_its_parent(folder):
    (folder / "cache").write_text("")
    output, errors = run_script(FORKED, folder)
    paths = [Path(line.split()[0]) for line in output]
    assert [line.split()[1] for line in output[:4]] == ["True", "False", "False", "True"]
    assert errors.count("RuntimeWarning") == 1
    assert list((folder / "tmp").iterdir()) == [] and not any(path.exists() for path in paths)


@pytest.fixture
def small_disk(tmp_path):
    """A function that makes a folder a disk with room for so many KiB."""
    made = []

    def make(path, size):
        path.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=1777", "none", str(path)]
        if not ROOT or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a disk of our own to fill needs the permission to mount one")
        made.append(path)

    yield make
    for path in made:
        subprocess.run(["umount", str(path)], check=True)


FULL = "No space left on device"


def test_full_cache(folder, small_disk):
    small_disk(folder / "disk", 8)
    cache = folder / "disk" / "cache"
    output, errors = run_script("build(); build(3); build()", folder, CUPYFLASH_CACHE_DIR=cache)
    assert [line.split()[1] for line in output] == ["True", "True", "False"]
    assert all(line.startswith(f"{folder}/tmp/cupyflash-") for line in output)
    assert errors.count("RuntimeWarning") == 1 and FULL in errors
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this system has no folder in memory")
def test_full_disks(folder, small_disk):
    """Cache and temporary files share the disk: there is memory still."""
    small_disk(folder / "disk", 8)
    variables = {"CUPYFLASH_CACHE_DIR": folder / "disk" / "cache", "TMPDIR": folder / "disk"}
    output, errors = run_script("build(); build(3); build()", folder, **variables)
    paths = [Path(line.split()[0]) for line in output]
    assert all(path.is_relative_to("/dev/shm") and not path.exists() for path in paths)
    assert [line.split()[1] for line in output] == ["True", "True", "False"]
    assert errors.count("RuntimeWarning") == 1 and FULL in errors
    code = """
jit.cache._MEMORY = "/nowhere"
try:
    build()
except OSError as error:
    print(error)
"""
    (line,), errors = run_script(code, folder, **variables)
    assert line.startswith("cupyflash: a compiled kernel must be kept in the cache or in a folder ")
    assert FULL in line and line.endswith(
        "set CUPYFLASH_CACHE_DIR or TMPDIR to a folder with room that you can write to"
    )


WARMUP = """
if __name__ == "__main__":
    tasks = [(Scale(factor=factor), "sm_80") for factor in range(8)]
    try:
        jit.build_all(tasks, {jobs}, progress=False)
    except OSError as error:
        print(error)
    print(len(jit.entries()))
"""


@pytest.mark.parametrize("size", [0, 64], ids=["full", "too small"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_warmup_on_a_full_disk(folder, small_disk, size, jobs):
    """It has filled the cache, or it says that it has not."""
    small_disk(folder / "disk", max(size, 4))
    if not size:
        (folder / "disk" / "file").write_bytes(bytes(4096))
    cache = folder / "disk" / "cache"
    code = WARMUP.format(jobs=jobs)
    (line, kept), _ = run_script(code, folder, CUPYFLASH_CACHE_DIR=cache)
    fact = "must have room for all kernels" if size else "must be one that you can write to"
    assert fact in line and str(cache) in line and int(kept) < 8
