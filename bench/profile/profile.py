"""Every kernel of the project at a typical size: what it is made of, its counters, and its bound.

    python -m bench profile            all of it; needs a GPU and the right to read its counters
    python -m bench profile --static   without counters, and so without a GPU

The static part comes from the cubins: registers, spills, shared memory, and the instructions of the
inner loop by kind (sass.py says which loop that is). The counters come from ncu, which runs each
call of cases.py once, with a cold L2. Where ncu cannot read them, the reason and what to
do are printed, and the exit status is 1. The results are bench/results/profile.json, the tables
profile.md, and the picture roofline.svg; without counters profile_static.json and .md.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.lib import counters, dry_run, harness
from bench.lib.counters import Counted
from bench.lib.launches import configurations, recorded
from bench.lib.report import Row
from bench.profile import cases as profile_cases
from bench.profile import report as profile_report
from bench.profile import sass
from bench.profile.pictures import draw_roofline
from cupyflash import jit

FACT, LEFT_OUT = "fact: ", "left out: "  # the beginnings of lines that `child` prints
ARCH = "sm_90a"  # of the static part where there is no GPU
PROTOCOL = (
    "ncu --clock-control none, every kernel replayed with caches flushed before each pass; least "
    "bytes are the inputs of the call read once and its results written once; the loop is that of "
    "bench.profile.sass"
)
PERCENT = ".avg.pct_of_peak_sustained_"
# Units that can bound a kernel, by what the page calls them: the metric is a share of their peak.
UNITS = {
    "tensor": "sm__pipe_tensor_cycles_active" + PERCENT + "active",
    "MUFU": "sm__inst_executed_pipe_xu" + PERCENT + "active",
    "FMA": "sm__pipe_fma_cycles_active" + PERCENT + "active",
    "ALU": "sm__inst_executed_pipe_alu" + PERCENT + "active",
    "issue": "smsp__issue_active" + PERCENT + "active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared" + PERCENT + "elapsed",
    "L2": "lts__throughput" + PERCENT + "elapsed",
    "DRAM": "dram__throughput" + PERCENT + "elapsed",
}
TIME, L2_BYTES = "gpu__time_duration.sum", "lts__t_bytes.sum"
OCCUPANCY = "sm__warps_active" + PERCENT + "active"
TENSOR_OPS = tuple(
    f"sm__ops_path_tensor_src_{kind}.sum" for kind in ("bf16_dst_fp32", "fp16", "tf32_dst_fp32")
)
FP32_OPS = {
    f"smsp__sass_thread_inst_executed_op_{kind}_pred_on.sum": flops
    for kind, flops in (("ffma", 2), ("fadd", 1), ("fmul", 1))
}
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
METRICS = (
    *(TIME, *counters.DRAM_BYTES, L2_BYTES, OCCUPANCY),
    *UNITS.values(),
    *(*TENSOR_OPS, *FP32_OPS),
    *(STALLED.format(reason) for reason in STALLS),
)


def child(only: str, quick: bool) -> None:
    """Run every case once, and once for ncu; print the facts of each."""
    import cupy

    arch = jit.arch_of(divmod(int(cupy.cuda.Device().compute_capability), 10))
    for found, case in facts(only, quick, arch):
        with profile_cases.forced(found["case"]), counters.measured():
            case.run()
        print(FACT + json.dumps(found), flush=True)


def facts(only: str, quick: bool, arch: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """What is known of each case: bytes, operations, and the kernels in the order of launches."""
    with configurations() as by_function:
        for label, make in profile_cases.cases(only, quick):
            try:
                with profile_cases.forced(label):
                    case = make()
                    case.run()  # makes the plan
                    results, launches = recorded(case.run)
            except Exception as error:  # the rest is worth knowing all the same
                print(f"{LEFT_OUT}{label}: {type(error).__name__}: {error}", flush=True)
                continue
            configs = [by_function[launch.function] for launch, _ in launches]
            found = {"case": label, "least_bytes": case.least_bytes(results)}
            found |= {"workspace_bytes": case.workspace, "flops": case.flops}
            yield found | {"kernels": [sass.static_facts(x, arch) for x in configs]}, case


def facts_without_gpu(only: str, quick: bool) -> list[dict[str, Any]]:
    """The facts of all cases, of plans that are made without a GPU."""
    with dry_run.hopper():
        return [found for found, _ in facts(only, quick, ARCH)]


def facts_of(output: str) -> list[dict[str, Any]]:
    """The facts that `child` printed."""
    lines = output.splitlines()
    return [json.loads(line[len(FACT) :]) for line in lines if line.startswith(FACT)]


def kernels_of(facts: Sequence[dict[str, Any]]) -> list[Row]:
    """The static facts of each kernel, once."""
    found = {x["expression"]: x for of_case in facts for x in of_case["kernels"]}
    return list(found.values())


def rows_of(facts: Sequence[dict[str, Any]], launches: Sequence[Counted]) -> list[Row]:
    """A row for each launch of each case; kernels of torch are left out.

    Raises:
        RuntimeError: these are not the launches of the cases.
    """
    expected = [(of_case["case"], kernel) for of_case in facts for kernel in of_case["kernels"]]
    names = [kernel["lowered_name"] for _, kernel in expected]
    known = set(names)
    ours = [launch for launch in launches if launch.name in known]
    if names != [launch.name for launch in ours]:
        fact = f"{len(names)} launches were expected, in their order"
        raise RuntimeError(f"bench profile: {fact}, ncu saw {len(ours)}")
    return [
        {"case": case, **{x: kernel[x] for x in ("kernel", "expression")}, **dynamic_row(launch)}
        for (case, kernel), launch in zip(expected, ours)
    ]


def dynamic_row(launch: Counted) -> Row:
    """The counters of a launch by shorter names."""
    values = launch.values
    of = {unit: values.get(metric) for unit, metric in UNITS.items()}
    stalls = {reason: values.get(STALLED.format(reason), 0.0) for reason in STALLS}
    total = sum(stalls.values()) or 1.0
    shares = sorted(((x / total, reason) for reason, x in stalls.items()), reverse=True)[:3]
    microseconds = values[TIME] / 1e3
    return {
        "us": round(microseconds, 2),
        "dram_bytes": counters.dram_bytes([launch]),
        "l2_bytes": values.get(L2_BYTES),
        "occupancy": _rounded(values.get(OCCUPANCY)),
        "busy": {unit: _rounded(share) for unit, share in of.items()},
        "stalls": {reason: round(100 * share, 1) for share, reason in shares},
        "tensor_flops": sum(values.get(metric, 0.0) for metric in TENSOR_OPS),
        "fp32_flops": sum(n * values.get(metric, 0.0) for metric, n in FP32_OPS.items()),
        "bound": bound_of(microseconds, of, shares[0][1]),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def bound_of(microseconds: float, busy: dict[str, float | None], stall: str) -> str:
    """The bound by `profile_report.RULE`."""
    if microseconds < profile_report.SHORT_US:
        return "launch"
    shares = {unit: share or 0.0 for unit, share in busy.items()}
    if shares.get("DRAM", 0.0) >= profile_report.BOUND_FROM:
        shares.pop("L2", None)
    unit = max(shares, key=shares.__getitem__)
    if shares[unit] >= profile_report.BOUND_FROM:
        return unit
    return f"latency ({stall.replace('_', ' ')})"


def case_rows(facts: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[Row]:
    """The traffic of each case beside the least possible."""
    found = []
    for of_case in facts:
        mine = [row for row in rows if row["case"] == of_case["case"]]
        dram = sum(row["dram_bytes"] for row in mine)
        found.append(
            {
                **{name: value for name, value in of_case.items() if name != "kernels"},
                "us": round(sum(row["us"] for row in mine), 1),
                "dram_bytes": dram,
                "l2_bytes": sum(row["l2_bytes"] or 0 for row in mine),
                "ratio": round(dram / of_case["least_bytes"], 3),
                "of_all": round(dram / (of_case["least_bytes"] + of_case["workspace_bytes"]), 3),
            }
        )
    return found


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("profile", __doc__, repeats=None)
    parser.add_argument("--static", action="store_true", help="without counters")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name contains it")
    parser.add_argument("--quick", action="store_true", help="attention at 4096 only")
    parser.add_argument("--child", action="store_true", help="(internal) the process below ncu")
    options = parser.parse_args(arguments)
    if options.child:
        child(options.only, options.quick)
        return 0
    gpu = not options.static
    run = harness.Run("profile", PROTOCOL, arguments, options, timed=False, on_gpu=gpu)
    run.out.width = run.out.width if run.out.is_terminal else profile_report.WIDTH
    status, launches = 0, []
    if not options.static:
        try:
            metrics = counters.available(METRICS)
            forwarded = ["--child", "--only", options.only, *["--quick"] * options.quick]
            output = counters.output_of("profile", forwarded, metrics)
            facts, launches = facts_of(output), counters.launches_of(output)
            failed = [line for line in output.splitlines() if line.startswith(LEFT_OUT)]
            status = int(bool(failed))
            for line in failed:
                run.notes.say(line)
        except RuntimeError as error:
            run.notes.say(f"no counters: {error}")
            status = 1
    if not launches:  # beside the results with counters, if there are any
        run.file = f"{run.file}_static"
        facts = facts_without_gpu(options.only, options.quick)
    kernels = run.fields["kernels"] = kernels_of(facts)
    if any(kernel["loop"] is None for kernel in kernels):
        run.notes.say(sass.NO_DISASSEMBLER)
    if launches:
        run.rows = rows_of(facts, launches)
        run.fields |= ceilings() | {"cases": case_rows(facts, run.rows)}
    run.write()
    if launches:
        run.draw(draw)
    tables = profile_report.tables(run.fields, run.rows)
    path = profile_report.write_page(run, tables)
    return run.finish(*tables.values(), f"wrote {path}") or status


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture; the committed one is roofline.svg."""
    path = path.with_name(path.name.replace("profile", "roofline"))
    draw_roofline(results, profile_report.longest(results["rows"]), path)


def ceilings() -> dict[str, float]:
    """The roofs of the picture: matrix product and copy, measured, and float32 on CUDA cores."""
    import cupy

    from bench.lib.timing import Timer

    facts = cupy.cuda.Device().attributes
    # 128 lanes of a multiprocessor, two operations each; ClockRate is in kHz.
    fp32 = facts["MultiProcessorCount"] * 128 * 2 * facts["ClockRate"] / 1e9
    return {**Timer(5).ceilings(), "fp32_tflops": round(fp32, 1)}
