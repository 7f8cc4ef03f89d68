"""README and the pages: their examples run, their links exist, their tables say what is so."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ADDING, DOCS, PARALLEL, README, blocks_of
from places import ROOT, SUPPORT
from targets import compute_capability

import cupyflash
from cupyflash import environment

LINKING = [
    README,
    *DOCS.values(),
    ADDING,
    PARALLEL,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]
LINKING += [ROOT / "tests" / "README.md", *sorted((ROOT / "bench").rglob("*.md"))]
# What a page says to change without a GPU; fewer tokens, as NumPy is slow.
WITHOUT_GPU = (
    ("import cupy as xp", "import numpy as xp"),
    ('device = "cuda"', 'device = "cpu"'),
    ("1024", "128"),
)
NEEDS_A_GPU = "# needs a GPU"
HOOK = "cupyflash.integrations.torch\n"  # replaces torch's operators, for the whole process


def processes():
    """Lists of blocks that share a process, as parameters of a test.

    Those of README, and those that need a GPU or a package that is not here, are alone. All others
    share one, since importing torch takes longer than most of them; where there is a GPU, and so
    usually more than two cores, those of a page do.
    """
    together = {}
    for path in (README, *DOCS.values()):
        for block in blocks_of(path, "python"):
            name, code = block
            if path == README or NEEDS_A_GPU in code or missing(code):
                yield pytest.param([block], id=name)
            elif HOOK not in code:
                page = path.stem if compute_capability()[0] else "pages"
                together.setdefault(page, []).append(block)
    yield from (pytest.param(blocks, id=page) for page, blocks in together.items())


def missing(code):
    """The packages that a block imports and that are not installed."""
    packages = {name.split(".")[0] for name in imported(code)}
    packages &= {"diffusers", "jax", "torch", "transformers"}
    return [name for name in sorted(packages) if importlib.util.find_spec(name) is None]


def imported(code):
    return re.findall(r"^(?:import|from) ([\w.]+)", code, re.MULTILINE)


def run(blocks):
    """Runs them in one process; how many arrays of floats each has made, by name."""
    absent = [name for _, code in blocks for name in missing(code)]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "page_blocks.py")],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if ".md:" in line)
    assert list(counts) == [name for name, _ in blocks]
    return {name: int(count) for name, count in counts.items()}


def check(blocks):
    counts = run(blocks)
    for name, code in blocks:
        if "cupyflash.attention(" in code and "raise" not in code and "except" not in code:
            assert counts[name] > 2


each_process = pytest.mark.parametrize("blocks", list(processes()))


@each_process
def test_examples_run_as_written(blocks):
    capability, reason = compute_capability()
    if not capability:
        pytest.skip(reason)
    check(blocks)


@each_process
def test_examples_run_without_a_gpu_as_their_page_says(blocks):
    changed = []
    for name, code in blocks:
        if NEEDS_A_GPU in code:
            compile(code, name, "exec")
            pytest.skip("this example says that it needs a GPU")
        for pattern, replacement in WITHOUT_GPU:
            code = code.replace(pattern, replacement)
        assert not re.search(r"\bcupy\b|cuda", re.sub("#.*", "", code)), name
        changed.append((name, code))
    check(changed)


@pytest.mark.parametrize("path", [README, *DOCS.values()], ids=lambda path: path.name)
def test_pages_say_what_to_change_without_a_gpu(path):
    """README in each block, a page before its first one."""
    if path == README:
        blocks = blocks_of(path, "python")
        assert len(blocks) == 2
        assert all(len(re.findall("# without a GPU: ", code)) == 1 for _, code in blocks)
        return
    introduction = path.read_text().partition("```")[0]
    code = "".join(code for _, code in blocks_of(path, "python"))
    for pattern, replacement in WITHOUT_GPU[:2]:
        if pattern in code:
            assert f"`{pattern}`" in introduction and f"`{replacement}`" in introduction


@pytest.mark.parametrize("of", ["torch", "diffusers"])
def test_the_hook_runs_on_a_gpu_and_says_so_without_one(of):
    blocks = [x for x in blocks_of(DOCS["frameworks"], "python") if HOOK in x[1]]
    assert len(blocks) == 2
    (block,) = (x for x in blocks if ("diffusers" in x[1]) == (of == "diffusers"))
    pytest.importorskip("torch", minversion="2.11")
    pytest.importorskip(of)
    if compute_capability()[0]:
        run([block])
    else:
        with pytest.raises(AssertionError, match="RuntimeError: .* needs one, got a torch"):
            run([block])


def commands():
    for path in DOCS.values():
        for name, text in blocks_of(path, "bash"):
            yield pytest.param(text, id=name)


@pytest.mark.parametrize("text", list(commands()))
def test_commands_run_as_written(text, tmp_path):
    for module in ("rich", "cupy") if "warmup" in text else ("rich",):
        pytest.importorskip(module)
    assert "clear" not in text  # of the cache of whoever copies it
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    changes = {"PATH": path, "PYTHONPATH": str(ROOT), "CUPYFLASH_CACHE_DIR": str(tmp_path)}
    command = ["bash", "-ec", text]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | changes
    )
    assert done.returncode == 0, done.stderr


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    commands = [text for _, text in blocks_of(README, "bash")]
    commands += re.findall("`(pip install [^`]*)`", README.read_text())
    assert len(commands) == 3
    for text in commands:
        assert f"as_user '{text.strip()}'" in script


def anchors(path):
    """Those that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.+?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_exist(path):
    text = re.sub(r"^```.+?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.is_file() and found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("path", [README, *DOCS.values()], ids=lambda path: path.name)
def test_tables_have_as_many_cells_in_each_row(path):
    for table in re.findall(r"(?:^\|.*\|\n)+", path.read_text(), re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


def rows(path, pattern):
    """The cells of the table rows whose first cell matches, without backticks."""
    found = re.findall(rf"^\| ({pattern}) \|(.+)\|$", path.read_text(), re.MULTILINE)
    return [[x.strip().strip("`") for x in (first, *rest.split("|"))] for first, rest in found]


def test_pages_name_what_exists():
    text = "".join(path.read_text() for path in (README, *DOCS.values()))
    for name in set(re.findall(r"cupyflash\.(\w+)\(", text) + re.findall(r"`(flash_\w+c)`", text)):
        assert callable(getattr(cupyflash, name))


def test_every_public_name_is_in_the_api():
    text = DOCS["api"].read_text()
    assert [name for name in cupyflash.__all__ if f"`{name}" not in text] == []


def test_the_options_of_attention():
    parameters = inspect.signature(cupyflash.attention).parameters.values()
    wanted = [(x.name, x.default) for x in parameters if x.kind is x.KEYWORD_ONLY]
    found = rows(DOCS["api"], r"`\w+`")
    table = [row for row in found if row[0] in dict(wanted)]
    assert [(name, eval(default)) for name, default, _ in table] == wanted


def test_the_options_of_warmup():
    from cupyflash.commands import cli

    wanted = list(inspect.signature(cupyflash.warmup).parameters)
    table = [row for row in rows(DOCS["options"], r"`\w+`") if row[0] in wanted]
    assert [name for name, *_ in table] == wanted
    parser = cli._parser()
    for _, command, _ in table:
        if command.startswith("--"):
            given = parser.parse_args(["warmup", "--arch", "sm_80", *command.split()])
            assert vars(given)[command.split()[0].removeprefix("--").replace("-", "_")]


def test_the_commands():
    from cupyflash.commands import cli

    (commands,) = cli._parser()._subparsers._group_actions
    table = rows(DOCS["options"], r"`python -m cupyflash \w+`")
    assert [row[0].split()[-1] for row in table] == list(commands.choices)


def test_the_environment_variables():
    in_code = re.findall(r"^(CUPYFLASH_\w+)", environment.__doc__, re.MULTILINE)
    assert [row[0] for row in rows(DOCS["options"], r"`CUPYFLASH_\w+`")] == in_code


def test_readme_is_one_screen():
    assert len(list(filter(str.strip, README.read_text().splitlines()))) <= 72


def test_readme_names_the_layout_before_the_first_example():
    before, _, _ = README.read_text().partition("```python")
    _, _, words = before.rpartition("## Use")
    assert (
        "(batch, seqlen, heads, head_dim)" in words and "(batch, heads, seqlen, head_dim)" in words
    )


def result(name, **fields):
    """The one row of a results file that has these fields."""
    found = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["rows"]
    (row,) = (x for x in found if all(x.get(key) == value for key, value in fields.items()))
    return row


def test_readme_claims_no_more_than_the_tables():
    """The figures of attention are those of bench/results, of one causal sequence of 16384."""
    for claim in ("as fast as the GPU", "every NVIDIA GPU", "every GPU"):
        assert claim not in README.read_text()
        assert claim not in (ROOT / "pyproject.toml").read_text()
    attention = rows(README, r"attention, head dim \d+[^|]*: forward, backward")
    assert len(attention) == 4
    for name, ours, theirs, _ in attention:
        is_float32 = "float32" in name
        peer = "sdpa-efficient" if is_float32 else "flash-attn-3"
        for cell, impl in ((ours, "cupyflash"), (theirs, peer)):
            for direction, figure in zip(("fwd", "bwd"), re.findall(r"\d+", cell), strict=True):
                row = result(
                    "attention-fp32" if is_float32 else "attention",
                    impl=impl, head_dim=int(re.search(r"\d+", name)[0]), causal=True,
                    seqlen_q=16384, **{"pass": direction},
                )  # fmt: skip
                assert figure == f"{row['tflops']:.0f}", (name, impl)


@pytest.mark.parametrize(
    "pattern, name, fields, ours, theirs",
    [
        ("training step [^|]*", "train_step", {"mode": "compiled", "seqlen": 4096},
         "cupyflash", ("sdpa-cudnn", "sdpa-flash")),
        ("a small GPT[^|]*", "train_step_small", {"mode": "graphs", "seqlen": 1024},
         "cupyflash", ("sdpa-cudnn", "sdpa-flash")),
        ("16 steps [^|]*", "unet", {"steps": 16, "batch": 1},
         "cupyflash-graphs", ("torch-compile-graphs", "torch-compile")),
        ("one token [^|]*", "gpt2", {"op": "gpt2_decode", "batch": 1},
         "cupyflash-fused-persistent", ("transformers-compile", "transformers-eager")),
    ],
)  # fmt: skip
def test_times_in_readme(pattern, name, fields, ours, theirs):
    ((_, *cells, _),) = rows(README, pattern)
    measured = result(name, impl=ours, **fields)["ms"]
    fastest = min(result(name, impl=impl, **fields)["ms"] for impl in theirs)
    for cell, milliseconds in zip(cells, (measured, fastest), strict=True):
        assert cell.strip("* ms") == f"{milliseconds:.3g}"


def test_versions_in_readme():
    """What the tests ran with on the GPU is what their report says."""
    report = json.loads((ROOT / ".ci" / "gpu-report.json").read_text())["machine"]
    short = {name: report[name].split(".") for name in ("torch", "cupy", "nvrtc", "driver")}
    text = " ".join(README.read_text().split())
    assert "torch {}.{}".format(*short["torch"]) in text
    assert "CuPy {}.{}".format(*short["cupy"]) in text
    assert f"NVRTC {report['nvrtc']} and driver {short['driver'][0]} on the GPU" in text
    assert report["gpu"].removeprefix("NVIDIA ") in text


def test_architectures_of_transformers():
    """The table of frameworks.md is that of bench architectures."""
    found = json.loads((ROOT / "bench" / "results" / "architectures.json").read_text())
    names = ("equal to", "raises", "has no attention", "could not")
    table = [row[1] for name in names for row in rows(DOCS["frameworks"], f"{name}[^|]*")]
    kinds = ("equal", "raises", "no attention", "not built")
    assert table == [str(found["counts"][kind]) for kind in kinds]
    version = ".".join(found["versions"]["transformers"].split(".")[:2])
    assert f"transformers {version}" in DOCS["frameworks"].read_text()
