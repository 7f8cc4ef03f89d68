"""Attention on pairs, in the signature of `cuequivariance_torch.triangle_attention`."""

from typing import Any, NoReturn

from ...runtime.array import Array, array_namespace, compiling
from ...runtime.checks import plain_flag
from ...runtime.lookup import from_foreign, library_of, to_foreign
from ...runtime.scratch import array_operations
from .foreign import refuse, refuses_foreign
from .operations import FORWARD
from .options import Extras, plain_options

FUNCTION = "triangle_attention"


@refuses_foreign
def triangle_attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    mask: Array | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """Attention in each of N rows of a pair representation, with one bias for all rows.

    softmax(scale * q k^T + bias) v over the keys that the mask shows. The mask and the bias are
    read apart, so nothing of the size of the scores of all rows is ever in memory. The arrays are
    those of `cupyflash.attention`, and q, k and v are not copied. With torch tensors everything but
    the mask has a gradient. That of the bias is summed over the rows in registers and in a fixed
    order in float16 and bfloat16 with D up to 64 on tensor cores, which do not take unaligned
    arrays, and by atomics otherwise; by atomics also with up to 64 queries and keys and D up to 32,
    if there is no mask. Under ``torch.use_deterministic_algorithms(True)`` equal calls give equal
    bits in all gradients, or the backward raises.

    Differences from cuequivariance_torch: a query whose keys are all masked gives 0 and an LSE of
    -inf, not the mean of v; no tensor is cast, but for a mask of integers; a mask of floats is
    refused, since one that is added to scores (0 and -1e9) would be taken for its opposite; the
    maxima are not returned.

    Args:
        q: (B, N, H, Q, D), float16, bfloat16 or float32; D from 1 to 256.
        k: (B, N, H, K, D), dtype of q.
        v: like k; its head_dim may be another one.
        bias: (B, 1, H, Q, K), dtype of q or float32.
        mask: (B, N, 1, 1, K), bool or integers; a key is seen where it is not 0.
        scale: of q k^T; default ``1 / sqrt(D)``.
        return_aux: also return the LSE.

        With B = 1, all arrays may lack the first axis. With B above 1, out and the gradients are
        copied once, because each of the B problems is a call of its own.

    Returns:
        out (B, N, H, Q, D) with the head_dim of v; with return_aux, (out, lse, None), the lse
        float32 (B, N, H, Q, 1), natural logarithm. They lack the first axis if q does.

    Raises:
        TypeError, ValueError, NotImplementedError: as `cupyflash.attention`.

    Source: Highly accurate protein structure prediction with AlphaFold, Nature 596 (2021), whose
    triangle attention this is.
    """
    if foreign:
        refuse(triangle_attention, foreign)
    if return_aux is not False:
        return_aux = plain_flag(FUNCTION, "return_aux", return_aux)
    arrays = {"q": q, "k": k, "v": v, "bias": bias} | ({} if mask is None else {"mask": mask})
    if not compiling() and library_of(q) is None:
        known = {
            name: x if library_of(x) else from_foreign(FUNCTION, x, name)
            for name, x in arrays.items()
        }
        found = triangle_attention(**known, scale=scale, return_aux=return_aux)
        if return_aux:
            return to_foreign(found[0], q), to_foreign(found[1], q), None
        return to_foreign(found, q)
    _check_shapes(arrays)
    batched = len(q.shape) == 5
    problems = _problems(arrays) if batched else [arrays]
    results = [_attention(x, scale, return_aux) for x in problems]
    outs, lses = zip(*results)
    out, lse = outs[0], lses[0]
    if batched:
        out = _joined(outs)
        lse = _joined(lses) if return_aux else None
    return (out, lse[..., None], None) if return_aux else out


def _attention(
    arrays: dict[str, Array], scale: float | None, return_lse: bool
) -> tuple[Array, Array | None]:
    """(out, lse) of arrays of one pair representation, without the axis B."""
    mask = arrays.get("mask")
    if mask is not None:
        mask = mask[:, 0, 0]
        if not str(mask.dtype).endswith("bool"):
            with array_operations(mask):
                mask = mask != 0
    extras = Extras(bias=arrays["bias"], key_mask=mask)
    options = plain_options(FUNCTION, scale=scale, layout="bhsd")
    tensors = (arrays["q"], arrays["k"], arrays["v"])
    return FORWARD(FUNCTION, (*tensors, *extras), (options, return_lse))


def _check_shapes(arrays: dict[str, Array]) -> None:
    """The axes that `cupyflash.attention` does not see.

    Raises:
        TypeError: something has no shape; a mask of floats.
        ValueError: the axes of bias or mask, or B, do not fit.
    """
    for name, x in arrays.items():
        if not hasattr(x, "shape"):
            raise TypeError(f"{FUNCTION}: {name} must be an array, got {type(x).__name__}")
    dtype = str(getattr(arrays.get("mask"), "dtype", "bool")).removeprefix("torch.")
    if not dtype.startswith(("bool", "int", "uint")):
        fact = "mask must be bool or integers, True or 1 where a key is seen: of floats, write "
        fact += "mask != 0 for 1 and 0, or mask == 0 for those added to scores (0 and -1e9)"
        raise TypeError(f"{FUNCTION}: {fact}, got {dtype}")
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}
    rank = len(shapes["q"])
    if rank not in (4, 5) or any(len(shape) != rank for shape in shapes.values()):
        fact = "all arrays must have five axes, or four without B"
        raise ValueError(f"{FUNCTION}: {fact}, got {shapes}")
    batch, rows, _, queries, _ = (1, *shapes["q"])[-5:]
    keys = shapes["k"][-2]
    if rank == 5 and (batch == 0 or any(shape[0] != batch for shape in shapes.values())):
        fact = "all arrays must have the same first axis B, of at least 1"
        raise ValueError(f"{FUNCTION}: {fact}, got {shapes}")
    bias = (1, shapes["q"][-3], queries, keys)
    if shapes["bias"][-4:] != bias:
        fact = f"bias must be (B, 1, H, Q, K) with (1, H, Q, K) = {bias}"
        raise ValueError(f"{FUNCTION}: {fact}, got {shapes}")
    mask = (rows, 1, 1, keys)
    if "mask" in shapes and shapes["mask"][-4:] != mask:
        fact = f"mask must be (B, N, 1, 1, K) with (N, 1, 1, K) = {mask}"
        raise ValueError(f"{FUNCTION}: {fact}, got {shapes}")


def _problems(arrays: dict[str, Array]) -> list[dict[str, Array]]:
    """The arrays of each of the B problems, as views."""
    batch = arrays["q"].shape[0]
    if batch == 1:  # a reshape, since torch copies in the gradient of an index
        return [{name: x.reshape(tuple(x.shape[1:])) for name, x in arrays.items()}]
    return [{name: x[b] for name, x in arrays.items()} for b in range(batch)]


def _joined(results: tuple[Array, ...]) -> Array:
    """The results of the B problems in one array."""
    if len(results) == 1:
        return results[0][None]
    with array_operations(results[0]):
        return _namespace(results[0]).stack(results)


def _namespace(x: Array) -> Any:
    """torch, CuPy or NumPy."""
    if type(x).__module__.partition(".")[0] in ("numpy", "cupy"):
        return array_namespace(x)
    import torch

    return torch
