"""The benchmarks on torch's CPU, small and with the clock taken out."""

import dataclasses
import importlib
import json
from typing import Any, NamedTuple

import torch

from bench.__main__ import SCRIPTS
from bench.attention.extras import Comparison, Variant, packed
from bench.attention.model_shapes import PADDING, PAIR, model
from bench.lib import data, harness, report, timing
from bench.parallel.problems import Case
from bench.scores.problems import cases
from bench.transformers.gpt import Size
from cupyflash.testing.problem import Problem
from cupyflash.testing.timing import Timing

SMALL = Problem("bfloat16", 16, 1, 300, 4, 2, True)
PROJECTIONS = ((16, 40, False, "gelu_tanh", 33), (32, 48, True, "silu", 20))
NORMS = {
    "layer_norm": [(6, 40)],
    "rms_norm": [(6, 40)],
    "group_norm_activation": [(2, 64, 16), (2, 64, 4, 4)],
    "diffusion_step": [(4, 16)],
}
# One of each kind; sdpa-math does all but softcap, sinks, and a window in packed sequences.
MODELS = (
    model("Groups", 1, 150, 4, 16, heads_kv=2, causal=True),
    model("Window", 1, 150, 4, 16, heads_kv=2, causal=True, window=(20, 0)),
    model("Documents", 1, 100, 2, 16, lengths=(60, 1, 39)),
    model("Local", 1, 300, 2, 16, lengths=(60, 1, 239), window=(9, 9)),
    model("Softcap", 1, 150, 2, 16, softcap=5.0),
    model("Sinks", 1, 150, 4, 16, heads_kv=2, causal=True, sinks=True, window=(20, 0)),
    model("Pair", 3, 49, 2, 16, bias=PAIR, scale=1.0),
    model("Padding", 2, 150, 2, 16, bias=PADDING),
    model("Cross", 2, 150, 2, 16, keys=77, head_dim_v=24),
)
COMPARISONS = (
    Comparison("packed", packed(SMALL, (150, 20, 130)), (Variant(SMALL),), 0.95),
    Comparison("window", Variant(SMALL, window=64), (Variant(SMALL),), 1.15),
    Comparison("same bits", Variant(SMALL, deterministic=True), (Variant(SMALL),), 1.12, ("bwd",)),
    Comparison(
        "impossible", Variant(Problem("bfloat16", 512, 1, 300, 4, 2, True)), (Variant(SMALL),), 0.9
    ),
)
PARALLEL = (
    Case(64, 4, 2, 16),
    Case(64, 4, 2, 16, packed=True),
    Case(64, 4, 1, 16, window=20),
)
SCORES = tuple(
    dataclasses.replace(case, tokens=300)
    for case in cases()
    if case.name in ("gate", "documents", "trained table", "Boolean 1x16x16384")
    and case.head_dim == 128
)
GPT = Size(layers=1, width=32, heads=2, seqlen=24, batch=2)


class Small(NamedTuple):
    """A script with arguments and sizes for the CPU.

    Attributes:
        rows: of its results file.
        changes: the constants that make it small, by "module.NAME" below `bench`.
    """

    arguments: str
    rows: int
    changes: dict[str, Any] = {}


BENCHMARKS = {
    "attention": Small(
        "--head-dim 16 --heads 4 --heads-kv 2 --seqlen 200 --batch-tokens 400 --dtype float32 "
        "--providers cupyflash sdpa-math",
        2 * 2 * 2,
    ),
    "models": Small(
        "--providers cupyflash sdpa-math torch-varlen",
        2 * (9 + 6),  # torch-varlen needs a GPU
        {"attention.models.MODELS": MODELS},
    ),
    "ladder": Small(
        "--heads 2 --head-dim 16 --seqlen 128 256 --dtype float32 --rungs cupyflash-simt sdpa-math",
        2 * 2,
        {
            "attention.ladder.total_memory": lambda: 2**40,
            "attention.ladder.peak_extra": lambda run: run().nbytes,
        },
    ),
    "extras": Small("", 5, {"attention.extras.comparisons": lambda: COMPARISONS}),
    "masks": Small(
        "--head-dim 16",
        2 * (7 + 5),
        {
            "attention.masks.BATCH": 2,
            "attention.masks.SEQLEN": 160,
            "attention.masks.HIDDEN": 32,
            "attention.masks.BACKENDS": ("sdpa-math",),
        },
    ),
    "memory": Small(
        "--head-dim 16 --providers cupyflash sdpa-math",
        2 * 2,
        {
            "attention.memory.HIDDEN": 32,
            "attention.memory.SEQLENS": [64],
            "attention.memory.peak_extra": lambda run: len(run()),
        },
    ),
    "precision": Small("--lengths 64", 13 * 5, {"attention.precision.SPREADS": (1.0, 100.0)}),
    "host_time": Small(
        "--modes eager graph",  # a CPU has no graphs, and CuPy needs a GPU
        3 * 3,
        {
            "attention.host_time.CALLS": 2,
            "attention.host_time.SAMPLES": 3,
            "attention.host_time.PROBLEMS": (SMALL,),
        },
    ),
    "parallel": Small(
        "--gpus 2 --dtype float32 --checked 32 --impls cupyflash-heads cupyflash-keys "
        "cupyflash-whole ring",
        2 * (3 + 3 + 3 + 1 + 1),  # whole has packed ones only; the ring neither, and no window
        {"parallel.parallel.cases": lambda ranks: PARALLEL},
    ),
    "scores": Small(
        "--only scores masks boolean gradient host "
        "--impls cupyflash cupyflash-plain cupyflash-option",
        2 * 2 + 2 * 3 + 2 * 3 + 2 + 2 * 5,  # gate, documents, bias, table, host
        {
            "scores.problems.HIDDEN": 256,
            "scores.problems.DOCUMENT": 100,
            "scores.scores.cases": lambda: SCORES,
            "scores.times.CALLS": 2,
            "scores.times.SAMPLES": 3,
        },
    ),
    "linear": Small(
        "--dtype float32 --rows 4 20 --impls cupyflash torch-eager",
        3 * 2 * 2 * 2,
        {"linear.problems.MODELS": PROJECTIONS},
    ),
    "linear_training": Small(
        "--dtype float32 --impls cupyflash torch-eager",
        2 * 2 * 2,
        {"linear.training.MODELS": PROJECTIONS},
    ),
    "norms": Small(
        "--dtype float32 --impls cupyflash torch-eager",
        2 * (2 * (2 + 3) + 1),
        {"norm.problems.SHAPES": NORMS},
    ),
    "decode": Small(
        "--dtype float32 --impls cupyflash sdpa-math --batch 1 3 --length 9 --tokens 1 2",
        2 * (2 + 1),
        {"decode.decode.HEADS": {"small": (4, 2, 16)}},
    ),
    "transformer": Small(
        "--dtype float32 --impls cupyflash torch-eager --batch 1 4",
        3 * 2 * 2,
        {
            "decode.transformer.MODELS": {"small": (64, 4, 3), "xl": (80, 5, 2)},
            "decode.transformer.CACHE": 16,
        },
    ),
    "gpt2": Small(
        "--random tiny --new-tokens 5 --dtype fp32 --peers transformers-eager --ncu",
        2 * 4,
        {
            "gpt2.measure.PREFILL": (2, 48),
            "gpt2.measure.DECODE": ((1, 24),),
            "lib.counters.find_ncu": lambda: None,
        },
    ),
    "engine": Small(
        "--models tiny --dtype float32 --steps 3",
        2 * 2 + 2 + 3,
        {
            "engine.engine.DECODE": ((1, 20), (3, 40)),
            "engine.engine.PREFILL": 100,
            "engine.engine.REQUESTS": 6,
            "engine.engine.PROMPTS": (3, 40),
            "engine.engine.ANSWERS": (2, 5),
        },
    ),
    "unet": Small(
        "--dtype float32 --batch 2 --impls torch-eager cupyflash",
        2 * 2,
        {
            "diffusion.unet.MODEL": {"widths": (16, 32), "embedding": 16, "groups": 4},
            "diffusion.unet.SAMPLERS": {"ddim": 3, "ddpm": 4},
        },
    ),
    "train_step": Small(
        "--modes eager",
        3,
        {
            "transformers.train_step.SIZES": {"small": (GPT,)},
            "transformers.train_step.COMPARED": ("sdpa-flash", "sdpa-math", "cupyflash"),
            "transformers.train_step.DEVICE": "cpu",
            "transformers.train_step.STEPS": 2,
        },
    ),
    "train_char_gpt": Small("--steps 25", 5, {"transformers.train_char_gpt.SIZE": GPT}),
    "rounding": Small("--seqlen 4096", 2),
}


def results_into(monkeypatch, folder):
    """Results are written to a folder, and read from there."""
    monkeypatch.setattr(report, "RESULTS", folder)


class FakeTimer:
    """A Timer of calls on the CPU, each of which takes a millisecond."""

    sm_mhz = None

    def __init__(self, repeats):
        self.repeats = repeats

    def compare(self, calls):
        for call in calls.values():
            call()
        return {name: Timing(1.0, (0.9, 1.1), self.repeats, 0) for name in calls}

    def ceilings(self):
        return {"matmul_tflops": 784.0, "copy_gbps": 4290.0}


class Benchmarks:
    """Runs scripts that write into ``folder``."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.folder = monkeypatch, folder
        for place, value in (
            ((timing, "Timer"), FakeTimer),
            ((data, "DEVICE"), "cpu"),
            ((report, "RESULTS"), folder),
            ((harness, "machine_fields"), lambda: {"gpu": "G", "versions": {}}),
            ((torch.cuda, "synchronize"), lambda: None),
            ((torch.cuda, "is_available"), lambda: False),
        ):
            monkeypatch.setattr(*place, value)

    def run(self, name, *arguments, **changes):
        """The exit status of a small benchmark, and what is in its results file.

        Args:
            arguments: after its own.
            changes: of attributes, by "module.NAME", after its own.
        """
        small = BENCHMARKS[name]
        for place, value in {**small.changes, **changes}.items():
            self.change(place, value)
        common = ["--repeats", "2"] if self.takes_repeats(name) else []
        status = self.module(name).main([*small.arguments.split(), *common, *arguments])
        return status, json.loads((self.folder / f"{name}.json").read_text())

    def change(self, place, value):
        module, _, attribute = place.rpartition(".")
        self.monkeypatch.setattr(importlib.import_module(f"bench.{module}"), attribute, value)

    @staticmethod
    def module(name):
        return importlib.import_module(f"bench.{SCRIPTS[name]}")

    @staticmethod
    def takes_repeats(name):
        without = ("memory", "precision", "host_time", "train_char_gpt", "rounding")
        return name not in without
