"""``python -m bench NAME ...`` runs a benchmark, ``python -m bench`` lists them."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

SCRIPTS = (
    *("all", "attention", "models", "ladder", "compare", "extras", "masks", "train_step"),
    *("train_char_gpt", "norms", "linear", "linear_training", "gpt2", "unet", "decode"),
    *("transformer", "host_time", "profile", "timeline", "time_budget", "memory"),
    *("architectures", "precision", "rounding", "tuning", "plot", "plot_diagrams", "plot_length"),
)


def summary(module: str) -> str:
    """The first line of a script's docstring; the script is not imported."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def main() -> int:
    """Exit status of the script; 2 if there is none of this name."""
    name, *arguments = sys.argv[1:] or [""]
    if name in SCRIPTS:
        return importlib.import_module(f"bench.{name}").main(arguments)
    print("python -m bench NAME [-h], with one of these names:", file=sys.stderr)
    for script in SCRIPTS:
        print(f"  {script:16} {summary(f'bench.{script}')}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
