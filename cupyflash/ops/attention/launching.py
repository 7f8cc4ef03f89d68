"""The launch of a kernel of attention, with the captures of a text in front of its pointers."""

import ctypes

from ...runtime.launch import Launch
from .kernels import AttentionKernel
from .problem import Problem


class AttentionLaunch(Launch):
    """The launch of one kernel of a pass, on a grid that follows from its configuration.

    Attributes:
        captures_at: where the captures of a text stand in the argument, which is made without them.
        captures_end: behind them; the same where the kernel takes none.
    """

    captures_at = captures_end = 0

    def __init__(self, config: AttentionKernel, problem: Problem, params: ctypes.Structure) -> None:
        super().__init__(config, problem.device, config.grid(params.shape), params)
        self.find_captures(config)

    @classmethod
    def on_grid(
        cls, config: AttentionKernel, device: int, grid: int, params: ctypes.Structure
    ) -> "AttentionLaunch":
        """A launch of ``grid`` blocks, whatever the configuration says."""
        launch = cls.__new__(cls)
        Launch.__init__(launch, config, device, grid, params)
        launch.find_captures(config)
        return launch

    def find_captures(self, config: AttentionKernel) -> None:
        """Sets the place of the captures: before the pointers, so behind tensor maps."""
        if config.captures_size:
            base = getattr(config.params, "base", None)
            self.captures_at = base.offset if base else 0
            self.captures_end = self.captures_at + config.captures_size

    def with_captures(self, argument: bytes, captures: bytes) -> bytes:
        """The argument with the captures in their place, if the kernel takes any."""
        if self.captures_end == 0:
            return argument
        return argument[: self.captures_at] + captures + argument[self.captures_at :]

    def without_captures(self, argument: bytes) -> bytes:
        """The argument without its captures, for a kernel that takes none."""
        return argument[: self.captures_at] + argument[self.captures_end :]
