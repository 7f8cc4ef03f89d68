"""Transformer blocks, for compute-sanitizer: ``DTYPE``.

There are several tiles of a matrix, shares of the keys, embeddings, a head and the next token.
"""

import sys

import cupy

import cupyflash

cupy.cuda.set_allocator(None)
dtype, width, hidden, vocab, layers = sys.argv[1], 128, 520, 1000, 2
make = lambda *shape: (0.1 * cupy.random.standard_normal(shape)).astype(dtype)
linear = lambda rows, columns: (make(rows, columns), make(rows))
blocks = [
    cupyflash.BlockWeights(
        make(width),
        make(width),
        *linear(3 * width, width),
        *linear(width, width),
        make(width),
        make(width),
        *linear(hidden, width),
        *linear(width, hidden),
    )
    for _ in range(layers)
]
stack = cupyflash.BlockStack(
    blocks,
    heads=2,
    final_weight=make(width),
    final_bias=make(width),
    head_weight=make(vocab, width),
    token_embedding=make(vocab, width),
    position_embedding=make(200, width),
)
for batch in (1, 2, 3, 8):  # a kernel each
    k_cache, v_cache = make(layers, batch, 200, 2, 64), make(layers, batch, 200, 2, 64)
    tokens = cupy.arange(batch, dtype="int32")
    lengths = cupy.asarray([77, 0, 199, 1, 63, 64, 198, 120][:batch], "int32")
    stack(make(batch, width), k_cache, v_cache, lengths)
    stack.next_logits(tokens, k_cache, v_cache, lengths)
    stack.step(tokens, k_cache, v_cache, lengths)
cupy.cuda.Device().synchronize()
