"""bench engine: requests with a limit of seconds, on the CPU, its table and its picture."""

import threading
import time

import pytest
import torch

transformers = pytest.importorskip("transformers")

from bench.engine import engine, ours, peers, serve  # noqa: E402
from bench.lib import data  # noqa: E402
from cupyflash.integrations.transformers import register  # noqa: E402
from cupyflash.integrations.transformers_models import NAME  # noqa: E402
from cupyflash.models.engine import Engine  # noqa: E402

LOAD = [([i + 1] * (5 + 9 * i), 10 + 3 * i) for i in range(5)]
TOTAL = sum(count for _, count in LOAD)
LONG = [(prompt, 150) for prompt, _ in LOAD]
LIMIT = 1.0


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def peer(attention):
    register()
    return peers.random_peer(peers.config_of("tiny"), "float32", attention)


def our_model():
    return ours.random_for_engine("tiny", "float32")


def slow_theirs(monkeypatch):
    model = peer("sdpa")
    model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    return model


def slow_ours(monkeypatch):
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (time.sleep(0.01), step(engine))[1])
    return our_model()


SLOW = [(serve.ours, slow_ours), (serve.transformers, slow_theirs)]


@pytest.mark.parametrize("clock, model", SLOW)
def test_a_limit_counts_the_tokens_until_then(cpu, monkeypatch, clock, model):
    """150 steps of 10 ms are longer than the limit, and leave nothing behind for the next call."""
    threads = set(threading.enumerate())
    with clock(model(monkeypatch), LONG, 4, LIMIT) as generate:
        for _ in range(2):
            begin = time.perf_counter()
            found = generate()
            assert 0 < found.tokens < 150 * len(LONG)
            assert LIMIT <= found.seconds < time.perf_counter() - begin + 0.01
            assert "4 at once" in found.settings
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("attention", ["sdpa", NAME])
def test_transformers_ends_all_requests(cpu, attention):
    model = peer(attention)
    with serve.transformers(model, LOAD, 2, 600) as generate:
        for _ in range(2):
            found = generate()
            assert found.tokens == TOTAL and "2 at once" in found.settings
    assert model.config._attn_implementation == attention


def test_ours_ends_all_requests(cpu):
    with serve.ours(our_model(), LOAD, 4, 600) as generate:
        assert generate().tokens == TOTAL


def test_ours_has_run_all_requests_before_the_clock_runs(cpu, monkeypatch):
    """A short limit would leave kernels to compile and graphs to capture in the timed run."""
    requests, submit = [], Engine.submit
    kept = lambda *given, **more: requests.append(submit(*given, **more)) or requests[-1]
    monkeypatch.setattr(Engine, "submit", kept)
    with serve.ours(our_model(), LOAD, 4, 0):
        assert [len(x.tokens) for x in requests] == [count for _, count in LOAD]


def test_masked_attention_gets_few_requests(cpu, monkeypatch):
    """SDPA attends across the sequences of a step, cupyflash does not."""
    monkeypatch.setattr(serve, "MASKED_BATCH", 2)
    for attention, batch in (("sdpa", 2), (NAME, 5)):
        with serve.transformers(peer(attention), LOAD, 64, 600) as generate:
            assert f"{batch} at once" in generate().settings


def test_a_failure_of_transformers_is_told(cpu):
    """The thread that computes ends, and so do all requests."""

    def failing(*_):
        raise ValueError("no such step")

    threads, model = set(threading.enumerate()), peer("sdpa")
    model.register_forward_pre_hook(failing)
    with (
        pytest.raises(RuntimeError, match="no such step|did not end"),
        serve.transformers(model, LOAD, 4, 600) as generate,
    ):
        generate()
    assert set(threading.enumerate()) <= threads


def test_layers_share_one_compiled_graph(cpu):
    config = peers.config_of("tiny")
    config.n_layer = 4
    model = peers.random_peer(config, "float32")
    given = torch.arange(20)[None]
    with torch.no_grad():
        right = model(given, use_cache=False).logits
        graphs = []

        def counted(graph, inputs):
            graphs.append(graph)
            return graph.forward

        peers.compile_layers(model, backend=counted)
        found = model(given, use_cache=False).logits
    assert len(graphs) == 1 and torch.equal(found, right)


def made_up(impl, rate, **more):
    cell = {"op": "engine_serve", "model": "tiny", "batch": 200, "tokens": 0}
    return cell | {"impl": impl, "ms": 3e4, "tokens_per_s": rate} | more


def test_table_and_picture_compare_rates(tmp_path):
    """A run that was broken off took as long as one that was not, with fewer tokens."""
    rows = [made_up("cupyflash", 9000.0, done=1.0), made_up(engine.ON_OURS, 4500.0, done=1.0)]
    rows.append(made_up("transformers-batching", 450.0, done=0.25))
    ratios = list(engine.table(rows).columns[-1].cells)
    shares = list(engine.table(rows).columns[-2].cells)
    assert sorted(ratios) == ["", "2.00", "20.00"]
    assert sorted(shares) == ["100% of tokens", "100% of tokens", "25% of tokens"]
    engine.draw({"rows": rows}, tmp_path / "engine.svg")
    text = (tmp_path / "engine.svg").read_text()
    assert " 450 (first 30 s)" in text and " 4,500<" in text
    assert "transformers-compile" not in text
