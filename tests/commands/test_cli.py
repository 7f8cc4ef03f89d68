"""The command line: what it prints, what it returns."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from fakes import fake_facts
from rich.console import Console
from targets import compute_capability
from tiny_kernel import needs_nvrtc

import cupyflash
from cupyflash import environment, jit, machine, packages, precompile
from cupyflash.commands import check, check_attention, cli, tables
from cupyflash.commands.check_operations import Maker
from cupyflash.jit import pool
from cupyflash.machine import Driver, Gpu
from cupyflash.ops.attention import backends
from cupyflash.ops.attention.problem import Access, Features, Kind
from cupyflash.ops.norm import kernels as norm

H200 = Driver((13, 0), (Gpu("NVIDIA H200", (9, 0), 141 * 2**30),))

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """A cache of its own, and lines that do not depend on the terminal."""
    monkeypatch.setenv("COLUMNS", "120")
    with environment.override(cache_dir=tmp_path / "cache", backend=None):
        yield tmp_path


def words(capsys):
    """Standard output and error with all white space as single blanks."""
    return tuple(" ".join(text.split()) for text in capsys.readouterr())


def test_module_and_script(tmp_path):
    command = [sys.executable, "-m", "cupyflash", "info"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("cupyflash ") and cupyflash.__version__ in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    scripts = importlib.metadata.entry_points(group="console_scripts", name="cupyflash")
    assert all(script.load() is cli.main for script in scripts)


def test_info_without_gpu(capsys, monkeypatch, workspace):
    fake_facts(monkeypatch, machine, driver=Driver(None, (), "no NVIDIA driver"))
    assert cli.main(["info"]) == 0
    out, _ = words(capsys)
    assert "GPU none; attention runs on the CPU, with NumPy" in out
    assert "sm90: float16, bfloat16 on compute capability 9.0" in out
    assert "sm80: float16 on compute capability ≥ 7.5; bfloat16 on ≥ 8.0" in out
    assert "simt: float16, bfloat16, float32 on compute capability ≥ 6.0" in out
    assert f"numpy {numpy.__version__}" in out
    assert f"cache {workspace / 'cache'} (0 kernels, 0.0 MiB)" in out
    assert "missing a GPU to run on: no NVIDIA driver to mend: install the NVIDIA driver" in out
    assert "settings" not in out


def test_info_with_gpu(capsys, monkeypatch):
    fake_facts(monkeypatch, machine, driver=H200, gpu_problem="")
    with environment.override(backend="simt", no_jit=True, dump=("ptx", "sass")):
        assert cli.main(["info"]) == 0
    out, _ = words(capsys)
    assert "GPU NVIDIA H200, sm_90a, 141 GiB the driver runs CUDA 13.0" in out
    assert "simt: float16, bfloat16, float32 Python" in out
    for setting in ("DUMP=ptx,sass", "BACKEND=simt", "NO_JIT=1"):
        assert f"CUPYFLASH_{setting}" in out
    assert "to run on" not in out


def test_info_without_cupy(capsys, monkeypatch):
    fake_facts(monkeypatch, machine, driver=H200)
    monkeypatch.setattr(machine, "has", lambda module: module == "rich")
    monkeypatch.setattr(packages, "_version", lambda package: "")
    assert cli.main(["info"]) == 0
    out, _ = words(capsys)
    assert "missing a GPU to run on: CuPy is not installed to mend: pip install '" in out
    assert "'cupy-cuda13x>=14' ml_dtypes 'nvidia-cuda-nvrtc>=13,<14'" in out


@pytest.mark.parametrize(
    "driver, extra",
    [
        (Driver(None, ()), "cuda12"),
        (Driver((12, 4), H200.gpus), "cuda12"),
        (H200, "cuda13"),
        (Driver((13, 0), (Gpu("Tesla V100", (7, 0), 2**34),)), "cuda12"),
    ],
)
def test_extra_for_driver(monkeypatch, driver, extra):
    fake_facts(monkeypatch, machine, driver=driver)
    assert machine.extra() == extra


def small_problems(library, bfloat16):
    return check.named(
        Maker(library),
        (check_attention.attention, "model", "float16", (4, 2), 64, 2, (40, 40), 9.0),
        (check_attention.packed_attention, "float32", (2, 1), 40, (1, 30)),
    )


@pytest.fixture
def only_attention(monkeypatch):
    monkeypatch.setattr(check, "operations", small_problems)


RIGHT = 3 if machine.gpu_problem() else 0  # the exit code where all that runs here is right


def test_check(capsys, only_attention):
    assert cli.main(["check"]) == RIGHT
    out, _ = words(capsys)
    assert "model, fp16 fwd" in out and "2 × 40, 4/2×64 bwd" in out and "31 in 2, 2/1×40" in out
    assert "WRONG" not in out
    if problem := machine.gpu_problem():
        assert "All 3 passes on the CPU are correct" in out
        last = f"NO GPU KERNEL RAN, and none was checked. No GPU is used: {problem}. To use one: "
        assert f"{last}{' and: '.join(machine.mend())}" in out
    else:
        assert "All 3 passes are correct" in out and "CuPy" in out


def test_check_without_gpu_is_not_green(capsys, monkeypatch, only_attention):
    """Whether a GPU is there or not: nobody may take this for a check of the kernels."""
    fake_facts(monkeypatch, machine, gpu_problem="CuPy sees no [GPU]")
    assert cli.main(["check"]) == 3
    out, _ = words(capsys)
    assert "passes on the CPU are correct" in out
    assert out.index("NO GPU KERNEL RAN") > out.index("correct")
    assert "No GPU is used: CuPy sees no [GPU]. To use one: " in out[out.index("KERNEL RAN") :]
    rows = [SimpleNamespace(failures=())]
    assert "green" not in tables.check_verdict(rows, (), "no GPU")
    assert "green" in tables.check_verdict(rows) and "RAN" not in tables.check_verdict(rows)


def test_check_of_nothing_is_not_green(capsys, monkeypatch, only_attention):
    def refuse(operation, library):
        raise NotImplementedError("attention: the backend sm90 does not run here")

    monkeypatch.setattr(check, "run", refuse)
    assert cli.main(["check"]) == 3
    out, _ = words(capsys)
    assert "NO GPU KERNEL RAN" in out and "correct" not in out
    assert "NO GPU KERNEL RAN" in tables.check_verdict([], [check.NotRun("x", ValueError())], "y")


def test_check_in_a_narrow_terminal(capsys, monkeypatch, only_attention):
    """Its columns are not cut."""
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main(["check"]) in (0, 3)  # 3: without a GPU no kernel ran
    out, _ = words(capsys)
    assert "…" not in out and "operation or model pass" in out
    assert "2 × 40, 4/2×64 bwd" in out and len(re.findall(r"[\d.]+ [MG]FLOPS [\d.]+ ok", out)) == 3


def test_check_finds_wrong_results(capsys, monkeypatch, only_attention):
    def attention(q, k, v, **options):
        out, lse = compute(q, k, v, **options)
        out[-1, -1, -1, -1] += 1
        return out, lse

    compute = cupyflash.attention
    monkeypatch.setattr(cupyflash, "attention", attention)
    assert cli.main(["check"]) == 1
    out, _ = words(capsys)
    assert "WRONG RESULTS model, fwd: out: max error " in out and "correct" not in out


def test_check_goes_on_where_something_does_not_run(capsys, monkeypatch, only_attention):
    """What is refused as documented is no failure; what breaks is."""

    def failing(error):
        def run(operation, library):
            if operation.name == "model":
                raise error
            return compute(operation, library)

        return run

    compute, name = check.run, "attention, model, float16, (4, 2), 64, 2, (40, 40), 9.0"
    monkeypatch.setattr(check, "run", failing(NotImplementedError("attention: needs a B200")))
    assert cli.main(["check"]) == RIGHT
    out, _ = words(capsys)
    assert f"not here: {name}: attention: needs a B200 All 1 pass" in out
    monkeypatch.setattr(check, "run", failing(RuntimeError("[no kernel]")))
    assert cli.main(["check"]) == 1
    out, _ = words(capsys)
    assert "31 in 2, 2/1×40" in out and "correct" not in out
    assert f"DID NOT RUN {name}: RuntimeError: [no kernel]" in out


@pytest.fixture(scope="module")
def checked_operations():
    """Every operation as `check` computes it here: [(name, operation, rows)]."""
    library = "numpy" if machine.gpu_problem() else "cupy"
    found = []
    with environment.override(backend=None):
        for name, make in check.operations(library, None):
            operation = make()
            found.append((name, operation, check.run(operation, library)))
    return found


def test_check_of_all_operations(checked_operations):
    rows = [row for _, _, rows in checked_operations for row in rows]
    assert [row.failures for row in rows] == [()] * len(rows) and len(rows) > 30
    assert all(row.error <= row.allowed and row.milliseconds > 0 for row in rows)
    called = {
        "attention", "attention_backward", "flash_attn_varlen_func", "attention_with_cache",
        "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "group_norm",
        "group_norm_backward", "linear", "mlp", "qkv_projection", "DiffusionSampler", "BlockStack",
    }  # fmt: skip
    modules = Path(check.__file__).parent.glob("check*.py")
    text = "".join(path.read_text() for path in modules)
    assert called <= set(re.findall(r"cupyflash\.(\w+)", text))


def test_check_sees_one_wrong_number_of_any_result(checked_operations):
    for name, operation, _ in checked_operations:
        for one in operation.passes:
            for result, x in one.compute().items():
                right = check.compare(operation.exact, result, x)
                x = x.copy()
                last = x.reshape(-1)[-1:]
                last[...] = (last.astype("float32") + (1 + 4 * right.allowed)).astype(x.dtype)
                finding = check.compare(operation.exact, result, x)
                assert finding.failure and finding.error > finding.allowed, (name, result)


def test_check_table_fits_80_columns(capsys, checked_operations):
    rows = [row for _, _, rows in checked_operations for row in rows]
    rows.append(dataclasses.replace(rows[0], label="fwd sm90", failures=("out: wrong",)))
    rows.append(dataclasses.replace(rows[0], name="Gemma 2 9B", milliseconds=12345.0))
    Console(width=80).print(tables.check_table(rows))
    out = capsys.readouterr().out
    assert "…" not in out and "FAIL" in out and "ok" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("library", ["cupy", "numpy"])
def test_check_covers_real_models(library):
    names = [name for name, _ in check.operations(library, "bfloat16")]
    for model in (
        "attention, GPT-2, float16, (12, 12), 64, ",
        "attention, Llama 3 8B, bfloat16, (32, 8), 128, ",
        "attention, Gemma 2 9B, bfloat16, (16, 8), 256, ",
        "attention, GPT-2, float32, ",
        "attention, odd lengths, float16, (3, 1), 40, 2, (113, 1023)",
        "packed_attention, bfloat16, ",
    ):
        assert [name.startswith(model) for name in names].count(True) == 1
    assert not any("bfloat16" in name for name, _ in check.operations(library, None))


@needs_nvrtc
def test_warmup_and_cache(capsys, workspace):
    command = "warmup --arch sm_80 --head-dim 8 32 --dtype fp32 --backend simt --topic"
    assert cli.main(command.split()) == 0
    assert words(capsys)[0] == f"4 kernels, 4 of them new, in {workspace / 'cache'}"
    assert cli.main(command.split()) == 0
    assert words(capsys)[0].startswith("4 kernels, 0 of them new")
    assert cli.main(["cache"]) == 0
    out, _ = words(capsys)
    assert "sm_80 flash_fwd_simt 1" in out and "4 kernels, " in out
    assert cli.main(["cache", "clear"]) == 0
    assert words(capsys)[0] == f"deleted 4 kernels from {workspace / 'cache'}"
    assert cli.main(["cache", "show"]) == 0
    assert words(capsys)[0] == f"0 kernels, 0.0 MiB in {workspace / 'cache'}"


def tasks_of(arguments, monkeypatch):
    """What a warm-up would compile."""
    tasks = []
    monkeypatch.setattr(jit, "build_all", lambda found, *_: tasks.extend(found) or [])
    assert cli.main(["warmup", *arguments.split()]) == 0
    return tasks


@needs_nvrtc
def test_warmup_of_projections(monkeypatch):
    """One topic has the kernels of all GPUs and those of Hopper, as calls take both."""
    kinds = {"linear_sm90", "linear_small_m_sm90"}
    for arch, found in (("sm_90a", kinds), ("sm_80", set())):
        tasks = tasks_of(f"--arch {arch} --backend --topic linear", monkeypatch)
        names = {config.name for config, _ in tasks}
        assert names & kinds == found
        assert {"linear_mma", "linear_small_m", "gate_fwd", "rotary_embedding"} < names


@needs_nvrtc
def test_warmup_of_topics(monkeypatch):
    """All beside attention; within limits what arrays of a dtype need, whatever the weights."""
    every = "--everything --arch sm_80"
    offered = {x for topic in precompile.TOPICS.values() for x in topic.configurations((8, 0))}
    tasks = tasks_of(f"{every} --backend", monkeypatch)
    assert set(tasks) == {(config, "sm_80") for config in offered}
    both = tasks_of(f"{every} --head-dim 64 --dtype fp16 --backend simt", monkeypatch)
    assert set(tasks_of(f"{every} --dtype fp16 --backend", monkeypatch)) < set(both)
    found = {x for x, _ in tasks_of(f"{every} --backend --topic norm --dtype bf16", monkeypatch)}
    assert {norm.SumPartials("bfloat16"), norm.SumPartials("float32")} <= found
    assert norm.forward("bfloat16", "float32", True, 33, False, (8, 0)) in found
    usual = tasks_of("--arch sm_80 --backend --topic norm --dtype bf16", monkeypatch)
    usual = {config for config, _ in usual}
    assert norm.forward("bfloat16", "bfloat16", True, 32, True, (8, 0)) in usual
    assert norm.SumPartials("bfloat16") in usual
    others = {x for x in found if {"float32", "float16"} & set(vars(x).values())}
    odd = others | {x for x in found if getattr(x, "vector", 0) == 1}
    assert usual == found - odd and others < odd
    assert {getattr(x, "dtype", "bfloat16") for x in found} == {"bfloat16"}


def test_warmup_names_what_it_does_not_know():
    for option, known in (("backends", "sm90, sm80, fp16x3, simt"), ("topics", "norm, group_norm")):
        with pytest.raises(ValueError, match=f"^warmup: {option} must be of {known}.*, got 'nrom'"):
            cupyflash.warmup(["sm_80"], **{option: ["nrom"]})


@needs_nvrtc
def test_warmup_compiles_what_the_backends_can_pick(monkeypatch):
    """All main kernels but those with a bias, as a text too, or dropout: they would be eight times
    as many.

    Nor those that only calls with precision="tf32" launch, or prompts on a past in pages.
    """
    tasks = tasks_of("--everything --arch sm_90a,sm_75 --topic", monkeypatch)
    offered = {
        (config, arch)
        for backend in backends.BACKENDS.values()
        for arch, capability in (("sm_90a", (9, 0)), ("sm_75", (7, 5)))
        for config in backend.configurations(capability)
    }
    switches = {task: dataclasses.asdict(task[0]) for task in offered}
    main = {task for task, values in switches.items() if "softcap" in values}
    left_out = {
        task
        for task in main
        if any(switches[task].get(name) for name in ("bias", "dropout", "paged"))
        or switches[task].get("parts") == 1
        or switches[task]["text"]
    }
    assert set(tasks) <= offered and main & set(tasks) == main - left_out


ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_warmup_compiles_by_default_what_defaults_pick(monkeypatch, arch):
    """Minutes, not hours: all of plain attention in the first backend, and nothing else."""
    capability = precompile.capability_of(arch)
    tasks = {config for config, _ in tasks_of(f"--arch {arch}", monkeypatch)}
    assert len(tasks) < 290 and pool.forecast([(x, arch) for x in tasks], 1) < 180
    for dtype, head_dim, masked, backward, lengths in itertools.product(
        ("float16", "bfloat16"), (64, 80, 128, 256), *[(False, True)] * 2, precompile.LENGTHS
    ):
        features = Features(masked=masked, **lengths)
        kind = Kind(dtype, head_dim, features, capability)
        name = backends.choose("test", kind, Access.TENSOR_MAP, backward=backward)
        kernels = backends.BACKENDS[name].kernels(kind, backward=backward)
        assert {x for x in kernels if not getattr(x, "walks_up", False)} <= tasks
    assert all("float32" not in vars(config).values() for config in tasks)
    assert all(getattr(config, "vector", 0) != 1 for config in tasks)
    for name in ("softcap", "alibi", "bias", "dropout", "walks_up"):
        assert not any(getattr(config, name, False) for config in tasks)
    with environment.override(backend="simt"):
        forced = {config.name for config, _ in tasks_of(f"--arch {arch} --topic", monkeypatch)}
        assert "flash_fwd_simt" in forced and "flash_fwd_sm80" not in forced


WARM_CALLS = """
import cupy, cupyflash
for seqlen, head_dim, causal in ((100, 64, True), (3000, 64, False), (100, 128, False)):
    q = cupy.ones((2, seqlen, 2, head_dim), "float16")
    out, lse = cupyflash.attention(q, q, q, causal=causal, return_lse=True)
    cupyflash.attention_backward(q, q, q, q, out, lse, causal=causal)
long = cupy.ones((1, 20000, 1, 64), "float16")
cupyflash.attention(long[:, :64], long, long)  # its keys are shared out
lengths = cupy.asarray([0, 5, 100], "int32")
x = cupy.ones((100, 2, 64), "float16")
cupyflash.flash_attn_varlen_func(x, x, x, lengths, lengths, 95, 95, causal=True)
for columns in (768, 4096):
    x, weight = cupy.ones((64, columns), "float16"), cupy.ones(columns, "float16")
    cupyflash.rms_norm(x, weight)
    cupyflash.layer_norm(x, weight, weight)
cache = cupy.zeros((2, 256, 2, 64), "float16")
new = cupy.ones((2, 1, 2, 64), "float16")
used = cupy.asarray([3, 200], "int32")
cupyflash.attention_with_cache(new, new, new, cache, cache.copy(), used)
cupy.cuda.Device().synchronize()
print("done")
"""


def test_warm_cache_serves_default_calls(workspace):
    """On the GPU at hand, in a process that may not compile."""
    number, reason = compute_capability()
    if not number:
        pytest.skip(reason)
    arch = jit.arch_of(divmod(number, 10))
    cupyflash.warmup([arch], head_dims=[64, 128], dtypes=["float16"], progress=False)
    variables = {"CUPYFLASH_CACHE_DIR": str(workspace / "cache"), "CUPYFLASH_NO_JIT": "1"}
    variables["CUPYFLASH_BACKEND"] = ""  # as in this process
    done = subprocess.run(
        [sys.executable, "-c", WARM_CALLS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stderr


WRONG_WARMUPS = [
    ({"archs": "sm_80"}, "archs must be a list or tuple, got 'sm_80'", None),
    ({"archs": ["sm_8"]}, "archs must be names such as sm_80 or sm_90a, got 'sm_8'", "--arch sm_8"),
    ({"archs": [80]}, "archs must be names such as sm_80 or sm_90a, got 80", None),
    ({"archs": ["sm_99"]}, "archs must be of .* know, .*sm_80.*, got sm_99", "--arch sm_99"),
    ({"archs": ["sm_50"]}, "archs must be of .* know, .*sm_80.*, got sm_50", "--arch sm_50"),
    ({"archs": ["sm_80a"]}, "archs must be of .* know, .*sm_80.*, got sm_80a", "--arch sm_80a"),
    ({"archs": []}, "some kernel must compute these dtypes .*, got dtypes float16, bfloat16", None),
    ({"head_dims": [64, 12]}, "head_dims must be multiples .* 256, got 12", "--head-dim 64 12"),
    ({"head_dims": [0]}, "head_dims must be multiples of 8 .* 256, got 0", "--head-dim 0"),
    ({"head_dims": [264]}, "head_dims must be multiples of 8 .* 256, got 264", "--head-dim 264"),
    ({"head_dims": [64.0]}, "head_dims must be multiples of 8 from 8 to 256, got 64.0", None),
    ({"head_dims": ["64x"]}, "head_dims must be multiples of .*, got '64x'", "--head-dim 64x"),
    ({"head_dims": 64}, "head_dims must be a list or tuple, got 64", None),
    ({"dtypes": ["fp8"]}, "dtypes must be of float16, bfloat16, float32, got 'fp8'", "--dtype fp8"),
    ({"dtypes": "float16"}, "dtypes must be a list or tuple, got 'float16'", None),
    (
        {"backends": ["sm70"]},
        "backends must be of sm90, sm80, fp16x3, simt, got 'sm70'",
        "--backend sm70",
    ),
    ({"topics": ["nrom"]}, "topics must be of norm, .*, got 'nrom'", "--topic nrom"),
    ({"jobs": 0}, "jobs must be a positive integer or None, got 0", "--jobs 0"),
]


@needs_nvrtc
@pytest.mark.parametrize("wrong, message, command", WRONG_WARMUPS)
def test_wrong_warmups(monkeypatch, capsys, wrong, message, command):
    """The same words in Python and on the command line."""
    monkeypatch.setattr(pool, "_run", lambda *_: pytest.fail("something would be compiled"))
    with pytest.raises((TypeError, ValueError), match=f"^warmup: {message}"):
        cupyflash.warmup(**{"archs": ["sm_80"], **wrong})
    if command:
        arch = "" if "--arch" in command else "--arch sm_80 "
        try:
            status = cli.main(f"warmup {arch}{command}".split())
        except SystemExit as error:
            status = error.code
        assert status in (1, 2) and re.search(f"cupyflash warmup: .*{message}", words(capsys)[1])


def running(session):
    """Processes of a session that have not ended, as Linux lists them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended just now
            state, _, _, number, *_ = path.read_text().rpartition(")")[2].split()
            if int(number) == session and state != "Z":
                found.append(path.parent.name)
    return found


@posix
@needs_nvrtc
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_interrupted_warmup(workspace, jobs):
    """Ctrl-C reaches every process of the terminal; all end at once, without a traceback."""
    command = f"warmup --arch sm_80 --everything --dtype fp16 --jobs {jobs} --topic".split()
    variables = {"CUPYFLASH_CACHE_DIR": str(workspace / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyflash", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what runs in the background without this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert re.match(r"cupyflash: \d+ kernels to compile, about ", process.stderr.readline())
    deadline = time.monotonic() + 60
    while not list(workspace.glob("cache/*.sm_80.*/kernel.cubin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, error = process.communicate(timeout=120)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in error and error.endswith("cupyflash warmup: interrupted\n")
    deadline = time.monotonic() + 10
    while running(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(process.pid) == []
    with environment.override(cache_dir=workspace / "cache"):
        assert jit.entries()  # what was compiled stays


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "required: command"),
        ("fly", "invalid choice: 'fly'"),
        ("warmup", "required: --arch"),
        ("warmup --arch sm_80,90", "must be names such as sm_80 or sm_90a, got '90'"),
        ("warmup --arch sm_80 --head-dim 12", "must be multiples of 8 from 8 to 256, got 12"),
        ("warmup --arch sm_80 --head-dim all", "must be multiples of 8 from 8 to 256, got 'all'"),
        ("warmup --arch sm_80 --dtype fp8", "must be of float16, bfloat16, float32, got 'fp8'"),
        ("cache drop", "invalid choice: 'drop'"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments.split())
    assert raised.value.code == 2
    assert message in words(capsys)[1]


@needs_nvrtc
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--arch sm_99", "sm_90a, sm_100, .* got sm_99"),
        (
            "--arch sm_75 --dtype bf16 --backend sm80 --topic",
            "some kernel must compute these dtypes",
        ),
        ("--arch sm_80 --head-dim 64 --backend", "--head-dim is of attention, which --backend wi"),
    ],
)
def test_impossible_warmup(capsys, arguments, message):
    assert cli.main(["warmup", *arguments.split()]) == 1
    assert re.match(f"cupyflash warmup: .*{message}", words(capsys)[1])


@needs_nvrtc
def test_warmup_that_cannot_write(capsys, workspace):
    (workspace / "file").write_text("")
    with environment.override(cache_dir=workspace / "file" / "cache"):
        assert cli.main(["warmup", "--arch", "sm_80"]) == 1
    error = words(capsys)[1]
    assert error.startswith("cupyflash warmup: the cache folder must be one that you can write to")
    assert str(workspace / "file") in error and error.endswith(
        "CUPYFLASH_CACHE_DIR to another folder"
    )
    with environment.override(cache_dir=workspace / "file"):
        assert cli.main(["info"]) == 0
    assert f"not usable: {workspace / 'file'} is a file; set CUPYFLASH_CACHE" in words(capsys)[0]
    with environment.override(no_jit=True):
        assert cli.main(["warmup", "--arch", "sm_80"]) == 1
    assert words(capsys)[1] == "cupyflash warmup: CUPYFLASH_NO_JIT must be 0 or unset, got 1"


def test_unsafe_cache(capsys, workspace):
    (workspace / "cache").mkdir()
    (workspace / "cache").chmod(0o777)
    assert cli.main(["cache"]) == 1
    assert "must belong to you" in words(capsys)[1]
    assert cli.main(["info"]) == 0
    assert "cache not usable: " in words(capsys)[0]


def test_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(machine, "has", lambda module: module != "rich")
    assert cli.main(["info"]) == 1
    error = words(capsys)[1]
    assert error.startswith("cupyflash: the command line needs rich; pip install ")
    assert error.endswith(" rich")
