"""Denoising with the U-Net of a diffusion policy beside torch eager and torch.compile.

    python -m bench unet --output unet

All steps of a sampler from noise to actions: 7 actions, horizon 16, channels 256, 512 and 1024, a
condition of 128 numbers. The peers run the same model with torch's operations, one compiled
function for network and update, embeddings and noise made before the loop, cuDNN in its benchmark
mode; with and without CUDA graphs. With ours, a graph has the whole loop in it.

`ms` is what a caller waits: the host's clock from the call to the end on the GPU. `gpu_ms` is by
CUDA events with launch cost hidden; null where there are too many launches for that. Results of
DDIM, which draws nothing, are compared with float64 first; an implementation that is wrong is
reported and left out. The exit status is 1 if cupyflash was wrong anywhere.
"""

import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench.lib import data, harness, report
from bench.lib.report import Row

PEERS = ("torch-eager", "torch-compile", "torch-compile-graphs")
IMPLS = (*PEERS, "cupyflash", "cupyflash-graphs")
SAMPLERS = {"ddim": 16, "ddpm": 100}  # steps
TRAINING_STEPS = 100
ACTIONS, HORIZON, CONDITION = 7, 16, 128
MODEL = {"widths": (256, 512, 1024), "embedding": 256, "groups": 8}
PROTOCOL = (
    "ms: the host's clock from the call to the end on the GPU, all implementations in turn, median "
    "of {repeats}; gpu_ms: " + harness.CLOCK + ", null where the host could not keep ahead"
)


@dataclasses.dataclass(frozen=True)
class UnetProblem:
    """All steps of a sampler for a batch of sequences."""

    dtype: str
    sampler: str
    batch: int

    def __str__(self) -> str:
        return f"{self.sampler}-{self.steps} {self.dtype} B={self.batch}"

    @property
    def steps(self) -> int:
        """The number of steps of the sampler."""
        return SAMPLERS[self.sampler]

    def row(self, **fields: Any) -> Row:
        """A row of a results file."""
        shape = {"steps": self.steps, "actions": ACTIONS, "horizon": HORIZON, **MODEL}
        return {"op": "unet_denoising", "problem": str(self), **dataclasses.asdict(self)} | {
            **shape,
            **fields,
        }

    def sampler_of(self, kind: str) -> Any:
        """A sampler of this kind, with the steps of the problem."""
        import cupyflash

        betas = cupyflash.beta_schedule("cosine", TRAINING_STEPS)
        return getattr(cupyflash.DiffusionSampler, kind)(betas, self.steps)

    @functools.cached_property
    def model(self) -> Any:
        """The model with random weights, which are the same for all implementations."""
        import torch

        from cupyflash.models.diffusion_policy import PolicyUnet

        torch.manual_seed(0)
        model = PolicyUnet(ACTIONS, CONDITION, **MODEL).requires_grad_(False)
        model.use_kernels(False)
        return model.to(data.DEVICE, getattr(torch, self.dtype))

    @functools.cached_property
    def inputs(self) -> tuple[Any, Any]:
        """Condition, and the noise to begin with."""
        import torch

        device = data.DEVICE
        generator = torch.Generator(device).manual_seed(1)
        shapes = ((self.batch, CONDITION), (self.batch, ACTIONS, HORIZON))
        return tuple(torch.randn(x, device=device, generator=generator) for x in shapes)

    def loops(self, impl: str) -> Callable[[str], Callable[[], Any]]:
        """The loop of an implementation, by the kind of the sampler."""
        if impl in PEERS:
            step = peer_step(self.model, impl)
            return lambda kind: self.peer_loop(kind, step, self.inputs)
        return functools.partial(self.our_loop, graph=impl == "cupyflash-graphs")

    def our_loop(self, kind: str, graph: bool) -> Callable[[], Any]:
        """With `ActionSampler`."""
        from cupyflash.models.policy_sampling import ActionSampler

        sampler = self.sampler_of(kind)
        sample = ActionSampler(self.model, sampler, self.batch, HORIZON, graph=graph)
        return lambda: sample(*self.inputs, seed=3)

    def peer_loop(self, kind: str, step: Callable, inputs: tuple[Any, Any]) -> Callable[[], Any]:
        """With torch alone, in the precision of ``inputs``."""
        import torch

        condition, start = inputs
        sampler = self.sampler_of(kind)
        embeddings = sampler.embeddings(MODEL["embedding"], like=start).to(start.dtype)
        coefficients = torch.from_numpy(sampler.coefficients).to(start)
        coefficients = torch.nn.functional.pad(coefficients, (0, 2))  # rows of 32 bytes
        zeros = torch.zeros(1, device=start.device).expand(self.steps, *start.shape).contiguous()

        @torch.no_grad()
        def loop() -> Any:
            fresh = torch.randn_like(zeros) if kind == "ddpm" else zeros
            x = start
            for i in range(self.steps):
                x = step(x, embeddings[i], coefficients[i], condition, fresh[i])
            return x

        return loop


def peer_step(model: Any, impl: str) -> Callable:
    """Network and update of one step."""
    import torch

    dtype = model.time[0].weight.dtype

    def step(x: Any, embedding: Any, c: Any, condition: Any, fresh: Any) -> Any:
        predicted = model(x.to(dtype), embedding.to(dtype), condition.to(dtype)).to(x.dtype)
        sample = (c[0] * x + c[1] * predicted).clamp(-1, 1)
        return c[2] * sample + c[3] * x + c[4] * predicted + c[5] * fresh

    if impl == "torch-eager":
        return step
    if impl == "torch-compile":
        return torch.compile(step, dynamic=False)
    replay = torch.compile(step, dynamic=False, mode="reduce-overhead")

    def graph_step(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return replay(*arguments).clone()  # the next replay overwrites its result

    return graph_step


def checked_call(problem: UnetProblem, impl: str) -> Callable[[], Any]:
    """One implementation, after its result of DDIM was compared with float64."""
    loops, (wide, eager) = problem.loops(impl), reference(problem)
    harness.assert_right(loops("ddim")(), wide, eager)
    return loops(problem.sampler)


@functools.lru_cache(maxsize=1)
def reference(problem: UnetProblem) -> tuple[Any, Any]:
    """Actions by DDIM in float64, and those of eager."""
    model = copy.deepcopy(problem.model).double()
    inputs = tuple(x.double() for x in problem.inputs)
    exact = problem.peer_loop("ddim", peer_step(model, "torch-eager"), inputs)()
    return exact, problem.loops("torch-eager")("ddim")()


def measure(run: harness.Run, problem: UnetProblem, impls: Sequence[str]) -> None:
    """Add a row for each implementation that is right."""
    from bench.lib.timing import medians

    calls = run.right(str(problem), impls, functools.partial(checked_call, problem))
    repeats = run.timer.repeats
    waited = {impl: functools.partial(wait_ms, call) for impl, call in calls.items()}
    waited, timings = medians(waited, repeats), run.timer.compare(calls)
    for impl, timing in timings.items():
        gpu_ms = round(timing.ms, 4) if timing.late <= timing.repeats // 4 else None
        row = problem.row(impl=impl, ms=round(waited[impl], 4), gpu_ms=gpu_ms)
        run.rows.append({**row, "repeats": repeats, "sm_mhz": run.timer.sm_mhz})


def wait_ms(call: Callable[[], Any]) -> float:
    """How long a caller waits until the GPU is done."""
    import torch

    wait = torch.cuda.synchronize if data.DEVICE == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def table_of(rows: list[Row]) -> Table:
    """problem | implementation | ms | on the GPU | of a step | times as fast as each peer."""
    figures = ("ms", "GPU ms", "us/step", "vs eager", "vs compile", "vs graphs")
    table = report.new_table("problem", "impl", right=figures)
    for problem, group in itertools.groupby(rows, lambda row: row["problem"]):
        cells = list(group)
        ms = {row["impl"]: row["ms"] for row in cells}
        for number, row in enumerate(cells):
            ratios = [f"{ms[peer] / row['ms']:.2f}" if peer in ms else "" for peer in PEERS]
            table.add_row(
                "" if number else problem,
                row["impl"],
                f"{row['ms']:.2f}",
                "" if row["gpu_ms"] is None else f"{row['gpu_ms']:.2f}",
                f"{1e3 * row['ms'] / row['steps']:.0f}",
                *ratios,
                style="bold" if row["impl"].startswith("cupyflash") else "",
            )
    return table


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("unet", __doc__, repeats=10, impls=IMPLS, dtypes=True)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 256])
    options = parser.parse_args(arguments)
    import torch

    torch.backends.cudnn.benchmark = True
    run = harness.Run("unet", PROTOCOL, arguments, options)
    cells = itertools.product(options.dtype, options.samplers, options.batch)
    for problem in run.each(itertools.starmap(UnetProblem, cells)):
        measure(run, problem, options.impls)
    return run.finish(table_of(run.rows))
