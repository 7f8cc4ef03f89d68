"""Actions from a `PolicyUnet`: all steps of a sampler, as prepared launches on buffers made once.

What depends on the timestep alone is computed once for all steps, what depends on the condition
alone once a call.
"""

from collections.abc import Callable
from typing import NoReturn

import cupyflash

from ..packages import importing
from ..runtime.checks import integer_within, plain_integer
from ..runtime.scratch import no_garbage_collected
from .diffusion_policy import PolicyUnet, ResidualBlock
from .policy_layers import Block, Convolution, Normalised, Sequences, growth, padded, prepared

with importing(__name__, "torch>=2.7"):
    import torch
    from torch.nn import functional

ALIGNMENT = 8  # channels: rows of 16 bytes


class ActionSampler:
    """Samples actions by a model and a sampler, for one batch size.

    Calls share memory, so those of several threads or streams must not overlap.

    Args:
        model: its weights are read here; after more training make another `ActionSampler`. A
            model in half precision on a GPU is the fastest.
        sampler: the steps of denoising.
        batch, length: of the sequences; the length is a multiple of that which `PolicyUnet` says.
        clip: predicted samples are kept between -clip and clip; None keeps them as they are.
        graph: capture all steps as one CUDA graph at the first call; later ones replay it, which
            takes the host one launch.

    Raises:
        TypeError: sizes that are no integers.
        ValueError: sizes, a graph without a GPU, a sampler with thresholding.
    """

    def __init__(
        self,
        model: PolicyUnet,
        sampler: cupyflash.DiffusionSampler,
        batch: int,
        length: int,
        *,
        clip: float | None = 1.0,
        graph: bool = False,
    ) -> None:
        like = model.time[0].weight
        factor = 2 ** len(model.pool)
        batch = plain_integer("ActionSampler", "batch", batch)
        length = plain_integer("ActionSampler", "length", length)
        if batch < 1 or length < 1 or length % factor:
            fact = f"batch must be at least 1 and length a multiple of {factor}"
            raise ValueError(f"ActionSampler: {fact}, got {batch} and {length}")
        if graph and not like.is_cuda:
            raise ValueError(f"ActionSampler: graph needs a model on a GPU, got {like.device}")
        if sampler.threshold is not None:  # its quantile would count channels that are padding
            fact = "the sampler must have no thresholding, but a clip"
            raise ValueError(f"ActionSampler: {fact}, got threshold {sampler.threshold}")
        self.sampler, self.clip, self.channels = sampler, clip, model.channels
        self.condition_shape, self.graph = (batch, model.condition), None
        self.shape, self.wants_graph = (batch, model.channels, length), graph
        # Calls write to this memory: inference tensors could be written in inference mode only.
        with torch.inference_mode(False), torch.no_grad():
            self._modulation(model, like)
            self._network(model, like)
            padded = (batch, length, self.input.channels)
            self.start = torch.zeros(padded, device=like.device).transpose(1, 2)
            self.noise = None
            if sampler.adds_noise(None):
                noise = torch.empty((sampler.num_steps, *padded), device=like.device)
                self.noise = noise.transpose(2, 3)

    def __reduce__(self) -> NoReturn:
        fact = "cannot be copied or pickled, as its launches know addresses; make another"
        raise TypeError(f"ActionSampler: {fact} of the same model and sampler")

    @torch.no_grad()
    def __call__(
        self, condition: torch.Tensor, noise: torch.Tensor, *, seed: int | None = None
    ) -> torch.Tensor:
        """Actions like ``noise``.

        Args:
            condition: (batch, condition).
            noise: (batch, channels, length), standard normal: where sampling starts.
            seed: of the noise that a sampler such as DDPM adds; another one for each call.

        Raises:
            TypeError: arrays that are no floating-point tensors, a seed that is no integer.
            ValueError: shapes, or no seed where noise is added.
        """
        for name, x, shape in (
            ("condition", condition, self.condition_shape),
            ("noise", noise, self.shape),
        ):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
                fact = f"{name} must be a floating-point torch.Tensor"
                raise TypeError(f"ActionSampler: {fact}, got {got}")
            if x.shape != shape:
                raise ValueError(f"ActionSampler: {name} must be {shape}, got {tuple(x.shape)}")
        if self.noise is not None:
            if seed is None:
                raise ValueError("ActionSampler: the sampler adds noise, needs a seed, got None")
            seed = integer_within("ActionSampler", "seed", seed, -(2**63), 2**64 - 1)  # as torch
            self.noise.normal_(generator=torch.Generator(self.noise.device).manual_seed(seed))
        with torch.cuda.device(self.start.get_device()):  # -1, the CPU, changes nothing
            return self._sample(condition, noise)

    def _sample(self, condition: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        active = functional.mish(condition.to(self.film.dtype)).float()
        torch.addmm(self.bias, active, self.of_condition, out=self.film_of_condition)
        self.start[:, : self.channels].copy_(noise)
        return torch.empty_like(noise).copy_(self._run()[:, : self.channels])

    def _run(self) -> torch.Tensor:
        if not self.wants_graph:
            return self._steps()
        if self.graph is None:
            self._steps()  # compiles, and fills the tables of the sampler
            graph = torch.cuda.CUDAGraph()
            with no_garbage_collected(), torch.cuda.graph(graph):
                self.result = self._steps()
            self.graph = graph
        self.graph.replay()
        return self.result

    def _steps(self) -> torch.Tensor:
        x = self.start
        for step in range(self.sampler.num_steps):
            noise = None if self.noise is None else self.noise[step]
            torch.add(self.film_of_condition, self.film_of_step[step], out=self.film)
            x = self.sampler.step(x, self._predicted(x), step, noise=noise, clip=self.clip)
        return x

    def _predicted(self, x: torch.Tensor) -> torch.Tensor:
        """The noise in x, both (batch, channels, length) with channels innermost."""
        self.input.inside[:, : self.channels].copy_(x[:, : self.channels])
        for call in self.program:
            call()
        self.features.copy_(self.first().transpose(1, 2))
        return self.last()

    def _modulation(self, model: PolicyUnet, like: torch.Tensor) -> None:
        """Scales and shifts of all blocks side by side: Mish and a product of the time and the
        condition, which both can be taken apart.
        """
        layers = [block.modulation[1] for block in _blocks(model)]
        weight = torch.cat([layer.weight for layer in layers]).float()
        of_time, of_condition = weight.t().split([model.embedding, model.condition])
        self.of_condition = of_condition.contiguous()
        self.bias = torch.cat([layer.bias for layer in layers]).float()
        embeddings = self.sampler.embeddings(model.embedding, like=like).to(like.dtype)
        self.film_of_step = functional.mish(model.time(embeddings)).float() @ of_time
        size = self.condition_shape[0], weight.shape[0]
        self.film_of_condition = self.film_of_step.new_empty(size)
        self.film = like.new_empty(size)

    def _network(self, model: PolicyUnet, like: torch.Tensor) -> None:
        """The network as a list of calls, each of which knows where it reads and writes."""
        batch, channels, length = self.shape
        channels += -channels % ALIGNMENT
        make = lambda channels, length: Sequences(batch, channels, length, like)  # noqa: E731
        sizes = [block.skip.out_channels for block in _blocks(model) for _ in range(2)]
        films = iter(self.film[..., None].split(sizes, 1))
        self.program, skips = [], []

        def block(module: ResidualBlock, source: Sequences) -> Sequences:
            out = make(module.skip.out_channels, source.length)
            self.program.append(Block(module, source, next(films), next(films), out.inside))
            return out

        def copy(source: Callable[[], torch.Tensor], to: torch.Tensor) -> None:
            self.program.append(lambda: to.copy_(source()))

        self.input = out = make(channels, length)
        for module, pool in zip(model.down, model.pool):
            skips.append(out := block(module, out))
            pooled = make(out.channels, out.length // 2)
            copy(Convolution(pool, out), pooled.inside)
            out = pooled
        out = block(model.middle, block(model.down[-1], out))
        for module, grow, skip in zip(model.up, model.grow, reversed(skips)):
            both = make(out.channels + skip.channels, skip.length)
            halves = both.inside.split([out.channels, skip.channels], 1)
            copy(growth(grow, out), halves[0])
            copy(lambda skip=skip: skip.inside, halves[1])
            out = block(module, both)
        first, norm, last = model.out
        self.first = Normalised(norm, Convolution(first, out))
        self.features = x = like.new_empty(batch, length, out.channels)
        more = channels - last.out_channels
        weight, bias = padded(last.weight[..., 0], more, 0), padded(last.bias, more)
        self.last = prepared(lambda: cupyflash.linear(x, weight, bias).transpose(1, 2), like)


def _blocks(model: PolicyUnet) -> list[ResidualBlock]:
    """All residual blocks in the order of their calls."""
    return [*model.down, model.middle, *model.up]
