"""Mode auto: the mode that was measured to pay, full depth where nothing was, and the same options whatever it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundles import with_manifest
from tiny_engines import TinyLlama
from tiny_model import TinyModel

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.bundle.store import replace_manifest
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.thresholds.resolve import NEVER_EXIT

PROMPT = [5, 1, 7]
PROMPTS = [PROMPT, [9] * 20, [33, 4]]
EXIT = AutoMode("exit", (0.5, 1.0), 0.02, "cpu", 1.25, None, "a processor, 2 threads", {})
FULL = replace(EXIT, mode="full", exit_speedup=0.97)
LOSSLESS = replace(EXIT, mode="lossless", lossless_speedup=1.5)


@pytest.fixture
def with_auto(tmp_path: Path) -> Callable[..., Engine]:
    def with_auto(bundle: Path, auto: AutoMode | None, **fields: Any) -> Engine:
        return load(with_manifest(bundle, tmp_path, auto=auto, **fields), threads=1)

    return with_auto


def test_it_is_what_was_measured(with_auto, tiny_bundle: Path, tiny: TinyModel) -> None:
    depth = {"exit": [0.5, 1.0], "full": [NEVER_EXIT] * 2, "lossless": [NEVER_EXIT] * 2}
    for auto in (EXIT, FULL, LOSSLESS):
        engine = with_auto(tiny_bundle, auto, min_layers=4)
        assert engine.resolved(GenerationConfig())["mode"] == auto.mode
        done = engine.generate(PROMPT, max_new_tokens=30)
        assert done.tokens == tiny.reference_greedy(PROMPT, depth[auto.mode], 30)[0]
        assert (done.stats.total_exited > 0) == (auto.mode == "exit") or auto.mode == "lossless"
        assert (done.stats.drafted > 0) == (auto.mode == "lossless")


def test_a_long_list_has_the_mode_of_those_decoded_at_once(with_auto, tiny_llama: TinyLlama) -> None:
    engine = with_auto(tiny_llama.exact, replace(EXIT, slots=32))
    assert [engine.resolved(GenerationConfig(), prompts)["mode"] for prompts in (32, 40)] == ["exit", "exit"]
    assert any(one.stats.total_exited > 0 for one in engine.generate(PROMPTS * 14, max_new_tokens=20))
    assert with_auto(tiny_llama.exact, replace(EXIT, slots=31)).resolved(GenerationConfig(), 40)["mode"] == "full"


def test_a_list_gets_the_tokens_of_each_prompt_alone(with_auto, tiny_llama: TinyLlama) -> None:
    for auto in (replace(EXIT, slots=3), replace(EXIT, slots=8), replace(LOSSLESS, slots=3), FULL):
        engine = with_auto(tiny_llama.exact, auto)
        alone = [engine.generate(prompt, max_new_tokens=20) for prompt in PROMPTS]
        batched = engine.generate(PROMPTS, max_new_tokens=20)
        assert [one.tokens for one in batched] == [one.tokens for one in alone]
        exited, drafted = (sum(getattr(one.stats, name) for one in batched) for name in ("total_exited", "drafted"))
        assert (drafted > 0, exited > 0 or drafted > 0) == (auto.mode == "lossless", auto.mode != "full")


def test_more_at_once_than_it_was_measured_to_pay_for_are_full_depth(with_auto, tiny_llama: TinyLlama) -> None:
    for auto in (EXIT, replace(EXIT, slots=2), LOSSLESS, replace(LOSSLESS, slots=2)):
        engine = with_auto(tiny_llama.exact, auto)
        full = [engine.generate(prompt, max_new_tokens=20, mode="full") for prompt in PROMPTS]
        for done in (engine.generate(PROMPTS, max_new_tokens=20), generated_by(engine, PROMPTS, slots=3)):
            assert [one.tokens for one in done] == [one.tokens for one in full]
            assert [one.stats.total_exited + one.stats.drafted for one in done] == [0] * len(PROMPTS)
        assert engine.resolved(GenerationConfig(), prompts=3)["mode"] == "full"
        assert (engine.auto_of(1), engine.auto_of(3)) == (auto, None)


def test_a_scheduler_decides_by_its_slots_and_not_by_how_many_are_taken(with_auto, tiny_llama: TinyLlama) -> None:
    engine = with_auto(tiny_llama.exact, replace(EXIT, slots=2))
    alone = engine.generate(PROMPT, max_new_tokens=20)
    assert alone.stats.total_exited > 0
    for slots, exits in ((1, True), (2, True), (3, False), (8, False)):
        (done,) = generated_by(engine, [PROMPT], slots)
        assert (done.tokens == alone.tokens, done.stats.total_exited > 0) == (exits, exits)
        two = generated_by(engine, PROMPTS[:2], slots)
        assert two[0].tokens == done.tokens


def generated_by(engine: Engine, prompts: list[list[int]], slots: int) -> list[Generation]:
    scheduler = engine.scheduler(SchedulerLimits(slots=slots))
    return [handle.result() for handle in [scheduler.submit(prompt, max_new_tokens=20) for prompt in prompts]]


def test_more_slots_than_a_batch_can_have_are_as_many_as_it_can(with_auto, tiny_llama: TinyLlama) -> None:
    engine = with_auto(tiny_llama.exact, replace(EXIT, slots=1024))
    assert engine.max_batch_size == 1024
    assert engine.auto_of(2000) == engine.auto


def test_what_was_not_measured_here_is_full_depth(with_auto, tiny_bundle: Path, tiny: TinyModel) -> None:
    for auto in (None, replace(EXIT, provider="tensorrt")):
        engine = with_auto(tiny_bundle, auto)
        assert engine.auto is None
        done = engine.generate(PROMPT, max_new_tokens=30)
        assert done.tokens == tiny.reference_greedy(PROMPT, [NEVER_EXIT] * 2, 30)[0]


@pytest.mark.parametrize("auto", [None, FULL, EXIT, LOSSLESS])
def test_options_for_exits_make_it_mode_exit(with_auto, tiny_bundle: Path, auto: AutoMode | None) -> None:
    engine = with_auto(tiny_bundle, auto)
    for options in ({"threshold": 0.4}, {"min_layers": 2}, {"threshold": [0.3, 0.6], "max_pending": 1}):
        resolved = engine.resolved(GenerationConfig(**options))
        assert resolved == engine.resolved(GenerationConfig(mode="exit", **options))


@pytest.mark.parametrize("auto", [None, FULL, EXIT, LOSSLESS])
def test_the_same_options_are_accepted_whatever_it_is(with_auto, tiny_bundle: Path, auto: AutoMode | None) -> None:
    engine = with_auto(tiny_bundle, auto)
    several = GenerationConfig(temperature=1, compaction_threshold=0.5, max_pending=3)
    assert engine.resolved(several, prompts=2)["compaction_threshold"] in (0.5, 1.0, 0.0)
    assert len(engine.generate(PROMPT, max_new_tokens=4, max_pending=3).tokens) == 4
    for options, reason in [
        ({"prompt_lookup": 3}, "prompt_lookup is for mode 'lossless', not 'auto'"),
        ({"compaction_threshold": 0.5}, "compaction_threshold is for a list of prompts"),
    ]:
        with pytest.raises(GenerationError, match=reason):
            engine.stream(PROMPT, **options)


def test_drafting_of_the_bundle_is_used(with_auto, tiny_bundle: Path) -> None:
    drafting = Drafting((0.1, 0.1), 4, 0, (0.4, 0.8), DEFAULT_VERIFY_COSTS, {})
    engine = with_auto(tiny_bundle, LOSSLESS, drafting=drafting)
    auto, named = (engine.generate(PROMPT, max_new_tokens=20, mode=mode) for mode in ("auto", "lossless"))
    assert (auto.tokens, auto.stats.layers_run) == (named.tokens, named.stats.layers_run)


@pytest.mark.parametrize(
    ("auto", "expected"),
    [
        (None, "mode auto is full depth: what exits gain on this provider was not measured (tide-export tune does)"),
        (
            EXIT,
            "mode auto is exit, 1.25x as fast as full depth, with at most 2 % changed tokens (a processor, 2 "
            "threads); full depth for several sequences at once: not measured (tide-export tune --mode exit --slots "
            "does)",
        ),
        (
            replace(EXIT, evidence={"slots": {"4": 0.934, "8": 0.98}}),
            "mode auto is exit, 1.25x as fast as full depth, with at most 2 % changed tokens (a processor, 2 "
            "threads); full depth for several sequences at once: there it runs at 0.93x with 4 and 0.98x with 8",
        ),
        (
            replace(EXIT, slots=4, evidence={"slots": {"4": 1.1, "8": 0.98}}),
            "mode auto is exit, 1.25x as fast as full depth, with at most 2 % changed tokens (a processor, 2 "
            "threads); the same for up to 4 sequences at once: 1.10x with 4 and 0.98x with 8",
        ),
        (
            LOSSLESS,
            "mode auto is lossless, 1.50x as fast as full depth, with its tokens (a processor, 2 threads); full depth "
            "for several sequences at once: not measured (tide-export tune --mode lossless --slots does)",
        ),
        (
            replace(LOSSLESS, slots=4, evidence={"slots": {"4": 1.1, "8": 0.98}}),
            "mode auto is lossless, 1.50x as fast as full depth, with its tokens (a processor, 2 threads); the same "
            "for up to 4 sequences at once: 1.10x with 4 and 0.98x with 8",
        ),
        (
            replace(FULL, lossless_speedup=1.0),
            "mode auto is full depth: exits with at most 2 % changed tokens run at 0.97x its speed and lossless "
            "mode runs at 1.00x its speed (a processor, 2 threads)",
        ),
        (
            replace(FULL, exit_speedup=None, evidence={"reason": "no exits save more than they cost"}),
            "mode auto is full depth: no exits save more than they cost",
        ),
    ],
)
def test_it_is_said_in_a_sentence(auto: AutoMode | None, expected: str) -> None:
    assert sentence(auto) == expected


def test_it_is_stored_in_the_manifest(tmp_path: Path) -> None:
    engine = load(TinyModel().write(tmp_path / "b"), threads=1)
    stored = replace_manifest(engine.bundle, replace(engine.manifest, auto=EXIT))
    assert load(tmp_path / "b").auto == stored.manifest.auto == EXIT
    assert '"auto"' not in replace(engine.manifest, auto=None).to_json()
    assert '"slots"' not in stored.manifest.to_json()
    stored = replace_manifest(stored, replace(engine.manifest, auto=replace(EXIT, slots=8)))
    assert load(tmp_path / "b").auto == stored.manifest.auto == replace(EXIT, slots=8)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("mode", "fast", "field 'auto.mode' must be one of full, exit, lossless"),
        ("thresholds", (0.5,), "field 'auto.thresholds' must have one value per checkpoint"),
        ("thresholds", (0.5, 1.5), r"field 'auto.thresholds' must lie in \[0, 1\]"),
        ("epsilon", 1.0, r"field 'auto.epsilon' must lie in \[0, 1\)"),
        ("exit_speedup", None, "field 'auto.exit_speedup' is missing for mode exit"),
        ("provider", 3, "field 'auto.provider' must be a string"),
        ("slots", 1, "field 'auto.slots' must be 2 or more"),
        ("slots", 2.5, "field 'auto.slots' must be a whole number"),
    ],
)
def test_a_manifest_with_another_record_is_refused(tiny_bundle: Path, field: str, value: Any, rule: str) -> None:
    bundle: Bundle = load(tiny_bundle).bundle
    text = replace(bundle.manifest, auto=replace(EXIT, **{field: value})).to_json()
    with pytest.raises(BundleError, match=rule):
        Manifest.from_json(text, MANIFEST_FILE)


def test_slots_are_for_what_is_not_full_depth(tiny_bundle: Path) -> None:
    bundle: Bundle = load(tiny_bundle).bundle
    text = replace(bundle.manifest, auto=replace(FULL, slots=4)).to_json()
    with pytest.raises(BundleError, match=r"field 'auto\.slots' is for modes exit and lossless"):
        Manifest.from_json(text, MANIFEST_FILE)
