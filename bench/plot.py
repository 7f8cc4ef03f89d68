"""The pictures of results files, drawn again without measuring anything.

    python -m bench plot bench/results/*.json

The script that wrote a file draws its pictures beside it; files without one are passed over.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from bench.__main__ import SCRIPTS
from bench.lib import harness


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("plot", __doc__, repeats=None, output=False)
    parser.add_argument("results", nargs="+", type=Path, help="files that other scripts wrote")
    for path in parser.parse_args(arguments).results:
        results = json.loads(path.read_text())
        if "command" in results:
            script = results["command"].split()[3]  # python -m bench script
            module = importlib.import_module(f"bench.{SCRIPTS[script]}")
            if draw := getattr(module, "draw", None):
                draw(results, path.with_suffix(".svg"))
    return 0
