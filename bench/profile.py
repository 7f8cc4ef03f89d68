"""Every kernel of the project at a typical size: its registers, its counters, and what bounds it.

    python -m bench.profile            the static part, and the counters where ncu can read them
    python -m bench.profile --static   without counters; needs no GPU
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench import counters, harness, profile_cases
from bench.dry_run import kernels_loaded
from cupyflash import jit

FACT = "fact: "
STALLS = (
    *("barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
    "warpgroup_arrive",
)


def child(only: str, quick: bool) -> None:
    """Run every case for ncu, and print facts of the cases and of their kernels."""
    import cupy

    arch = jit.arch_of(divmod(int(cupy.cuda.Device().compute_capability), 10))

    def calls() -> Iterator[tuple[str, Any]]:
        for label, make in profile_cases.cases(only, quick):
            with profile_cases.forced(label), kernels_loaded() as found:
                case = make()
                least = case.least_bytes(case.run())
                yield label, case.run
            kernels = [fact_of(jit.build(config, arch), config) for config in dict.fromkeys(found)]
            fact = {"label": label, "least": least, "flops": case.flops, "kernels": kernels}
            print(FACT + json.dumps(fact), flush=True)

    counters.profile(calls())


def fact_of(built: jit.Built, config: Any) -> dict[str, Any]:
    return {
        "lowered_name": built.lowered_name,
        "expression": built.expression,
        "path": str(built.path),
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "threads": config.threads,
        "dynamic_shared": config.shared_memory,
    }


if __name__ == "__main__":
    child(sys.argv[2] if len(sys.argv) > 2 else "", False)
