"""Running a bundle needs numpy and one engine alone, and without the engine says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

import tide_export

EXPORT_ONLY = (
    "torch",
    "transformers",
    "pydantic",
    "rich",
    "tokenizers",
    "safetensors",
    "onnx",
    "onnx_ir",
    "onnxscript",
)

BLOCK = """
import sys
sys.path.insert(0, {root!r})

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_blocked(blocked: tuple[str, ...], code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    root = str(Path(tide_export.__file__).parents[1])
    script = BLOCK.format(root=root, blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)


def test_a_bundle_runs_with_numpy_and_onnxruntime_alone(tiny_bundle: Path) -> None:
    code = """
import tide_export
print(tide_export.load(sys.argv[1], threads=1).generate([1, 2, 3], 8).tokens)
"""
    done = run_blocked(EXPORT_ONLY, code, str(tiny_bundle))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tide_export.load(tiny_bundle).generate([1, 2, 3], 8).tokens)


def test_the_block_blocks() -> None:
    assert run_blocked(("torch",), "import torch").returncode == 1


@pytest.mark.parametrize("module", ["engine", "providers", "session", "state", "sampling", "stats"])
def test_every_runtime_module_imports_without_an_engine(module: str) -> None:
    done = run_blocked((*EXPORT_ONLY, "onnxruntime"), f"import tide_export.runtime.{module}")
    assert done.returncode == 0, done.stderr


def test_without_an_engine_load_says_what_to_install(tiny_bundle: Path) -> None:
    code = """
import tide_export
try: tide_export.load(sys.argv[1])
except tide_export.TideError as error: sys.exit(f"{type(error).__name__}: {error}")
"""
    done = run_blocked(("onnxruntime",), code, str(tiny_bundle))
    assert done.returncode == 1
    assert done.stderr.startswith("ProviderError: ")
    assert "pip install tide_export[cpu]" in done.stderr
    assert "Traceback" not in done.stderr
