"""The score function of the reference: scale, softcap, ALiBi, bias, and which keys a query sees.

For query row i and key column j, with ``diagonal`` the key on which query 0 sits::

    s_ij = scale * q_i . k_j
    s_ij = text(s_ij)                                        if the caller has written a score
    s_ij = softcap * tanh(s_ij / softcap)                    if softcap > 0
    s_ij = s_ij - slope * |i + diagonal - j|                 if there are ALiBi slopes
    s_ij = s_ij + bias_ij                                    if there is a bias
    s_ij = -inf                                              if the key mask hides key j
    s_ij = -inf                                              if the caller has written a mask
    s_ij = -inf   unless   i + diagonal - left <= j <= i + diagonal + right

Softcap: Gemma 2, arXiv:2408.00118; ALiBi: arXiv:2108.12409; windows: arXiv:2004.05150.

Arrays are NumPy or CuPy arrays of grouped heads. Query head h uses kv head h // group. The heads of
q split into (heads_kv, group), and the rows of a group are stacked into one matrix, so that K and V
are never repeated in memory::

    q (batch, seqlen_q, heads_q, head_dim) -> (batch, heads_kv, group, seqlen_q, head_dim)
    k (batch, seqlen_k, heads_kv, head_dim) -> (batch, heads_kv, seqlen_k, head_dim)
"""

import dataclasses
import math
from collections.abc import Callable

from ...runtime.array import Array, array_namespace, compute_dtype
from ...runtime.structs import header
from .score_text.call import TextCall

Slope = Callable[[Array], Array]

# Where a float32 has no digit left for the score, a bias means "not seen".
BIAS_LIMIT = header("attention/bias.cuh").BIAS_LIMIT


@dataclasses.dataclass(frozen=True)
class ScoreFunction:
    """The formula above for one problem; rows and columns count from the start of the sequence.

    Attributes:
        seqlen_q: number of query rows.
        seqlen_k: number of key columns.
        scale: factor of q . k.
        softcap: bound of the scores, 0 for none.
        diagonal: key on which query 0 sits, negative if it lies before the first key.
        left: keys to the left of the diagonal that a query sees.
        right: keys to the right of the diagonal that a query sees.
        slopes: ALiBi slopes (batch or 1, heads_kv, group) or None.
        bias: (batch, heads_kv, group, seqlen_q, seqlen_k), any axis may be 1, or None; bool: True
            where the query sees the key.
        key_mask: bool (batch, 1, 1, 1, seqlen_k), True where all queries see the key, or None.
        text: a score or a mask of the caller's own, or None.
    """

    seqlen_q: int
    seqlen_k: int
    scale: float
    softcap: float
    diagonal: int
    left: int
    right: int
    slopes: Array | None
    bias: Array | None
    key_mask: Array | None
    text: TextCall | None = None

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        *,
        causal: bool | str = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        bias: Array | None = None,
        key_mask: Array | None = None,
        text: TextCall | None = None,
    ) -> "ScoreFunction":
        """The score of options of ``cupyflash.attention``, for grouped q (b, h, g, m, d), k."""
        seqlen_q, seqlen_k = q.shape[3], k.shape[2]
        unlimited = seqlen_q + seqlen_k
        left, right = (
            unlimited if bound is None or bound < 0 else bound for bound in window or (None, None)
        )
        if alibi_slopes is not None:
            rows = alibi_slopes.shape[0] if alibi_slopes.ndim == 2 else 1
            alibi_slopes = alibi_slopes.astype(q.dtype).reshape(rows, *q.shape[1:3])
        return cls(
            seqlen_q,
            seqlen_k,
            scale=1 / math.sqrt(q.shape[4]) if scale is None else scale,
            softcap=softcap,
            diagonal=0 if causal == "top-left" else seqlen_k - seqlen_q,
            left=left,
            right=0 if causal else right,
            slopes=alibi_slopes,
            bias=None if bias is None else group_bias(bias, k),
            key_mask=None if key_mask is None else key_mask[:, None, None, None],
            text=text,
        )

    def key_range(self, row_begin: int, row_end: int) -> tuple[int, int]:
        """Keys [begin, end) outside of which the queries [row_begin, row_end) see nothing."""
        begin = max(0, row_begin + self.diagonal - self.left)
        end = min(self.seqlen_k, row_end + self.diagonal + self.right)
        return begin, max(begin, end)

    def tile(self, q: Array, k: Array, row: int, col: int) -> tuple[Array, Slope]:
        """Scores of a tile of queries against a tile of keys, and the way of their gradient.

        Args:
            q: (batch, heads_kv, group, m, head_dim), the queries [row, row + m).
            k: (batch, heads_kv, n, head_dim), the keys [col, col + n).

        Returns:
            scores (batch, heads_kv, group, m, n), -inf where the key is not seen, and a function
            that turns their gradient into that of q . k: it multiplies by ``scale``, and by
            1 - tanh² if there is a softcap, or by the derivative of the caller's score.
        """
        xp = array_namespace(q)
        scores = grouped_matmul(q, k.swapaxes(-1, -2))
        scores *= self.scale
        derivative, of_text = self.scale, None
        if self.text is not None:
            scores, of_text = self.text.score(scores, row, col)
        if self.softcap > 0:
            scores = xp.tanh(scores / self.softcap)
            derivative = self.scale * (1 - scores * scores)
            scores *= self.softcap
        rows, cols = q.shape[3], k.shape[2]
        # How far each key lies to the right of the diagonal.
        offset = (xp.arange(cols) + col) - (xp.arange(rows)[:, None] + row + self.diagonal)
        if self.slopes is not None:
            scores -= self.slopes[..., None, None] * xp.abs(offset).astype(scores.dtype)
        if self.bias is not None:
            bias = self.bias[tile_of(self.bias, slice(row, row + rows), slice(col, col + cols))]
            if bias.dtype == bool:
                scores = xp.where(bias, scores, -xp.inf)
            else:
                bias = bias.astype(scores.dtype, copy=False)
                bias = xp.where(bias <= -BIAS_LIMIT, -xp.inf, xp.minimum(bias, BIAS_LIMIT))
                scores = scores + bias
        if self.key_mask is not None:
            scores = xp.where(self.key_mask[..., col : col + cols], scores, -xp.inf)
        if self._needs_mask(row, row + rows, col, col + cols):
            seen = (offset >= -self.left) & (offset <= self.right)
            scores = xp.where(seen, scores, -xp.inf)
        if self.text is not None:
            scores = self.text.mask(scores, row, col)

        def slope(gradient: Array) -> Array:
            gradient = gradient if of_text is None else of_text(gradient)
            gradient *= derivative
            return gradient

        return scores, slope

    def _needs_mask(self, row_begin: int, row_end: int, col_begin: int, col_end: int) -> bool:
        """Whether any query of the tile does not see one of its keys: the two corners decide."""
        leftmost = col_begin - (row_end - 1 + self.diagonal)
        rightmost = col_end - 1 - (row_begin + self.diagonal)
        return leftmost < -self.left or rightmost > self.right


def group_bias(bias: Array, k: Array) -> Array:
    """View of a bias of rank 2 to 4 as (batch, heads_kv, group, seqlen_q, seqlen_k), each or 1."""
    bias = bias[(None,) * (4 - bias.ndim)]
    heads, heads_kv = bias.shape[1], k.shape[1]
    groups = (1, 1) if heads == 1 else (heads_kv, heads // heads_kv if heads_kv else 1)
    return bias.reshape(bias.shape[0], *groups, *bias.shape[2:])


def tile_of(bias: Array, rows: slice, cols: slice) -> tuple:
    """Index of a tile in the last two axes, either of which may be 1."""
    whole = slice(None)
    return ..., whole if bias.shape[-2] == 1 else rows, whole if bias.shape[-1] == 1 else cols


def finite_max(row_max: Array) -> Array:
    """0 where a row sees no key (-inf), so that exp(-inf - max) is 0 and not NaN."""
    return array_namespace(row_max).where(row_max == -float("inf"), 0, row_max)


def positive_sum(row_sum: Array) -> Array:
    """1 where a row sees no key, so that 0 / sum is 0."""
    return array_namespace(row_sum).where(row_sum == 0, 1, row_sum)


def log_sum(row_max: Array, row_sum: Array) -> Array:
    """lse = m + log l, -inf where a row sees no key."""
    xp = array_namespace(row_sum)
    return xp.where(row_sum == 0, -xp.inf, row_max + xp.log(positive_sum(row_sum)))


def heads_first(x: Array) -> Array:
    """View of x (batch, seqlen, heads, head_dim) as (batch, heads, seqlen, head_dim)."""
    return x.astype(compute_dtype(x), copy=False).swapaxes(1, 2)


def group_heads(x: Array, k: Array) -> Array:
    """View of x, which is like q, as (batch, heads_kv, group, seqlen_q, head_dim).

    Query head h uses kv head h // group, so the heads split into (heads_kv, group).
    """
    batch, seqlen, heads, head_dim = x.shape
    heads_kv = k.shape[2]
    x = x.astype(compute_dtype(x), copy=False)
    x = x.reshape(batch, seqlen, heads_kv, heads // heads_kv if heads_kv else 1, head_dim)
    return x.transpose(0, 2, 3, 1, 4)


def group_sinks(sinks: Array, q_groups: Array) -> Array:
    """(heads_q,) as (heads_kv, group, 1), to broadcast against the rows of ``q_groups``."""
    return sinks.reshape(*q_groups.shape[1:3], 1)


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that have length 1 in ``shape``, as of what was broadcast."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


def grouped_matmul(a: Array, b: Array) -> Array:
    """a (batch, heads_kv, group, m, x) times b (batch, heads_kv, x, n), one b for a whole group.

    The rows of a group are stacked into one matrix, so K and V are never repeated in memory.
    """
    batch, heads, group, rows, inner = a.shape
    stacked = a.reshape(batch, heads, group * rows, inner)
    return (stacked @ b).reshape(batch, heads, group, rows, b.shape[-1])


def grouped_matmul_transposed(a: Array, b: Array) -> Array:
    """Sum over the group of aᵀ b: a (…, group, m, n), b (…, group, m, x) -> (…, n, x)."""
    batch, heads, group, rows, cols = a.shape
    stacked_a = a.reshape(batch, heads, group * rows, cols)
    stacked_b = b.reshape(batch, heads, group * rows, b.shape[-1])
    return stacked_a.swapaxes(-1, -2) @ stacked_b


def empty_results(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, Array]:
    """Zero out (like q, with the head_dim of v) and -inf LSE in the compute dtype, and grouped
    views to write them.
    """
    xp, dtype = array_namespace(q), compute_dtype(q)
    batch, seqlen_q, heads_q, _ = q.shape
    out = xp.zeros((*q.shape[:3], v.shape[3]), dtype)
    lse = xp.full((batch, heads_q, seqlen_q), -xp.inf, dtype)
    out_groups = group_heads(out, k)
    return out, lse, out_groups, lse.reshape(out_groups.shape[:4])
