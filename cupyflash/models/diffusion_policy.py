"""A small 1-D U-Net for diffusion policies, with the kernels of this library.

The network predicts the noise in a sequence of actions (batch, channels, length) from a sinusoidal
embedding of the timestep and a condition, such as features of what a robot sees. Its blocks are
Conv1d, GroupNorm and Mish; torch has the convolutions, the rest is one kernel. This is a module for
training; `policy_sampling.ActionSampler` runs it when it is trained.

Source of the architecture: Chi et al., Diffusion Policy, arXiv:2303.04137.
"""

import cupyflash

from ..packages import importing

with importing(__name__, "torch>=2.7"):
    import torch
    from torch import nn
    from torch.nn import functional


class GroupNormMish(nn.GroupNorm):
    """GroupNorm and Mish as one kernel, or with ``fused = False`` as two operations of torch.

    The arguments are those of `torch.nn.GroupNorm`.
    """

    fused = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """mish(group_norm(x)), like x (batch, channels, length)."""
        if not self.fused:
            return functional.mish(super().forward(x))
        return cupyflash.group_norm(
            x, self.num_groups, self.weight, self.bias, eps=self.eps, activation="mish"
        )


class ResidualBlock(nn.Module):
    """Two convolutions, scale and shift by the condition between them.

    Args:
        channels_in, channels: of what comes in and what goes out.
        condition: the number of features by which scale and shift are computed.
        groups: of the norms, a divisor of channels.
    """

    def __init__(self, channels_in: int, channels: int, condition: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv1d(channels_in, channels, 5, padding=2), GroupNormMish(groups, channels)
        )
        self.second = nn.Sequential(
            nn.Conv1d(channels, channels, 5, padding=2), GroupNormMish(groups, channels)
        )
        self.modulation = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * channels))
        self.skip = nn.Conv1d(channels_in, channels, 1)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """(batch, channels, length), of x (batch, channels_in, length) and a condition for each."""
        scale, shift = self.modulation(condition)[..., None].chunk(2, dim=1)
        return self.second(self.first(x) * scale + shift) + self.skip(x)


class PolicyUnet(nn.Module):
    """The network that predicts the noise in a sequence of actions (batch, channels, length).

    The length is a multiple of ``2 ** (len(widths) - 1)``.

    Args:
        channels: numbers of an action.
        condition: features that the caller computes from what the robot sees.
        widths: channels of each level, from the finest to the coarsest; each halves the length.
        embedding: columns of the embedding of a timestep (`DiffusionSampler.embeddings`).
        groups: of the norms, a divisor of all widths.

    Source: Diffusion Policy, arXiv:2303.04137.
    """

    def __init__(
        self,
        channels: int,
        condition: int,
        *,
        widths: tuple[int, ...] = (64, 128, 256),
        embedding: int = 64,
        groups: int = 8,
    ) -> None:
        super().__init__()
        self.channels, self.condition, self.embedding = channels, condition, embedding
        self.time = nn.Sequential(
            nn.Linear(embedding, 4 * embedding), nn.Mish(), nn.Linear(4 * embedding, embedding)
        )
        size = embedding + condition
        block = lambda a, b: ResidualBlock(a, b, size, groups)  # noqa: E731
        self.down = nn.ModuleList(map(block, (channels, *widths[:-1]), widths))
        self.pool = nn.ModuleList(nn.Conv1d(x, x, 3, 2, 1) for x in widths[:-1])
        self.middle = block(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose1d(x, x, 4, 2, 1) for x in widths[:0:-1])
        self.up = nn.ModuleList(
            block(wide + narrow, narrow) for wide, narrow in zip(widths[:0:-1], widths[-2::-1])
        )
        self.out = nn.Sequential(
            nn.Conv1d(widths[0], widths[0], 5, padding=2),
            GroupNormMish(groups, widths[0]),
            nn.Conv1d(widths[0], channels, 1),
        )

    def forward(
        self, x: torch.Tensor, embedding: torch.Tensor, condition: torch.Tensor
    ) -> torch.Tensor:
        """The predicted noise, like x.

        Args:
            x: (batch, channels, length).
            embedding: (embedding,), of the timestep that the whole batch has.
            condition: (batch, condition).
        """
        time = self.time(embedding).expand(x.shape[0], -1)
        condition = torch.cat([time, condition], 1)
        skips = []
        for block, pool in zip(self.down, (*self.pool, nn.Identity())):
            x = block(x, condition)
            skips.append(x)
            x = pool(x)
        x = self.middle(x, condition)
        for block, grow, skip in zip(self.up, self.grow, skips[-2::-1]):
            x = block(torch.cat([grow(x), skip], 1), condition)
        return self.out(x)

    def use_kernels(self, fused: bool) -> None:
        """Whether GroupNorm and Mish are one kernel of this library, or torch's operations."""
        for module in self.modules():
            if isinstance(module, GroupNormMish):
                module.fused = fused
