"""Where the checkout lies, and scripts in processes of their own, which find these modules."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = next(x for x in Path(__file__).resolve().parents if (x / "pyproject.toml").exists())
SUPPORT = ROOT / "tests" / "support"
PYTHONPATH = os.pathsep.join(map(str, (ROOT, SUPPORT)))


def run_script(script, *arguments, timeout=500, gpu=False):
    """Runs a script that must succeed within ``timeout`` seconds; returns what it prints.

    Without ``gpu`` it sees no GPU, and no backend that this run forces.
    """
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "CUPYFLASH_BACKEND": ""}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": PYTHONPATH} | hidden,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return done.stdout
