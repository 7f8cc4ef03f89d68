"""The examples of docs/parallel.md run on two processes, as written but for the device.

The processes are those of ranks.py.
"""

import re
from pathlib import Path

import pytest

import cupyflash

PAGE = Path(cupyflash.__file__).parent / "docs" / "parallel.md"
ON_A_CPU = (
    ('dist.init_process_group("nccl")', ""),  # the tests have one
    ('torch.device("cuda", dist.get_rank())', 'torch.device("cpu")'),
    ("torch.cuda.set_device(device)", ""),
)


def blocks():
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)


def run(code):
    """Figures of what the examples have made."""
    names = {}
    exec(compile(code, PAGE.name, "exec"), names)
    whole, weight = names["whole"], names["weight"]
    losses = float(names["out"].logits.detach().square().sum())
    return whole.square().sum().item(), weight.grad.square().sum().item(), losses


def test_examples(two):
    pytest.importorskip("transformers", "5.4")
    code = "\n".join(blocks())
    for pattern, replacement in ON_A_CPU:
        assert pattern in code
        code = code.replace(pattern, replacement)
    assert "cuda" not in code
    first, second = two.run(run, code)
    assert first[:2] == second[:2] and first[2] != second[2]


def test_the_pages_figures():
    from cupyflash.parallel.choice import LEAST_BYTES, LEAST_COPIED

    assert (LEAST_BYTES, LEAST_COPIED) == (256 << 20, 64 << 20)
