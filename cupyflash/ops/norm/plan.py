"""LayerNorm and RMSNorm: what calls of one signature share, and how they run."""

import functools
from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import require_grid
from ...runtime.gpu import capability_of, multiprocessors
from ...runtime.launch import Launch, clusters_at_once
from ...runtime.operation import Plan
from ...runtime.rows import Rows, result_strides
from ...runtime.scratch import tile_counters
from ...runtime.structs import header
from . import kernels
from .configs import NormBwd, NormBwdCluster

structs = header("norm/params.cuh")

WEIGHT_BLOCKS = 8  # blocks of norm_bwd_weight for each multiprocessor
MAX_ROWS = 2**30  # the most rows with several axes, as norm_bwd divides by their sizes


def forward_launch(
    function: str,
    tensors: Mapping[str, View],
    weight_dtype: str,
    rms: bool,
    eps: float,
    aligned: bool,
) -> Launch:
    """The forward kernel for x, out and residual, the last only if there is one."""
    x, rows = tensors["x"], Rows(function, tensors)
    vector, capability = aligned and rows.aligned, capability_of(x.device)
    config = kernels.forward(x.dtype, weight_dtype, rms, rows.columns, vector, capability)
    params = structs.NormFwdParams(**rows.strides, shape=rows.shape(eps))
    grid = require_grid(function, config.grid(rows.rows), x.shape)
    return Launch(config, x.device, grid, params)


class ForwardPlan(Plan):
    """The forward kernel for one signature."""

    def __init__(
        self,
        function: str,
        rms: bool,
        library: Any,
        views: Mapping[str, View],
        eps: float,
        aligned: bool,
    ) -> None:
        x, weight = views["x"], views["weight"]
        super().__init__(x.device)
        self.library = library
        self.shape, self.stats_shape = x.shape, (*x.shape[:-1], 2)
        self.strides = result_strides(library, x)
        self.has_residual = "residual" in views
        self.launch = None
        if 0 in x.shape:
            return
        tensors = {"x": x, "out": x._replace(strides=self.strides)}
        if self.has_residual:
            tensors["residual"] = views["residual"]
        self.launch = forward_launch(function, tensors, weight.dtype, rms, eps, aligned)

    def run(
        self, arrays: tuple[Array | None, ...], pointers: list[int], need_stats: bool
    ) -> tuple[Array, Array | None, Array | None]:
        """(out, h, statistics), by one launch.

        Args:
            arrays: x, residual, weight, bias, and None in the place of a seed of dropout.
            pointers: of these arrays.
        """
        x, library, pointer = arrays[0], self.library, self.library.pointer
        out = library.empty(self.shape, self.strides, x)
        h = library.empty(self.shape, self.strides, x) if self.has_residual else None
        stats = library.empty_float32(self.stats_shape, x) if need_stats else None
        if self.launch is not None:
            argument = self.launch.argument(
                *pointers[:4],
                pointer(out),
                pointer(h) if self.has_residual else 0,
                pointer(stats) if need_stats else 0,
            )
            self.launch.start(library.stream(self.device_id), argument)
        return out, h, stats


class BackwardPlan(Plan):
    """The backward kernels for one signature."""

    def __init__(
        self,
        function: str,
        rms: bool,
        library: Any,
        views: Mapping[str, View],
        aligned: bool,
        need_dbias: bool,
    ) -> None:
        x, weight = views["x"], views["weight"]
        super().__init__(x.device)
        self.library, self.need_dbias = library, need_dbias
        self.shape, self.strides = x.shape, result_strides(library, x)
        self.empty = 0 in x.shape
        if self.empty:
            return
        tensors = {name: views[name] for name in ("x", "dout", "dresidual") if name in views}
        rows = Rows(function, {**tensors, "dx": x._replace(strides=self.strides)})
        vector = aligned and rows.aligned
        config = _backward_config(x, weight, rms, rows, vector)
        at_once = multiprocessors(x.device)
        if isinstance(config, NormBwd):
            splits = min(config.grid(rows.rows), at_once)
            launches = [(config, splits)]
        elif config is not None:
            splits = min(rows.rows, clusters_at_once(config, x.device))
            launches = [(config, splits * config.cluster)]
        else:
            config, of_weight = kernels.long_backward(x.dtype, weight.dtype, rms, vector)
            blocks = -(-rows.columns // of_weight.columns)
            splits = min(rows.rows, -(-WEIGHT_BLOCKS * at_once // blocks))
            launches = [(config, rows.rows), (of_weight, blocks * splits)]
        params = structs.NormBwdParams(**rows.strides, shape=rows.shape(0.0), splits=splits)
        self.launches = [
            Launch(config, x.device, require_grid(function, grid, x.shape), params)
            for config, grid in launches
        ]
        gradients = 1 + need_dbias
        self.partials_shape = (gradients, splits, rows.columns)
        # The blocks of a cooperative launch wait for each other and add up themselves.
        self.counters = self.sum = None
        if launches[0][0].cooperative:
            self.counters = tile_counters(x.device)
        else:
            self.sum = sum_launch(weight, x.device, self.partials_shape)

    def run(
        self, arrays: tuple[Array | None, ...], pointers: list[int]
    ) -> tuple[Array, Array, Array | None]:
        """(dx, dweight, dbias).

        Args:
            arrays: dout, x, weight, stats, dresidual and the seed of dropout, which is not used.
            pointers: of these arrays.
        """
        x, weight, library, pointer = arrays[1], arrays[2], self.library, self.library.pointer
        inputs = pointers[:5]
        dx = library.empty(self.shape, self.strides, x)
        if self.empty:
            dweight = library.zeros_like(weight)
            return dx, dweight, library.zeros_like(weight) if self.need_dbias else None
        dweight = library.empty(self.shape[-1:], (1,), weight)
        dbias = library.empty(self.shape[-1:], (1,), weight) if self.need_dbias else None
        partials = library.empty_float32(self.partials_shape, x)
        stream, at_partials = library.stream(self.device_id), pointer(partials)
        sums = pointer(dweight), pointer(dbias) if self.need_dbias else 0
        counter = 0
        if self.counters:
            counter, _own = self.counters.address(stream, library, x)
        for launch in self.launches:
            values = (*inputs, pointer(dx), at_partials, *sums, counter)
            launch.start(stream, launch.argument(*values))
        if self.sum:
            self.sum.start(stream, self.sum.argument(at_partials, *sums))
        return dx, dweight, dbias


def _backward_config(
    x: View, weight: View, rms: bool, rows: Rows, vector: bool
) -> NormBwd | NormBwdCluster | None:
    """The kernel that reads rows once; None where they have to be read twice."""
    if len(rows.sizes) > 1 and rows.rows >= MAX_ROWS:
        return None
    config = kernels.backward(
        x.dtype, weight.dtype, rms, rows.columns, vector, capability_of(x.device)
    )
    if config and config.cooperative and not launches_cooperatively(x.device):
        return None
    return config


def sum_launch(weight: View, device: int, shape: tuple[int, int, int]) -> Launch:
    """The launch that adds up the partial sums of the gradients of weight and bias.

    Args:
        shape: (gradients, rows, columns) of the partial sums.
    """
    gradients, rows, columns = shape
    params = structs.SumPartialsParams(rows=rows, columns=columns)
    blocks = gradients * -(-columns // 32)
    return Launch(kernels.sum_partials(weight.dtype, rows), device, blocks, params)


@functools.cache
def launches_cooperatively(device: int) -> bool:
    """Whether this GPU and its driver run cooperative launches."""
    import cupy

    return bool(cupy.cuda.Device(device).attributes["CooperativeLaunch"])
