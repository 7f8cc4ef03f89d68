"""Which way keys and queries take: the bytes that each one moves, and how many attention hides."""

# An all-gather beside attention costs 31 % of its own time (measured on two H100 with NVLink), and
# an all-to-all all of it, because nothing can be computed before it has ended.
NOT_HIDDEN = 0.31
# At least so many bytes of K and V travel together, by collectives and by copies. With fewer, links
# are far from their rate and launches count; a copy costs less than a collective.
LEAST_BYTES = 256 << 20
LEAST_COPIED = 64 << 20
# A copy engine moves so many bytes a second, and each copy costs the host so many seconds.
ENGINE_RATE, COPY_SECONDS = 317e9, 8e-6


def heads_bytes(ranks: int, heads: tuple[int, int], head_dims: tuple[int, int], item: int) -> float:
    """Bytes that each rank sends for each of its tokens in a forward, all-to-all.

    q, k and v go, out comes back, and of each the share of the other ranks. The backward moves as
    many: dout goes, dq, dk and dv come back.
    """
    heads_q, heads_kv = heads
    heads_kv = max(heads_kv, ranks)  # with fewer key heads several ranks get the same one
    return (heads_q + heads_kv) * sum(head_dims) * item * (ranks - 1) / ranks


def keys_bytes(ranks: int, heads_kv: int, head_dims: tuple[int, int], item: int) -> float:
    """Bytes that each rank receives for each of its tokens in a forward, all-gather of k and v.

    The backward moves as many again and, in float32, the gradients.
    """
    return heads_kv * sum(head_dims) * item * (ranks - 1)


def heads_divide(ranks: int, heads_q: int, heads_kv: int) -> bool:
    """Whether each rank can get as many query heads, of whole key heads or of one."""
    even = heads_kv % ranks == 0 or (heads_kv > 0 and ranks % heads_kv == 0)
    return heads_q % ranks == 0 and even


def engines_pay(copies: int, size: int) -> bool:
    """Whether so many copies of ``size`` bytes in all are for the copy engines.

    They take no multiprocessor; but many small ones cost the host more time than the bytes need,
    and a kernel that writes them all is one launch.
    """
    return copies * COPY_SECONDS <= size / ENGINE_RATE


def choose(
    ranks: int,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    item: int,
    *,
    prefers_heads: bool = False,
    share: float = 1.0,
) -> str:
    """The move, "heads" or "keys", that moves fewer bytes that attention does not hide.

    Both passes count, also where no gradient is wanted, so that training and evaluation agree.

    Args:
        heads: of q and of k.
        item: bytes of an element.
        prefers_heads: an option costs more where keys travel.
        share: of the keys of other ranks, those that a rank sees: with a window only they travel.
    """
    if not heads_divide(ranks, *heads):
        return "keys"
    if prefers_heads:
        return "heads"
    across = 2 * heads_bytes(ranks, heads, head_dims, item)
    along = [keys_bytes(ranks, heads[1], head_dims, size) for size in (item, item, 4)]
    return "keys" if NOT_HIDDEN * share * sum(along) < across else "heads"


def heads_at_once(
    tokens: int, heads_kv: int, head_dims: tuple[int, int], item: int, least: int
) -> int:
    """Key heads that travel together: as few as make ``least`` bytes, in groups of one size.

    Args:
        tokens: of the keys that travel.
    """
    one = max(1, tokens * sum(head_dims) * item)
    sizes = (n for n in range(1, heads_kv) if heads_kv % n == 0)
    return next((n for n in sizes if n * one >= least), max(1, heads_kv))
