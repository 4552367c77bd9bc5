"""`tide-export draft` from end to end, on an engine that stands in for the bundle's, with a clock that counts."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafting_stubs import Clock, StubEngine
from tiny_configs import small_llama
from transformers import LlamaForCausalLM

from tide_export.cli.main import main
from tide_export.drafting import answers, flow, run, schedule, store, training
from tide_export.drafting.config import DraftConfig
from tide_export.drafting.flow import draft
from tide_export.drafting.target import Target
from tide_export.errors import ConfigError, DraftError
from tide_export.model.source import load_model
from tide_export.routers.drafter_weights import CONFIDENCES, Drafter
from tide_export.runtime.config import GenerationConfig

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A random Llama with the demo model's tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = small_llama(4096, 32, 1, 512)
        config.initializer_range = 0.5
        LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return Target.of(load_model(model))


def make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule, "now", Clock())
    patch.setattr(schedule, "MIN_GAIN", -math.inf)
    patch.setattr(answers, "MAX_BATCH", 16)
    patch.setattr(answers, "FIRST_BATCH", 16)
    patch.setattr(training, "fast_dtype", lambda device: None)
    patch.setattr(run, "SAVE_SECONDS", 0.5)


def stand_in(folder: Path, target: Target, patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for a bundle and its engine, and the drafters that were written."""
    stub = SimpleNamespace(path=folder / "bundle", engine=StubEngine(target), written=list[Drafter](), loaded=0)
    stub.manifest = SimpleNamespace(weights="fp32", drafting=None, model=SimpleNamespace(context_length=None))
    stub.path.mkdir()

    def check(path, weights_sha256=None, width=None):
        assert width in (None, target.embeddings.shape[1])
        if weights_sha256 not in (None, target.weights_sha256):
            raise DraftError(f"bundle {path} was exported from another model than the one given: name that model")
        return SimpleNamespace(path=stub.path, manifest=stub.manifest)

    def load(path, provider, threads):
        assert provider == ("auto" if threads is None else "cpu")
        stub.loaded += 1
        return stub.engine

    patch.setattr(flow, "check_bundle", check)
    patch.setattr(run, "load", load)
    patch.setattr(flow, "write_drafter", lambda path, drafter: stub.written.append(drafter))
    patch.setattr(flow, "_measure", lambda path, prompts, temperature, report: 1.25)
    return stub


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("".join(f"def f{number}(x):\n" for number in range(40)))
    return str(file)


@pytest.fixture
def bundle(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return stand_in(tmp_path, target, monkeypatch)


def config(prompts: str | None, **options) -> DraftConfig:
    given = {"minutes": 0.075, "max_new_tokens": 8, "vocabulary": 128}
    return DraftConfig(prompts=prompts, **{**given, **options})


@pytest.fixture(scope="module")
def whole(model: Path, prompts: str, target: Target, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A training that was not interrupted: its report, drafter, cache and messages."""
    folder, messages = tmp_path_factory.mktemp("whole"), list[str]()
    handler, log = logging.Handler(), logging.getLogger("tide_export")
    handler.emit = lambda record: messages.append(record.getMessage())
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(log, "level", logging.INFO)
        patch.setattr(log, "handlers", [*log.handlers, handler])
        stub = stand_in(folder, target, patch)
        report = draft(str(model), stub.path, config(prompts), cache=folder / "cache")
    (drafter,) = stub.written
    assert stub.loaded == 1
    return SimpleNamespace(report=report, drafter=drafter, cache=folder / "cache", messages=messages)


def same(found: Drafter, expected: Drafter) -> bool:
    arrays = all(np.array_equal(found.arrays[name], expected.arrays[name]) for name in expected.arrays)
    return arrays and np.array_equal(found.tokens, expected.tokens)


def test_a_drafter_is_trained_and_measured(whole: SimpleNamespace, target: Target) -> None:
    drafter, report, messages = whole.drafter, whole.report, whole.messages
    assert np.array_equal(drafter.head, target.head.numpy()[drafter.tokens])
    assert len(drafter.tokens) == 128
    assert drafter.bias is None
    assert {name: array.shape for name, array in drafter.arrays.items()} == drafter.shape.arrays
    assert len(drafter.acceptance) == len(CONFIDENCES)
    assert drafter.weights_sha256 == target.weights_sha256
    assert json.loads(json.dumps(drafter.provenance))["acceptance"]["drafts"] > 50
    assert report.minutes == pytest.approx(0.075, rel=0.25)
    assert report.trained_tokens > 1.2 * report.tokens
    assert 5 <= len([one for one in messages if "drafts accepted" in one]) <= 10
    assert any(one.startswith("done, ") for one in messages)
    assert "expected speed" in report.render()


@pytest.mark.parametrize("at", ["answers", "training"])
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(
    at: str, whole, model: Path, bundle, prompts: str, target: Target, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    step, steps = training.Trainer.train_step, list[float]()

    def interrupted(trainer: training.Trainer, progress: float) -> None:
        steps.append(progress)
        if len(steps) == 9:
            raise KeyboardInterrupt
        step(trainer, progress)

    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "tide_export"):
        if at == "answers":
            bundle.engine = StubEngine(target, interrupt_at=5)
        else:
            patched.setattr(training.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draft(str(model), bundle.path, config(prompts))
    folder = bundle.path.parent
    assert f"resumes from {folder / '.bundle.draft'}" in caplog.messages[-1]
    assert bundle.written == []
    bundle.engine = StubEngine(target)
    report = draft(str(model), bundle.path, config(prompts))
    (drafter,) = bundle.written
    assert same(drafter, whole.drafter)
    assert report == replace(whole.report, bundle=str(bundle.path))
    assert [entry.name for entry in folder.iterdir()] == ["bundle"]


def test_a_cache_that_is_complete_writes_the_drafter_again(whole, model: Path, bundle, prompts: str) -> None:
    again = draft(str(model), bundle.path, config(prompts), cache=whole.cache)
    assert again == replace(whole.report, bundle=str(bundle.path))
    assert (bundle.engine.calls, bundle.loaded) == (0, 0)
    assert same(bundle.written[0], whole.drafter)
    cache = shutil.copytree(whole.cache, bundle.path.parent / "cache")
    longer = draft(str(model), bundle.path, config(prompts, minutes=0.1), cache=cache)
    assert longer is not None
    assert longer.minutes == pytest.approx(0.1, rel=0.25)
    assert longer.trained_tokens > whole.report.trained_tokens
    assert bundle.engine.calls > 0
    with pytest.raises(DraftError, match=r"cache is of a training with seed 0, not 7: give the same settings"):
        draft(str(model), bundle.path, config(prompts, seed=7), cache=cache)


def test_a_run_interrupted_in_its_last_round_takes_more_minutes(
    model: Path, bundle, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training.Trainer.train_step

    def interrupted(trainer: training.Trainer, progress: float) -> None:
        if progress > 0.9:
            raise KeyboardInterrupt
        step(trainer, progress)

    with monkeypatch.context() as patched:
        patched.setattr(training.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draft(str(model), bundle.path, config(prompts))
    report = draft(str(model), bundle.path, config(prompts, minutes=0.15))
    assert report is not None
    assert report.minutes == pytest.approx(0.15, rel=0.25)


def test_speeds_of_a_resumed_run_are_by_the_costs_of_this_machine(
    model: Path, bundle, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, asked, taken = (0.5, 0.9, 1.8, 3.6, 7.2), list[tuple[float, ...]](), list[StubEngine]()

    def resolved(engine: StubEngine, config: GenerationConfig) -> dict[str, dict[str, tuple[float, ...]]]:
        assert taken or not engine.calls, "before anything runs beside it"
        taken.append(engine)
        return {"drafting": {"verify_costs": costs}}

    monkeypatch.setattr(StubEngine, "resolved", resolved)
    step, expected = training.Trainer.train_step, schedule.expected_speed

    def interrupted(trainer: training.Trainer, progress: float) -> None:
        if progress > 0.6:
            raise KeyboardInterrupt
        step(trainer, progress)

    monkeypatch.setattr(schedule, "expected_speed", lambda shares, used: asked.append(used) or expected(shares, used))
    with monkeypatch.context() as patched:
        patched.setattr(training.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draft(str(model), bundle.path, config(prompts))
    assert draft(str(model), bundle.path, config(prompts)) is not None
    assert set(asked) == {costs}
    assert 1 <= len(taken) <= 2, "once in a run"


def test_a_training_that_gains_little_ends_early(
    model: Path, bundle, prompts: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(schedule, "MIN_GAIN", 100.0)
    with caplog.at_level(logging.INFO, "tide_export"):
        report = draft(str(model), bundle.path, config(prompts))
    assert report is not None
    assert report.minutes < 0.06
    assert len([one for one in caplog.messages if "drafts accepted" in one]) == 4
    assert any(one.endswith("of speed: the last round") for one in caplog.messages)


def test_its_tokens_are_chosen_without_held_out_answers(
    model: Path, bundle, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_from, choose = list[list[bool]](), run.frequent_tokens

    def recorded(answers, *sizes):
        chosen_from.append([answer.held_out for answer in answers])
        return choose(answers, *sizes)

    monkeypatch.setattr(run, "frequent_tokens", recorded)
    assert draft(str(model), bundle.path, config(prompts, minutes=0.03)) is not None
    assert [any(held_out) for held_out in chosen_from] == [False]


def test_shipped_prompts(model: Path, bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_export.drafting.prompts.MAX_PROMPTS", 300)
    assert draft(str(model), bundle.path, config(None, minutes=0.03)) is not None
    assert len(set(bundle.engine.prompts)) > 20


def test_command_line(model: Path, bundle, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle.path / "tide.json").write_text("{}")  # the command line asks whether it is there
    words = ["draft", str(model), str(bundle.path), "--minutes", "0.05", "--prompts", prompts, "--vocabulary", "64"]
    assert main([*words, "--max-new-tokens", "8", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["vocabulary"] == 64
    assert len(report["acceptance"]["sampled"]) == 4
    assert main(["draft", str(model), str(bundle.path), "--prompts", "none.txt"]) == 2
    assert capsys.readouterr().err.startswith("tide-export: error: cannot read prompts from none.txt: ")
    with pytest.raises(SystemExit):
        main(["draft", "--help"])
    shown = capsys.readouterr().out
    assert "--minutes X" in shown
    assert "--prompts FILE" in shown


class TestRefusals:
    def test_before_the_model_is_loaded(self, bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(flow, "load_model", lambda *_, **__: pytest.fail("loaded"))
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(DraftError, match=r"empty.txt holds no prompts"):
            draft("none", bundle.path, config(str(tmp_path / "empty.txt")))
        monkeypatch.setattr(store, "SPARE_BYTES", 10**18)
        with pytest.raises(
            DraftError, match=r"the answers need about 1000000000.0 GB in .*bundle.draft, and .* are free: name"
        ):
            draft("none", bundle.path, config(None))

    def test_a_bundle_that_cannot_be_written(self, bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(file: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(flow, "check_writable", refuse)
        with pytest.raises(DraftError, match=r"cannot write to bundle .*: Permission denied"):
            draft("none", bundle.path, config(None))

    def test_prompts_longer_than_the_bundle_takes(self, bundle, model: Path, prompts: str) -> None:
        bundle.manifest.model.context_length = 6
        with pytest.raises(DraftError, match=r"0 of its prompts have 1 to 3 tokens, and 2 are needed"):
            draft(str(model), bundle.path, config(prompts))

    def test_a_bundle_of_another_model(self, bundle, model: Path, prompts: str, monkeypatch) -> None:
        check = flow.check_bundle
        monkeypatch.setattr(flow, "check_bundle", lambda path, sha=None, width=None: check(path, sha and "00" * 32))
        with pytest.raises(DraftError, match="was exported from another model than the one given"):
            draft(str(model), bundle.path, config(prompts))
        assert [entry.name for entry in bundle.path.parent.iterdir() if "draft" in entry.name] == []

    def test_a_model_that_answers_with_a_token(self, bundle, model: Path, prompts: str, target: Target) -> None:
        bundle.engine = StubEngine(target, longest=1)
        with pytest.raises(
            DraftError, match=r"answers each of the first 16 prompts with fewer than 3 tokens, so there is"
        ):
            draft(str(model), bundle.path, config(prompts))

    def test_states_of_another_width(self, bundle, model: Path, prompts: str, target: Target) -> None:
        bundle.engine.mixers = torch.cat([bundle.engine.mixers, bundle.engine.mixers], -1)
        bundle.engine.target = Target(target.embeddings, torch.cat([target.head, target.head], -1), None, "")
        with pytest.raises(DraftError, match=r"the bundle's hidden states have shape \(\d+, 64\), not \(\d+, 32\)"):
            draft(str(model), bundle.path, config(prompts))

    def test_states_that_are_not_finite(self, bundle, model: Path, prompts: str, monkeypatch) -> None:
        original = bundle.engine.generate

        def broken(ids, config):
            results = original(ids, config)
            results[3].states[0, 0] = np.nan
            return results

        monkeypatch.setattr(bundle.engine, "generate", broken)
        with pytest.raises(DraftError, match=r"states hold numbers that are not finite: `tide-export validate`"):
            draft(str(model), bundle.path, config(prompts))

    def test_no_room_for_the_answers_of_the_whole_time(
        self, bundle, model: Path, prompts: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DraftError, match=r"the answers of \d+\.\d hours need about \d+\.\d GB in .*\.draft, and"):
            draft(str(model), bundle.path, config(prompts, minutes=10.0**10))

    def test_options(self) -> None:
        with pytest.raises(ConfigError, match="minutes must be greater than 0"):
            DraftConfig.from_options(minutes=0)
