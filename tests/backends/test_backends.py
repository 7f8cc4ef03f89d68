"""The choice of the backend that serves a problem, and the error if none does. Needs no GPU."""

import pytest

from cupyflash import environment
from cupyflash.ops.attention.backends import BACKENDS, choose
from cupyflash.ops.attention.problem import Access, Features, Kind
from cupyflash.ops.attention.sm80.backward import backward_kernels
from cupyflash.ops.attention.sm80.forward import forward_kernel
from cupyflash.ops.attention.sm90 import backward as sm90_backward
from cupyflash.ops.attention.sm90 import forward as sm90_forward
from cupyflash.precompile import TOPICS
from cupyflash.runtime.gpu import ARCHITECTURES, architecture

MAPPED, VECTOR, ELEMENT = Access.TENSOR_MAP, Access.VECTOR, Access.ELEMENT


PLAIN = Features()


def chosen(
    dtype,
    head_dim=64,
    access=MAPPED,
    capability=(9, 0),
    backward=False,
    forced=None,
    features=PLAIN,
):
    kind = Kind(dtype, head_dim, features, capability)
    with environment.override(backend=forced):
        return choose("f", kind, access, backward=backward)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs_on_tensor_cores(dtype, capability):
    assert chosen(dtype, capability=capability) == "sm80"
    assert chosen(dtype, capability=capability, backward=True) == "sm80"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hopper_has_a_backend_of_its_own(dtype, backward):
    assert chosen(dtype, backward=backward) == "sm90"
    assert chosen(dtype, 256, backward=backward) == "sm90"
    assert chosen(dtype, access=VECTOR, backward=backward) == "sm80"
    assert chosen(dtype, access=ELEMENT, backward=backward) == "simt"


ONE_TILE = Features(short=4, few_keys=True, one_tile=True, one_pass=True)


@pytest.mark.parametrize("backward", [False, True])
def test_sequences_of_one_tile_run_on_smaller_tiles_on_hopper(backward):
    for head_dim in (64, 80, 128):
        assert chosen("float16", head_dim, features=ONE_TILE, backward=backward) == "sm80"
    assert chosen("float16", 64, features=ONE_TILE, backward=backward, forced="sm90") == "sm90"
    assert chosen("float16", 136, features=ONE_TILE, backward=backward) == "sm90"
    assert chosen("float16", access=ELEMENT, features=ONE_TILE, backward=backward) == "simt"


def test_one_kernel_computes_the_backward_of_short_sequences():
    names = {
        name: [x.name for x in backward_kernels(Kind("float16", 32, features, (8, 0)))]
        for name, features in {
            "plain": ONE_TILE,
            "bias": ONE_TILE._replace(bias=1),
            "groups": ONE_TILE._replace(one_pass=False),
            "softcap": ONE_TILE._replace(softcap=True),
            "dropout": ONE_TILE._replace(dropout=True),
        }.items()
    }
    assert names["plain"] == names["bias"] == ["flash_bwd_short_sm80"]
    assert "flash_bwd_keys_sm80" in names["groups"]
    assert all("flash_bwd_sm80" in names[x] for x in ("softcap", "dropout"))
    assert chosen("float16", features=ONE_TILE._replace(one_pass=False), backward=True) == "sm90"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_warps_own_keys_for_narrow_heads_without_options(capability):
    """The kernel has no options: to pick it for a problem with one would be wrong silently."""

    def picked(head_dim, **features):
        kind = Kind("float16", head_dim, Features(**features), capability)
        found = BACKENDS["sm80"].backward_candidates(kind).values()
        found = {config.name for config in found}
        assert backward_kernels(kind)[1].name in found
        return "flash_bwd_keys_sm80" in found

    for head_dim in (16, 32, 64):
        assert picked(head_dim) == picked(head_dim, masked=True, short=4) == (capability >= (8, 0))
        options = {"softcap": True, "alibi": True, "dropout": True, "bias": 1}
        for name, value in options.items():
            assert not picked(head_dim, **{name: value})
    assert picked(72) == (capability in ((8, 0), (9, 0), (10, 0)))
    assert not picked(128)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_two_blocks_fit_on_a_multiprocessor(capability):
    """Of four warps: where a warp owns keys, and those of wide heads where there is room."""
    memory = architecture(capability).shared_memory
    problems = [(32, True), (64, True)]
    problems += [(96, True), (160, False), (192, False)] * (memory > 99)
    problems += [(256, False)] * (memory == 227)
    for head_dim, backward in problems:
        kind = Kind("float16", head_dim, Features(), capability)
        config = backward_kernels(kind)[1] if backward else forward_kernel(kind)
        # A block takes 1 KB for the system and 256 bytes for what is static.
        assert 2 * (config.shared_memory / 1024 + 1.25) <= memory + 1
        assert config.num_warps == 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_v_has_kernels_of_its_own(dtype):
    """A kernel of the width of q reads what lies behind a narrow v; options have such kernels."""
    sm90, narrow = BACKENDS["sm90"], Features(head_dim_v=128)
    known = set(sm90.configurations((9, 0)))
    for head_dim in (136, 192):
        kind = Kind(dtype, head_dim, narrow, (9, 0))
        short = kind._replace(features=narrow._replace(masked=True, short=3))
        *forward, combine = sm90_forward.forward_kernels(kind)
        assert {*forward, combine, *sm90_forward.forward_kernels(short)} <= known
        main = sm90_backward.backward_kernels(kind)[1]
        assert not sm90.pads(kind)
        for kernel in (*forward, main):
            assert (kernel.head_dim, kernel.head_dim_v) == (192, 128)
        assert combine.head_dim == 128 and len(forward) == 3
        for config in sm90.forward_candidates(kind).values():
            assert config.shared_memory <= 227 * 1024 and config.head_dim_v == 128
    options = {"softcap": True, "alibi": True, "dropout": True, "bias": 1}
    kind = Kind(dtype, 192, narrow, (9, 0))
    for name, value in options.items():
        assert sm90.pads(kind._replace(features=narrow._replace(**{name: value})))
    assert sm90.pads(kind._replace(head_dim=128)) and sm90.pads(kind._replace(head_dim=200))
    wide, *_, combine = sm90_forward.forward_kernels(kind._replace(features=Features()))
    assert (wide.head_dim, wide.head_dim_v, combine.head_dim) == (192, 192, 192)


def test_what_tensor_cores_cannot_take_runs_on_simt():
    assert chosen("float16", access=ELEMENT) == "simt"
    assert chosen("float16", capability=(7, 0)) == "simt"


@pytest.mark.parametrize("backward", [False, True])
def test_float32_runs_on_tensor_cores_where_that_is_faster(backward):
    """Not on GeForce cards, for few rows, or in the backward of wide heads but on Hopper."""
    tiny, tf32 = Features(tiny=True), Features(tf32=True)
    for capability in ((7, 5), (8, 0), (9, 0), (10, 0)):
        assert chosen("float32", capability=capability, backward=backward) == "fp16x3"
        assert chosen("float32", capability=capability, features=tiny) == "simt"
        assert chosen("float32", 64, ELEMENT, capability, backward) == "fp16x3"
    for capability in ((7, 0), (8, 6), (8, 9), (12, 0)):
        assert chosen("float32", capability=capability, backward=backward) == "simt"
    assert chosen("float32", capability=(8, 6), backward=backward, features=tf32) == "fp16x3"
    assert chosen("float32", capability=(8, 6), forced="fp16x3") == "fp16x3"
    for head_dim in (136, 192, 256):
        assert chosen("float32", head_dim, backward=backward) == "fp16x3"
        on_ampere = chosen("float32", head_dim, capability=(8, 0), backward=backward)
        assert on_ampere == ("simt" if backward else "fp16x3")
    with pytest.raises(NotImplementedError, match="^f: the backend fp16x3 .*float16"):
        chosen("float16", forced="fp16x3")


def test_the_fast_tanh_is_not_exact_enough_for_a_huge_softcap():
    wide = Features(softcap=True, wide_softcap=True)
    assert chosen("float16", features=wide) == "simt"
    assert chosen("float16", features=Features(softcap=True)) == "sm90"
    with pytest.raises(NotImplementedError, match="sm80 .* a softcap above 4096$"):
        chosen("float16", features=wide, forced="sm80")


def test_turing_has_float16_only():
    assert chosen("float16", capability=(7, 5)) == "sm80"
    assert chosen("bfloat16", capability=(7, 5)) == "simt"
    assert chosen("float16", 256, capability=(7, 5)) == "sm80"
    assert chosen("float16", 256, capability=(7, 5), backward=True) == "simt"


def test_unsupported_gpu():
    with pytest.raises(NotImplementedError, match=r"^f: .*capability \(6, 0\).*\(5, 2\)"):
        chosen("float32", capability=(5, 2))


def test_forced_backend():
    assert chosen("float16", forced="simt") == "simt"
    with pytest.raises(NotImplementedError, match="^f: the backend sm80 .*float32"):
        chosen("float32", forced="sm80")
    with pytest.raises(NotImplementedError, match="^f: the backend sm90 .*zero, negative"):
        chosen("float16", access=VECTOR, forced="sm90")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_sm90_runs_on_hopper_only(capability):
    with pytest.raises(NotImplementedError, match="^f: the backend sm90 "):
        chosen("float16", capability=capability, forced="sm90")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_shared_memory_fits_the_gpu(capability):
    """A block's tiles and its static variables, within what the CUDA programming guide lists."""
    limits = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}
    limit = limits.get(capability, 99) * 1024
    for backend in BACKENDS.values():
        for config in backend.configurations(capability):
            assert config.shared_memory + 512 <= limit, config


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
def test_a_kernel_for_sm_90_runs_there_alone(capability):
    """The suffix says that it needs the instructions of sm_90a."""
    for backend in (*BACKENDS.values(), *TOPICS.values()):
        names = {config.name for config in backend.configurations(capability)}
        assert capability == (9, 0) or not [name for name in names if name.endswith("_sm90")]
