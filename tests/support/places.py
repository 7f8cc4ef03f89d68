"""Where the checkout lies, and what finds the package and these modules in another process."""

import os
from pathlib import Path

ROOT = next(x for x in Path(__file__).resolve().parents if (x / "pyproject.toml").exists())
SUPPORT = ROOT / "tests" / "support"
PYTHONPATH = os.pathsep.join(map(str, (ROOT, SUPPORT)))
