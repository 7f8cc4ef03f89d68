"""The measurements of bench gpt2: prompts, steps and single operations of what is correct."""

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from bench.gpt2.ops import Op, persistent_op, token_ops
from bench.gpt2.peers import Peer, make_peer, to_transformers
from bench.lib import data
from bench.lib.deadline import Deadline
from bench.lib.harness import Run, assert_right
from bench.lib.report import Row
from bench.lib.timing import medians
from cupyflash.commands.generate import DTYPES
from cupyflash.models.gpt2 import Gpt2
from cupyflash.models.gpt2.decoder import Decoder
from cupyflash.runtime.structs import header

MODES = ("naive", "flash", "fused")
PREFILL = (8, 1024)  # batch, tokens; less where the context is shorter
DECODE = ((1, 512), (32, 512))
MAX_BATCH = header("block/params.cuh").MAX_BATCH  # of the persistent kernel


def our_models(options: argparse.Namespace) -> dict[str, Gpt2]:
    """The three modes on the same weights."""
    place = {"dtype": DTYPES[options.dtype], "device": "gpu" if _gpu() else "cpu"}
    if options.model:
        first = Gpt2.from_folder(options.model, **place)
    else:
        first = Gpt2.random(options.random, **place)
    return {mode: Gpt2(first.config, first.weights, mode=mode) for mode in MODES}


def _gpu() -> bool:
    return data.DEVICE == "cuda"


def prefill_shape(model: Gpt2) -> tuple[int, int]:
    """Batch and length of the prompts."""
    batch, length = PREFILL
    return batch, min(length, model.config.context)


def tokens_of(model: Gpt2, batch: int, length: int) -> numpy.ndarray:
    """Random prompts (batch, length)."""
    return numpy.random.default_rng(batch).integers(0, model.config.vocabulary, (batch, length))


def last_logits(model: Any, given: numpy.ndarray) -> numpy.ndarray:
    """The logits of a model of transformers after the last tokens, float64 (batch, vocabulary)."""
    with torch.inference_mode():
        tokens = torch.from_numpy(given).to(data.DEVICE)
        return model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1].double().cpu().numpy()


class Bench:
    """The implementations that are correct, and the means to measure them.

    Attributes:
        ours: by mode.
        peers: by name.
    """

    def __init__(self, options: argparse.Namespace, run: Run, deadline: Deadline) -> None:
        self.options, self.timer, self.notes = options, run.timer, run.notes
        self.deadline = deadline
        self.ours, self.peers = our_models(options), {}
        self.model = next(iter(self.ours.values()))
        self.given = tokens_of(self.model, 2, 64)
        plain = to_transformers(self.model)
        self.yardstick = last_logits(plain, self.given)
        self.exact = last_logits(plain.double(), self.given)
        for name in options.peers:
            with self.told(name), self.deadline.enforced():
                peer = make_peer(name, self.model)
                self.check(last_logits(peer.plain, self.given))
                self.peers[name] = peer
        for mode, model in list(self.ours.items()):
            del self.ours[mode]
            with self.told(f"cupyflash-{mode}"):
                rows = [x[-1] for x in model.logits(self.given.tolist())]
                self.check(numpy.stack([x.get() if _gpu() else x for x in rows]))
                self.ours[mode] = model

    @contextlib.contextmanager
    def told(self, name: str) -> Iterator[None]:
        """Whatever the check raises leaves somebody out, with a line why."""
        try:
            yield
        except Exception as error:  # transformers and the GPU raise many kinds
            self.notes.left_out(name, error, "the check")

    def check(self, found: numpy.ndarray) -> None:
        """Raise AssertionError unless these logits are right."""
        arrays = (found, self.exact, self.yardstick)
        assert_right(*arrays, "logits", DTYPES[self.options.dtype])

    def working(self, where: str, calls: dict[str, Any]) -> dict[str, Any]:
        """The calls that work; those of peers only while there is time."""

        def tried(name: str) -> Any:
            if name in self.peers:
                with self.deadline.enforced():
                    calls[name]()
            return calls[name]

        return self.notes.working(where, calls, tried)

    def prefill(self) -> list[Row]:
        """Latency of the prompts."""
        batch, length = prefill_shape(self.model)
        given, calls = tokens_of(self.model, batch, length), {}
        prompts, on_device = given.tolist(), torch.from_numpy(given).to(data.DEVICE)
        for mode, model in self.ours.items():
            decoder = Decoder(model, batch, length)
            calls[f"cupyflash-{mode}"] = functools.partial(decoder.run, decoder.prepare(prompts))
        for name, peer in self.peers.items():
            calls[name] = functools.partial(peer.prefill, on_device)
        rows = []
        calls = self.working("prefill", calls)
        for name, timing in self.timer.compare(calls).items():
            self.notes.late(name, timing, "prefill")
            row = {"op": "gpt2_prefill", "batch": batch, "tokens": length, "impl": name}
            rate = round(1e3 * batch * length / timing.ms)
            rows.append({**row, "ms": round(timing.ms, 4), "tokens_per_s": rate})
        return rows

    def decode(self, batch: int, length: int) -> list[Row]:
        """Time of a step after prompts."""
        length = min(length, self.model.config.context // 2)
        count = min(self.options.new_tokens, self.model.config.context - length)
        given, runs = tokens_of(self.model, batch, length), {}
        for mode, model in self.ours.items():
            ways = ["graph", "persistent"] if mode == "fused" and _gpu() else ["auto"]
            for how in ways[:1] if batch > MAX_BATCH else ways:
                name = f"cupyflash-{mode}" + (f"-{how}" if how != "auto" else "")
                own = Gpt2(model.config, model.weights, mode=mode)  # which keeps its graphs
                runs[name] = functools.partial(our_step_ms, own, given, count, how)
        for name, peer in self.peers.items():
            runs[name] = functools.partial(peer_step_ms, peer, given, count)
        runs = self.working(f"decode, batch {batch}", runs)
        fields = {"op": "gpt2_decode", "batch": batch, "tokens": length, "new_tokens": count}
        rows = []
        for name, ms in medians(runs, self.options.repeats).items():
            row = {**fields, "impl": name, "ms": round(ms, 5)}
            rows.append({**row, "tokens_per_s": round(1e3 * batch / ms, 1)})
        return rows

    def ops(self) -> list[Row]:
        """The operations of a token for the picture."""
        rows = []
        for mode, ops in ops_of(self.ours).items():
            calls = {op.name: op.call for op in ops}
            calls = self.working(f"ops of {mode}", calls)
            timings = self.timer.compare(calls)
            for op in ops:
                if op.name in timings:
                    row = {"mode": mode, "name": op.name, "group": op.group, "count": op.count}
                    ms = round(timings[op.name].ms, 5)
                    rows.append({**row, "ms": ms, "flops": op.flops, "bytes": None})
        return rows


def our_step_ms(model: Gpt2, given: numpy.ndarray, count: int, how: str) -> float:
    """Milliseconds from token to token."""
    steps = model.stream(given.tolist(), count, end_of_text=-1, decode=how)
    next(steps)
    begin = time.perf_counter()
    for _ in steps:
        pass
    return 1e3 * (time.perf_counter() - begin) / max(1, count - 1)


def peer_step_ms(peer: Peer, given: numpy.ndarray, count: int) -> float:
    """Milliseconds of a step of transformers, measured in the same way."""
    begin = 0.0

    def mark() -> None:
        nonlocal begin
        synchronize()
        begin = time.perf_counter()

    synchronize = torch.cuda.synchronize if _gpu() else lambda: None
    peer.decode(torch.from_numpy(given).to(data.DEVICE), count, mark)
    synchronize()
    return 1e3 * (time.perf_counter() - begin) / max(1, count - 1)


def ops_of(models: dict[str, Gpt2]) -> dict[str, list[Op]]:
    """The operations of a token of each mode; "persistent" is what decodes small batches."""
    batch, length = DECODE[0]
    found = {}
    for mode, model in models.items():
        length = min(length, model.config.context // 2)
        found[mode] = list(token_ops(model, batch, length))
    if "fused" in models:
        found["persistent"] = [persistent_op(models["fused"], batch, length)]
    return found
