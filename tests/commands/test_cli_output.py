"""What the command line prints into narrow pipes, other encodings, and pipes that close early."""

import os
import re
import subprocess
import sys

import pytest

from cupyflash import environment, jit

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
GPT2 = ["generate", "--device", "cpu", "--random", "tiny", "--max-new-tokens", "3", "--prompt"]
COMMANDS = [["--help"], ["warmup", "--help"], ["info"], ["cache"], [*GPT2, "héµ世"]]


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # then `info` lists the GPUs of each backend


def run(arguments, stdout=subprocess.PIPE, **variables):
    """Exit code, output and errors of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A cache with a kernel of a long name."""
    folder = tmp_path_factory.mktemp("cache")
    built = jit.Built(folder, "", "flash_bwd_postprocess_sm90<x>", "sm_90a", "", 1, 0, 0, (), 0.1)
    with environment.override(cache_dir=folder):
        jit.cache.publish("flash_bwd_postprocess_sm90.sm_90a." + "0" * 16, built, bytes(5000), "")
    return str(folder)


@pytest.mark.parametrize("columns", ["40", "60"])
def test_cache_of_a_narrow_pipe(kernels, columns):
    status, output, _ = run(["cache"], COLUMNS=columns, CUPYFLASH_CACHE_DIR=kernels)
    text = output.decode()
    assert status == 0 and "…" not in text
    assert re.search(r"^sm_90a +flash_bwd_postprocess_sm90 +1 +5 *$", text, re.MULTILINE)


def test_encodings(kernels):
    """What ascii can hold, the others can: of them the commands that print more where they can."""
    of_all = COMMANDS[2], COMMANDS[-1]
    for encoding, commands in (("ascii", COMMANDS), ("cp1252", of_all), ("utf-8", of_all)):
        for arguments in commands:
            status, output, errors = run(
                arguments, PYTHONIOENCODING=encoding, CUPYFLASH_CACHE_DIR=kernels, **NO_GPU
            )
            assert status == 0 and b"codec" not in errors, (encoding, arguments, errors)
            output.decode(encoding)
            if arguments == ["info"]:
                assert ("≥" if encoding == "utf-8" else ">=") in output.decode(encoding)
            if arguments[0] == "generate":
                shown = {"ascii": r"h\xe9\xb5\u4e16", "cp1252": r"héµ\u4e16", "utf-8": "héµ世"}
                assert output.decode(encoding).startswith(shown[encoding])


def test_plain_c_locale(kernels):
    """Of a minimal container, with Python's own help switched off."""
    variables = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} | NO_GPU
    status, output, errors = run(["info"], **variables, PYTHONIOENCODING="")
    assert (status, errors) == (0, b"") and b"compute capability >= " in output


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda x: x[0])
def test_pipe_that_nobody_reads(kernels, arguments):
    """As of `head`, when it has seen enough: no traceback, no message."""
    reader, writer = os.pipe()
    os.close(reader)
    status, _, errors = run(arguments, writer, CUPYFLASH_CACHE_DIR=kernels)
    os.close(writer)
    # argparse says nothing of what it could not print, if Python does not buffer it.
    assert errors == b"" and (status == 1 or "--help" in arguments)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", COMMANDS[2:], ids=lambda x: x[0])
def test_output_that_has_no_room(kernels, arguments):
    with open("/dev/full", "wb") as full:
        status, _, errors = run(arguments, full, CUPYFLASH_CACHE_DIR=kernels)
    (line,) = errors.decode().splitlines()
    assert status == 1 and line.startswith("cupyflash") and line.endswith("left on device")


def test_closed_output(kernels):
    """As a daemon or `>&-` has it."""
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, "-m", "cupyflash", "cache"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUPYFLASH_CACHE_DIR": kernels},
        stderr=subprocess.PIPE,
        timeout=120,
    )
    assert b"Traceback" not in done.stderr
