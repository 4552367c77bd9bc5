"""What mode auto is: chosen from measured speeds, by one rule, for export and for tune."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.tuning import auto
from tide_export.tuning.auto import exit_speedup, measure_auto, with_exits, with_lossless
from tide_export.tuning.request import LosslessRequest

DRAFTS = LosslessRequest(dataset="text", threads=2, new_tokens=40, temperature=0.3)
POINT = {"epsilon": 0.02, "perplexity_epsilon": 0.02, "thresholds": [0.7, 0.8, 1.0], "layers": 9.0, "saved": 0.2}
POINT |= {"tokens": 5000, "temperature": 0.8, "documents": 7, "changed": 0.01, "changed_error": 0.001}
POINT |= {"perplexity": 0.012, "perplexity_error": 0.002}
CHANGE = {"changed": 0.03, "perplexity": 0.01, "perplexity_epsilon": 0.02}


@pytest.fixture
def engine(demo_bundle: Path) -> Engine:
    return with_auto(load(demo_bundle, threads=1), None)


def with_auto(engine: Engine, record: AutoMode | None) -> Engine:
    """The same engine, of a bundle with another record of what mode auto is."""
    other = copy.copy(engine)
    other.bundle = replace(engine.bundle, manifest=replace(engine.manifest, auto=record))
    return other


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The speed-up that is "measured", and then the thresholds it was measured at."""
    measured: list[Any] = [1.3]

    def stand_in(_: Engine, thresholds: Any) -> tuple[float, float]:
        measured[1:] = [thresholds]
        return measured[0], 0.01

    monkeypatch.setattr(auto, "exit_speedup", stand_in)
    return measured


def manifest_with(bundle: Path, *points: dict[str, Any], **fields: Any) -> Manifest:
    manifest = Manifest.from_json((bundle / MANIFEST_FILE).read_text())
    return replace(manifest, calibration={"operating_points": points}, **fields)


class Streams:
    """Stands in for an engine: steps of known cost on a clock of its own, some of them delayed by other programs."""

    def __init__(self, engine: Engine, layers: list[int]) -> None:
        self.manifest, self.bundle, self.layers, self.now = engine.manifest, engine.bundle, layers, 0.0
        self.tokens = {"full": 0, "exit": 0}

    def stream(self, prompt: list[int], config: GenerationConfig, max_new_tokens: int, seed: int) -> Iterator[int]:
        return Steps(self, config, max_new_tokens)


class Steps(Iterator[int]):
    def __init__(self, engine: Streams, config: GenerationConfig, count: int) -> None:
        self.engine, self.config, self.count, self.stats = engine, config, count, SimpleNamespace(layers_run=[])
        assert config.temperature == 0.8
        assert config.stop_token_ids == ()

    def __next__(self) -> int:
        number, engine = len(self.stats.layers_run), self.engine
        if number == self.count:
            raise StopIteration
        layers = 12 if self.config.mode == "full" else engine.layers[number % len(engine.layers)]
        engine.tokens[self.config.mode] += 1
        delayed = engine.tokens[self.config.mode] % 17 == 3
        engine.now += (100.0 if number == 0 else 0.001 * (layers + 2)) + (0.5 if delayed else 0.0)
        self.stats.layers_run.append(layers)
        return 1


@pytest.mark.parametrize("layers", [[12], [3], [3, 3, 12], [3, 6, 9, 12]])
def test_delays_by_other_programs_do_not_count(
    engine: Engine, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(engine, layers)
    monkeypatch.setattr(auto.time, "perf_counter", lambda: streams.now)
    steps = [layers[n % len(layers)] for n in range(1, streams.tokens["full"] or auto.MIN_NEW_TOKENS)]
    expected = 14 * len(steps) / sum(count + 2 for count in steps)
    monkeypatch.setattr(auto, "STEADY_SECONDS", 0.0)
    speedup, error = exit_speedup(cast(Engine, streams), [0.5] * 3)
    assert speedup == pytest.approx(expected)
    assert error == pytest.approx(0.0, abs=1e-9)  # delays are no noise
    assert streams.tokens["full"] == streams.tokens["exit"]


def test_the_engine_that_serves_is_measured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "NEW_TOKENS", 16)
    monkeypatch.setattr(auto, "STEADY_SECONDS", 0.0)
    assert 0.01 < exit_speedup(engine, [0.0] * 3)[0] < 100
    engine.bundle = replace(engine.bundle, files={})
    assert 0.01 < exit_speedup(engine, [1.0] * 3)[0] < 100, "without a tokenizer"


def test_export_takes_the_largest_share_that_is_allowed(demo_bundle: Path, speed: list[Any]) -> None:
    shares = (0.005, 0.02, 0.05)
    points = [
        POINT | {"epsilon": e, "perplexity_epsilon": p, "saved": 3 * e + p, "thresholds": [min(e, p), 1.0, 1.0]}
        for e in shares
        for p in shares
    ]
    for epsilon, taken in ((0.02, 0.02), (0.04, 0.02), (0.9, 0.05), (0.005, 0.005)):
        record = measure_auto(demo_bundle, manifest_with(demo_bundle, *points), epsilon, epsilon)
        assert (record.mode, record.exit_speedup, record.epsilon) == ("exit", 1.3, epsilon)
        assert record.thresholds == speed[1] == (taken, 1.0, 1.0)
        assert record.machine.endswith("threads")
        assert record.evidence["perplexity_epsilon"] == epsilon
    one = measure_auto(demo_bundle, manifest_with(demo_bundle, *points), 0.05, 0.005)
    assert (one.thresholds[0], one.evidence["saved"]) == (0.005, 3 * 0.05 + 0.005), "each bound counts by itself"
    assert sentence(measure_auto(demo_bundle, manifest_with(demo_bundle, *points), 0.02, 0.02)).startswith(
        "mode auto is exit, 1.30 ± 0.01x as fast as full depth, with 1.00 ± 0.10 % changed tokens (at most 2 %) and "
        "perplexity +1.20 ± 0.20 % (at most +2 %) on 5,000 tokens that the thresholds were not chosen "
        "on, temperature 0.8 ("
    )


@pytest.mark.parametrize(
    ("point", "epsilon", "reason"),
    [
        (POINT, 0.0, "the routers have no thresholds for an epsilon of 0 and a perplexity_epsilon of 0.02"),
        (POINT | {"thresholds": [0.5]}, 0.02, "the operating points in the routers' record cannot be read"),
        (POINT | {"thresholds": [0.5, 2.0, 1.0]}, 0.02, "the operating points in the routers' record cannot be"),
        (POINT | {"epsilon": "all"}, 0.02, "the operating points in the routers' record cannot be read"),
        (
            {name: value for name, value in POINT.items() if not name.startswith("perplexity")},
            0.02,
            "the operating points in the routers' record cannot be read: calibrate again",
        ),
        (POINT | {"perplexity_epsilon": 0.05}, 0.02, "the routers have no thresholds for an epsilon of 0.02 and a"),
        ({"epsilon": 0.01}, 0.02, "the operating points in the routers' record cannot be read"),
        (
            POINT | {"tokens": 49, "saved": 0.0},
            0.02,
            "49 held-out tokens of the calibration text are too few to show at most 2 % changed tokens: 50 or more",
        ),
        (
            POINT | {"saved": 0.001},
            0.02,
            "no exits with at most 2 % changed tokens and at most 2 % more perplexity save more",
        ),
    ],
)
def test_what_cannot_pay_is_not_measured(
    demo_bundle: Path, speed: list[Any], point: dict[str, Any], epsilon: float, reason: str
) -> None:
    record = measure_auto(demo_bundle, manifest_with(demo_bundle, point), epsilon, 0.02)
    assert (record.mode, record.exit_speedup, record.thresholds) == ("full", None, (1.0,) * 3)
    assert record.evidence["reason"].startswith(reason)
    assert len(speed) == 1


def test_a_gain_within_the_error_of_the_measurement_is_none(demo_bundle: Path, speed: list[Any]) -> None:
    for speedup, mode in ((1.019, "full"), (1.02, "exit"), (0.9, "full")):
        speed[0] = speedup
        assert measure_auto(demo_bundle, manifest_with(demo_bundle, POINT), 0.02, 0.02).mode == mode


def test_tune_of_one_mode_keeps_what_is_known_of_the_other(engine: Engine, speed: list[Any]) -> None:
    exits = with_exits(engine, (0.5, 0.6, 0.7), 0.05, CHANGE, 2)
    assert (exits.mode, exits.epsilon, exits.thresholds) == ("exit", 0.05, (0.5, 0.6, 0.7))
    tuned = with_auto(engine, exits)
    for speedup, mode in ((1.5, "lossless"), (1.2, "exit"), (None, "exit")):
        both = with_lossless(tuned, speedup, DRAFTS, [])
        assert (both.mode, both.lossless_speedup, both.exit_speedup) == (mode, speedup, 1.3)
        assert both.thresholds == exits.thresholds
    drafting = with_auto(engine, with_lossless(engine, 1.4, DRAFTS, []))
    nothing = with_exits(drafting, (1.0,) * 3, 0.01, CHANGE, 2)
    assert (nothing.mode, nothing.exit_speedup, nothing.lossless_speedup) == ("lossless", None, 1.4)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({4: 1.1, 8: 1.02, 16: 0.99}, 8),
        ({4: 1.019, 8: 1.2}, None),
        ({8: 1.3, 2: 1.1, 4: 0.9}, 2),
        ({32: 1.02}, 32),
    ],
)
def test_several_exit_where_they_pay_for_all_fewer(
    engine: Engine, speed: list[Any], monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float], expected: int | None
) -> None:
    asked = []

    def stand_in(_: Engine, modes: list[GenerationConfig], prompts: Any, slots: int) -> float:
        asked.append([(mode.mode, mode.threshold) for mode in modes])
        return speeds[slots]

    monkeypatch.setattr(auto, "slot_speedup", stand_in)
    record = with_exits(engine, (0.5, 0.6, 0.7), 0.05, CHANGE, 2, tuple(speeds))
    assert (record.mode, record.slots) == ("exit", expected)
    assert record.evidence["slots"] == {str(count): speeds[count] for count in sorted(speeds)}
    assert asked == [[("full", None), ("exit", (0.5, 0.6, 0.7))]] * len(speeds)
    tuned = with_auto(engine, record)
    assert with_exits(tuned, (0.5, 0.6, 0.7), 0.05, CHANGE, 2).slots is None, "of other thresholds"
    kept = with_lossless(tuned, 1.2, DRAFTS, [])
    assert (kept.slots, kept.evidence) == (expected, record.evidence)
    drafting = with_lossless(tuned, 1.5, DRAFTS, [])
    assert (drafting.slots, "slots" in drafting.evidence) == (None, False), "they were measured in mode exit"
    speed[0], asked[:] = 1.0, []
    assert (with_exits(engine, (0.5, 0.6, 0.7), 0.05, CHANGE, 2, (4,)).slots, asked) == (None, []), (
        "it does not pay for one"
    )


def test_several_draft_where_they_pay_for_all_fewer(
    engine: Engine, speed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, speeds = [], {2: 1.4, 4: 1.02, 8: 0.97}

    def stand_in(_: Engine, modes: list[GenerationConfig], prompts: Any, slots: int) -> float:
        asked.append(([mode.mode for mode in modes], {mode.max_new_tokens for mode in modes}, prompts))
        assert {mode.temperature for mode in modes} == {0.3}
        return speeds[slots]

    monkeypatch.setattr(auto, "slot_speedup", stand_in)
    request = replace(DRAFTS, slots=(8, 2, 4))
    record = with_lossless(engine, 1.5, request, [[5], [7]])
    assert (record.mode, record.slots, record.evidence["slots"]) == ("lossless", 4, {"2": 1.4, "4": 1.02, "8": 0.97})
    assert asked == [(["full", "lossless"], {40}, [[5], [7]])] * 3
    tuned = with_auto(engine, record)
    kept = with_exits(tuned, (0.5, 0.6, 0.7), 0.05, CHANGE, 2, (4,))
    assert (kept.mode, kept.slots, kept.evidence["slots"]) == ("lossless", 4, record.evidence["slots"])
    asked.clear()
    assert (with_lossless(tuned, None, request, [[5]]).slots, asked) == (None, []), "it does not pay for one"
    assert (with_lossless(tuned, 1.5, DRAFTS, [[5]]).slots, asked) == (None, []), "of other drafts"
