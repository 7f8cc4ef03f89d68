"""Kernels, emulated on the CPU: the one test of their results that needs no GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from emulator import COMPILER, replacing
from places import SUPPORT, run_script
from targets import few, has


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
def test_calls(emulated_kernels):
    """In a process that takes itself for one with a Hopper GPU, of whatever GPU and backend."""
    run_script(SUPPORT / "emulated_calls.py", emulated_kernels, *few())


def test_threads_that_compile_at_once(tmp_path):
    """Two threads make the same file, and each has written it before the other puts it there."""
    path, written = tmp_path / "program.so", threading.Barrier(2, timeout=10)

    def make(text):
        with replacing(path) as own:
            own.write_text(text)
            written.wait()
            assert own.read_text() == text

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, ("first", "second")))
    assert path.read_text() in ("first", "second") and list(tmp_path.iterdir()) == [path]
