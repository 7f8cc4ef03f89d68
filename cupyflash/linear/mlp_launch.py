"""A whole MLP of small M, ready to be launched."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.array import Array, View
from ..runtime.gpu import capability_of, multiprocessors
from ..runtime.launch import Launch
from ..runtime.scratch import tile_counters
from ..runtime.structs import header
from . import kernels
from .launches import is_aligned, row_norm, row_strides
from .reference import Options

structs = header("linear/params.cuh")


class MlpLaunch(Launch):
    """All blocks are on the GPU at once, so that they can wait for each other."""

    has_scratch = True

    def __init__(
        self, config: kernels.MlpSmallM, device: int, clusters: int, params: structs.MlpParams
    ) -> None:
        super().__init__(config, device, clusters * config.cluster, params)
        self.partials_shape = (clusters, params.rows, -(-params.columns // 4) * 4)
        self.counters = tile_counters(device)

    def run(self, library: Any, stream: Any, like: Array, pointers: Sequence[int]) -> None:
        """``pointers`` are those of the arrays, in the order of `MlpParams`."""
        partials = library.empty_float32(self.partials_shape, like)
        counter, _own = self.counters.address(stream, library, like)
        self(stream, *pointers, library.pointer(partials), counter)


def small_m_mlp(
    views: Mapping[str, View], options: Options, aligned: bool, backend: str | None
) -> MlpLaunch | None:
    """None where there are too many rows, or no room for them in shared memory.

    The views go by the fields of `Arrays`; x and residual are (rows, columns).
    """
    if backend == "simt":
        return None
    x, up, down = views["x"], views["weight"], views["down_weight"]
    steps, processors = row_strides(views), multiprocessors(x.device)
    config = kernels.small_m_mlp(
        x.dtype,
        options.activation,
        "gate_weight" in views,
        x.shape[0],
        (x.shape[1], up.shape[0], down.shape[0]),
        aligned and is_aligned(x, {**steps, "hidden": up.shape[0]}),
        capability_of(x.device),
        processors,
    )
    if config is None:
        return None
    params = structs.MlpParams(
        x_stride=steps["x"],
        up_stride=steps["weight"],
        gate_stride=steps.get("gate_weight", 0),
        down_stride=steps["down_weight"],
        residual_stride=steps.get("residual", 0),
        out_stride=down.shape[0],
        rows=x.shape[0],
        depth=x.shape[1],
        hidden=up.shape[0],
        columns=down.shape[0],
    )
    if "norm_weight" in views:
        params.norm = row_norm(x, views["norm_weight"], options)
    return MlpLaunch(config, x.device, config.clusters(params.hidden, processors), params)
