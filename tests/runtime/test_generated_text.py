"""Stop strings and text of a generation: across token borders, trimmed, in every mode and in lists."""

from typing import Any

import pytest

from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.tokenizer import LateText

PROMPT = "def read_lines(path):"
MODES: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "exit", "threshold": 0.5},
    {"mode": "lossless", "threshold": 0.3, "prompt_lookup": 6},
]


@pytest.fixture(scope="module")
def engine(demo_bundle: Any) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1)


@pytest.mark.parametrize("options", MODES)
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_after_it(engine: Engine, options: dict) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    whole = engine.generate(ids, max_new_tokens=40, detokenize=True, **options)
    assert whole.text == LateText(engine.tokenizer, ids).of(whole.tokens, True)
    for start in range(0, 30, 3):
        stop = whole.text[start : start + 5]
        at = whole.text.index(stop)
        done = engine.generate(ids, max_new_tokens=40, stop=["never", stop], **options)
        assert (done.text, done.finish_reason) == (whole.text[:at], "stop")
        assert done.tokens == whole.tokens[: len(done.tokens)]
        assert stop in engine.tokenizer.decode([*ids, *done.tokens])
        assert stop not in engine.tokenizer.decode([*ids, *done.tokens[:-1]])[len(PROMPT) :]


def test_a_list_and_a_scheduler_stop_as_one_prompt_does(engine: Engine) -> None:
    prompts = [engine.tokenizer.encode(text) for text in (PROMPT, "import os", "class Reader:")]
    options: dict[str, Any] = {"max_new_tokens": 30, "stop": ["\n", "("]}
    alone = [engine.generate(prompt, **options) for prompt in prompts]
    facts = [(one.text, one.tokens, one.finish_reason) for one in alone]
    assert [(one.text, one.tokens, one.finish_reason) for one in engine.generate(prompts, **options)] == facts
    assert any(one.finish_reason == "stop" for one in alone)
    scheduler = engine.scheduler(SchedulerLimits(slots=2))
    handles = [scheduler.submit(prompt, **options) for prompt in prompts]
    for handle, (text, tokens, _) in zip(handles, facts, strict=True):
        pieces, seen = [], 0
        for _ in handle:
            pieces.append(handle.text[seen:])
            seen = len(handle.text)
        assert handle.result().tokens == tokens
        assert "".join(pieces) == text == handle.text


def test_what_a_cancelled_request_held_back_is_returned(engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    whole = engine.generate(ids, max_new_tokens=6, mode="full", detokenize=True).text
    scheduler = engine.scheduler(SchedulerLimits(slots=1))
    handle = scheduler.submit(ids, max_new_tokens=40, mode="full", stop=whole + "never")
    for _ in range(6):
        next(handle)
    assert handle.text == ""
    handle.cancel()
    scheduler.step()
    assert (handle.result().text, handle.finish_reason) == (whole, "cancelled")


def test_text_shows_the_special_tokens_that_it_is_asked_to(engine: Engine) -> None:
    ids, (end,) = engine.tokenizer.encode(PROMPT), engine.manifest.model.eos_token_ids
    for more in ({}, {"stop": "never"}):
        options: dict[str, Any] = {"detokenize": True, "logit_bias": {end: 1000.0}, "max_new_tokens": 3} | more
        assert engine.generate(ids, **options).text == ""
        assert engine.generate(ids, special_tokens=[5], **options).text == ""
        shown = engine.generate(ids, special_tokens=[end], **options)
        assert shown.text == engine.tokenizer.token_text(end) != ""


def test_text_needs_a_tokenizer(tiny_engine: Engine) -> None:
    for option in ({"stop": "x"}, {"detokenize": True}):
        with pytest.raises(GenerationError, match=f"{next(iter(option))} needs a tokenizer, and bundle .* holds no"):
            tiny_engine.generate([1], **option)
    assert tiny_engine.generate([1], max_new_tokens=1, stop=[]).text is None


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 3, ["a", 3], {"a": 1}, b"x", "\ud800"])
def test_stop_strings_that_are_none_are_named(stop: Any) -> None:
    with pytest.raises(GenerationError, match="stop"):
        GenerationConfig(stop=stop)
