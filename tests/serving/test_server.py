"""The server over real HTTP: OpenAI's own client gets the engine's tokens, and what is wrong is one error."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from running_server import GREEDY, PROMPT, Running, text_of
from tokenizers import Tokenizer, decoders, models

from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.serving import answers
from tide_export.serving.config import ServerConfig
from tide_export.serving.logprobs import bytes_of
from tide_export.serving.protocol import ApiError, ChatRequest
from tide_export.serving.service import Service


def test_a_completion_is_the_engine_s_text(server: Running, engine: Engine) -> None:
    ids = BundleTokenizer(engine.bundle).encode(PROMPT)
    expected = text_of(engine, ids, max_new_tokens=24, mode="full")
    for prompt in (PROMPT, ids):
        done = server.openai.completions.create(prompt=prompt, **GREEDY)
        assert (done.choices[0].text, done.choices[0].finish_reason) == (expected, "length")
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids), 24)
    events = list(
        server.openai.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(event.choices[0].text for event in events if event.choices) == expected
    assert events[-1].usage is not None
    assert events[-1].usage.total_tokens == len(ids) + 24
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"


def test_choices_and_several_prompts(server: Running, engine: Engine) -> None:
    prompts, options = ["import os", "def main():"], {"model": "demo", "max_tokens": 8, "temperature": 0.8, "seed": 3}
    mode: dict[str, Any] = {"extra_body": {"mode": "full", "top_k": 50}}
    done = server.openai.completions.create(prompt=prompts, n=2, **options, **mode)
    tokenizer, expected = BundleTokenizer(engine.bundle), []
    for prompt in prompts:
        for seed in (3, 4):
            more = {"temperature": 0.8, "top_k": 50, "seed": seed}
            expected.append(text_of(engine, tokenizer.encode(prompt), max_new_tokens=8, mode="full", **more))
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for event in server.openai.completions.create(prompt=prompts, n=2, stream=True, **options, **mode):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == expected


def test_a_conversation(server: Running, engine: Engine) -> None:
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "List "}, {"type": "text", "text": "files"}]}
    ]
    ids = BundleTokenizer(engine.bundle).encode_plain("# user: List files\n# assistant:")
    expected = text_of(engine, ids, max_new_tokens=12, mode="full")
    options = GREEDY | {"max_tokens": None, "max_completion_tokens": 12}
    done = server.openai.chat.completions.create(messages=parts, **options)
    assert done.choices[0].message.content == expected
    events = server.openai.chat.completions.create(messages=parts, stream=True, **options)
    pieces = [event.choices[0].delta for event in events]
    assert pieces[0].role == "assistant"
    assert "".join(piece.content or "" for piece in pieces) == expected


def test_stop_strings_end_the_text_before_them(server: Running) -> None:
    whole = server.openai.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    for stop in (whole[9:13], ["never", whole[20:23]]):
        first = min(whole.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in whole)
        done = server.openai.completions.create(prompt=PROMPT, stop=stop, **GREEDY).choices[0]
        assert (done.text, done.finish_reason) == (whole[:first], "stop")
        events = server.openai.completions.create(prompt=PROMPT, stop=stop, stream=True, **GREEDY)
        assert "".join(event.choices[0].text for event in events) == whole[:first]
    assert server.idle()


CHANGED: dict[str, Any] = {
    "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"300": 2.0}, "seed": 5, "temperature": 0.7,
    "max_tokens": 12,
}  # fmt: skip
MORE: dict[str, Any] = {"mode": "lossless", "min_p": 0.02, "repetition_penalty": 1.3, "stop_token_ids": [17]}


def test_options_change_the_tokens_as_the_engine_s(server: Running, engine: Engine) -> None:
    ids, eos = engine.tokenizer.encode(PROMPT), engine.manifest.model.eos_token_ids
    options = {name: value for name, value in (CHANGED | MORE).items() if name != "max_tokens"}
    options |= {"logit_bias": {300: 2.0}, "max_new_tokens": 12, "logprobs": 2, "detokenize": True}
    expected = engine.generate(ids, **options | {"stop_token_ids": [*eos, 17]})
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "logprobs": 2, "extra_body": MORE, **CHANGED}
    (choice,) = server.openai.completions.create(**asked).choices
    assert choice.text == expected.text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], rel=1e-4)
    assert "".join(choice.logprobs.tokens) == expected.text
    assert choice.logprobs.text_offset == [
        len("".join(choice.logprobs.tokens[:number])) for number in range(len(expected.tokens))
    ]
    best = [dict(sorted(one.top, key=lambda pair: -pair[1])[:1]) for one in expected.logprobs]
    for found, one in zip(choice.logprobs.top_logprobs, best, strict=True):
        assert max(found.values()) == pytest.approx(next(iter(one.values())), rel=1e-4)
        assert len(found) == 2
    streamed = list(server.openai.completions.create(stream=True, **asked))
    parts = [event.choices[0].logprobs for event in streamed if event.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == choice.logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == choice.logprobs.text_offset


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["lines"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_text_of_a_form(server: Running) -> None:
    client, model = server.openai, {"model": "demo", "temperature": 0}
    named: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "lines", "schema": SCHEMA, "strict": True}}
    said = client.chat.completions.create(
        messages=[{"role": "user", "content": "List"}], response_format=named, max_completion_tokens=60, **model
    )
    value = json.loads(said.choices[0].message.content or "")
    assert value.keys() == {"lines"}
    assert said.choices[0].finish_reason == "stop"
    for body in ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
        done = client.completions.create(prompt=PROMPT, max_tokens=60, extra_body=body, **model)
        assert json.loads(done.choices[0].text).keys() == {"lines"}
    for body, form in (
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["left", 'a "b"']}, 'left|a "b"'),
        ({"guided_grammar": 'start: "x" | "y"'}, "x|y"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\s*\{.*"),
        ({"response_format": {"type": "text"}}, r"(?s).*"),
    ):
        events = client.completions.create(prompt=PROMPT, max_tokens=9, stream=True, extra_body=body, **model)
        assert re.fullmatch(form, "".join(event.choices[0].text for event in events))


def test_log_probabilities_of_a_conversation(server: Running) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "List"}], "logprobs": True, **GREEDY}
    (choice,) = server.openai.chat.completions.create(top_logprobs=3, **asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 3
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
        assert bytes(one.bytes) == one.token.encode()
    streamed = server.openai.chat.completions.create(stream=True, **asked)
    parts = [event.choices[0].logprobs for event in streamed]
    tokens = [one for part in parts if part is not None for one in part.content]
    assert [one.token for one in tokens] == [one.token for one in choice.logprobs.content]
    assert {len(one.top_logprobs) for one in tokens} == {0}
    body = {"model": "demo", "messages": asked["messages"], "top_logprobs": 2}
    refused = server.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "top_logprobs needs logprobs")


def test_the_bytes_of_tokens_give_their_characters(engine: Engine, tmp_path: Path) -> None:
    """Also those of a token that holds part of a character, if the vocabulary tells them."""
    ids = engine.tokenizer.encode_plain(text := "鍵 é🌍")
    assert "\ufffd" in [engine.tokenizer.token_text(token) for token in ids]
    assert bytes(one for token in ids for one in bytes_of(engine.tokenizer, token) or ()) == text.encode()
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    for decoder, told in ((decoders.ByteFallback(), [0xE9]), (decoders.Replace("<0xE9>", "\ufffd"), None)):
        made.decoder = decoder
        made.save(str(tmp_path / "tokenizer.json"))
        assert bytes_of(BundleTokenizer(tmp_path), 0xE9) == told


def test_a_streamed_echo_is_written_beside_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    write, threads = answers.of_completion, list[threading.Thread]()
    monkeypatch.setattr(answers, "of_completion", lambda *of: threads.append(threading.current_thread()) or write(*of))
    body = {"model": "demo", "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 2, "stream": True}
    streamed = [line for line in server.http.post("/v1/completions", json=body).text.splitlines() if line]
    assert json.loads(streamed[0].removeprefix("data: "))["choices"][0]["text"] == PROMPT
    assert [thread is server._thread for thread in threads][:2] == [False, True]


def test_null_is_as_if_it_were_not_given(server: Running) -> None:
    names = ["temperature", "top_p", "n", "stream", "presence_penalty", "frequency_penalty", "logprobs", "stop", "mode"]
    bare = {"model": "demo", "seed": 5, "max_tokens": 6}
    for path, asked, more in (
        ("completions", {"prompt": PROMPT}, ["echo", "suffix"]),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, ["top_logprobs", "tools"]),
    ):
        nulls = dict.fromkeys(names + more)
        told = [server.http.post(f"/v1/{path}", json=bare | asked | fields) for fields in ({}, nulls)]
        assert [one.status_code for one in told] == [200, 200], told[1].text
        without, with_nulls = ([one["choices"], one["usage"]["completion_tokens"]] for one in (x.json() for x in told))
        assert without == with_nulls


def test_an_end_of_sequence_can_be_ignored(server: Running, engine: Engine) -> None:
    whole = engine.generate(engine.tokenizer.encode(PROMPT), max_new_tokens=24, mode="full").tokens
    stopping = server.openai.completions.create(
        prompt=PROMPT, **GREEDY | {"extra_body": {"mode": "full", "stop_token_ids": [whole[5]], "ignore_eos": True}}
    )
    assert stopping.usage is not None
    assert stopping.usage.completion_tokens == whole.index(whole[5]) + 1
    assert stopping.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{bad", 400, "the body is no JSON"),
        (b"[1, 2]", 400, "Input should be"),
        ({"prompt": "a"}, 400, "model: Field required"),
        ({"model": "other", "prompt": "a"}, 404, "there is no model 'other' here, but 'demo'"),
        (
            b'{"model": "demo", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
            400,
            "the body is no JSON: Exceeds the limit",
        ),
        ({"model": "demo", "prompt": ""}, 400, "the prompt is empty"),
        ({"model": "demo", "prompt": []}, 400, "the prompt is empty"),
        ({"model": "demo", "prompt": ["a"] * 4, "n": 2}, 400, "ask for 8 choices, and this server takes 7 at a time"),
        ({"model": "demo", "prompt": [99999]}, 400, "outside the vocabulary"),
        ({"model": "demo", "prompt": [1] * 1024}, 400, "the model's context of 1024 leaves no room"),
        ({"model": "demo", "prompt": "a", "top_p": 3}, 400, "top_p: Input should be less than or equal to 1"),
        ({"model": "demo", "prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater"),
        ({"model": "demo", "prompt": "a", "presence_penalty": 3}, 400, "presence_penalty: Input should be less"),
        ({"model": "demo", "prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty: Input should be greater"),
        ({"model": "demo", "prompt": "a", "repetition_penalty": 1e-40}, 400, "repetition_penalty: Input should be"),
        ({"model": "demo", "prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias.x"),
        ({"model": "demo", "prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias holds token id 99999, outside"),
        ({"model": "demo", "prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids holds token id -1, outside"),
        ({"model": "demo", "prompt": "a", "logprobs": 21}, 400, "logprobs: Input should be less"),
        ({"model": "demo", "prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ({"model": "demo", "prompt": "a", "guided_regex": "[a"}, 400, "regex cannot be compiled: "),
        (
            {"model": "demo", "prompt": "a", "guided_grammar": "start: start"},
            400,
            "grammar cannot be compiled: it allows no text",
        ),
        ({"model": "demo", "prompt": "a", "guided_json": "{"}, 400, "json_schema must be a JSON object"),
        ({"model": "demo", "prompt": "a", "guided_choice": []}, 400, "guided_choice: List should have at least 1"),
        ({"model": "demo", "prompt": "a", "structured_outputs": {"xml": 1}}, 400, "structured_outputs.xml"),
        ({"model": "demo", "prompt": "a", "guided_regex": "a", "guided_json": {}}, 400, "exclude each other"),
        ({"model": "demo", "prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"model": "demo", "prompt": "a", "mode": "full", "threshold": 0.5}, 400, "threshold is for modes"),
        ({"model": "demo", "prompt": "a", "stop": [""]}, 400, "stop"),
        ({"model": "demo", "prompt": "a" * 30_000}, 413, "more than 20000 bytes"),
    ],
)
def test_what_is_wrong_is_one_error(server: Running, body: Any, status: int, reason: str) -> None:
    answer = server.http.post("/v1/completions", content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status
    assert reason in answer.json()["error"]["message"]
    assert server.idle()


def test_what_conversations_are_refused(server: Running, demo_bundle: Path) -> None:
    for messages, reason in (([], "messages"), ([{"role": "robot", "content": "x"}], "messages.0.role")):
        answer = server.http.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
        assert answer.status_code == 400
        assert reason in answer.json()["error"]["message"]
    asked = ChatRequest(model="demo", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(ApiError, match="takes no conversations"):
        Service(load(demo_bundle, provider="cpu", threads=1), ServerConfig(model_name="demo")).prompts(asked)
