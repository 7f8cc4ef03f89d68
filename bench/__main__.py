"""``python -m bench NAME ...`` runs a benchmark, ``python -m bench`` lists them."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

SCRIPTS = {  # name: module of bench
    "all": "all",
    "attention": "attention.attention",
    "models": "attention.models",
    "ladder": "attention.ladder",
    "compare": "lib.compare",
    "extras": "attention.extras",
    "masks": "attention.masks",
    "memory": "attention.memory",
    "precision": "attention.precision",
    "rounding": "attention.rounding",
    "tuning": "attention.tuning",
    "scores": "scores.scores",
    "host_time": "attention.host_time",
    "parallel": "parallel.parallel",
    "linear": "linear.linear",
    "linear_training": "linear.training",
    "norms": "norm.norms",
    "decode": "decode.decode",
    "transformer": "decode.transformer",
    "gpt2": "gpt2.gpt2",
    "engine": "engine.engine",
    "gguf_folder": "engine.gguf_folder",
    "cache_error": "engine.cache_error",
    "unet": "diffusion.unet",
    "architectures": "transformers.architectures",
    "train_step": "transformers.train_step",
    "train_char_gpt": "transformers.train_char_gpt",
    "profile": "profile.profile",
    "timeline": "profile.timeline",
    "time_budget": "profile.time_budget",
    "plot": "plot",
    "plot_diagrams": "attention.diagrams",
}


def summary(module: str) -> str:
    """The first line of a script's docstring; the script is not imported."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def main() -> int:
    """Exit status of the script; 2 if there is none of this name."""
    name, *arguments = sys.argv[1:] or [""]
    if name in SCRIPTS:
        return importlib.import_module(f"bench.{SCRIPTS[name]}").main(arguments)
    print("python -m bench NAME [-h], with one of these names:", file=sys.stderr)
    for script, module in SCRIPTS.items():
        print(f"  {script:16} {summary(f'bench.{module}')}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
