"""compute-sanitizer on a small case of each kernel (GPU only, where the tool is installed)."""

import os
import shutil
import subprocess
import sys

import pytest
from matrix import each, each_library

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")

# Without CuPy's pool each array is an allocation of its own, so memcheck knows its end.
PROGRAM = """
import sys
import cupy, cupyflash
from cupyflash import environment
from cupyflash.ops.attention import dispatch, few_tiles
from cupyflash.testing import make_inputs, make_varlen_inputs
cupy.cuda.set_allocator(None)
backend, dtype = sys.argv[1:]
hopper = cupy.cuda.Device().compute_capability == "90"
widest = 256 if backend != "fp16x3" else 192 if hopper else 128  # of the backward
with environment.override(backend=backend):
    for many in (few_tiles.MANY, 0):  # with 0, forwards have the tiles for many tiles
        few_tiles.MANY = many
        dispatch._forward_plans.clear()
        for head_dim, window in ((64, None), (40, (30, 10)), (128, None), (widest, None)):
            x = make_inputs("cupy", dtype, batch=1, seqlen_q=70, seqlen_k=150, heads_q=2,
                            heads_kv=1, head_dim=head_dim)
            options = {"causal": "top-left", "window": window}
            out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
            for deterministic in (False, True):
                cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse,
                                             deterministic=deterministic, **options)
    # Heads of 32 columns; sequences of one tile, and a bias that they share.
    for seqlen_q, seqlen_k, head_dim in ((70, 150, 32), (49, 49, 32), (33, 64, 64),
                                         (33, 64, 80), (33, 64, 128)):
        x = make_inputs("cupy", dtype, batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2,
                        head_dim=head_dim)
        for bias in (None, cupy.ones((2, seqlen_q, seqlen_k), "float32")):
            out, lse = cupyflash.attention(x.q, x.k, x.v, bias=bias, return_lse=True)
            cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, bias=bias,
                                         bias_grad=bias is not None)
    # Few queries, whose keys blocks share; packed sequences; a bias, sinks and dropout.
    x = make_inputs("cupy", dtype, batch=1, seqlen_q=20, seqlen_k=1200, heads_q=2, head_dim=128)
    cupyflash.attention(x.q, x.k, x.v)
    x = make_varlen_inputs("cupy", dtype, (70, 0, 150), heads_q=2, heads_kv=1)
    lengths = x.cu_seqlens_q, x.cu_seqlens_k, 150, 150
    cupyflash.flash_attn_varlen_func(x.q, x.k, x.v, *lengths, causal=True)
    x = make_inputs("cupy", dtype, batch=2, seqlen_q=70, seqlen_k=150, heads_q=2)
    used = cupy.asarray([50, 70], "int32")
    options = {"bias": cupy.ones((1, 2, 70, 150), dtype), "sinks": cupy.ones(2, "float32"),
               "dropout_p": 0.1, "dropout_seed": 1, "seqused_q": used, "seqused_k": used}
    out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
    cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, bias_grad=True, **options)
    # A bias whose rows are multiples of 16 bytes: sm_90 reads it through a tensor map, and stores
    # its gradient if it is not broadcast.
    for head_dim in (64, 96, widest):
        for keys, shape in ((150, (270, 152)), (152, (2, 2, 270, 152))):
            x = make_inputs("cupy", dtype, batch=2, seqlen_q=270, seqlen_k=keys, heads_q=2,
                            head_dim=head_dim)
            options = {"bias": cupy.ones(shape, dtype)[..., :keys]}
            out, lse = cupyflash.attention(x.q, x.k, x.v, return_lse=True, **options)
            cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, bias_grad=keys == 152,
                                         **options)
    # Blocks that take whole heads, of one key tile and of three.
    rules = sys.modules["cupyflash.ops.attention.sm90.backward"]
    rules.SAVED_KEYS = rules.HEADS_L2_FRACTION = 1e9
    for head_dim in (32, 64, 96, 128):
        for seqlen_k, causal in ((120, False), (270, False), (270, True)):
            x = make_inputs("cupy", dtype, batch=2, seqlen_q=140, seqlen_k=seqlen_k, heads_q=2,
                            head_dim=head_dim)
            out, lse = cupyflash.attention(x.q, x.k, x.v, causal=causal, return_lse=True)
            cupyflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, causal=causal)
cupy.cuda.Device().synchronize()
"""

# The operations beside attention: short rows and long ones, groups of one block and of several.
NORMS = """
import sys
import cupy, cupyflash, cupyflash.ops.baselines
from cupyflash import environment
from cupyflash.runtime.lookup import library_of
from cupyflash.ops.linear import elementwise, launches
from cupyflash.ops.linear.reference import Options
from cupyflash.ops.group_norm import plan
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
    launches.multiprocessors = lambda device: processors
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
from cupyflash import attention_with_cache
for tokens, heads, head_dim, length in ((1, 2, 64, 300), (3, 5, 72, 300), (8, 1, 256, 4200)):
    q, new = (make(3, n, heads, head_dim) for n in (tokens, 2 * tokens))
    caches = make(3, length, heads, head_dim), make(3, length, heads, head_dim)
    positions = cupy.asarray([0, 17, length - tokens], dtype="int32")
    for batch in (1, 3):
        few = (q[:batch], new[:batch, :tokens], new[:batch, tokens:], *(x[:batch] for x in caches))
        attention_with_cache(*few, positions[:batch])
from cupyflash.ops.decode.embedding import embedding
from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.ops.decode.sampling import DecodeState, Sampling, sample
for columns in (24, 33, 5000):
    logits, tokens = make(3, columns), cupy.arange(3, dtype="int32")
    rows = embedding(tokens, logits, tokens, logits).reshape(3, 1, columns)
    cache_append(rows, rows, make(3, 4, 1, columns), make(3, 4, 1, columns), tokens)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, 7, 0.5, 1)):
        state = DecodeState(tokens.copy(), tokens.copy(), tokens.copy())
        sample(logits, sampling, out=cupy.zeros(3, "int32"), state=state)
cupy.cuda.Device().synchronize()
"""

# Transformer blocks: several tiles of a matrix, shares of the keys, embeddings, head, next token.
BLOCKS = """
import sys
import cupy, cupyflash
cupy.cuda.set_allocator(None)
dtype, width, hidden, vocab, layers = sys.argv[1], 128, 520, 1000, 2
make = lambda *shape: (0.1 * cupy.random.standard_normal(shape)).astype(dtype)
linear = lambda rows, columns: (make(rows, columns), make(rows))
blocks = [
    cupyflash.BlockWeights(make(width), make(width), *linear(3 * width, width),
                           *linear(width, width), make(width), make(width),
                           *linear(hidden, width), *linear(width, hidden))
    for _ in range(layers)
]
stack = cupyflash.BlockStack(
    blocks, heads=2, final_weight=make(width), final_bias=make(width),
    head_weight=make(vocab, width), token_embedding=make(vocab, width),
    position_embedding=make(200, width))
for batch in (1, 2, 3, 8):  # a kernel each
    k_cache, v_cache = make(layers, batch, 200, 2, 64), make(layers, batch, 200, 2, 64)
    tokens = cupy.arange(batch, dtype="int32")
    lengths = cupy.asarray([77, 0, 199, 1, 63, 64, 198, 120][:batch], "int32")
    stack(make(batch, width), k_cache, v_cache, lengths)
    stack.next_logits(tokens, k_cache, v_cache, lengths)
    stack.step(tokens, k_cache, v_cache, lengths)
cupy.cuda.Device().synchronize()
"""


@each_library(library="cupy", device="cuda")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sanitizer_of_transformer_blocks(target, dtype, record_property):
    """Not racecheck: it does not see that __syncwarp() orders a warp's reads of a tile before the
    arrival of its first lane, and so reports every copy into a tile of the ring (bench/notes).
    """
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    run = [sys.executable, "-c", BLOCKS, dtype]
    sanitize(run, "memcheck", f"transformer {dtype}", "kns=decode", record_property)


@each_library(library="cupy", device="cuda")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_beside_attention(target, tool, record_property):
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    run = [sys.executable, "-c", NORMS, "float16", tool]
    kernels = "norm|partials|diffusion|linear|mlp|rotary|vector|naive|fused|embedding|cache|sample"
    kernels += "|flash_decode|dropout_add"
    sanitize(run, tool, "norms", f"regex={kernels}", record_property)


@each(library="cupy", device="cuda")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(target, tool, record_property):
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    run = [sys.executable, "-c", PROGRAM, target.backend, target.dtypes[-1]]
    sanitize(run, tool, target.backend, "regex=flash|sequence_maps|fp16x3", record_property)


def sanitize(run, tool, name, kernels, record_property):
    """Run a program under the tool; the report gets the result under this name."""
    subprocess.run(run, check=True)  # compiles outside of the tool
    options = ["--tool", tool, "--error-exitcode", "99", "--kernel-name", kernels]
    done = subprocess.run(
        [SANITIZER, *options, *run], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    result = "clean" if done.returncode == 0 else f"exit code {done.returncode}"
    record_property("sanitizer", f"{tool} {name}: {result}")
    assert result == "clean", done.stdout[-5000:]
