"""A kernel that NVRTC has made slow: one warning with the cure, `info` and `check` say it too."""

import pytest
import tiny_kernel
from fakes import fake_facts
from tiny_kernel import Scale, needs_nvrtc, run_python

from cupyflash import jit, machine, precompile
from cupyflash.commands import check, cli
from cupyflash.jit import compiler, messages
from cupyflash.precompile import TOPICS

pytestmark = needs_nvrtc

# An accumulator is changed while the product may run, so ptxas has to serialise it.
PRODUCT = """
  float* x = params.x;
  float d[4] = {x[0], x[1], x[2], x[3]};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, "
               "1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"((long long)params.n));
  d[0] += 1.0f;
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) x[i] = d[i];
"""
# So many values live in 24 registers.
VALUES = """
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = params.x[i];
  __syncthreads();
  for (int i = 0; i < 64; ++i) params.x[63 - i] = a[i];
"""
# What is wrong with a kernel: its bounds and body.
SLOW = {
    "serialised": ("__launch_bounds__(128, 1)", PRODUCT),
    "it spills registers": ("__maxnreg__(24)", VALUES),
}

# Loads kernels as a GPU would have it, in a process of its own.
LOAD = """
import contextlib, warnings, cupy
from types import SimpleNamespace
from tiny_kernel import Scale
from cupyflash import jit
class Device(contextlib.nullcontext):
    compute_capability = "90"
class Module:
    def __init__(self, path):
        assert Path(path).read_bytes()[:4] == b"\\x7fELF"
    def get_function(self, name):
        return self
    kernel = SimpleNamespace(ptr=0)
cupy.RawModule, cupy.cuda.Device = Module, Device
warnings.simplefilter("always")  # or Python itself would drop the second
for factor in sys.argv[1:]:
    jit.load(Scale(factor=int(factor)), 0)
"""


def write_kernel(folder, fault):
    bounds, body = SLOW[fault]
    kernel = folder / "cuda_src/tiny/scale.cu"
    text = kernel.read_text().replace("__global__ void", f"__global__ void {bounds}")
    kernel.write_text(text.replace("  params.x[thr", body + "  params.x[thr", 1))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with tiny_kernel.workspace(tmp_path) as path:
        monkeypatch.setattr(messages, "_warned", False)
        yield path


@pytest.mark.parametrize("fault", SLOW)
def test_each_process_warns_once(folder, fault):
    write_kernel(folder, fault)
    for compiled in (2, 2, 3):  # kernels in the cache: a process of its own finds them there
        factors = [str(2 + i) for i in range(compiled)]
        status, _, error = run_python(LOAD, folder, *factors)
        assert status == 0, error
        assert error.count("RuntimeWarning") == 1
        assert f"scale<float, 2> is slow, as NVRTC {compiler.version()} has compiled it" in error
        assert fault in error and compiler.cure(compiler.version()) in error
    assert len(jit.entries()) == 3


def test_good_kernels_do_not_warn(folder):
    assert run_python(LOAD, folder, "2", "3") == (0, "", "")
    assert machine.slow_kernels() == []


@pytest.mark.parametrize("fault", SLOW)
def test_info_and_check_name_the_fault(folder, fault, capsys, monkeypatch):
    fake_facts(monkeypatch, check, operations=())
    write_kernel(folder, fault)
    jit.build_all([(Scale(factor=x), "sm_90a") for x in (2, 3)], jobs=1, progress=False)
    for command in ("info", "check"):
        assert cli.main([command]) in (0, 3)  # 3: without operations no kernel ran
        text = " ".join(capsys.readouterr().out.split())
        assert "is slow, as NVRTC" in text and fault in text and ", and 1 more" in text
        assert compiler.cure(compiler.version()) in text


def test_warmup_warns(folder, monkeypatch):
    class Tiny:
        @staticmethod
        def configurations(capability):
            return [Scale()]

    write_kernel(folder, "it spills registers")
    monkeypatch.setitem(TOPICS, "norm", Tiny)
    with pytest.warns(RuntimeWarning, match="is slow, as NVRTC"):
        precompile.warmup(
            ["sm_90a"], dtypes=["float32"], backends=[], topics=["norm"], jobs=1, progress=False
        )


@pytest.mark.parametrize(
    "version, text",
    [
        ("13.4", "pip install 'nvidia-cuda-nvrtc==13.5.*'"),
        ("12.8", "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'"),
        ("12.9", "please report it"),
        ("14.0", "please report it"),
    ],
)
def test_cure(version, text):
    assert compiler.cure(version) == text


@pytest.mark.parametrize(
    "change, slow",
    [
        ({"spill_bytes": 32}, False),
        ({"spill_bytes": 40}, True),
        ({"spill_bytes": 40, "arch": "sm_70"}, False),
        ({"spill_bytes": 40, "has_text": True}, False),
        ({"warnings": ("scale.cu(3): warning #177-D: never referenced",)}, False),
        ({"warnings": ("ptxas info : (C7511) Potential Performance Loss: …",)}, True),
    ],
)
def test_rule(folder, change, slow):
    built = vars(jit.build(Scale(), "sm_80"))
    assert bool(jit.Built(**{**built, **change}).slowness) == slow


def test_old_nvrtc_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        fake_facts(patch, compiler.nvrtc(), getVersion=(12, 2))
        with pytest.raises(ImportError, match="got NVRTC 12.2, which must be 12.3 or newer; pip"):
            compiler.nvrtc()
        assert "NVRTC 12.2, which must be 12.3 or newer" in machine.compiler_problem()
