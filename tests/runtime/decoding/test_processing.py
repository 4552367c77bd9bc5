"""Logits are changed before a token is chosen: as transformers does it, in every mode, undone with the tokens."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from distribution import probabilities
from judge import TEXT
from tiny_engines import TinyLlama
from tiny_model import TinyModel
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tide_export.bundle.manifest import Drafting
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.decoding.processing import LogitsProcessing
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.oracle import oracle

LOGITS = np.array([0.3, 2.0, -1.0, 2.0, 0.3, 1.2, -40.0, 0.3, 0.9, -0.2], np.float32)
PROMPT = [3, 1, 4, 1, 5]


def even_ids_only(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """A hook that depends on the length, and writes into its argument."""
    logits[1 + len(ids) % 2 :: 2] -= 5
    return logits


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"logit_bias": {3: 4.5, 7: -2, 0: 1}},
    {"logits_processor": even_ids_only},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.1,
        "logit_bias": {9: 3.0},
        "logits_processor": even_ids_only,
    },
]


def processed(logits: np.ndarray, prompt: list[int], generated: list[int], options: dict[str, Any]) -> np.ndarray:
    """The order of the documentation, one token at a time, in float32."""
    f = np.float32
    made = logits.astype(np.float32)
    if "logits_processor" in options:
        made = options["logits_processor"]([*prompt, *generated], made)
    for token in {*prompt, *generated}:
        penalty = f(options.get("repetition_penalty", 1.0))
        made[token] = made[token] / penalty if made[token] > 0 else made[token] * penalty
    for token, count in Counter(generated).items():
        made[token] = made[token] - f(options.get("frequency_penalty", 0.0)) * f(count)
        made[token] = made[token] - f(options.get("presence_penalty", 0.0))
    for token, bias in options.get("logit_bias", {}).items():
        made[token] = made[token] + f(bias)
    return made


def processing_of(prompt: list[int], options: dict[str, Any]) -> LogitsProcessing:
    named = {"logits_processor": "processor"}
    return LogitsProcessing(prompt, **{named.get(name, name): value for name, value in options.items()})


@pytest.mark.parametrize("options", OPTIONS)
def test_logits_are_those_of_the_plain_loop_bit_for_bit(options: dict[str, Any]) -> None:
    processing, generated, random = processing_of(PROMPT, options), list[int](), np.random.default_rng(1)
    for _ in range(200):  # more than the tables hold at first
        logits = (random.standard_normal(300) * 3).astype(np.float32)
        expected = processed(logits.copy(), PROMPT, generated, options)
        before = logits.copy()
        assert processing(logits).tobytes() == expected.tobytes()
        assert (logits == before).all()  # they are the engine's
        generated.append(int(random.integers(0, 300)))
        processing.accept(generated[-1])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("undo", ["rewind", "restore"])
def test_tokens_can_be_taken_back(options: dict[str, Any], undo: str) -> None:
    processing = processing_of(PROMPT, options)
    for token in (1, 2, 2):
        processing.accept(token)
    expected = processing(LOGITS)
    for token in (2, 8, 1, 8):
        processing.accept(token)
    getattr(processing, undo)(len(PROMPT) + 3)
    np.testing.assert_array_equal(processing(LOGITS), expected)
    processing.accept(9)
    np.testing.assert_array_equal(processing(LOGITS), processed(LOGITS, PROMPT, [1, 2, 2, 9], options))


def test_a_half_done_change_is_undone() -> None:
    processing = processing_of(PROMPT, OPTIONS[-1])
    expected = processing(LOGITS)
    processing.ids.append(8)  # an exception came before the rest of `accept`
    processing.restore(len(PROMPT))
    np.testing.assert_array_equal(processing(LOGITS), expected)


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.2), (3, 1.0, 0.4), (0, 0.8, 0.1), (5, 0.7, 0.3)])
def test_min_p_is_vllm_s(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """transformers' warpers in the order of vLLM V1."""
    logits = np.random.default_rng(4).standard_normal(40).astype(np.float32) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, torch.tensor(logits[None])).softmax(-1)[0]
    found = torch.zeros(40, dtype=torch.float64)
    for token, p in probabilities(Sampler(temperature, top_k, top_p, min_p=min_p), logits).items():
        found[token] = p
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-7)
    assert 1 <= int((found > 0).sum()) < 40


def test_min_p_of_one_keeps_the_most_likely_alone() -> None:
    assert probabilities(Sampler(1.0, min_p=1.0), LOGITS) == {1: 0.5, 3: 0.5}


@pytest.fixture(scope="module")
def llama(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


BIAS = {5: 1.5, 17: -1.0, 300: 2.0}


def test_full_is_transformers_own_generation(tiny_llama: TinyLlama, llama: Engine) -> None:
    model, prompt = tiny_llama.source.model, TEXT[:9]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0,
        logits_processor=LogitsProcessorList([
            RepetitionPenaltyLogitsProcessor(1.3), SequenceBiasLogitsProcessor({(t,): b for t, b in BIAS.items()}),
        ]),
    )[0, 9:].tolist()  # fmt: skip
    options = {"repetition_penalty": 1.3, "logit_bias": BIAS, "max_new_tokens": 30, "stop_token_ids": []}
    assert llama.generate(prompt, mode="full", **options).tokens == expected
    assert llama.generate(prompt, mode="lossless", threshold=0.4, **options).tokens == expected
    assert llama.generate(prompt, mode="full", max_new_tokens=30, stop_token_ids=[]).tokens != expected


@pytest.mark.parametrize("options", OPTIONS)
def test_exit_is_the_rule_with_the_same_processing(tiny: TinyModel, tiny_engine: Engine, options: dict) -> None:
    tokens, layers = list[int](), list[int]()
    for _ in range(30):
        logits, exit_layers, _ = tiny.reference([*PROMPT, *tokens], [0.5, 0.65])
        tokens.append(int(processed(logits[-1], PROMPT, tokens, options).argmax()))
        layers.append(int(exit_layers[-1]))
    done = tiny_engine.generate(PROMPT, max_new_tokens=30, mode="exit", threshold=[0.5, 0.65], **options)
    assert (done.tokens, done.stats.exit_layer) == (tokens, layers)
    assert len(set(layers)) > 1


def test_exit_is_the_rule_in_eager_pytorch(tiny_llama: TinyLlama, llama: Engine) -> None:
    options, tokens = OPTIONS[-1], list[int]()
    for _ in range(12):
        judged = oracle(tiny_llama.source, tiny_llama.routers, [*TEXT[:7], *tokens], [0.5, 0.5])
        tokens.append(int(processed(judged.logits[-1].numpy(), TEXT[:7], tokens, options).argmax()))
    given = {"max_new_tokens": 12, "stop_token_ids": [], "min_layers": 0, **options}
    assert llama.generate(TEXT[:7], mode="exit", threshold=0.5, **given).tokens == tokens


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "min_p": 0.02, "seed": 3}])
@pytest.mark.parametrize("lookup", [0, 8])
@pytest.mark.parametrize("options", OPTIONS)
def test_lossless_is_full(tiny_engine: Engine, options: dict, lookup: int, sampled: dict) -> None:
    free = (0.0,) * 5
    engine = tiny_engine.drafting_as(Drafting((0.0, 0.0), 4, lookup, free[:2], free, {}))
    given = {"max_new_tokens": 60, "logprobs": 2, **options, **sampled}
    full = engine.generate(PROMPT, mode="full", **given)
    lossless = engine.generate(PROMPT, mode="lossless", **given)
    assert lossless.tokens == full.tokens
    assert [one.top for one in lossless.logprobs] == [
        pytest.approx(np.array(one.top), rel=1e-4) for one in full.logprobs
    ]
    assert lossless.stats.drafted


def test_a_draft_is_the_token_that_the_same_processing_gives(tiny_engine: Engine) -> None:
    """A bias that leaves one token makes every draft right; with drafts that ignore it all would be rejected."""
    done = tiny_engine.generate(
        PROMPT, max_new_tokens=50, mode="lossless", threshold=0.0, prompt_lookup=0, logit_bias={11: 1000.0}
    )
    assert done.tokens == [11] * 50
    assert done.stats.accepted == done.stats.drafted > 10


def test_log_probabilities_are_the_model_s(tiny: TinyModel, tiny_engine: Engine) -> None:
    options = {"max_new_tokens": 8, "mode": "exit", "threshold": [0.5, 0.65], "repetition_penalty": 2.0}
    done = tiny_engine.generate(PROMPT, logprobs=3, **options)
    for number, one in enumerate(done.logprobs):
        logits, _, _ = tiny.reference([*PROMPT, *done.tokens[:number]], [0.5, 0.65])
        expected = torch.tensor(logits[-1]).double().log_softmax(-1)
        best = expected.topk(3)
        assert one.logprob == pytest.approx(expected[done.tokens[number]].item(), abs=1e-4)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert len(done.logprobs) == 8
    assert any(one.top[0][0] != token for one, token in zip(done.logprobs, done.tokens, strict=True))
    assert {len(one.top) for one in tiny_engine.generate(PROMPT, logprobs=0, **options).logprobs} == {0}
    assert tiny_engine.generate(PROMPT, **options).logprobs is None


def test_log_probabilities_of_equal_logits_are_by_id() -> None:
    sampler = Sampler(logprobs=3)
    sampler(LOGITS)
    assert [token for token, _ in sampler.logprobs[0].top] == [1, 3, 5]
    sampler = Sampler(logprobs=10)
    sampler(LOGITS)
    assert math.fsum(math.exp(value) for _, value in sampler.logprobs[0].top) == pytest.approx(1.0)


def test_a_stream_has_log_probabilities_of_what_it_returned(tiny_engine: Engine) -> None:
    stream = tiny_engine.stream(PROMPT, max_new_tokens=12, mode="lossless", threshold=0.0, logprobs=1)
    for count in range(1, 13):
        next(stream)
        assert len(stream.logprobs) == len(stream.tokens) == count


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda ids, logits: 1 / 0, "logits_processor failed: division by zero"),
        (lambda ids, logits: logits[:3], r"logits_processor must return logits of shape \[48\], not \[3\]"),
        (lambda ids, logits: None, r"must return logits of shape \[48\], not \[\]"),
        (lambda ids, logits: "x", "logits_processor failed: could not convert"),
        (lambda ids, logits: logits * np.nan, "leave no token with a finite logit"),
        (lambda ids, logits: logits - np.inf, "leave no token with a finite logit"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hook_that_fails_is_one_sentence(tiny_engine: Engine, hook: Any, message: str, temperature: float) -> None:
    with pytest.raises(GenerationError, match=message):
        tiny_engine.generate(PROMPT, logits_processor=hook, temperature=temperature)


def test_broken_logits_are_the_model_s_fault_whatever_changes_them() -> None:
    broken = LOGITS.copy()
    broken[2] = math.nan
    with pytest.raises(GenerationError, match="the model's logits are not finite"):
        Sampler(processing=LogitsProcessing(PROMPT, logit_bias={1: 1.0}))(broken)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": "1"},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": 3},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": [1, 2]},
        {"logits_processor": 3},
        {"logprobs": -1},
        {"logprobs": True},
    ],
)
def test_options_out_of_range_are_named(options: dict) -> None:
    with pytest.raises(GenerationError, match=next(iter(options))):
        GenerationConfig(**options)


def test_options_that_the_vocabulary_bounds(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match=r"logit_bias holds token id 48, outside the vocabulary 0\.\.47"):
        tiny_engine.generate(PROMPT, logit_bias={48: 1.0})
    with pytest.raises(GenerationError, match="logprobs must be a whole number from 0 to 48, not 49"):
        tiny_engine.generate(PROMPT, logprobs=49)
    assert len(tiny_engine.generate(PROMPT, logprobs=48, max_new_tokens=1).logprobs[0].top) == 48


def test_a_config_with_a_bias_is_hashable_and_equal_to_its_like() -> None:
    config = GenerationConfig(logit_bias={4: 1, 2: -0.5})
    assert config.logit_bias == ((2, -0.5), (4, 1.0))
    assert hash(config) == hash(GenerationConfig(logit_bias=((4, 1.0), (2, -0.5))))


def test_nothing_is_processed_where_no_option_asks_for_it(tiny: TinyModel, tiny_engine: Engine) -> None:
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    stream = tiny_engine.stream(PROMPT, max_new_tokens=5, mode="full", **neutral)
    assert stream._decoder._sampler._processing is None
    assert list(stream) == tiny.reference_greedy(PROMPT, [NEVER_EXIT, NEVER_EXIT], 5)[0]
