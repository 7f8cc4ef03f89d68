"""Compiled models on torch's flash operators as cupyflash replaces them, by inductor.

Their graphs are made from torch's meta functions, whose strides inductor asserts. On a CPU SDPA has
another operator of its own, so there it is replaced by the one that it calls on a GPU.
"""

import shutil

import pytest
from targets import few
from torch_hook import active, flash_sdpa, needs_hook, sdpa

torch = pytest.importorskip("torch")

from matrix import each  # noqa: E402
from passes import one_graph  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

from cupyflash import environment  # noqa: E402

B, H, S, D = 2, 4, 20, 32
NO_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")


def bhsd(heads=H, batch=B, seqlen=S):
    return (batch, heads, seqlen, D), lambda x: x


def bshd(heads=H, batch=B, seqlen=S):
    return (batch, seqlen, heads, D), lambda x: x.transpose(1, 2)


def expanded(layout, batch=B, heads=H):
    shape, lay = layout
    return shape, lambda x: lay(x).expand(batch, heads, -1, -1)


def repeated(heads_kv):
    """`repeat_kv` of transformers, of which one head makes a view."""
    shape, lay = bshd(heads_kv)
    times = (B, heads_kv, H // heads_kv, S, D)
    return shape, lambda x: lay(x)[:, :, None].expand(times).reshape(B, H, S, D)


def part_of_a_projection(place):
    return (B, S, 3, H, D), lambda x: x.permute(2, 0, 3, 1, 4)[place]


def part_of_a_cache():
    return (B, H, 2 * S, D), lambda x: x[:, :, :S]


def sequence_first():
    """nn.MultiheadAttention, batch_first=False."""
    return (S, B, H * D), lambda x: x.reshape(S, B * H, D).transpose(0, 1).view(B, H, S, D)


# Of q, and of k and v: the shape of what a model has, and how it becomes (batch, heads, seqlen, D).
LAYOUTS = {
    "heads first": [bhsd(), bhsd()],
    "transposed": [bshd(), bshd()],
    "packed": [part_of_a_projection(0), part_of_a_projection(1)],
    "sequence first": [sequence_first(), sequence_first()],
    "heads of k and v expanded": [bhsd(), expanded(bhsd(1))],
    "heads of k and v expanded, transposed": [bshd(), expanded(bshd(1))],
    "repeat_kv of one head": [bshd(), repeated(1)],
    "repeat_kv of two heads": [bshd(), repeated(2)],
    "batch of k and v expanded": [bhsd(), expanded(bhsd(batch=1))],
    "batch of k and v expanded, transposed": [bshd(), expanded(bshd(batch=1))],
    "batch of q expanded": [expanded(bhsd(batch=1)), bhsd()],
    "all expanded": [expanded(bshd(1, 1)), expanded(bshd(1, 1))],
    "part of a cache": [bhsd(), part_of_a_cache()],
    "one head": [bshd(1), bshd(1)],
    "one query": [bshd(seqlen=1), bshd()],
    "one sequence": [bshd(batch=1), bshd(batch=1)],
    "batch second": [
        ((S, B, H, D), lambda x: x.permute(1, 2, 0, 3)),
        ((S, B, H, D), lambda x: x.permute(1, 2, 0, 3)),
    ],
}


def of_choice(target):
    """The backend of a user's choice on Hopper: forced, sm90 refuses what is expanded."""
    return environment.override(backend=None if target.backend == "sm90" else target.backend)


def leaves_of(name, device):
    (shape_q, _), (shape_k, _) = LAYOUTS[name]
    options = {"device": device, "dtype": torch.float16, "requires_grad": True}
    return [torch.randn(shape, **options) for shape in (shape_q, shape_k, shape_k)]


def steps(x):
    return [step for size, step in zip(x.shape, x.stride()) if size > 1]


@needs_hook
@each(library="torch")
@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_those_of_the_meta_functions(target, name):
    q, k, v = (lay(x.detach()) for x, lay in zip(leaves_of(name, target.device), lays(name)))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    dout = torch.randn(q.shape, device=target.device, dtype=torch.float16)

    def run(q, k, v, dout):
        out, lse, _, _, longest_q, longest_k, seed, unused, _ = flash_sdpa(q, k, v)
        lengths = None, None, longest_q, longest_k
        return out, *backward(dout, q, k, v, out, lse, *lengths, 0.0, False, seed, unused)

    with active(target), of_choice(target):
        real = run(q, k, v, dout)
        with FakeTensorMode() as mode:
            fake = run(*map(mode.from_tensor, (q, k, v, dout)))
    for result, x, y in zip(("out", "dq", "dk", "dv"), real, fake, strict=True):
        assert (x.shape, steps(x)) == (y.shape, steps(y)), result


def lays(name):
    (_, lay_q), (_, lay_k) = LAYOUTS[name]
    return lay_q, lay_k, lay_k


@needs_hook
@NO_COMPILER
@each(library="torch")
def test_every_layout_by_inductor(target):
    """All layouts in one graph, forward and backward; without a GPU every third."""
    names = list(LAYOUTS)[:: 3 if few() else 1]
    inputs = {name: leaves_of(name, target.device) for name in names}
    attend = sdpa(target)

    def function(inputs):
        return {
            name: torch.tanh(attend(*(lay(x) for lay, x in zip(lays(name), inputs[name]))))
            for name in names
        }

    with active(target), of_choice(target):
        found = gradients(one_graph(function, backend="inductor"), inputs)
        eager = gradients(function, inputs)
    for name in names:
        # The same attention in both; inductor rounds tanh and sums of expanded axes less often.
        torch.testing.assert_close(found[name], eager[name], rtol=4e-3, atol=4e-3, msg=name)


def gradients(function, inputs):
    """[out, dq, dk, dv] by layout."""
    results = function(inputs)
    leaves = [x for of_layout in inputs.values() for x in of_layout]
    loss = sum(x.float().square().sum() for x in results.values())
    found = iter(torch.autograd.grad(loss, leaves))
    return {name: [out.detach(), *(next(found) for _ in "qkv")] for name, out in results.items()}


@pytest.fixture
def through_sdpa(monkeypatch):
    """Lets SDPA call the flash operator, as it does by itself on a GPU."""

    def replace(target):
        def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
            # Without padding a model of transformers has a causal mask, or none and is_causal.
            is_causal = is_causal or attn_mask is not None
            return attend(query, key, value, dropout_p=dropout_p, is_causal=is_causal)

        attend = sdpa(target)
        if not target.gpu:
            monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", flash)

    return replace


def check_model(target, model, inputs, result):
    """The compiled model beside itself without: results and gradients of all weights."""
    torch._dynamo.reset()  # lengths of earlier models would make this one's dynamic, with a mask
    model, found = model.to(target.device, torch.float16).train(), []
    inputs = {name: x.to(target.device) for name, x in inputs.items()}
    with active(target):
        for call in (one_graph(model, backend="inductor"), model):
            model.zero_grad()
            out = result(call(**inputs))
            out.float().square().mean().backward()
            weights = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
            found.append({"out": out.detach(), **weights})
    compiled, eager = found
    for name, x in eager.items():
        # Both round to float16 at other places.
        error, size = (compiled[name] - x).abs().max().item(), x.abs().max().item()
        assert error <= 2**-7 * size + 2**-14, f"{name}: {error} of {size}"


@needs_hook
@NO_COMPILER
@each(library="torch")
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_with_learned_queries(target, through_sdpa, batch_first):
    """Queries that all sequences share, expanded over the batch."""
    torch.manual_seed(0)

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = torch.nn.Parameter(torch.randn(5, H * D))
            self.attend = torch.nn.MultiheadAttention(H * D, H, batch_first=batch_first)

        def forward(self, x):
            axis = 0 if batch_first else 1
            queries = self.queries.unsqueeze(axis)
            queries = queries.expand(B, -1, -1) if batch_first else queries.expand(-1, B, -1)
            return self.attend(queries, x, x, need_weights=False)[0]

    through_sdpa(target)
    x = torch.randn((B, S, H * D) if batch_first else (S, B, H * D), dtype=torch.float16)
    check_model(target, Pooled(), {"x": x}, lambda out: out)


@needs_hook
@NO_COMPILER
@each(library="torch")
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_transformers_decoder(target, through_sdpa, heads_kv):
    """With one key head, multi-query attention, what `repeat_kv` returns is an expanded view."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=H * D, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=H, num_key_value_heads=heads_kv, attn_implementation="sdpa",
    )  # fmt: skip
    through_sdpa(target)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 100, (B, S))
    check_model(target, model, {"input_ids": tokens}, lambda out: out.logits)
