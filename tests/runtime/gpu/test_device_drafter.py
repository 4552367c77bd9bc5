"""A drafter among segment networks, on the host and on the stand-in GPU, where its runs are recorded and replayed: the
full model's tokens; one launch and one wait a draft; and what becomes of a run that fails."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caller_networks import CallersNetworks, Run, callers_engine
from drafters import drafting_copy
from fake_cudart import FakeCudart
from generations import NEW_TOKENS, PROMPTS, alone, together, tokens_of
from tiny_configs import CONTEXT
from tiny_engines import TinyLlama

from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError
from tide_export.names import segment_networks as names
from tide_export.names.networks import DRAFTER, HEAD
from tide_export.runtime.engine import Engine

DRAFTS = Drafting((1.0, 1.0), 0, 0, (1.0, 1.0), (0.0,) * 5, {}, 4, 0.0)  # by the drafter alone, as they cost nothing
LOSSLESS: dict[str, Any] = {"mode": "lossless", "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}


@pytest.fixture(scope="module")
def drafting(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafting_copy(tiny_llama.exact, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def callers(drafting: Path, device: FakeCudart | None) -> tuple[Engine, CallersNetworks]:
    engine, networks = callers_engine(open_bundle(drafting), device)
    return engine.drafting_as(DRAFTS), networks


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_tokens_are_those_of_full(callers: tuple[Engine, CallersNetworks], temperature: float) -> None:
    engine, networks = callers
    options = {"temperature": temperature, "seed": 6}
    full = tokens_of(alone(engine, mode="full", **options))
    assert not any(name == DRAFTER for name, _, _ in networks.runs)
    for found in (alone(engine, **LOSSLESS | options), together(engine, **LOSSLESS | options)):
        assert tokens_of(found) == full
        assert all(one.stats.learned_drafted for one in found)
    assert any(name == DRAFTER and slots > 1 for name, _, slots in networks.runs), "drafts of several at once"
    assert engine.generate([3] * (CONTEXT - 8), mode="full", max_new_tokens=50).tokens == (
        engine.generate([3] * (CONTEXT - 8), **LOSSLESS | {"max_new_tokens": 50, "stop_token_ids": None}).tokens
    )


def test_a_draft_is_one_launch_and_one_wait(drafting: Path, cudart: FakeCudart) -> None:
    """Once it is recorded, as `cudaGraphLaunch` and `cudaStreamSynchronize`: its copies are in the recording."""
    engine, networks = callers_engine(open_bundle(drafting), cudart)
    engine = engine.drafting_as(DRAFTS)
    for _ in range(3):
        engine.generate([5, 9], **LOSSLESS)
    networks.runs.clear()
    before = cudart.calls(), cudart.calls("cudaGraphLaunch"), cudart.calls("cudaStreamSynchronize")
    made = engine.generate([5, 9], **LOSSLESS)
    all_calls, launches, waits = (
        now - then
        for now, then in zip(
            (cudart.calls(), cudart.calls("cudaGraphLaunch"), cudart.calls("cudaStreamSynchronize")),
            before,
            strict=True,
        )
    )
    drafts = sum(name == DRAFTER for name, _, _ in networks.runs)
    steps = sum(name == HEAD for name, _, _ in networks.runs)
    assert drafts >= made.stats.learned_drafted > 5
    assert launches == waits == drafts + steps, "all are replayed"
    assert all_calls > launches + waits


def test_a_run_that_fails_is_made_again(callers: tuple[Engine, CallersNetworks]) -> None:
    engine, networks = callers
    expected = alone(engine, PROMPTS[1:2], mode="full")[0].tokens
    for _ in range(2):
        stream = engine.stream(PROMPTS[1], **LOSSLESS)
        made = [next(stream)]
        networks.failing_once(DRAFTER)
        with pytest.raises(GenerationError, match="injected"):
            made += list(stream)
        assert made + list(stream) == expected
    assert alone(engine, PROMPTS[1:2], **LOSSLESS)[0].tokens == expected


def test_a_drafter_without_an_engine_does_not_draft_on_engines(drafting: Path, tmp_path: Path) -> None:
    """As after `draft`, before `build`: the caller's networks are engines by the provider's name."""
    from tide_export.runtime.callers_networks import load_networks

    bundle = open_bundle(drafting)
    networks = CallersNetworks(bundle)
    engine = Engine(bundle, load_networks(bundle, {"verify": False}, "tensorrt", networks)).drafting_as(DRAFTS)
    made = engine.generate([5, 9], **LOSSLESS)
    assert made.tokens == alone(engine, PROMPTS[1:2], mode="full")[0].tokens
    assert made.stats.learned_drafted == 0


def test_what_a_sequence_left_does_not_spoil_the_next_one_s_drafts(callers: tuple[Engine, CallersNetworks]) -> None:
    """Attention multiplies what it masks by zero, and zero times NaN is NaN."""
    engine, networks = callers
    expected = alone(engine, PROMPTS[1:2], **LOSSLESS)[0].stats.drafts

    def overflows(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if run[0] == DRAFTER:
            tensors[names.present(0, "value")][:, :, :8] = np.nan

    networks.after = overflows  # then the drafter gives NaN, and drafts nothing
    full = alone(engine, PROMPTS[1:2], mode="full")[0].tokens
    assert alone(engine, PROMPTS[1:2], **LOSSLESS)[0].tokens == full
    networks.after = lambda run, tensors: None
    assert alone(engine, PROMPTS[1:2], **LOSSLESS)[0].stats.drafts == expected
