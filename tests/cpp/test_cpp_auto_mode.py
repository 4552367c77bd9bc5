"""Mode auto in C++: the mode, tokens and refusals of the Python runtime, for every record a manifest may have."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cpp_builds import CppBuild
from cpp_engine import CppEngine, facts
from tiny_model import TinyModel

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.bundle.store import replace_manifest
from tide_export.errors import GenerationError
from tide_export.runtime.engine import load

EXIT = AutoMode("exit", (0.5, 1.0), 0.02, "cpu", 1.25, None, "a processor, 2 threads", {"n": 1})
RECORDS = {
    "none": None,
    "full": replace(EXIT, mode="full"),
    "exit": EXIT,
    "lossless": replace(EXIT, mode="lossless", lossless_speedup=1.5),
    "other provider": replace(EXIT, provider="tensorrt"),
}
OPTIONS = [
    {},
    {"threshold": 0.4},
    {"min_layers": 3},
    {"max_pending": 2},
    {"mode": "exit"},
]


@pytest.mark.parametrize("record", RECORDS)
def test_both_languages_take_the_same_mode(tmp_path: Path, open_cpp: Callable[..., CppEngine], record: str) -> None:
    folder = TinyModel().write(tmp_path / "b", min_layers=4)
    opened = load(folder, threads=1)
    drafting = Drafting((0.1, 0.1), 4, 0, (0.4, 0.8), DEFAULT_VERIFY_COSTS, {})
    replace_manifest(opened.bundle, replace(opened.manifest, auto=RECORDS[record], drafting=drafting))
    python, cpp = load(folder, threads=1), open_cpp(folder)
    for options in OPTIONS:
        ours, theirs = (engine.generate([5, 1, 7], max_new_tokens=24, **options) for engine in (cpp, python))
        assert facts(ours) == facts(theirs), options
    for options in ({"prompt_lookup": 2}, {"compaction_threshold": 0.5}):
        said = []
        for engine in (python, cpp):
            with pytest.raises(GenerationError) as error:
                engine.generate([5], **options)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_the_program_says_which_mode_it_took(tmp_path: Path, cpp: CppBuild) -> None:
    folder = TinyModel().write(tmp_path / "b")
    bundle = load(folder).bundle

    def mode(*arguments: str) -> str:
        done = subprocess.run([cpp.program, folder, *arguments], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)["mode"]

    assert mode("--ids", "5,1") == "full"
    replace_manifest(bundle, replace(bundle.manifest, auto=EXIT))
    assert mode("--ids", "5,1") == "exit"
    assert mode("--ids", "5,1", "--mode", "lossless") == "lossless"
