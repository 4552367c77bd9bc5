"""Logits are changed before a token is chosen: as transformers does it, in every mode, undone with rejected drafts."""

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
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.stepping import sample
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.oracle import oracle

PROMPT = [3, 1, 4, 1, 5]


def even_ids_only(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """A hook that depends on the length, and writes into its argument."""
    logits[1 + len(ids) % 2 :: 2] -= 5
    return logits


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": {3: 4.5, 7: -2, 0: 1}},
    "hook": {"logits_processor": even_ids_only},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.1,
        "logit_bias": {9: 3.0},
        "logits_processor": even_ids_only,
    },
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


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


@every_option
@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.6, "seed": 4}], ids=["greedy", "drawn"])
def test_tokens_are_chosen_from_the_changed_logits(
    tiny_engine: Engine, options: dict[str, Any], drawn: dict[str, Any]
) -> None:
    """Of logits that a hook sets: the model's play no part. 200 tokens are more than any table holds at first."""
    table = np.random.default_rng(1).standard_normal((300, 48)).astype(np.float32) * 3
    hook = options.get("logits_processor", lambda ids, logits: logits)
    given = options | {"logits_processor": lambda ids, logits: hook(ids, table[len(ids)].copy())}
    found = tiny_engine.generate(PROMPT, mode="full", max_new_tokens=200, stop_token_ids=[], **given, **drawn).tokens
    for number, token in enumerate(found):
        changed = processed(table[len(PROMPT) + number], PROMPT, found[:number], options)
        assert token == sample(changed, len(PROMPT) + number, **drawn), number


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.2), (3, 1.0, 0.4), (0, 0.8, 0.1), (5, 0.7, 0.3)])
def test_min_p_is_vllm_s(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """transformers' warpers in the order of vLLM V1: the tokens that are kept are those that are drawn."""
    logits = np.random.default_rng(4).standard_normal(40).astype(np.float32) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, torch.tensor(logits[None])).softmax(-1)[0]
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = probabilities(logits, **options)
    kept = {token: p for token, p in enumerate(expected.tolist()) if p > 0}
    assert found == pytest.approx(kept, rel=1e-4)
    assert 1 <= len(kept) < 40
    assert {sample(logits, position, seed=1, **options) for position in range(2000)} == kept.keys()


def test_min_p_of_one_keeps_the_most_likely_alone() -> None:
    logits = np.array([0.3, 2.0, -1.0, 2.0, 1.99], np.float32)
    drawn = {sample(logits, position, temperature=1.0, min_p=1.0, seed=1) for position in range(100)}
    assert drawn == {1, 3}


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
    assert llama.generate([prompt, prompt[:2]], mode="full", **options)[0].tokens == expected
    assert llama.generate(prompt, mode="full", max_new_tokens=30, stop_token_ids=[]).tokens != expected


@every_option
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
    options, tokens = OPTIONS["all"], list[int]()
    for _ in range(12):
        judged = oracle(tiny_llama.source, tiny_llama.routers, [*TEXT[:7], *tokens], [0.5, 0.5])
        tokens.append(int(processed(judged.logits[-1].numpy(), TEXT[:7], tokens, options).argmax()))
    given = {"max_new_tokens": 12, "stop_token_ids": [], "min_layers": 0, **options}
    assert llama.generate(TEXT[:7], mode="exit", threshold=0.5, **given).tokens == tokens


@every_option
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "min_p": 0.02, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("lookup", [0, 8])
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


@every_option
def test_lists_and_schedulers_change_the_same(llama: Engine, options: dict[str, Any]) -> None:
    prompts = [TEXT[:8] * 2, [2, 6], TEXT[3:10]]
    for mode in ({"mode": "full"}, {"mode": "exit", "threshold": 0.5}, {"mode": "lossless", "prompt_lookup": 3}):
        given = {"max_new_tokens": 14, "stop_token_ids": [], "logprobs": 1, **mode, **options}
        alone = [llama.generate(prompt, **given) for prompt in prompts]
        scheduler = llama.scheduler(SchedulerLimits(slots=2, prompt_tokens=5))
        handles = [scheduler.submit(prompt, **given) for prompt in prompts]
        for found in (llama.generate(prompts, **given), [handle.result() for handle in handles]):
            assert [one.tokens for one in found] == [one.tokens for one in alone]
            for one, other in zip(found, alone, strict=True):
                assert [p.logprob for p in one.logprobs] == pytest.approx([p.logprob for p in other.logprobs], abs=1e-4)


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
    (all_of_them,) = tiny_engine.generate(PROMPT, logprobs=48, max_new_tokens=1).logprobs
    assert math.fsum(math.exp(value) for _, value in all_of_them.top) == pytest.approx(1.0)


def test_a_stream_has_log_probabilities_of_what_it_returned(tiny_engine: Engine) -> None:
    stream = tiny_engine.stream(PROMPT, max_new_tokens=12, mode="lossless", threshold=0.0, logprobs=1)
    for count in range(1, 13):
        next(stream)
        assert len(stream.logprobs) == len(stream.tokens) == count


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


def test_a_config_with_a_bias_is_hashable_and_equal_to_its_like() -> None:
    config = GenerationConfig(logit_bias={4: 1, 2: -0.5})
    assert config.logit_bias == ((2, -0.5), (4, 1.0))
    assert hash(config) == hash(GenerationConfig(logit_bias=((4, 1.0), (2, -0.5))))


def test_neutral_options_change_nothing(tiny: TinyModel, tiny_engine: Engine) -> None:
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    found = tiny_engine.generate(PROMPT, max_new_tokens=5, mode="full", **neutral).tokens
    assert found == tiny.reference_greedy(PROMPT, [NEVER_EXIT, NEVER_EXIT], 5)[0]
