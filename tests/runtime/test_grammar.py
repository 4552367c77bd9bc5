"""Grammars: the text follows them in every mode, lossless is full, and what cannot be compiled is one sentence."""

import json
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import with_manifest

from tide_export.bundle.manifest import Drafting
from tide_export.errors import GenerationError
from tide_export.runtime import grammar
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.grammar import Compilations, Grammar, schema_error
from tide_export.runtime.limited import LimitError
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.thresholds.resolve import NEVER_EXIT

PROMPT = "def read_lines(path):\n    return "
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 8},
        "lines": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4},
    },
    "required": ["path", "lines"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHOICES = ["path.read_text()", "path.open()", "lines", "line"]
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": r"[0-9]{3}(\.[0-9]{1,4})?, (ab|cd){0,5}"},
    {"grammar": 'start: "[" (item ",")* item "]"\nitem: "path" | "lines" | /[0-9]+/'},
]
MODES: list[dict[str, Any]] = [{"mode": "full"}, {"mode": "exit", "threshold": 0.4}]
FREE = (0.0,) * 5


@pytest.fixture(scope="module")
def engine(demo_bundle: Any) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1)


def check(options: dict[str, Any], text: str) -> None:
    if "json_schema" in options:
        value = json.loads(text)
        assert value.keys() == {"path", "lines"}
        assert len(value["path"]) <= 8
        assert set(value["lines"]) <= {1, 2}
    elif "regex" in options:
        assert re.fullmatch(options["regex"], text)
    else:
        assert re.fullmatch(r"\[((path|lines|[0-9]+),)*(path|lines|[0-9]+)\]", text)


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.2}])
def test_text_follows_the_grammar_in_every_mode(engine: Engine, grammar: dict, sampled: dict) -> None:
    ids, ended = engine.tokenizer.encode(PROMPT), 0
    options: dict[str, Any] = {"max_new_tokens": 60, "detokenize": True, **grammar, **sampled}
    for mode in MODES:
        done = engine.generate(ids, **options, **mode)
        if done.finish_reason == "stop":
            ended += 1
            assert done.tokens[-1] in engine.manifest.model.eos_token_ids
            check(grammar, done.text)
    assert ended
    full = engine.generate(ids, mode="full", **options)
    for lookup in (0, 8):
        drafting = engine.drafting_as(
            Drafting((0.2,) * len(engine.manifest.checkpoints), 4, lookup, FREE[:3], FREE, {})
        )
        lossless = drafting.generate(ids, mode="lossless", **options)
        assert (lossless.tokens, lossless.text) == (full.tokens, full.text)
        assert lossless.stats.drafted


@pytest.mark.parametrize("mode", [*MODES, {"mode": "lossless", "threshold": 0.2}])
def test_a_choice_is_the_likeliest_token_by_token(engine: Engine, mode: dict[str, Any]) -> None:
    """Judged without llguidance: of the tokens that keep the text a beginning of a choice, the one of the largest
    logit; an end-of-sequence token where the text is one."""
    ids, tokenizer = engine.tokenizer.encode(PROMPT), engine.tokenizer
    grammar = "start: " + " | ".join(map(json.dumps, CHOICES))
    done = engine.generate(ids, max_new_tokens=20, grammar=grammar, stop_token_ids=[], detokenize=True, **mode)
    thresholds = [NEVER_EXIT if mode["mode"] == "lossless" else mode.get("threshold", NEVER_EXIT)] * 3
    state, fed, text = engine.start(thresholds, max_pending=0), ids, ""
    texts = [tokenizer.token_text(token) for token in range(engine.manifest.model.vocab_size)]
    ends = engine.manifest.model.eos_token_ids
    for token in done.tokens:
        logits = state.step(fed).logits.copy()
        fits = [bool(piece) and any(one.startswith(text + piece) for one in CHOICES) for piece in texts]
        for end in ends:
            fits[end] = text in CHOICES
        logits[~np.array(fits)] = -np.inf
        assert token == int(logits.argmax())
        fed, text = [token], text + (texts[token] if token not in ends else "")
    assert text == done.text
    assert text in CHOICES
    assert done.tokens[-1] in ends
    assert done.finish_reason == "stop"


SPACES: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"enum": ["a", "b"]}, "lines": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("mode", [*MODES, {"mode": "lossless", "threshold": 0.2}])
def test_json_ends_though_the_model_would_write_line_breaks_for_ever(engine: Engine, mode: dict[str, Any]) -> None:
    spaces = [
        token for token in range(engine.manifest.model.vocab_size) if engine.tokenizer.token_text(token).isspace()
    ]

    def writes_spaces(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[spaces] += 1000.0
        return logits

    options: dict[str, Any] = {"max_new_tokens": 60, "detokenize": True, "logits_processor": writes_spaces} | mode
    ids = engine.tokenizer.encode(PROMPT)
    done = engine.generate(ids, json_schema=SPACES, **options)
    assert done.finish_reason == "stop"
    assert done.text == json.dumps(json.loads(done.text))  # a space after each comma and colon, as it may be
    free = engine.generate(ids, json_schema=SPACES, json_whitespace=True, **options)
    assert (free.finish_reason, free.text.strip()) == ("length", "{")
    own = SPACES | {"x-guidance": {"whitespace_flexible": True}}
    assert engine.generate(ids, json_schema=own, **options).text.strip() == "{"
    none = SPACES | {"x-guidance": {"item_separator": ",", "key_separator": ":"}}
    assert " " not in engine.generate(ids, json_schema=none, **options).text


def test_a_list_and_a_scheduler_follow_grammars_of_their_own(engine: Engine) -> None:
    prompts = [engine.tokenizer.encode(text) for text in (PROMPT, "import os", "class Reader:")]
    shared = {"max_new_tokens": 40, "mode": "lossless", "threshold": 0.3}
    alone = [engine.generate(prompt, **shared, **one).tokens for prompt, one in zip(prompts, GRAMMARS, strict=True)]
    scheduler = engine.scheduler(SchedulerLimits(slots=2))
    handles = [scheduler.submit(prompt, **shared, **one) for prompt, one in zip(prompts, GRAMMARS, strict=True)]
    assert [handle.result().tokens for handle in handles] == alone
    regex = shared | GRAMMARS[1]
    assert [one.tokens for one in engine.generate(prompts, **regex)] == [
        engine.generate(prompt, **regex).tokens for prompt in prompts
    ]


@pytest.mark.parametrize("kind", GRAMMARS)
def test_tokens_can_be_taken_back_at_random(engine: Engine, kind: dict[str, Any]) -> None:
    """Also over the end of the text."""
    config, order = GenerationConfig(**kind), random.Random(3)
    ((name, text),) = [(one, getattr(config, one)) for one in kind]
    grammar, taken = Grammar(engine.bundle, name, text), list[int]()
    state = grammar.start()
    ended = 0
    for _ in range(300):
        if taken and (order.random() < 0.15 or taken[-1] in engine.manifest.model.eos_token_ids):
            del taken[len(taken) - order.randint(1, min(3, len(taken))) :]
        else:
            allowed = np.flatnonzero(state.mask()).tolist()
            # Ends are rare among random tokens.
            token = next((end for end in engine.manifest.model.eos_token_ids if end in allowed), order.choice(allowed))
            ended += token in engine.manifest.model.eos_token_ids
            taken.append(token)
        state.read(taken)
        if not taken or taken[-1] not in engine.manifest.model.eos_token_ids:
            fresh = grammar.start()
            fresh.read(taken)
            assert (state.mask() == fresh.mask()).all()
    assert ended


class Compiler:
    """A process that takes 2 s for each grammar, by a clock of its own."""

    def __init__(self) -> None:
        self.now, self.left = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def call(self, function: str, *asked: Any, seconds: float) -> tuple[str, str]:
        assert function == "compiled"
        assert grammar._turns[os.getpid()].locked()  # so others that compile meanwhile take nothing of the time
        self.left.append(seconds)
        self.now += min(seconds, 2.0)
        if seconds < 2.0:
            raise LimitError(f"takes longer than {seconds:g} s")
        return "", ""


def test_the_grammars_of_one_request_have_5_seconds_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(grammar, "_process", compiler)
    monkeypatch.setattr(grammar, "time", compiler)
    request, schemas = Compilations(), [json.dumps({"enum": [number]}) for number in range(3)]
    reasons = []
    for schema in schemas:  # as for each prompt of a request
        with request.shared():
            reasons.append(schema_error(engine.bundle, schema))
    assert reasons == ["", "", "takes longer than 5 s"]
    assert [schema_error(engine.bundle, schema) for schema in schemas] == [""] * 3
    assert compiler.left == [5.0, 3.0, 1.0, 5.0, 5.0, 5.0]


def test_generations_of_one_request_share_their_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, call = list[Any](), grammar._process.call

    def counted(function: str, *arguments: Any, **options: Any) -> Any:
        found = call(function, *arguments, **options)
        asked.extend([arguments[1:3]] if function == "compiled" and found is not None else [])
        return found

    prompts = [engine.tokenizer.encode(text) for text in (PROMPT, "import os", PROMPT)]
    shared: dict[str, Any] = {"max_new_tokens": 30, "mode": "full"} | GRAMMARS[1]
    alone = [engine.generate(prompt, **shared).tokens for prompt in prompts]
    monkeypatch.setattr(grammar._process, "call", counted)
    scheduler, request = engine.scheduler(SchedulerLimits(slots=2)), Compilations()
    with request.shared():
        handles = [scheduler.submit(prompt, **shared) for prompt in prompts]
        handles.append(scheduler.submit(prompts[0], max_new_tokens=2, mode="full", regex="a+"))
    assert [handle.result().tokens for handle in handles[:3]] == alone
    assert asked == [("regex", GRAMMARS[1]["regex"]), ("regex", "a+")]
    engine.generate(prompts[0], **shared)
    assert len(asked) == 3
    assert [found.tokens for found in engine.generate(prompts, **shared)] == alone
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "[0-9"}, "regex cannot be compiled: .*unclosed character class"),
        ({"grammar": "start: nothing"}, 'grammar cannot be compiled: .*unknown name: "nothing"'),
        ({"json_schema": {"type": "nosuch"}}, "json_schema cannot be compiled: Invalid type: nosuch"),
        ({"json_schema": "{"}, "json_schema must be a JSON object, or text that holds one, not '{'"),
        ({"json_schema": [1]}, "json_schema must be a JSON object"),
        ({"json_schema": {"a": object}}, "json_schema must be a JSON object"),
        ({"regex": ""}, "regex must be a string that is not empty"),
        ({"grammar": 3}, "grammar must be a string that is not empty, not 3"),
        ({"regex": "a", "grammar": "start: /a/"}, "json_schema, regex and grammar exclude each other"),
    ],
)
def test_what_is_no_grammar_is_one_sentence(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message) as error:
        engine.stream([1, 2], **options)
    assert "\n" not in str(error.value)


def test_what_a_grammar_needs(
    engine: Engine, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(GenerationError, match=r"regex needs a tokenizer, and bundle .* holds no tokenizer.json"):
        tiny_engine.stream([1], regex="a")
    endless = with_manifest(engine.bundle.path, tmp_path, model=replace(engine.manifest.model, eos_token_ids=()))
    with pytest.raises(GenerationError, match="regex needs a model with an end-of-sequence token"):
        load(endless, threads=1, verify=False).stream([1], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        GenerationError, match=r"regex needs the package 'llguidance': pip install -e '\.\[grammar\]' in the clone"
    ):
        engine.stream([1], regex="a")
