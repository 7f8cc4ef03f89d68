"""The wheel, what importing costs, and that README and .ci/run say the same."""

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from backends import compute_capability

import cupyflash
from cupyflash import environment

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
    assert [x for x in requirements if "torch" in x] == ['torch>=2.4; extra == "torch"']


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


def test_import_is_light():
    """Under 0.3 s (of processor time) beyond NumPy; no GPU library before a GPU array comes."""
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
    runs = [python(code, cwd=ROOT).split() for _ in range(3)]
    assert [loaded for _, *loaded in runs] == [[]] * 3
    assert min(float(seconds) for seconds, *_ in runs) < 0.3


def test_ci_runs_the_commands_of_the_readme():
    commands = re.findall(r"```bash\n(.+?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    script = (ROOT / ".ci" / "run").read_text()
    for command in commands:
        assert f"bash -c '{command}'" in script


README_BLOCKS = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_names_what_exists():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"cupyflash\.(\w+)\(", text) + re.findall(r"`(flash_\w+c)`", text)):
        assert callable(getattr(cupyflash, name))


# What follows a block in its process: every float it has made is finite, gradients included.
FINITE = """
def _numbers(x):
    for x in (x, getattr(x, "grad", None)):
        if hasattr(x, "shape") and "float" in str(x.dtype):
            x = x.detach().double().cpu() if hasattr(x, "detach") else x
            yield numpy.asarray(x.get() if hasattr(x, "get") else x).astype("float64")

import numpy, warnings
warnings.simplefilter("ignore")  # torch: the grad of what is no leaf
made = [y for x in list(globals().values()) for y in _numbers(x)]
assert all(numpy.isfinite(x).all() for x in made), [numpy.isfinite(x).mean() for x in made]
print(len(made), "arrays")
"""
# A block as its comment says that it works without a GPU; fewer tokens, as NumPy is slow.
WITHOUT_GPU = (
    ("import cupy, ", "import "),
    ("cupy.asarray", "numpy.asarray"),
    ('device = "cuda"', 'device = "cpu"'),
    ('.to("cuda")', ""),
    ("1024", "128"),
    ("4096", "128"),
)


def modules_of(block):
    return re.findall(r"\w+", block.split("\n")[0].split("#")[0].split(" ", 1)[1])


def runs_with_finite_numbers(block):
    for module in modules_of(block):
        if module in ("torch", "transformers", "jax"):
            pytest.importorskip(module)
    output = python(block + FINITE, cwd=ROOT)
    assert output.endswith(" arrays\n")
    if "cupyflash.attention(" in block or "mlp(" in block:
        assert int(output.split()[-2]) > 2


each_block = pytest.mark.parametrize(
    "block", README_BLOCKS, ids=lambda block: "-".join(modules_of(block)[:3])
)


@each_block
def test_readme_runs_as_written(block):
    compile(block, "README.md", "exec")
    capability, reason = compute_capability()
    if not capability:
        pytest.skip(reason)
    runs_with_finite_numbers(block)


@each_block
def test_readme_runs_without_a_gpu_as_it_says(block):
    """Each block says in one sentence what to change where there is none; that is what runs."""
    assert len(re.findall(r"# .*without a GPU", block)) == 1
    if "needs one" in block:
        if not compute_capability()[0]:
            pytest.importorskip("torch", minversion="2.11")
            with pytest.raises(AssertionError, match="RuntimeError: .* needs one, got a torch"):
                python(block, cwd=ROOT)
        return
    for pattern, replacement in WITHOUT_GPU:
        block = block.replace(pattern, replacement)
    code = re.sub("#.*", "", block)
    assert "cuda" not in code and "cupy." not in code
    runs_with_finite_numbers(block)


def test_readme_names_the_layout_before_the_first_example():
    text = (ROOT / "README.md").read_text()
    before, _, _ = text.partition("```python")
    _, _, words = before.rpartition("## Use")
    assert (
        "(batch, seqlen, heads, head_dim)" in words and "(batch, heads, seqlen, head_dim)" in words
    )


def test_readme_claims_no_more_than_the_tables():
    """Its figures beside FlashAttention-3 are those of bench/README.md."""
    text, tables = ((ROOT / name).read_text() for name in ("README.md", "bench/README.md"))
    for claim in ("as fast as the GPU", "every NVIDIA GPU", "every GPU"):
        assert claim not in text and claim not in (ROOT / "pyproject.toml").read_text()
    rows = re.findall(r"^\| head dim (\d+) \|(.+)\|$", text, re.MULTILINE)
    assert len(rows) == 3
    for head_dim, cells in rows:
        numbers = re.findall(r"\d+", cells)
        for name, pair in (("forward", numbers[:2]), ("backward", numbers[2:])):
            row = re.search(rf"^\| {name} {head_dim} causal .*\| (\S+) \|$", tables, re.MULTILINE)
            assert row[1].split("/") == pair


def test_readme_lists_the_environment_variables():
    in_code = re.findall(r"^(CUPYFLASH_\w+)", environment.__doc__, re.MULTILINE)
    in_readme = re.findall(r"^\| `(CUPYFLASH_\w+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert in_code == in_readme
