"""The problems of bench norms: shapes of real models, and each operation in plain torch."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.lib import data

OPS = ("layer_norm", "rms_norm", "group_norm_activation", "diffusion_step")
ACTIVATION, GROUPS = {3: "mish", 4: "silu"}, {3: 8, 4: 32}  # by rank of x

# (..., columns) of the norms, with residual; channels-first shapes of GroupNorm.
SHAPES = {
    "layer_norm": [(16384, 768), (16384, 4096), (8192, 8192), (2048, 65536)],
    "rms_norm": [(16384, 4096), (16384, 8192)],
    "group_norm_activation": [
        (4096, 256, 16),
        (4096, 1024, 4),
        (64, 320, 64, 64),
        (64, 640, 32, 32),
        (8, 128, 256, 256),
    ],
    "diffusion_step": [(4096, 16, 16), (64, 4, 512, 512)],
}


@dataclasses.dataclass(frozen=True)
class NormProblem:
    """One operation on one shape."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    channels_last: bool = False

    def __str__(self) -> str:
        text = f"{self.op} {self.dtype} {'x'.join(map(str, self.shape))}"
        return f"{text} channels-last" if self.channels_last else text

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes that the operation has, "fwd" and "bwd"."""
        return ("fwd",) if self.op == "diffusion_step" else ("fwd", "bwd")

    def bytes(self, direction: str) -> int:
        """Bytes of the tensors that a pass must read and write."""
        one = math.prod(self.shape) * (4 if self.dtype == "float32" else 2)
        reads_and_writes = {
            ("layer_norm", "fwd"): 4,  # x, residual; out, new residual
            ("layer_norm", "bwd"): 4,  # dout, h, gradient of h; dx
            ("group_norm_activation", "fwd"): 2,
            ("group_norm_activation", "bwd"): 3,
            ("diffusion_step", "fwd"): 3,  # noise is drawn inside
        }
        op = "layer_norm" if self.op == "rms_norm" else self.op
        return one * reads_and_writes[op, direction]

    def row(self, **fields: Any) -> dict[str, Any]:
        """A row of a results file."""
        shape = {"shape": list(self.shape), "channels_last": self.channels_last}
        return {"op": self.op, "problem": str(self), "dtype": self.dtype, **shape, **fields}

    def tensors(self) -> tuple[Any, ...]:
        """The arguments of the operation, standard normal; leaves that want a gradient."""
        features = self.shape[-1] if "norm" in self.op and len(self.shape) == 2 else self.shape[1]
        weights = [self._random((features,), seed) for seed in (1, 2)]
        if self.op == "diffusion_step":
            return self._random(self.shape, 0), self._random(self.shape, 1)
        x = self._random(self.shape, 0)
        if self.op == "group_norm_activation":
            return tuple(y.requires_grad_() for y in (x, *weights))
        residual = self._random(self.shape, 3)
        weights = weights[:1] if self.op == "rms_norm" else weights
        return tuple(y.requires_grad_() for y in (x, residual, *weights))

    def gradients(self) -> tuple[Any, ...]:
        """The gradients of the outputs."""
        outputs = 1 if self.op == "group_norm_activation" else 2
        return tuple(self._random(self.shape, 10 + i) for i in range(outputs))

    def function(self, impl: str) -> Callable:
        """The operation on `tensors`; a tuple of results."""
        if impl == "cupyflash":
            return _ours(self.op)
        if impl == "liger":
            return _liger(self.op)
        function = _torch(self.op)
        if impl == "torch-compile":
            import torch
            import torch._functorch.config

            # A compiled backward may overwrite what the forward saved, if it runs only once; here
            # it is timed again and again on one graph.
            torch._functorch.config.donated_buffer = False
            return torch.compile(function, dynamic=False)
        return function

    def results(self, function: Callable, direction: str, wide: bool = False) -> tuple[Any, ...]:
        """Results of a pass, without those that are random; with ``wide`` in float64."""
        import torch

        tensors, gradients = self.tensors(), self.gradients()
        if wide:
            tensors = tuple(y.detach().double().requires_grad_(y.requires_grad) for y in tensors)
            gradients = tuple(y.double() for y in gradients)
        if direction == "fwd":
            with torch.no_grad():
                return tuple(function(*tensors, noisy=False))
        outputs = function(*tensors)
        return torch.autograd.grad(outputs, tensors, gradients)

    @staticmethod
    def without_graph(function: Callable, tensors: tuple[Any, ...]) -> Any:
        """A forward for inference."""
        import torch

        with torch.no_grad():
            return function(*tensors)

    def _random(self, shape: tuple[int, ...], seed: int) -> Any:
        import torch

        x = data.random(shape, self.dtype, seed)
        if self.channels_last and len(shape) == 4:
            return x.to(memory_format=torch.channels_last)
        return x


def problems(ops: Sequence[str], dtypes: Sequence[str]) -> Iterator[NormProblem]:
    """Every op x dtype x shape, images in both memory formats."""
    for op in ops:
        for dtype in dtypes:
            for shape in SHAPES[op]:
                yield NormProblem(op, dtype, shape)
                if op == "group_norm_activation" and len(shape) == 4:
                    yield NormProblem(op, dtype, shape, channels_last=True)


@functools.cache
def _sampler() -> Any:
    import cupyflash

    return cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 100))


STEP = 40  # of the sampler; any step but the last has noise


def _ours(op: str) -> Callable:
    import cupyflash

    def layer_norm(x: Any, residual: Any, weight: Any, bias: Any, noisy: bool = True) -> Any:
        return cupyflash.layer_norm(x, weight, bias, residual=residual)

    def rms_norm(x: Any, residual: Any, weight: Any, noisy: bool = True) -> Any:
        return cupyflash.rms_norm(x, weight, residual=residual)

    def group_norm_activation(x: Any, weight: Any, bias: Any, noisy: bool = True) -> Any:
        activation, groups = ACTIVATION[x.ndim], GROUPS[x.ndim]
        return (cupyflash.group_norm(x, groups, weight, bias, activation=activation),)

    def diffusion_step(x: Any, predicted: Any, noisy: bool = True) -> Any:
        # The last step adds no noise, so that its result can be compared.
        step, seed = (STEP, 1) if noisy else (_sampler().num_steps - 1, None)
        return (_sampler().step(x, predicted, step, seed=seed, clip=1.0),)

    return locals()[op]


def _torch(op: str) -> Callable:
    import torch
    from torch.nn import functional

    def layer_norm(x: Any, residual: Any, weight: Any, bias: Any, noisy: bool = True) -> Any:
        h = x + residual
        return functional.layer_norm(h, h.shape[-1:], weight, bias), h

    def rms_norm(x: Any, residual: Any, weight: Any, noisy: bool = True) -> Any:
        h = x + residual
        return functional.rms_norm(h, h.shape[-1:], weight, 1e-6), h

    def group_norm_activation(x: Any, weight: Any, bias: Any, noisy: bool = True) -> Any:
        activation = getattr(functional, ACTIVATION[x.ndim])
        return (activation(functional.group_norm(x, GROUPS[x.ndim], weight, bias)),)

    def diffusion_step(x: Any, predicted: Any, noisy: bool = True) -> Any:
        step = STEP if noisy else _sampler().num_steps - 1
        a, b, c, d, e, sigma = _sampler().coefficients[step].tolist()
        sample = (a * x + b * predicted).clamp(-1, 1)
        mean = c * sample + d * x + e * predicted
        return (mean + sigma * torch.randn_like(x) if noisy else mean,)

    return locals()[op]


def _liger(op: str) -> Callable:
    """The operation with the kernels of liger_kernel, and torch for the rest."""
    import liger_kernel.ops.fused_add_rms_norm
    import liger_kernel.ops.group_norm
    import liger_kernel.ops.layer_norm
    from torch.nn import functional

    ops = liger_kernel.ops

    def layer_norm(x: Any, residual: Any, weight: Any, bias: Any, noisy: bool = True) -> Any:
        h = x + residual
        return ops.layer_norm.LigerLayerNormFunction.apply(h, weight, bias, 1e-5), h

    def rms_norm(x: Any, residual: Any, weight: Any, noisy: bool = True) -> Any:
        norm = ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction
        return norm.apply(x, residual, weight, 1e-6)

    def group_norm_activation(x: Any, weight: Any, bias: Any, noisy: bool = True) -> Any:
        activation, norm = ACTIVATION[x.ndim], ops.group_norm.LigerGroupNormFunction
        sizes = x.shape[1], GROUPS[x.ndim]
        normal = norm.apply(x.flatten(2), weight, bias, *sizes, 1e-5).view(x.shape)
        return (getattr(functional, activation)(normal),)

    if op not in locals():
        raise NotImplementedError(f"liger has no {op}")
    return locals()[op]
