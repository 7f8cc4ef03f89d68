"""What bench parallel measures on a number of GPUs, and what its model expects."""

import pytest

pytest.importorskip("torch", reason="the problems are those of torch.distributed")

from bench.parallel import model, parallel  # noqa: E402
from bench.parallel.picture import draw  # noqa: E402
from bench.parallel.problems import Case, cases  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_problems(ranks):
    """Those of any number of GPUs, each once, and the sizes that belong to all GPUs together."""
    found = cases(ranks)
    assert len(set(found)) == len(found) and found[0] == Case(8192, 32, 8)
    totals = {x.kind: sum(x.lengths(ranks)) for x in found if x.window or x == found[4]}
    assert totals == {"window 4096": 2**19, "causal": 2**20}
    for n, heads in ((8192, 32), (32768, 32), (131072, 32), (8192, 64), (32768, 64), (131072, 64)):
        assert Case(n, heads, 8) in found
    assert {Case(8192, 32, 32), Case(8192, 32, 8, packed=True)} < set(found)


def test_one_gpu_has_as_much_work():
    for ranks in (2, 4, 8, 16):
        for case in cases(ranks):
            one, times = case.share_of_one(ranks)
            for direction in ("fwd", "fwd+bwd"):
                assert times * one.flops(1, direction) == case.flops(ranks, direction) / ranks


def test_model():
    """It hides keys behind the groups before, and tends to one GPU's rate with the tokens."""
    case, link = Case(8192, 32, 8), model.LINK
    q, k = 8192 * 32 * 256, 8192 * 8 * 256
    heads = model.seconds(case, 2, "heads", 1e-3, 4e-3)
    extra = (2 * q + 2 * k) / 2 / link + 50e-6
    assert heads == pytest.approx((1e-3 + extra, 4e-3 + 2 * extra))
    keys = model.seconds(case, 2, "keys", 1e-3, 4e-3)  # 32 MiB, which travel at once
    one = 2 * k / link + 25e-6
    assert keys == pytest.approx((1e-3 + one, 4e-3 + 3 * one))
    for move in ("heads", "keys"):
        long = Case(2**20, 32, 8)
        one = [long.flops(8, x) / 8 / 6e14 for x in ("fwd", "fwd+bwd")]
        for alone, both in zip(one, model.seconds(long, 8, move, *one), strict=True):
            assert 0.97 < alone / both < 1
    assert model.auto(case, 8) == "keys" and model.auto(Case(8192, 32, 32), 8) == "heads"


def test_model_of_whole_documents():
    """Nothing travels on two GPUs; on four some do, and most wait for the one with most pairs."""
    case = Case(8192, 32, 8, packed=True)
    assert model.seconds(case, 2, "whole", 3e-4, 1e-3) == pytest.approx((3e-4, 1e-3))
    whole, keys = (model.seconds(case, 4, move, 3e-4, 1e-3) for move in ("whole", "keys"))
    assert 3e-4 * 1.1 < whole[0] < keys[0] and 1e-3 * 1.1 < whole[1] < keys[1]


def test_memory_of_a_million_tokens():
    """On eight GPUs, in GiB: q has 1, k 0.25; all keys and values 4, and 1 in 16 twice."""
    case = Case(2**17, 32, 8)
    assert model.memory(case, 8, "heads") == 9.5 * 2**30
    keys = 2 + 0.5 + 2 * 4 * 17 / 16 + (3 + 4.25) / 8
    assert model.memory(case, 8, "keys") == keys * 2**30
    assert model.memory(Case(8192, 32, 8, packed=True), 8, "keys") is None


def test_table_and_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the pictures are drawn by matplotlib")
    rows = []
    for gpus, tokens, share in ((2, 8192, 0.9), (4, 8192, 0.8), (4, 32768, 0.95)):
        for impl in ("cupyflash-one-gpu", "cupyflash-keys"):
            more = {"pass": "fwd+bwd", "ms": 1.0, "tflops": 500.0, "share": share, "impl": impl}
            rows.append(Case(tokens, 32, 8).row(gpus, **more))
    rows[1] |= {"model": 0.93, "auto": True, "gib": 1.5, "formula_gib": 1.25}
    times, memory = parallel.tables(rows)
    assert times.row_count == 6 and list(memory.columns[2].cells) == ["1.50"]
    assert list(times.columns[2].cells)[1] == "cupyflash-keys*"
    assert list(times.columns[6].cells)[:3] == ["", "93.0", ""]
    draw({"rows": rows, "gpus": 4}, tmp_path / "parallel")
    text = (tmp_path / "parallel.svg").read_text()
    for shown in ("2 GPUs, forward", "4 GPUs, forward and backward", "32K", "% of 4 × one GPU"):
        assert f">{shown}<" in text
