"""cupyflash as torch's flash backend, through torch's hook.

The CPU tests override the same operators for CPU tensors; there `scaled_dot_product_attention` has
another operator of its own, so they call the one that it calls on a GPU.
"""

import functools

import numpy
import pytest
from matrix import each
from passes import one_graph, results
from torch_hook import active, flash_sdpa, names_of_calls, needs_hook, sdpa

import cupyflash
from cupyflash.testing import expected

torch = pytest.importorskip("torch")
integration = pytest.importorskip("cupyflash.integrations.torch")

attention = torch.nn.attention
HALF = "float16"  # torch chooses its flash backend for half precision only


def gradients(function, inputs, **options):
    return results(functools.partial(function, **options), inputs)


@pytest.fixture
def calls(monkeypatch):
    return names_of_calls(monkeypatch)


@needs_hook
def test_register_activates_nothing():
    before = attention.current_flash_attention_impl()
    integration.register()
    assert "cupyflash" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() == before


def test_torch_without_the_hook(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(ImportError, match=r"needs torch 2.11 or newer, .* got .*; pip install"):
        integration.register()


@needs_hook
@each(library="torch", device="cuda")
def test_activate_and_restore(target, calls):
    """Before and after, torch's own kernels and its own order of targets."""
    inputs = target.inputs(HALF, seqlen_q=20, layout="bhsd")
    qkv = inputs.q, inputs.k, inputs.v
    run = torch.nn.functional.scaled_dot_product_attention
    run(*qkv)
    order = torch._C._get_sdp_priority_order()
    with active(target):
        assert attention.current_flash_attention_impl() == "cupyflash"
        run(*qkv)
    assert len(calls) == 1
    run(*qkv)
    assert len(calls) == 1 and torch._C._get_sdp_priority_order() == order


@each(library="torch", device="cpu")
def test_remove_gives_the_operators_back(target):
    inputs = target.inputs(HALF, seqlen_q=20, layout="bhsd")
    order = torch._C._get_sdp_priority_order()
    for _ in range(2):
        with active(target):
            assert (
                torch._C._get_sdp_priority_order()[0] == attention.SDPBackend.FLASH_ATTENTION.value
            )
            flash_sdpa(inputs.q, inputs.k, inputs.v)
        assert torch._C._get_sdp_priority_order() == order
        with pytest.raises(NotImplementedError):
            flash_sdpa(inputs.q, inputs.k, inputs.v)


@each(library="torch")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("storage", ["contiguous", "transposed", "packed"])
def test_sdpa(target, calls, storage, causal):
    inputs = target.inputs(HALF, seqlen_q=60, layout="bhsd", storage=storage)
    with active(target):
        found = gradients(sdpa(target), inputs, is_causal=causal, scale=0.2)
    assert len(calls) == 2
    expected(inputs, causal=causal, scale=0.2).check(**found)


@each(library="torch")
def test_grouped_queries(target, calls):
    inputs = target.inputs(HALF, seqlen_q=60, heads_q=4, heads_kv=2, layout="bhsd")
    options = {"enable_gqa": True} if target.gpu else {}
    with active(target):
        found = gradients(sdpa(target), inputs, **options)
    assert len(calls) == 2
    expected(inputs).check(**found)


@each(library="torch")
def test_dropout(target, calls):
    """Of torch's generator; the mask of the backward is that of the forward."""
    inputs = target.inputs(HALF, seqlen_q=60, layout="bhsd")
    qkv = inputs.q, inputs.k, inputs.v
    with active(target):
        torch.manual_seed(1)
        found = gradients(sdpa(target), inputs, dropout_p=0.3)
        assert len(calls) == 2
        torch.manual_seed(1)
        again = sdpa(target)(*qkv, dropout_p=0.3)
        other = sdpa(target)(*qkv, dropout_p=0.3)
    assert torch.equal(found["out"], again) and not torch.equal(again, other)
    torch.manual_seed(1)
    ours = gradients(functools.partial(cupyflash.attention, layout="bhsd", dropout_p=0.3), inputs)
    for name, x in ours.items():
        # The same kernels with the same seed: another mask differs by far more.
        torch.testing.assert_close(found[name], x, msg=name)


@each(library="torch")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (5, 3)], ids=str)
def test_varlen_attn(target, calls, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    inputs = target.varlen_inputs(HALF, [9, 0, 30], [12, 3, 40])
    packed = inputs.cu_seqlens_q, inputs.cu_seqlens_k, 30, 40
    with active(target):
        found = gradients(
            lambda *qkv: varlen.varlen_attn(*qkv, *packed, window_size=window), inputs
        )
        _, lse = varlen.varlen_attn(
            inputs.q, inputs.k, inputs.v, *packed, window_size=window,
            return_aux=varlen.AuxRequest(lse=True),
        )  # fmt: skip
    assert len(calls) == 3
    expected(inputs, window=window).check(**found, lse=lse)


@each(library="torch")
def test_varlen_attn_out(target, calls):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("torch without varlen_attn_out")
    inputs = target.varlen_inputs(HALF, [9, 0, 30])
    packed = inputs.cu_seqlens_q, inputs.cu_seqlens_k, 30, 30
    out = torch.full_like(inputs.q, torch.nan)
    with active(target):
        varlen.varlen_attn_out(out, inputs.q, inputs.k, inputs.v, *packed)
    assert len(calls) == 1
    expected(inputs).check(out=out)


@each(library="torch")
def test_compiled_model(target, calls):
    """torch traces its own operators; the strides of their results are those it expects."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    layer = layer.to(target.device, torch.float16)
    x = torch.randn(2, 30, 128, device=target.device, dtype=torch.float16)

    def block(x):
        qkv = torch.nn.functional.linear(x, layer.self_attn.in_proj_weight)
        q, k, v = qkv.view(2, 30, 3, 4, 32).permute(2, 0, 3, 1, 4)
        out = sdpa(target)(q, k, v, is_causal=True)
        return layer.self_attn.out_proj(out.transpose(1, 2).reshape(2, 30, 128))

    with active(target):
        graph = one_graph(block)
        found = torch.autograd.grad(graph(x).sum(), layer.self_attn.in_proj_weight)
        count = len(calls)
        eager = torch.autograd.grad(block(x).sum(), layer.self_attn.in_proj_weight)
    assert count == 2 and len(calls) == 4
    # The same attention in both; torch.compile may order the sums of the projections otherwise.
    torch.testing.assert_close(found, eager)


@each(library="torch")
def test_lengths_of_packed_keys(target):
    """`seqused_k` beside the ends of the sequences."""
    inputs = target.varlen_inputs(HALF, [9, 3])
    qkv, ends = (inputs.q, inputs.k, inputs.v), inputs.cu_seqlens_q
    used = target.array(numpy.array([4, 3], "int32"))
    with active(target):
        out, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, ends, ends, 9, 9, 0.0, False, False, seqused_k=used
        )
    exact = cupyflash.flash_attn_varlen_func(*qkv, ends, ends, 9, 9, seqused_k=used)
    assert torch.equal(out, exact)
    assert not torch.equal(out, cupyflash.flash_attn_varlen_func(*qkv, ends, ends, 9, 9))


@each(library="torch", device="cpu")
@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k"])
def test_options_that_torch_hands_to_the_forward_alone(target, name):
    """A gradient without them would be that of another function."""
    inputs = target.varlen_inputs(HALF, [9, 3])
    qkv, ends = (inputs.q, inputs.k, inputs.v), inputs.cu_seqlens_q
    flash = torch.ops.aten._flash_attention_forward
    heads = inputs.q.shape[-2]
    option = {name: torch.ones(heads) if name == "alibi_slopes" else ends[1:]}
    learned = [x.detach().requires_grad_() for x in qkv]
    with active(target):
        with pytest.raises(NotImplementedError, match=f"{name} has no backward in torch"):
            flash(*learned, ends, ends, 9, 9, 0.0, False, False, **option)
        if name == "alibi_slopes":
            flash(*qkv, ends, ends, 9, 9, 0.0, False, False, **option)
            with torch.no_grad():
                flash(*learned, ends, ends, 9, 9, 0.0, False, False, **option)


@each(library="torch", device="cpu")
def test_what_is_not_built(target):
    inputs = target.varlen_inputs(HALF, [9, 3])
    qkv, ends = (inputs.q, inputs.k, inputs.v), inputs.cu_seqlens_q
    flash = torch.ops.aten._flash_attention_forward
    with active(target):
        with pytest.raises(NotImplementedError, match="return_debug_mask is not built"):
            flash(*qkv, ends, ends, 9, 9, 0.0, False, True)
        with pytest.raises(NotImplementedError, match="seqused_k has no backward"):
            q = qkv[0].detach().requires_grad_()
            flash(q, *qkv[1:], ends, ends, 9, 9, 0.0, False, False, seqused_k=ends[1:] // 4)
        with pytest.raises(TypeError, match="_flash_attention_forward: cum_seq_q must be int32"):
            flash(*qkv, ends.long(), ends.long(), 9, 9, 0.0, False, False)
        if "block_table" in str(flash.default._schema):
            with pytest.raises(NotImplementedError, match="block_table .* is not built"):
                flash(*qkv, ends, ends, 9, 9, 0.0, False, False, block_table=ends[None])
