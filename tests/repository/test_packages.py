"""Packages that are missing: each error names the pip line, and no line names cupyflash itself."""

import importlib.metadata
import re
import subprocess
import sys

import pytest
from places import ROOT

from cupyflash import packages

TEXTS = ("*.md", "cupyflash/**/*.py", "cupyflash/**/*.md", "cuda_src/**/*.cu*", "bench/**/*.py")
TEXTS = (*TEXTS, "bench/*.md", "tests/**/*.py")


@pytest.fixture
def installed(monkeypatch):
    """The versions of packages that are there, which the test fills in."""
    found = {}

    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


def test_no_text_takes_cupyflash_from_the_index():
    """pip may be given a path with an extra, and no name that anybody could put on the index."""
    texts = {path: path.read_text(encoding="utf-8") for x in TEXTS for path in ROOT.glob(x)}
    assert len(texts) > 200
    wrong = re.compile(r"cupyflash\\?\[\w|pip3? install [^\n;|&]*\bcupyflash\b")
    found = [f"{path}: {match[0]}" for path, x in texts.items() for match in wrong.finditer(x)]
    assert [x for x in found if not x.startswith(__file__)] == []


def test_line_of_an_empty_environment(installed):
    assert packages.pip_line("cli") == "pip install rich"
    nvidia = "'nvidia-cuda-nvrtc-cu12>=12.8' nvidia-cuda-runtime-cu12"
    line = f"pip install 'cupy-cuda12x>=14' ml_dtypes {nvidia}"
    assert packages.pip_line("cuda12") == line
    assert packages.cuda_line().startswith(line)
    assert "CUDA 13 driver pip install 'cupy-cuda13x>=14' ml_dtypes 'nv" in packages.cuda_line()


NVRTC = "'nvidia-cuda-nvrtc-cu12>=12.8'"


@pytest.mark.parametrize(
    "version, line",
    [
        ("14.2.0", f"pip install {NVRTC} nvidia-cuda-runtime-cu12"),
        ("13.9", f"pip install 'cupy-cuda12x>=14' {NVRTC} nvidia-cuda-runtime-cu12"),
    ],
)
def test_line_names_what_is_missing_or_too_old(installed, version, line):
    installed |= {"cupy-cuda12x": version, "ml_dtypes": "0.5"}
    assert packages.pip_line("cuda12") == packages.cuda_line() == line


def test_cupy_of_another_origin_is_kept(installed):
    installed |= {"cupy": "14.1", "ml_dtypes": "0.5"}
    assert "cupy-cuda" not in packages.pip_line("cuda12")


def test_everything_is_there_and_something_is_broken(installed):
    installed |= {"safetensors": "0.6", "tokenizers": "0.22"}
    assert packages.pip_line("gpt2") == "pip install --upgrade safetensors tokenizers"


def test_two_packages_of_cupy_never_meet(installed):
    installed |= {"cupy-cuda12x": "14.2.0"}
    line = packages.pip_line("cuda13")
    assert line.startswith("pip uninstall cupy-cuda12x && pip install 'cupy-cuda13x>=14' ")


@pytest.mark.parametrize(
    "module, missing, line",
    [
        ("cupyflash.integrations.torch", "torch", "'torch>=2.7'"),
        ("cupyflash.integrations.transformers", "torch", "'torch>=2.7'"),
        ("cupyflash.models.diffusion_policy", "torch", "'torch>=2.7'"),
        ("cupyflash.models.policy_sampling", "torch", "'torch>=2.7'"),
        ("cupyflash.integrations.transformers", "transformers", "'transformers>=5.4'"),
    ],
)
def test_import_without_a_package(module, missing, line):
    """In a fresh process; transformers is needed where it is registered."""
    if missing != "torch":
        pytest.importorskip("torch")
    use = f"; {module}.register()" if missing == "transformers" else ""
    code = f"import sys; sys.modules['{missing}'] = None; import {module}{use}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(rf"ImportError: cupyflash\.\S+ needs {missing}.*; pip install {line}", last)


def test_a_broken_package_speaks_for_itself(tmp_path):
    """Not the pip line of torch, where something that torch needs is missing."""
    (tmp_path / "torch.py").write_text("import nothing_of_this_name")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import cupyflash.integrations.torch"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'nothing_of_this_name'\n")
