"""GPT-2 transformer blocks for one new token of a few sequences: one launch, for all layers.

A block is pre-norm: h = x + proj(attention(qkv(ln1(x)))), then h + down(gelu(up(ln2(h)))), with the
tanh form of GELU and biases everywhere. One persistent cooperative kernel runs a whole stack of
them; what takes its time is to read the weights once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...runtime.array import Array, ArrayT
from ...runtime.checks import plain_flag
from .stack import BLOCK, BLOCKS, FORWARD, LOGITS, NEXT_TOKENS, TOKENS, Stack


class BlockWeights(NamedTuple):
    """The weights of a block, matrices (out_features, in_features) as in torch.nn.Linear.

    Attributes:
        ln1_weight, ln1_bias: (width,), the norm before the attention.
        qkv_weight, qkv_bias: (3 * width, width), (3 * width,): rows of q, then k, then v.
        proj_weight, proj_bias: (width, width), (width,).
        ln2_weight, ln2_bias: (width,), the norm before the MLP.
        up_weight, up_bias: (hidden, width), (hidden,).
        down_weight, down_bias: (width, hidden), (width,).
    """

    ln1_weight: Array
    ln1_bias: Array
    qkv_weight: Array
    qkv_bias: Array
    proj_weight: Array
    proj_bias: Array
    ln2_weight: Array
    ln2_bias: Array
    up_weight: Array
    up_bias: Array
    down_weight: Array
    down_bias: Array


def transformer_block(
    x: ArrayT,
    weights: BlockWeights,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    heads: int,
    eps: float = 1e-5,
) -> ArrayT:
    """One block for one new token of each sequence, whose key and value go into the caches.

    One launch. All floating-point arrays are of one dtype, contiguous where not said otherwise.
    Before it is captured into a CUDA graph it must have been called once with these weights; what
    is prepared for them is kept as long as they live. torch.compile breaks its graph at the call.

    Args:
        x: (batch, width), batch at most 8, width at most 1920, float16, bfloat16 or float32; any
            row stride.
        weights: of the block.
        k_cache: (batch, max_length, heads, head_dim), head_dim = width / heads a multiple of 8 up
            to 128; any strides that are multiples of 16 bytes, the last dimension contiguous.
        v_cache: like k_cache.
        lengths: int32 (batch,): tokens in the caches before this one. The new key and value are
            written at that row, and lengths + 1 keys are attended to. Where a length is less than 0
            or not less than max_length, the result is NaN and nothing is written.
        heads: of the attention.
        eps: added to the variances.

    Returns:
        (batch, width), like x.

    Raises:
        TypeError: dtypes, libraries, no numbers.
        ValueError: shapes, strides, alignment, devices, heads, eps; a cache shares memory with
            another array of the call.
        NotImplementedError: a gradient is wanted; the GPU is older than Turing, or cannot take the
            width.

    Source: Language Models are Unsupervised Multitask Learners (GPT-2); the attention is that of
    arXiv:2205.14135 with the keys shared out over blocks.
    """
    arrays = (k_cache, v_cache, lengths, x)
    return BLOCK("transformer_block", arrays, (weights, heads, eps))[0]


class BlockStack:
    """Blocks one after the other, optionally with embeddings, last norm and head, in one launch.

    Weights are checked once, here; the arrays must stay as and where they are.

    Args:
        blocks: 1 to 64, of the same sizes.
        heads: of the attention.
        eps: added to the variances.
        final_weight, final_bias: (width,), the norm before the head.
        head_weight: (vocab, width); may be token_embedding.
        token_embedding: (vocab, width).
        position_embedding: (positions, width).

    Raises:
        As `transformer_block`; ValueError also where some but not all of the last five are given.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        *,
        heads: int,
        eps: float = 1e-5,
        final_weight: Array | None = None,
        final_bias: Array | None = None,
        head_weight: Array | None = None,
        token_embedding: Array | None = None,
        position_embedding: Array | None = None,
    ) -> None:
        ends = {
            "final_weight": final_weight,
            "final_bias": final_bias,
            "head_weight": head_weight,
            "token_embedding": token_embedding,
            "position_embedding": position_embedding,
        }
        self._stack = Stack("BlockStack", blocks, ends, heads, eps)

    def __call__(self, x: ArrayT, k_cache: Array, v_cache: Array, lengths: Array) -> ArrayT:
        """x after all blocks; the caches are (layers, batch, max_length, heads, head_dim)."""
        return BLOCKS("BlockStack", (k_cache, v_cache, lengths, x), (self._stack, FORWARD))[0]

    def next_logits(self, tokens: ArrayT, k_cache: Array, v_cache: Array, lengths: Array) -> ArrayT:
        """Logits of the token after ``tokens``, int32 (batch,): float32 (batch, vocab).

        A token out of range or a position without embedding gives NaN and writes nothing.
        """
        self._stack.require_ends("next_logits")
        arrays = (k_cache, v_cache, lengths, tokens)
        return TOKENS("next_logits", arrays, (self._stack, LOGITS))[0]

    def step(
        self,
        tokens: ArrayT,
        k_cache: Array,
        v_cache: Array,
        lengths: Array,
        *,
        out: Array | None = None,
        advance: bool = True,
    ) -> ArrayT:
        """Greedy decoding: writes the tokens with the largest logits, and adds 1 to the lengths.

        So that a loop of calls, or of replays of a CUDA graph, needs nothing of the host. A
        sequence that cannot go on (see `next_logits`) gets token -1 and keeps its length; one with
        a NaN or infinity among its logits, or with nothing but -infinity, gets token -1.

        Args:
            tokens: int32 (batch,), those to append now.
            out: int32 (batch,); tokens itself by default.
            advance: whether to change the lengths.

        Returns:
            out.
        """
        self._stack.require_ends("step")
        advance = plain_flag("step", "advance", advance)
        apart = () if out is None or out is tokens else (out,)
        call = NEXT_TOKENS[advance, bool(apart)]
        arrays = (k_cache, v_cache, lengths, tokens, *apart)
        return TOKENS("step", arrays, (self._stack, call))[0]
