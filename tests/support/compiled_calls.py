"""One call of every public function under torch.compile, compared with the same call without.

``python tests/support/compiled_calls.py cpu attention mlp`` runs two of them in one fresh process;
`test_compiled_calls.py` decides which ones share a process.
"""

import functools
import sys
import types

import torch

import cupyflash

PUBLIC = tuple(cupyflash.__all__)
# What is no computation, or an argument of one.
NOT_CALLED = {"BlockWeights", "Mask", "Norm", "Rotary", "Score", "warmup"}
B, H, D = 2, 4, 64
SEQLENS = (24, 29)
WIDTH = H * D


class Problem:
    """Seeded tensors on a device: float32 on a CPU, else float16."""

    def __init__(self, device, seqlen):
        self.device, self.s = device, seqlen
        self.dtype = torch.float32 if device == "cpu" else torch.float16
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape, scale=1.0, mean=0.0):
        x = scale * torch.randn(shape, generator=self.generator) + mean
        return x.to(self.device, self.dtype)

    def integers(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def leaf(self, *shape, **options):
        return self.normal(*shape, **options).requires_grad_()


def attention_like(function, **options):
    def make(p):
        return functools.partial(function, causal=True, **options), [p.leaf(B, p.s, H, D)] * 3

    return make


def flex(p):
    score = cupyflash.Score(lambda score, b, h, q, k: score - 0.1 * (q - k))
    mask = cupyflash.Mask(lambda b, h, q, k: k <= q)
    function = lambda q, k, v: cupyflash.flex_attention(q, k, v, score, mask)
    return function, [p.leaf(B, H, p.s, D)] * 3


def attention_backward(p):
    q, k, v, dout = (p.normal(B, p.s, H, D) for _ in range(4))
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    return functools.partial(cupyflash.attention_backward, causal=True), [dout, q, k, v, out, lse]


def attention_with_cache(p):
    new, caches = [p.normal(B, 1, H, D) for _ in range(3)], [p.normal(B, 40, H, D) for _ in "kv"]
    places = p.integers(5, 30)

    def step(q, k, v):
        return cupyflash.attention_with_cache(q, k, v, *caches, places)

    return step, new


def kvcache(p):
    caches, places = [p.normal(B, 40, H, D) for _ in "kv"], p.integers(5, 30)

    def step(q, k, v):
        return cupyflash.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=places)

    return step, [p.normal(B, 1, H, D) for _ in range(3)]


def append(p):
    places = p.integers(5, 30)

    def step(k, v, k_cache, v_cache):
        caches = k_cache.clone(), v_cache.clone()
        cupyflash.cache_append(k, v, *caches, places)
        return caches

    new, caches = ([p.normal(*shape) for _ in "kv"] for shape in ((B, H, D), (B, 40, H, D)))
    return step, [*new, *caches]


def unpadded(p):
    mask = p.integers(*[i % 3 > 0 for i in range(B * p.s)]).reshape(B, p.s)
    return lambda x: cupyflash.unpad_input(x, mask)[0] + 0, [p.leaf(B, p.s, D)]


def padded(p):
    rows = torch.arange(p.s, device=p.device) * 2
    return lambda x: cupyflash.pad_input(x, rows, B, p.s), [p.leaf(p.s, D)]


def rows_of(p):
    rows = torch.arange(p.s, device=p.device) // 2
    return lambda x: cupyflash.index_first_axis(x, rows), [p.leaf(p.s, D)]


def combine(p):
    lse = p.normal(3, B, p.s, H).float().requires_grad_()
    return cupyflash.flash_attn_combine, [p.leaf(3, B, p.s, H, D), lse]


def lengths(p):
    """The ends of packed sequences: all but five rows, and those five with the rest."""
    return p.integers(0, p.s - 5, B * p.s)


def kvpacked(function, ends_of=None):
    def make(p):
        rows = (B * p.s,) if ends_of else (B, p.s)
        q, kv = p.leaf(*rows, H, D), p.leaf(*rows, 2, H, D)
        ends = [ends_of(p)] * 2 if ends_of else []
        longest = [p.s + 5] * 2 if ends_of else []
        return (lambda q, kv: function(q, kv, *ends, *longest, causal=True)), [q, kv]

    return make


def qkvpacked(function, ends_of=None):
    def make(p):
        qkv = p.leaf(*((B * p.s,) if ends_of else (B, p.s)), 3, H, D)
        ends = [ends_of(p)] if ends_of else []
        longest = [p.s + 5][: len(ends)]
        return (lambda qkv: function(qkv, *ends, *longest, causal=True)), [qkv]

    return make


def varlen(p):
    q, k, v = (p.leaf(B * p.s, H, D) for _ in range(3))
    ends, longest = lengths(p), p.s + 5
    call = cupyflash.flash_attn_varlen_func
    return (lambda *x: call(*x, ends, ends, longest, longest, causal=True)), [q, k, v]


def sdpa(p):
    heads_first = [p.leaf(B, H, p.s, D) for _ in range(3)]
    return functools.partial(cupyflash.scaled_dot_product_attention, is_causal=True), heads_first


def triangle(p):
    qkv = [p.leaf(B, 3, H, p.s, D) for _ in range(3)]
    mask = p.integers(*range(B * 3 * p.s)).reshape(B, 3, 1, 1, p.s) % 5
    bias = p.leaf(B, 1, H, p.s, p.s)
    return functools.partial(cupyflash.triangle_attention, mask=mask), [*qkv, bias]


def norm(name):
    def make(p):
        tensors = [p.leaf(p.s, 384), p.leaf(384, scale=0.2, mean=1)]
        tensors += [p.leaf(384)] if name == "layer_norm" else []
        function = getattr(cupyflash, name)

        def call(x, *weights):
            out, h = function(x, *weights, residual=x, dropout_p=0.2, dropout_seed=7)
            return function(out + h, *weights), out, h

        return call, tensors

    return make


def norm_backward(name):
    def make(p):
        x, dout = p.normal(p.s, 384), p.normal(p.s, 384)
        weight = p.normal(384, scale=0.2, mean=1)
        arguments = (x, weight, p.normal(384)) if name == "layer_norm" else (x, weight)
        _, stats = getattr(cupyflash, name)(*arguments, return_stats=True)
        function = getattr(cupyflash, f"{name}_backward")

        def call(*arrays):
            return *function(*arrays), *function(*arrays, dropout_p=0.2, dropout_seed=7)

        return call, [dout, x, weight, stats]

    return make


def group_norm(p):
    tensors = [p.leaf(B, 32, 10, 12), p.leaf(32, scale=0.2, mean=1), p.leaf(32)]
    return (lambda x, w, b: cupyflash.group_norm(x, 8, w, b, activation="silu")), tensors


def group_norm_backward(p):
    x, dout, weight, bias = p.normal(B, 32, 120), p.normal(B, 32, 120), p.normal(32), p.normal(32)
    _, stats = cupyflash.group_norm(x, 8, weight, bias, return_stats=True)
    return cupyflash.group_norm_backward, [dout, x, weight, bias, stats]


def linear(p):
    tensors = [p.leaf(p.s, WIDTH), p.leaf(128, WIDTH, scale=WIDTH**-0.5), p.leaf(128)]
    return functools.partial(cupyflash.linear, activation="gelu"), tensors


def mlp(p):
    up, down = p.leaf(512, WIDTH, scale=WIDTH**-0.5), p.leaf(WIDTH, 512, scale=512**-0.5)
    weight = p.leaf(WIDTH, scale=0.2, mean=1)

    def call(x, up, down, weight):
        return cupyflash.mlp(x, up, down, residual=x, norm=cupyflash.Norm(weight, rms=True))

    return call, [p.leaf(p.s, WIDTH), up, down, weight]


def qkv_projection(p):
    cos, sin = p.normal(p.s, D // 2), p.normal(p.s, D // 2)

    def call(x, weight):
        rotary = cupyflash.Rotary(cos, sin)
        return cupyflash.qkv_projection(x, weight, heads_q=H, rotary=rotary)

    return call, [p.leaf(B, p.s, WIDTH), p.leaf(3 * WIDTH, WIDTH, scale=WIDTH**-0.5)]


def diffusion(p):
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 20))
    call = lambda x, model: sampler.step(x, model, 7, seed=3, clip=1.0)
    return call, [p.normal(B, 16, 8), p.normal(B, 16, 8)]


def schedule(p):
    return (lambda x: x * float(cupyflash.beta_schedule("cosine", 20)[3])), [p.normal(4)]


def embeddings(p):
    table = cupyflash.timestep_embeddings((1, 5), 16)
    return (lambda x: x * float(table[1, 3])), [p.normal(4)]


def block_weights(p):
    scale, shape = {"scale": 0.2}, (WIDTH, WIDTH)
    of = lambda rows, columns: p.normal(rows, columns, scale=columns**-0.5)
    return cupyflash.BlockWeights(
        p.normal(WIDTH, **scale), p.normal(WIDTH, **scale),
        of(3 * WIDTH, WIDTH), p.normal(3 * WIDTH, **scale),
        of(*shape), p.normal(WIDTH, **scale), p.normal(WIDTH, **scale), p.normal(WIDTH, **scale),
        of(512, WIDTH), p.normal(512, **scale), of(WIDTH, 512), p.normal(WIDTH, **scale),
    )  # fmt: skip


def transformer_block(p):
    weights, caches = block_weights(p), [p.normal(B, 40, H, D) for _ in "kv"]
    places = p.integers(5, 30)
    call = lambda x: cupyflash.transformer_block(x, weights, *caches, places, heads=H)
    return call, [p.normal(B, WIDTH)]


def block_stack(p):
    stack = cupyflash.BlockStack([block_weights(p)] * 2, heads=H)
    caches, places = [p.normal(2, B, 40, H, D) for _ in "kv"], p.integers(5, 30)
    return (lambda x: stack(x, *caches, places)), [p.normal(B, WIDTH)]


CALLS = {
    "BlockStack": block_stack,
    "DiffusionSampler": diffusion,
    "attention": attention_like(cupyflash.attention),
    "attention_backward": attention_backward,
    "attention_with_cache": attention_with_cache,
    "beta_schedule": schedule,
    "cache_append": append,
    "flash_attn_combine": combine,
    "flash_attn_func": attention_like(cupyflash.flash_attn_func, window_size=(9, 0)),
    "flash_attn_kvpacked_func": kvpacked(cupyflash.flash_attn_kvpacked_func),
    "flash_attn_qkvpacked_func": qkvpacked(cupyflash.flash_attn_qkvpacked_func),
    "flash_attn_varlen_func": varlen,
    "flash_attn_varlen_kvpacked_func": kvpacked(cupyflash.flash_attn_varlen_kvpacked_func, lengths),
    "flash_attn_varlen_qkvpacked_func": qkvpacked(
        cupyflash.flash_attn_varlen_qkvpacked_func, lengths
    ),
    "flash_attn_with_kvcache": kvcache,
    "flex_attention": flex,
    "group_norm": group_norm,
    "group_norm_backward": group_norm_backward,
    "index_first_axis": rows_of,
    "layer_norm": norm("layer_norm"),
    "layer_norm_backward": norm_backward("layer_norm"),
    "linear": linear,
    "mlp": mlp,
    "pad_input": padded,
    "qkv_projection": qkv_projection,
    "rms_norm": norm("rms_norm"),
    "rms_norm_backward": norm_backward("rms_norm"),
    "scaled_dot_product_attention": sdpa,
    "timestep_embeddings": embeddings,
    "transformer_block": transformer_block,
    "triangle_attention": triangle,
    "unpad_input": unpadded,
}


def results(function, arguments):
    """What a call returns, and gradients where there are any."""
    out = function(*arguments)
    parts = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    leaves = [x for x in dict.fromkeys(arguments) if x.requires_grad]
    if leaves:
        weights = torch.linspace(0.5, 1.5, parts[0].numel(), device=parts[0].device)
        parts += torch.autograd.grad((parts[0].float().reshape(-1) * weights).sum(), leaves)
    return [x.detach().clone() for x in parts]


class PutOff(types.ModuleType):
    """A module that imports others when something reads it, as those that CuPy puts off."""

    def __getattribute__(self, name):
        sys.modules[f"put_off_{len(sys.modules)}"] = types.ModuleType("put_off")
        return super().__getattribute__(name)


def check(name, device):
    """The compiled call gives what the plain one does; the target is the default one on a GPU.

    It is traced again for another shape, after what the first launch on a GPU does: import CuPy.
    """
    torch.compiler.reset()  # functions that share a frame would reach the limit of its graphs
    target = {"backend": "aot_eager"} if device == "cpu" else {}
    for seqlen in SEQLENS:
        function, arguments = CALLS[name](Problem(device, seqlen))
        compiled = torch.compile(function, **target)
        # First compiled: nothing of the process has been set up by a plain call.
        found, right = results(compiled, arguments), results(function, arguments)
        for x, y in zip(found, right, strict=True):
            error, size = (x - y).abs().max().item(), y.abs().max().item()
            # A last place of the result, and of each of its sums of up to 64 products or rows,
            # which the traced path of a CPU adds in another order.
            allowed = size * (torch.finfo(y.dtype).eps + 64 * torch.finfo(torch.float32).eps)
            assert torch.isfinite(x).all() and error <= allowed, (
                f"{name}: compiled differs by {error:.3g} of {size:.3g}, allowed {allowed:.3g}"
            )
        assert results(compiled, arguments)[0].shape == right[0].shape
        import cupy  # noqa: F401

        sys.modules["put_off"] = PutOff("put_off")


if __name__ == "__main__":
    place, *names = sys.argv[1:]
    for each in names:
        check(each, place)
        print(each, flush=True)
