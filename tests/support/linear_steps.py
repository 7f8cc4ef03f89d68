"""Projections by separate operations of torch: what the tests of gradients compare with."""

import dataclasses

import numpy
from arrays import normal, stored

import cupyflash

HEADS, HEAD_DIM = (4, 2), 8
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Problem:
    """A projection with all that it has.

    Attributes:
        function: "linear", "mlp" or "qkv_projection".
        tensors: the arguments by name; those of the norm are norm_weight and norm_bias.
        activation, rms, interleaved: options.
    """

    function: str
    tensors: dict
    activation: str | None = None
    rms: bool = False
    interleaved: bool = False

    def ours(self, **tensors):
        """By cupyflash; q, k and v as one."""
        norm = None
        if "norm_weight" in tensors:
            weight, bias = tensors.pop("norm_weight"), tensors.pop("norm_bias", None)
            norm = cupyflash.Norm(weight, bias, EPS, self.rms)
        if self.function != "qkv_projection":
            function = getattr(cupyflash, self.function)
            return function(**tensors, norm=norm, activation=self.activation)
        rotary = None
        if "cos" in tensors:
            angles = tensors.pop("cos"), tensors.pop("sin"), tensors.pop("positions", None)
            rotary = cupyflash.Rotary(*angles, self.interleaved)
        heads = {"heads_q": HEADS[0], "heads_kv": HEADS[1]}
        return joined(cupyflash.qkv_projection(**tensors, **heads, norm=norm, rotary=rotary))

    def theirs(self, products=None, **tensors):
        """By torch, one operation after the other.

        Args:
            products: gets (x, weight, out) of each product.
        """
        from torch.nn import functional

        def product(x, prefix=""):
            names = (f"{prefix}weight", f"{prefix}bias")
            weight, bias = (tensors.get(name) for name in names)
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
            out = functional.linear(x, weight, bias)
            if products is not None:
                out.retain_grad()
                products.append((x, weight, out))
            return out

        x = self._normalised(tensors)
        if self.function == "qkv_projection":
            return self._turned(product(x), tensors)
        prefix = "up_" if self.function == "mlp" else ""
        out = product(x, prefix)
        if "gate_weight" in tensors:
            out = self._activated(product(x, "gate_")) * out
        else:
            out = self._activated(out)
        if self.function == "mlp":
            out = product(out, "down_")
        return out + tensors["residual"] if "residual" in tensors else out

    def _normalised(self, tensors):
        x = tensors["x"]
        if "norm_weight" not in tensors:
            return x
        import torch

        wide = torch.promote_types(x.dtype, torch.float32)
        h, bias = x.to(wide), tensors.get("norm_bias")
        if not self.rms:
            h = h - h.mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
        h = h * tensors["norm_weight"].to(wide)
        return (h if bias is None else h + bias.to(wide)).to(x.dtype)

    def _activated(self, z):
        from torch.nn import functional

        if self.activation == "gelu_tanh":
            return functional.gelu(z, approximate="tanh")
        return getattr(functional, self.activation)(z) if self.activation else z

    def _turned(self, out, tensors):
        import torch

        out = out.unflatten(-1, (-1, HEAD_DIM))
        if "cos" not in tensors:
            return out.flatten(-2)
        positions = tensors.get("positions")
        if positions is None:
            positions = torch.arange(out.shape[-3], device=out.device).expand(out.shape[:-2])
        cos, sin = (tensors[name].to(out.dtype)[positions.long()] for name in ("cos", "sin"))
        cos, sin, half = cos[..., None, :], sin[..., None, :], cos.shape[-1]
        rest = out[..., : sum(HEADS), 2 * half :]
        if self.interleaved:
            first, second = (out[..., : sum(HEADS), i : 2 * half : 2] for i in range(2))
        else:
            first = out[..., : sum(HEADS), :half]
            second = out[..., : sum(HEADS), half : 2 * half]
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        turned = torch.cat((turned, rest), -1)
        return torch.cat((turned, out[..., sum(HEADS) :, :]), -2).flatten(-2)


def joined(parts):
    """q, k and v as the one array that they are parts of."""
    import torch

    return torch.cat(parts, -2).flatten(-2)


def problem_of(
    target,
    function,
    dtype,
    *,
    rows=(2, 5),
    sizes=(40, 64, 24),
    activation=None,
    gated=False,
    norm="",
    bias=True,
    residual=False,
    weights=None,
    turned=0.0,
    positions="",
    interleaved=False,
    storage="contiguous",
):
    """Random tensors.

    Args:
        sizes: d_in, columns of the (first) product, and d_out of an MLP.
        norm: "layer", "rms" or "".
        weights: dtype of weights and biases, of which the values fit into ``dtype``.
        turned: part of head_dim that is turned.
        positions: dtype.
    """
    depth, columns, last = sizes
    out = last if function == "mlp" else columns

    def make(shape, seed):
        return stored(target, normal(shape, seed), dtype, storage)

    def weight(shape, seed):
        values = stored(target, shape[-1] ** -0.5 * normal(shape, seed), dtype)
        return values.float() if weights == "float32" else values

    first = "up_" if function == "mlp" else ""
    tensors = {"x": make((*rows, depth), 0), f"{first}weight": weight((columns, depth), 1)}
    if function == "mlp":
        tensors["down_weight"] = weight((last, columns), 2)
        if gated:
            tensors["gate_weight"] = weight((columns, depth), 3)
    if bias:
        names = [name.replace("weight", "bias") for name in tensors if "weight" in name]
        sizes_of = {"down_bias": last}
        for i, name in enumerate(names):
            tensors[name] = weight((sizes_of.get(name, columns),), 4 + i)
    if residual:
        tensors["residual"] = make((*rows, out), 10)
    if norm:
        tensors["norm_weight"] = 1 + weight((depth,), 11)
        if norm == "layer":
            tensors["norm_bias"] = weight((depth,), 12)
    if turned:
        half = int(turned * HEAD_DIM) // 2
        angles = 10 * normal((max(50, *rows), half), 13)
        for name in ("cos", "sin"):
            tensors[name] = stored(target, getattr(numpy, name)(angles), dtype)
        if positions:
            chosen = numpy.random.default_rng(14).integers(0, 50, rows)
            tensors["positions"] = target.array(chosen.astype(positions))
    return Problem(function, tensors, activation, norm == "rms", interleaved)


FIXED = ("cos", "sin", "positions")  # they have no gradients


def leaves(tensors, dtype=None):
    """The tensors as leaves, in another dtype if one is given."""

    def leaf(name, x):
        if name == "positions":
            return x
        x = x.detach() if dtype is None else x.detach().to(dtype)
        return x.requires_grad_(name not in FIXED)

    return {name: leaf(name, x) for name, x in tensors.items()}


def results(function, tensors, dout):
    """out and the gradients by name."""
    import torch

    out = function(**tensors)
    wanted = {name: x for name, x in tensors.items() if name not in FIXED}
    found = torch.autograd.grad(out, list(wanted.values()), dout.to(out.dtype))
    return {"out": out} | {f"d{name}": x for name, x in zip(wanted, found, strict=True)}


def largest_sum(problem, dout):
    """The largest sum of magnitudes in a product, forward or backward, in float64."""
    import torch

    products, largest = [], 0.0
    tensors = leaves(problem.tensors, torch.float64)
    problem.theirs(products, **tensors).backward(dout.double())
    for x, weight, out in products:
        x, weight, dz = (y.abs() for y in (x.detach(), weight.detach(), out.grad))
        rows, of_rows = (y.reshape(-1, y.shape[-1]) for y in (dz, x))
        sums = (x @ weight.t(), dz @ weight, rows.t() @ of_rows, rows.sum(0))
        largest = max(largest, *(float(y.max()) for y in sums))
    return largest
