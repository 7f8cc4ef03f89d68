"""A seeded sample of the architectures in bench/results/architectures.json, compared anew; half
of it where there is no GPU.

`python -m bench architectures` compares all of them and writes the table.
"""

import json
import random

import pytest
from places import ROOT
from targets import few

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from bench.transformers import architectures  # noqa: E402

TABLE = ROOT / "bench/results/architectures.json"
RESULTS = json.loads(TABLE.read_text())
EQUAL = sorted(kind for kind, row in RESULTS["rows"].items() if row["result"] == "equal")
SLOW = {"cosmos3_omni", "ctrl", "glm5_next", "yolos"}  # ten seconds and more for one
SAMPLE = set(random.Random(18).sample(sorted(set(EQUAL) - SLOW), 12)) - {"data2vec-audio"}  # 30 s


@pytest.fixture(autouse=True)
def prepared():
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    architectures.prepare()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.parametrize("kind", sorted(SAMPLE)[1::2] if few() else sorted(SAMPLE))
def test_architecture_beside_eager(kind):
    if not [*architectures.architectures([kind])]:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    row = architectures.row_of(kind)
    another = transformers.__version__ != RESULTS["versions"]["transformers"]
    if another and row["result"] in ("raises", "not built"):  # it may be otherwise by default there
        pytest.skip(f"transformers {transformers.__version__}: {row}")
    assert row["result"] == "equal", row


def test_table_has_no_differences():
    rows = RESULTS["rows"]
    assert [kind for kind, row in rows.items() if row["result"] == "differs"] == []
    assert len(EQUAL) >= 180
    cases = [case for row in rows.values() for case in row.get("cases", [])]
    for case in ("none", "left", "right", "gradients", "packed", "dynamic cache", "static cache"):
        assert cases.count(case) >= 50, case
    assert cases.count("sliding") >= 10


def test_a_difference_is_seen(monkeypatch):
    """The same comparison with an attention function that forgets the mask of the padding."""
    right = architectures.integration.attention

    def wrong(module, query, key, value, attention_mask, **options):
        return right(module, query, key, value, None, **options)

    monkeypatch.setattr(architectures.integration, "attention", wrong)
    assert architectures.row_of("mistral")["why"].keys() >= {"left", "packed"}
    row = architectures.row_of("bert")
    assert row["result"] == "differs"


def test_a_model_that_takes_no_part():
    assert architectures.row_of("bloom") == {"model": "BloomForCausalLM", "result": "raises"}
    assert architectures.row_of("mamba")["result"] == "no attention"
