"""Lossless mode with a drafter's drafts returns the full model's tokens with the same seed, whatever it drafts: alone,
in lists, beside exits and n-grams, with everything that changes logits, up to every kind of end."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from drafters import ROWS, drafting_copy, random_drafter, with_drafter
from tiny_model import WIDTH, TinyModel

from tide_export.bundle.manifest import Drafting
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits

SMALL = TinyModel(vocabulary=7, seed=3)
TOKENS = np.array([0, 1, 3, 4, 5, 6])  # not 2
NEVER = 1.0
PROVIDERS = ["cpu", "cpu-networks"]  # the second: the segment networks on ONNX Runtime


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_drafter(SMALL.write(tmp_path_factory.mktemp("small") / "b"), random_drafter(WIDTH, WIDTH, TOKENS))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle)


def both(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], Any]:
    """The tokens of full, and the generation in lossless mode, which must have these."""
    drafting = {name: options.pop(name) for name in ("drafter", "prompt_lookup", "threshold") if name in options}
    full = engine.generate(prompt, mode="full", **options)
    lossless = engine.generate(
        prompt, mode="lossless", **{"threshold": NEVER, "prompt_lookup": 0} | drafting, **options
    )
    assert lossless.tokens == full.tokens
    assert lossless.finish_reason == full.finish_reason
    return full.tokens, lossless


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.5])
@pytest.mark.parametrize("drafter", [1, 3, 8])
@pytest.mark.parametrize("lookup", [0, 4])
def test_the_tokens_are_those_of_full(engine: Engine, temperature: float, drafter: int, lookup: int) -> None:
    drafted = accepted = 0
    for seed in range(tiers.sized(8, 20)):
        _, made = both(
            engine,
            [1, 4, 2][: 1 + seed % 3],
            temperature=temperature,
            seed=seed,
            max_new_tokens=40,
            stop_token_ids=[],
            drafter=drafter,
            prompt_lookup=lookup,
        )
        stats = made.stats
        drafted, accepted = drafted + stats.learned_drafted, accepted + stats.learned_accepted
        assert stats.learned_drafted + stats.lookup_drafted == stats.drafted
        assert stats.learned_accepted + stats.lookup_accepted == stats.accepted == stats.exit_layer.count(0)
        assert stats.layer_tokens_run == 6 * (len([1, 4, 2][: 1 + seed % 3]) + 39 + stats.drafted - stats.accepted)
    assert drafted > accepted
    assert accepted > 0 or temperature == 0, "or this says nothing about drafts that are accepted"


def test_coupled_draws_agree_more_often_than_independent_ones(engine: Engine) -> None:
    """A drafter that knows nothing, at a temperature that makes all tokens about equally likely."""
    drafted = accepted = 0
    for seed in range(tiers.sized(20, 60)):
        _, made = both(engine, [1, 2], temperature=20.0, seed=seed, max_new_tokens=60, stop_token_ids=[], drafter=1)
        drafted, accepted = drafted + made.stats.learned_drafted, accepted + made.stats.learned_accepted
    assert drafted > 300
    assert accepted > 0.6 * drafted  # six of seven tokens are proposed; drawn independently it would be a seventh


def test_no_drafter_no_drafts(engine: Engine) -> None:
    made = engine.generate([1], mode="lossless", threshold=NEVER, prompt_lookup=0, drafter=0, max_new_tokens=30)
    assert made.stats.drafted == 0


def test_without_a_drafter_it_is_refused(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match=r"drafter is for a bundle with a drafter, and bundle .* has none"):
        tiny_engine.generate([1], mode="lossless", drafter=4)


def test_it_is_for_lossless_mode_alone(engine: Engine) -> None:
    with pytest.raises(GenerationError, match="drafter is for mode 'lossless', not 'exit'"):
        engine.generate([1], mode="exit", drafter=4)
    with pytest.raises(GenerationError, match="drafter is for mode 'lossless', not 'auto'"):
        engine.generate([1], drafter=4)
    with pytest.raises(GenerationError, match="drafter must be a whole number, 0 or more, not -1"):
        engine.generate([1], mode="lossless", drafter=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logit_bias": {2: 3.0, 5: -2.0}},
        {"logprobs": 2},
        {"logits_processor": lambda ids, logits: logits + 0.3 * (np.arange(len(logits)) == len(ids) % 7)},
        {"logits_processor": lambda ids, logits: np.where(np.arange(len(logits)) == 2, logits, -np.inf)},
        {"threshold": 0.0},
    ],
)
def test_whatever_changes_logits_changes_drafts_too(engine: Engine, options: dict[str, Any]) -> None:
    for seed in range(tiers.sized(5, 12)):
        tokens, made = both(engine, [3, 1], temperature=0.8, seed=seed, max_new_tokens=30, stop_token_ids=[], **options)
        assert len(tokens) == 30
        if "logprobs" in options:
            full = engine.generate(
                [3, 1], mode="full", temperature=0.8, seed=seed, max_new_tokens=30, stop_token_ids=[], logprobs=2
            )
            assert made.logprobs is not None
            assert full.logprobs is not None
            assert [one.logprob for one in made.logprobs] == pytest.approx([one.logprob for one in full.logprobs])


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_not_one_token_more_than_asked_for(engine: Engine, most: int) -> None:
    for seed in range(5):
        tokens, _ = both(engine, [3, 1, 4], temperature=0.5, seed=seed, max_new_tokens=most, stop_token_ids=[])
        assert len(tokens) == most


def test_stop_tokens_and_a_full_context_end_it(engine: Engine) -> None:
    for stop in range(7):
        both(engine, [2, 5], temperature=0.9, seed=stop, max_new_tokens=60, stop_token_ids=[stop])
    prompt = [1] * (SMALL.context - 10)
    _, made = both(engine, prompt, temperature=0.5, seed=1, max_new_tokens=50, stop_token_ids=[])
    assert made.finish_reason == "context"


def test_any_number_of_drafts_may_be_asked_for(engine: Engine) -> None:
    for most in (ROWS // 2, 10**6, 2**63 - 1):
        _, made = both(
            engine, [1, 2], temperature=0.5, seed=2, max_new_tokens=60, stop_token_ids=[], drafter=most, prompt_lookup=2
        )
        assert made.stats.learned_drafted


def test_a_sequence_longer_than_the_drafter_s_goes_on(tmp_path: Path) -> None:
    model = TinyModel(vocabulary=7, seed=3, context=6 * ROWS)
    engine = load(with_drafter(model.write(tmp_path / "b"), random_drafter(WIDTH, WIDTH, TOKENS)))
    for prompt in ([1, 2], [3] * (ROWS + 5)):
        _, made = both(engine, prompt, temperature=0.5, seed=2, max_new_tokens=4 * ROWS, stop_token_ids=[])
        assert made.stats.learned_drafted > 20  # also after the drafter began anew


def test_a_hook_that_fails_leaves_the_stream_as_it_was(engine: Engine) -> None:
    calls = 0

    def process(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls in (4, 5, 11):
            raise ValueError("not now")
        return logits

    options: dict[str, Any] = {"temperature": 0.6, "seed": 5, "max_new_tokens": 25, "stop_token_ids": []}
    expected = engine.generate([1, 2], mode="full", **options).tokens
    stream = engine.stream([1, 2], mode="lossless", threshold=NEVER, logits_processor=process, **options)
    made: list[int] = []
    failures = 0
    while len(made) < 25:
        try:
            made.append(next(stream))
        except GenerationError:
            failures += 1
    assert (made, failures) == (expected, 3)


def test_states_are_what_the_head_reads(engine: Engine, tmp_path: Path) -> None:
    made = engine.generate([1, 4, 2], mode="full", max_new_tokens=9, states=True, stop_token_ids=[])
    assert made.states is not None
    assert made.states.shape == (3 + 9 - 1, WIDTH)
    logits = made.states @ SMALL.weights()["head"]
    assert logits.argmax(axis=1)[2:].tolist() == made.tokens
    assert engine.generate([1], mode="full").states is None
    with pytest.raises(GenerationError, match="states is for modes 'full' and 'exit', not 'lossless'"):
        engine.generate([1], mode="lossless", states=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights_sha256": "1" * 64}, "is of another model than the bundle's: run tide-export draft again"),
        ({"tokens": "0-1,3-5,5"}, "must be ascending ranges of the model's token ids"),
        ({"tokens": "0-1,3-7"}, "must be ascending ranges of the model's token ids"),
        ({"tokens": "0-1,"}, "must be ascending ranges of the model's token ids"),
        ({"acceptance": (0.5,)}, "must have 8 values in"),
        ({"max_tokens": 1}, "must be 2 or more"),
        ({"layers": (7,)}, r"must be ascending and lie in 1\.\.6"),
    ],
)
def test_a_drafter_that_is_not_the_bundle_s_is_refused(
    bundle: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    file = tmp_path / "b" / "tide.json"
    manifest = json.loads(file.read_text())
    manifest["drafter"] |= changes
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=rf"field 'drafter\.{next(iter(changes))}' {sentence}"):
        load(tmp_path / "b")


@pytest.mark.parametrize("changes", [{"tokens": "0-1"}, {"kv_shape": (1, 32)}])
def test_a_network_that_is_not_the_manifest_s_is_refused(bundle: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    copy = tmp_path / "b"
    shutil.copytree(bundle, copy)
    engine = load(with_drafter(copy, random_drafter(WIDTH, WIDTH, TOKENS), **changes))
    assert engine.generate([1], mode="full", max_new_tokens=3).tokens  # which needs none
    with pytest.raises(BundleError, match=r"drafter\.onnx"):
        engine.generate([1], mode="lossless", max_new_tokens=3)


def test_the_manifest_and_the_file_belong_together(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "b"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "tide.json").read_text())
    (copy / "tide.json").write_text(json.dumps(manifest | {"drafter": None}))
    with pytest.raises(BundleError, match=r"field 'drafter' must be there with the file drafter\.onnx"):
        load(copy)


@pytest.fixture(scope="module")
def demo(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafting_copy(demo_bundle, tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("temperature", tiers.exhaustive_beyond(1, [0.9, 0.0]))
def test_lists_and_schedulers_give_the_tokens_of_full(
    demo: Path, demo_text_ids: list[int], temperature: float, provider: str
) -> None:
    engine = load(demo, provider=provider, threads=1)
    prompts = [demo_text_ids[150 * n : 150 * n + length] for n, length in enumerate((1, 37, 90, 2))]
    options: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_new_tokens": 20, "stop_token_ids": []}
    full = [made.tokens for made in engine.generate(prompts, mode="full", **options)]
    made = engine.generate(prompts, mode="lossless", **options)
    assert [one.tokens for one in made] == full
    assert all(one.stats.learned_drafted for one in made)
    # From a prefix cache, whose tokens have no states: the drafter begins after them. Segment networks have none.
    prefixes = 1 << 24 if provider == "cpu" else 0
    scheduler = engine.scheduler(SchedulerLimits(slots=2, prompt_tokens=32, prefix_cache_bytes=prefixes))
    text = demo_text_ids[300:390]
    expected = engine.generate(text, mode="full", **options).tokens
    for cached in (False, True):
        request = scheduler.submit(text, mode="lossless", **options)
        result = request.result()
        assert result.tokens == expected
        assert (request.cached_tokens > 0) == (cached and prefixes > 0)
        assert result.stats.learned_drafted


def test_what_a_step_costs_with_others_in_it_decides(demo: Path, demo_text_ids: list[int]) -> None:
    """Up to four more tokens than one cost nothing here, and each further one more than a step."""
    engine = load(demo, threads=1)
    checkpoints = len(engine.manifest.checkpoints)
    steep = Drafting((NEVER,) * checkpoints, 0, 0, (1.0,) * checkpoints, (0.0, 0.0, 0.0, 9.0, 20.0), {}, 3, 0.0)
    tuned = engine.drafting_as(steep)
    options: dict[str, Any] = {"mode": "lossless", "max_new_tokens": 24, "stop_token_ids": []}
    prompts = [demo_text_ids[50 * n : 50 * n + 20] for n in range(8)]
    drafted = {
        count: sum(made.stats.learned_drafted for made in tuned.generate(prompts[:count], **options))
        for count in (1, 2, 8)
    }
    assert drafted[1] > 20
    assert drafted[2] > 20
    # All but those that go on after the others have ended.
    assert drafted[8] <= 3


@pytest.mark.parametrize("temperature", tiers.exhaustive_beyond(1, [0.9, 0.0]))
def test_segment_networks_give_final_states_and_draft_as_the_graph(
    demo: Path, demo_text_ids: list[int], temperature: float
) -> None:
    """Both have one drafter, up to the rounding of its matrices, so that most drafts are the same."""
    free = Drafting((NEVER,) * 3, 0, 0, (1.0,) * 3, (0.0,) * 5, {}, 4, 0.0)
    engines = [load(demo, provider=provider, threads=1).drafting_as(free) for provider in PROVIDERS]
    options: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_new_tokens": 40, "stop_token_ids": []}
    for prompt in (demo_text_ids[:3], demo_text_ids[40:340]):
        graph, networks = (engine.generate(prompt, mode="full", states=True, **options) for engine in engines)
        assert graph.tokens == networks.tokens
        assert graph.states is not None
        assert networks.states is not None
        np.testing.assert_allclose(networks.states, graph.states, atol=1e-3)
        graph, networks = (engine.generate(prompt, mode="lossless", **options) for engine in engines)
        assert graph.tokens == networks.tokens
        drafted = [made.stats.learned_drafted for made in (graph, networks)]
        assert min(drafted) > 20
        assert abs(drafted[0] - drafted[1]) <= 0.3 * max(drafted)


def test_exits_draft_beside_the_drafter_on_segment_networks(demo: Path, demo_text_ids: list[int]) -> None:
    engine = load(demo, provider="cpu-networks", threads=1)
    low = Drafting((0.05,) * 3, 4, 6, (0.2,) * 3, (0.0,) * 5, {}, 3, 0.3)
    tuned, counts = engine.drafting_as(low), np.zeros(2, int)
    for seed in range(tiers.sized(2, 4)):
        options: dict[str, Any] = {"temperature": 0.7, "seed": seed, "max_new_tokens": 50, "stop_token_ids": []}
        full = engine.generate(demo_text_ids[:9], mode="full", **options)
        made = tuned.generate(demo_text_ids[:9], mode="lossless", **options)
        assert made.tokens == full.tokens
        counts += made.stats.learned_drafted, made.stats.drafted - made.stats.learned_drafted
    assert counts.min() > 0
