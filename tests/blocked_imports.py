"""A Python that cannot import some packages, as on a machine that lacks them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
EXPORT = tuple(re.split(r"[<>=!~\[; ]", requirement)[0].replace("-", "_") for requirement in EXTRAS["export"])
ENGINES = ("onnxruntime", "tensorrt", "tensorrt_rtx", "polygraphy", "cuda")

BLOCK = """
import importlib, sys
sys.path.insert(0, {root!r})

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_blocked(blocked: tuple[str, ...], code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs code in a Python that cannot import these packages."""
    script = BLOCK.format(root=str(ROOT), blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
