"""Compiled calls on tensors whose sizes only the run knows, as those of ``x[mask]``: one graph.

The two switches of Dynamo are those that a user sets for such programs.
"""

import shutil

import pytest
from targets import compute_capability

torch = pytest.importorskip("torch")

import cupyflash  # noqa: E402

NO_GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() and compute_capability()[0]), reason="no GPU"
)
DEVICES = [pytest.param("cpu", marks=pytest.mark.no_backend), pytest.param("cuda", marks=NO_GPU)]
ROWS, HEADS, HEAD_DIM = 20, 4, 16
WIDTH = HEADS * HEAD_DIM


def heads(x, mask):
    return x[mask].unflatten(-1, (HEADS, HEAD_DIM))


def ends(mask):
    """The ends of two sequences: the first three rows that are kept, and the rest."""
    rows = mask.sum()
    return torch.stack((rows * 0, rows.clamp(max=3), rows)).int()


def varlen(x, mask):
    q, offsets = heads(x, mask), ends(mask)
    return cupyflash.flash_attn_varlen_func(q, q, q, offsets, offsets, ROWS, ROWS, causal=True)


def varlen_of_a_read_length(x, mask):
    q, offsets = heads(x, mask), ends(mask)
    longest = offsets.diff().max().item()
    return cupyflash.flash_attn_varlen_func(q, q, q, offsets, offsets, longest, longest)


def window_of_a_read_length(x, mask):
    q = x.view(1, ROWS, HEADS, HEAD_DIM)
    return cupyflash.attention(q, q, q, window=(mask.sum().item(), 0))


def attention(x, mask):
    q = heads(x, mask)[None]
    return cupyflash.attention(q, q, q)


def sdpa(x, mask):
    q = heads(x, mask)[None].transpose(1, 2)
    return cupyflash.scaled_dot_product_attention(q, q, q, is_causal=True)


def group_norm(x, mask):
    return cupyflash.group_norm(x.view(ROWS, HEADS, HEAD_DIM)[mask], 2)


def channels_last(x, mask):
    return cupyflash.group_norm(x.view(ROWS, HEADS, HEAD_DIM)[mask].transpose(1, 2), 2)


def layer_norm(x, mask):
    x = heads(x, mask)
    return cupyflash.layer_norm(x.transpose(0, 1), residual=x.transpose(0, 1))[0]


def mlp(x, mask):
    up, weight = x.new_ones(8, WIDTH) / WIDTH, x.new_ones(WIDTH)
    return cupyflash.mlp(x[mask], up, up.t().contiguous(), norm=cupyflash.Norm(weight, rms=True))


CALLS = {
    "attention": attention,
    "channels last": channels_last,
    "flash_attn_varlen_func": varlen,
    "flash_attn_varlen_func, max_seqlen": varlen_of_a_read_length,
    "group_norm": group_norm,
    "layer_norm, transposed": layer_norm,
    "linear": lambda x, mask: cupyflash.linear(x[mask], x.new_ones(8, WIDTH)),
    "mlp": mlp,
    "rms_norm": lambda x, mask: cupyflash.rms_norm(x[mask][None], x.new_ones(WIDTH)),
    "scaled_dot_product_attention": sdpa,
    "window": window_of_a_read_length,
}


def results(call, x, mask):
    x = x.clone().requires_grad_()
    out = call(x, mask)
    out.square().sum().backward()
    return out, x.grad


def check(call, device, backend):
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device=device)
    switches = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**switches):
        graph = torch.compile(call, fullgraph=True, backend=backend)
        for kept in (7, 1, ROWS):
            mask = torch.randperm(ROWS, device=device) < kept
            found, eager = results(graph, x, mask), results(call, x, mask)
            # The same attention and norms in both; sums around them may be ordered otherwise.
            torch.testing.assert_close(found, eager)
            assert found[0].stride() == eager[0].stride() or kept == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_sizes_that_only_the_run_knows(name, device):
    check(CALLS[name], device, "aot_eager")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_under_inductor(device):
    """A layer of a model without padding, in one graph."""

    def layer(x, mask):
        x = cupyflash.rms_norm(x, x.new_ones(WIDTH))
        return varlen_of_a_read_length(torch.tanh(x), mask).flatten(1) + mlp(x, mask)

    check(layer, device, "inductor")
