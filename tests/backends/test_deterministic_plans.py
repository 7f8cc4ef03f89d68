"""Which gradients the backward pass of a Hopper GPU sums in a fixed order (no GPU needed).

A process of its own makes the plans, by `bench.lib.dry_run`.
"""

import json
import types
import warnings

import pytest
from places import run_script

pytest.importorskip("torch")

REFUSED, WARNED = "refused", "warned"
OPTION, SWITCH, WARN_ONLY = "option", "switch", "warn_only"


def problem(head_dim=64, rows=512, shape=(1, 4, 512, 512), dtype="bfloat16", unaligned=False):
    """q, k, v and a bias, or None for a ``shape`` of None; all want a gradient."""
    import torch

    dtype = getattr(torch, dtype)
    q, k, v = (torch.zeros(2, rows, 4, head_dim + unaligned, dtype=dtype) for _ in "qkv")
    bias = None if shape is None else torch.zeros(shape, dtype=dtype, requires_grad=True)
    return [x[..., int(unaligned) :].requires_grad_() for x in (q, k, v)], bias


def attention(how="", **sizes):
    """What `found` says of `cupyflash.attention`."""
    import cupyflash

    qkv, bias = problem(**sizes)
    options = {"bias": bias, "deterministic": how == OPTION}
    return found(lambda: cupyflash.attention(*qkv, **options), how)


def triangle(how="", rows=64, masked=False):
    """The same for `triangle_attention`, which has no option but the switch of torch."""
    import torch

    import cupyflash

    (q, k, v), bias = problem(32, rows, (1, 4, rows, rows))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(2, 1, 1, rows, dtype=torch.bool) if masked else None
    return found(lambda: cupyflash.triangle_attention(q, k, v, bias, mask), how)


def transformers(packed=False, **options):
    """The same for the attention function of transformers, and its keyword."""
    import torch

    from cupyflash.integrations.transformers import attention

    qkv = [x.transpose(1, 2) for x in problem(**PLAIN)[0]]
    layer, ends = types.SimpleNamespace(is_causal=True), torch.tensor([0, 200, 512])
    if packed:
        qkv = [x[:1] for x in qkv]
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        options |= {"max_length_q": 312, "max_length_k": 312}
    return found(lambda: attention(layer, *qkv, None, **options)[0])


def found(forward, how=""):
    """Whether the gradient of q is summed in turns, that of the bias in registers; what was said.

    Without either they are sums of atomics, in any order.
    """
    import torch

    from cupyflash.ops.attention import dispatch

    torch.use_deterministic_algorithms(how in (SWITCH, WARN_ONLY), warn_only=how == WARN_ONLY)
    plans = [dispatch._backward_plans, dispatch._packed_backward_plans]
    for x in plans:
        x.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            forward().sum().backward()
        except NotImplementedError as error:
            assert "bias that is broadcast" in str(error)
            return [False, False, REFUSED]
    *_, plan = (y for x in plans for y in x.values())  # behind that of the padding
    texts = [str(x.message) for x in said if "has no deterministic order" in str(x.message)]
    turns, in_registers = plan.work.scratch.semaphores, plan.work.bias_gradient
    return [bool(turns), bool(in_registers), WARNED if texts else ""]


# At this head dim no block takes a whole head, whose dq then needs no turns.
PLAIN = {"head_dim": 256, "shape": None}
SHORT = {"head_dim": 32, "rows": 64, "shape": (1, 4, 64, 64)}
CASES = {
    "plain": (attention, PLAIN, [False, False, ""]),
    "plain, option": (attention, {**PLAIN, "how": OPTION}, [True, False, ""]),
    "plain, warn only": (attention, {**PLAIN, "how": WARN_ONLY}, [True, False, ""]),
    # The order that a bias gradient has without being asked, and where it has none.
    "shared": (attention, {}, [False, True, ""]),
    "shared, short": (attention, SHORT, [False, False, ""]),
    "shared, short, option": (attention, {**SHORT, "how": OPTION}, [True, True, ""]),
    "shared, short, wider": (attention, {**SHORT, "head_dim": 40}, [False, True, ""]),
    "shared, unaligned": (attention, {"unaligned": True}, [False, False, ""]),
    "shared, unaligned, option": (
        attention,
        {"unaligned": True, "how": OPTION},
        [False, False, REFUSED],
    ),
    "shared by heads, option": (
        attention,
        {"shape": (2, 1, 512, 512), "how": OPTION},
        [False, False, REFUSED],
    ),
    "pairs": (triangle, {}, [False, False, ""]),
    "pairs, masked": (triangle, {"masked": True}, [False, True, ""]),
    "pairs, longer": (triangle, {"rows": 72}, [False, True, ""]),
    "pairs, switch": (triangle, {"how": SWITCH}, [True, True, ""]),
    # A warning about the bias leaves the gradient of q in order.
    "warn only": (attention, {"how": WARN_ONLY}, [True, True, ""]),
    "warn only, wide": (attention, {"head_dim": 128, "how": WARN_ONLY}, [True, False, WARNED]),
    "warn only, row": (attention, {"shape": (1, 512), "how": WARN_ONLY}, [True, False, WARNED]),
    "warn only, unaligned": (
        attention,
        {"unaligned": True, "how": WARN_ONLY},
        [True, False, WARNED],
    ),
    "warn only, padded": (attention, {"head_dim": 100, "how": WARN_ONLY}, [True, False, WARNED]),
    "warn only, float32": (
        attention,
        {"dtype": "float32", "how": WARN_ONLY},
        [True, False, WARNED],
    ),
    "transformers": (transformers, {"deterministic": None}, [False, False, ""]),
    "transformers, option": (transformers, {"deterministic": True}, [True, False, ""]),
    "transformers, packed": (
        transformers,
        {"packed": True, "deterministic": True},
        [True, False, ""],
    ),
}


def main():
    """Prints what `found` says of each case, in JSON."""
    from bench.lib.dry_run import hopper

    with hopper():
        print(json.dumps({name: call(**options) for name, (call, options, _) in CASES.items()}))


@pytest.fixture(scope="module")
def results():
    return json.loads(run_script(__file__))


@pytest.mark.parametrize("name", CASES)
def test_what_has_a_fixed_order(results, name):
    assert results[name] == CASES[name][2]


if __name__ == "__main__":
    main()
