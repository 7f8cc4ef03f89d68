"""Many new tokens on caches in pages, by kernels that run on the CPU (test_paged_prefill.py).

``python tests/decode/prefill_calls.py FOLDER [few]``; kernels are compiled into the folder, with
``few`` those of every second case. What no sequence owns is NaN, and entries of the table that no
key needs are no pages or those of others.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import numpy
import torch

from cupyflash import attention_with_cache, environment
from cupyflash.ops.attention import sharing
from cupyflash.testing import assert_close_to_float64, to_numpy64
from cupyflash.testing.cached import CachedCase, CachedProblem

CASES = [
    CachedCase("bfloat16", page=16, tokens=70, group=2, head_dim=128, packed=True, strided=True),
    CachedCase("float16", page=64, tokens=130, head_dim=128, length="page-1", group=4),
    CachedCase("float16", page=8, tokens=90, option="sliding", group=3, length="full"),
    CachedCase("bfloat16", page=24, tokens=70, option="window", length="page", head_dim=72),
    CachedCase("float16", page=256, tokens=150, option="softcap", length="one", head_dim=256),
    CachedCase("bfloat16", page=16, tokens=90, option="slopes of sequences", head_dim=192),
    CachedCase("float16", page=32, tokens=140, option="sinks", head_dim=24, packed=True),
    CachedCase("bfloat16", page=48, tokens=70, option="all keys", head_dim=96, length="zero"),
    CachedCase("float16", page=0, tokens=30, option="sliding", group=4),
    CachedCase("float16", page=200, tokens=130, option="in the cache", strided=True),
    CachedCase("bfloat16", page=128, tokens=300, option="sliding", group=2, head_dim=128),
]
SPLIT = CachedCase("bfloat16", page=16, tokens=280, option="sliding", head_dim=128, packed=True)
# Without a causal mask, so that the key tile on the diagonal comes before those behind it.
FROM_DIAGONAL = CachedCase("float16", page=64, tokens=200, option="slopes of sequences", group=2)
GATHERED = [
    CachedCase("float16", page=20, tokens=90),
    CachedCase("float16", page=16, tokens=90, option="leftpad"),
]


def check(case, device="cpu", **options):
    """Compares results and caches; the options are given besides those of the case."""

    def array(values, dtype=None):
        x = torch.from_numpy(numpy.ascontiguousarray(values)).to(device)
        return x if dtype is None else x.to(getattr(torch, dtype))

    problem = CachedProblem(case, array)
    problem.options.update(options)
    problem.arguments.update(options)
    out, lse = attention_with_cache(**problem.arguments, return_lse=True)
    right, right_lse = problem.expected()
    half = "float16" if case.dtype == "float16" else None
    rounded, _ = problem.expected("float32", half)
    assert_close_to_float64(to_numpy64(out), right, rounded, case.dtype, "out", terms=8.0)
    numpy.testing.assert_allclose(to_numpy64(lse), right_lse, rtol=1e-4, atol=1e-5)
    for name, after in zip(("k_cache", "v_cache"), problem.after):
        numpy.testing.assert_array_equal(to_numpy64(problem.arguments[name]), after)


@contextlib.contextmanager
def splits(number):
    """The blocks that share the keys of a tile."""
    choose = lambda configs, *_: sharing.Choice([*configs][-1], number)  # noqa: E731
    with mock.patch.object(sharing, "choose", choose):
        yield


def run_emulated(folder, step):
    import emulator

    def run(case, *names, **options):
        forced = environment.override(backend="sm90")  # also for the shortest sequences
        with emulator.hopper(folder) as launched, forced:
            check(case, **options)
        print(f"{case}: {', '.join(launched)}", flush=True)
        assert [*names] == [x for x in launched if x != "cache_append"]

    for case in CASES[::step]:
        run(case, "sequence_maps_sm90", "flash_fwd_sm90")
    run(FROM_DIAGONAL, "sequence_maps_sm90", "flash_fwd_sm90", causal=False)
    with splits(2):
        run(SPLIT, "sequence_maps_sm90", "flash_fwd_sm90", "flash_fwd_combine_sm90")
    for case in GATHERED:
        run(case, "cache_gather", "sequence_maps_sm90", "flash_fwd_sm90")


if __name__ == "__main__":
    torch.set_deterministic_debug_mode("error")  # then torch.empty() is filled with NaN
    run_emulated(Path(sys.argv[1]), 1 + ("few" in sys.argv[2:]))
