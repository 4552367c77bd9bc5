"""Mode auto in C++: the mode, tokens and refusals of the Python runtime, for every record a manifest may have."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cpp_builds import CppBuild
from cpp_engine import CppEngine, facts
from cpp_scheduler import CppScheduler
from tiny_engines import TinyLlama
from tiny_model import TinyModel

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.bundle.store import replace_manifest
from tide_export.errors import GenerationError
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits

EXIT = AutoMode("exit", (0.5, 1.0), 0.02, "cpu", 1.25, None, "a processor, 2 threads", {"n": 1})
RECORDS = {
    "none": None,
    "full": replace(EXIT, mode="full"),
    "exit": EXIT,
    "lossless": replace(EXIT, mode="lossless", lossless_speedup=1.5),
    "other provider": replace(EXIT, provider="tensorrt"),
    "two at once": replace(EXIT, slots=2),
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


@pytest.mark.parametrize(("mode", "slots"), [("exit", None), ("exit", 2), ("exit", 8), ("lossless", 2)])
def test_both_languages_take_the_same_mode_for_several(
    tmp_path: Path, tiny_llama: TinyLlama, cpp: CppBuild, mode: str, slots: int | None
) -> None:
    folder = Path(shutil.copytree(tiny_llama.exact, tmp_path / "b"))
    opened = load(folder, threads=1)
    auto = replace(EXIT, mode=mode, lossless_speedup=1.5, slots=slots)
    auto = replace(auto, thresholds=(0.5,) * len(opened.manifest.checkpoints))
    replace_manifest(opened.bundle, replace(opened.manifest, auto=auto))
    engine = load(folder, threads=1)
    for count in (1, 2, 3):
        prompts = [[5, 1, 7], [9] * 20, [33, 4]][:count]
        ids = [argument for prompt in prompts for argument in ("--ids", ",".join(map(str, prompt)))]
        done = subprocess.run([cpp.program, folder, *ids, "--max-new-tokens", "16"], capture_output=True, check=True)
        answer = json.loads(done.stdout)
        expected = [one.tokens for one in engine.generate(prompts, max_new_tokens=16)]
        assert answer["mode"] == (mode if count <= (slots or 1) else "full")
        assert ([answer["tokens"]] if count == 1 else [one["tokens"] for one in answer["sequences"]]) == expected


@pytest.mark.parametrize("slots", [2, 3])
def test_a_scheduler_decides_by_its_slots(
    tmp_path: Path, tiny_llama: TinyLlama, open_cpp: Callable[..., CppEngine], slots: int
) -> None:
    folder = Path(shutil.copytree(tiny_llama.exact, tmp_path / "b"))
    opened = load(folder, threads=1)
    auto = replace(EXIT, thresholds=(0.5,) * len(opened.manifest.checkpoints), slots=2)
    replace_manifest(opened.bundle, replace(opened.manifest, auto=auto))
    limits, found = SchedulerLimits(slots=slots), []
    for scheduler in (load(folder, threads=1).scheduler(limits), CppScheduler(open_cpp(folder), limits)):
        done = scheduler.submit([5, 1, 7], max_new_tokens=16).result()
        found.append((done.tokens, done.stats.exit_layer))
    assert found[0] == found[1]
    assert (min(found[0][1]) < opened.manifest.model.num_layers) == (slots == 2)
