"""Running a bundle needs numpy and one engine alone, and without the engine says what to install."""

from pathlib import Path

from blocked_imports import EXPORT, run_blocked

import tide_export


def test_a_bundle_runs_with_numpy_and_onnxruntime_alone(tiny_bundle: Path) -> None:
    code = """
import tide_export
print(tide_export.load(sys.argv[1], threads=1).generate([1, 2, 3], max_new_tokens=8).tokens)
"""
    done = run_blocked((*EXPORT, "tokenizers"), code, str(tiny_bundle))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tide_export.load(tiny_bundle).generate([1, 2, 3], max_new_tokens=8).tokens)


def test_without_an_engine_load_says_what_to_install(tiny_bundle: Path) -> None:
    code = """
import tide_export
try: tide_export.load(sys.argv[1])
except tide_export.TideError as error: sys.exit(f"{type(error).__name__}: {error}")
"""
    done = run_blocked(
        ("onnxruntime",), f"import os; os.environ.pop('TIDE_ONNXRUNTIME', None)\n{code}", str(tiny_bundle)
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ProviderError: ")
    assert "pip install -e '.[cpu]' in the clone" in done.stderr
    assert "Traceback" not in done.stderr
