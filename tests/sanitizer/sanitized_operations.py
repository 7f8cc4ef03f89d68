"""A small case of each kernel beside attention, for compute-sanitizer: ``DTYPE``.

Rows are short and long, groups have one block and several.
"""

import sys

import cupy

import cupyflash
import cupyflash.ops.baselines
from cupyflash import attention_with_cache, environment
from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.ops.decode.embedding import embedding
from cupyflash.ops.decode.sampling import DecodeState, Sampling, sample
from cupyflash.ops.group_norm import plan
from cupyflash.ops.linear import elementwise, launches
from cupyflash.ops.linear.reference import Options
from cupyflash.runtime.lookup import library_of

cupy.cuda.set_allocator(None)
dtype = sys.argv[1]
make = lambda *shape: cupy.random.standard_normal(shape).astype(dtype)
for rows, columns in ((5, 8), (7, 33), (3, 1000), (3, 4096), (2, 20008)):
    x, weight = make(rows, columns), make(columns)
    out, h, stats = cupyflash.layer_norm(x, weight, weight, residual=x, return_stats=True)
    cupyflash.layer_norm_backward(out, h, weight, stats, dresidual=x)
    dropout = {"dropout_p": 0.3, "dropout_seed": 5}
    for residual in (x, x.astype("float32")):
        _, h, stats = cupyflash.rms_norm(x, residual=residual, return_stats=True, **dropout)
        cupyflash.rms_norm_backward(out, h, None, stats, **dropout)
plan.clusters_at_once = lambda config, device: 2  # with 3 groups of samples each
for shape in ((3, 16, 7), (2, 32, 8, 8), (3, 8, 130, 128), (20, 80, 30, 30), (2, 256, 12, 11)):
    x, weight = make(*shape), make(shape[1])
    for _ in range(2):
        options = {"activation": "mish"}
        out, stats = cupyflash.group_norm(x, 2, weight, weight, return_stats=True, **options)
        cupyflash.group_norm_backward(out, x, weight, weight, stats, **options)
        x = cupy.moveaxis(cupy.ascontiguousarray(cupy.moveaxis(x, 1, -1)), -1, 1)
sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 10))
up, down = make(300, 72), make(50, 300)
for rows in (3, 12, 70):
    x = make(2, rows, 72)
    norm = cupyflash.Norm(make(72), make(72))
    for backend in ("sm80", "simt", None):
        with environment.override(backend=backend):
            cupyflash.linear(x, up, make(300), activation="gelu", norm=norm)
            cupyflash.linear(x[..., 1:34], up[:, 1:34], residual=make(2, rows, 300))
            options = {"activation": "silu", "residual": make(2, rows, 50), "norm": norm}
            cupyflash.mlp(x, up, down, make(300), make(50), gate_weight=up, **options)
            cupyflash.mlp(x, up, down, **options)
            rotary = cupyflash.Rotary(make(rows, 10), make(rows, 10))
            cupyflash.qkv_projection(x, up[:240], heads_q=4, heads_kv=1, rotary=rotary)
            rotary = cupyflash.Rotary(make(rows, 32), make(rows, 32))
            cupyflash.qkv_projection(x, up[:256], heads_q=2, heads_kv=1, rotary=rotary)
# What the gradients of projections launch besides.
for size in (8, 333, 20008):
    x = make(size)
    library = library_of(x)
    elementwise.gate(library, "silu", x, x)
    elementwise.gate(library, "gelu", x, x, x)
x, angles = make(2, 5, 4 * 40), make(5, 10)
elementwise.rotate(library, x, angles, angles, None, Options(heads=(2, 1)))
elementwise.rotate(library, x, angles, angles, cupy.full((2, 5), 3, "int32"), Options(heads=(2, 1)))
# linear_small_m_sm90 in clusters of 4 and of 8; blocks alone in theirs that go on to the next tile.
for columns, depth, processors in ((300, 264, 132), (300, 520, 132), (320, 520, 2)):
    launches.multiprocessors = lambda device, count=processors: count
    weight, norm = make(columns, depth), cupyflash.Norm(make(depth), make(depth))
    for rows in (5, 32):
        x = make(rows, depth)
        cupyflash.linear(x, weight, make(columns), activation="gelu")
        cupyflash.linear(x, weight, residual=make(rows, columns), norm=norm)
x = make(3, 333)
sampler.step(x, x, cupy.asarray([1, 2, 3]), seed=1)
cupyflash.ops.baselines.vector_add(x, x)
q = make(2, 9, 3, 40)
steps = cupyflash.ops.baselines
for attention in (steps.naive_attention, steps.fused_attention, steps.flash_attention_1):
    attention(q, q, q, causal=True)

for tokens, heads, head_dim, length in ((1, 2, 64, 300), (3, 5, 72, 300), (8, 1, 256, 4200)):
    q, new = (make(3, n, heads, head_dim) for n in (tokens, 2 * tokens))
    caches = make(3, length, heads, head_dim), make(3, length, heads, head_dim)
    positions = cupy.asarray([0, 17, length - tokens], dtype="int32")
    for batch in (1, 3):
        few = (q[:batch], new[:batch, :tokens], new[:batch, tokens:], *(x[:batch] for x in caches))
        attention_with_cache(*few, positions[:batch])

for columns in (24, 33, 5000):
    logits, tokens = make(3, columns), cupy.arange(3, dtype="int32")
    rows = embedding(tokens, logits, tokens, logits).reshape(3, 1, columns)
    cache_append(rows, rows, make(3, 4, 1, columns), make(3, 4, 1, columns), tokens)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, 7, 0.5, 1)):
        state = DecodeState(tokens.copy(), tokens.copy(), tokens.copy())
        sample(logits, sampling, out=cupy.zeros(3, "int32"), state=state)
cupy.cuda.Device().synchronize()
