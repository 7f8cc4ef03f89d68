"""Arrays of grouped heads: how the reference shares K and V within a group of query heads.

Query head h uses kv head h // group. The heads of q split into (heads_kv, group), and the rows of
a group are stacked into one matrix, so that K and V are never repeated in memory::

    q (batch, seqlen_q, heads_q, head_dim) -> (batch, heads_kv, group, seqlen_q, head_dim)
    k (batch, seqlen_k, heads_kv, head_dim) -> (batch, heads_kv, seqlen_k, head_dim)
"""

from ..runtime.array import Array, array_namespace, compute_dtype


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
