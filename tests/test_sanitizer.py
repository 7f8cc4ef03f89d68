"""compute-sanitizer on a small case of each kernel (GPU only, where the tool is installed)."""

import os
import shutil
import subprocess
import sys

import pytest
from matrix import each

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")

# Without CuPy's pool each array is an allocation of its own, so memcheck knows its end.
PROGRAM = """
import sys
import cupy, cupyflash
from cupyflash import environment
from cupyflash.testing import make_inputs
cupy.cuda.set_allocator(None)
family, dtype = sys.argv[1:]
with environment.override(family=family):
    for head_dim, window in ((64, None), (40, (30, 10)), (128, None), (256, None)):
        x = make_inputs("cupy", dtype, batch=1, seqlen_q=70, seqlen_k=150, heads_q=2, heads_kv=1,
                        head_dim=head_dim)
        options = {"causal": "top-left", "window": window}
        out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
        for deterministic in (False, True):
            cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse,
                                         deterministic=deterministic, **options)
cupy.cuda.Device().synchronize()
"""


@each(library="cupy", device="cuda")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(backend, tool, record_property):
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    run = [sys.executable, "-c", PROGRAM, backend.family, backend.dtypes[-1]]
    subprocess.run(run, check=True)  # compiles outside of the tool
    options = ["--tool", tool, "--error-exitcode", "99", "--kernel-name", "kns=flash"]
    done = subprocess.run(
        [SANITIZER, *options, *run], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    result = "clean" if done.returncode == 0 else f"exit code {done.returncode}"
    record_property("sanitizer", f"{tool} {backend.family}: {result}")
    assert result == "clean", done.stdout[-5000:]
