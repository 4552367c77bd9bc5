"""JSON of a schema is one line unless `json_whitespace` asks for more, and an answer that was cut says so."""

import json
from typing import Any

import pytest
from running_server import Running
from scripted import saying

SCHEMA = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
SCHEMA["additionalProperties"] = False
NAMED = {"type": "json_schema", "json_schema": {"name": "sun", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "sun", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 40, "prompt": "Sun?"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Sun?"}], "max_tokens": 60}


@pytest.mark.parametrize("form", [{"response_format": NAMED}, {"guided_json": SCHEMA}])
def test_a_model_that_writes_line_breaks_for_ever_ends_its_object(server: Running, form: dict[str, Any]) -> None:
    (line_break,) = server.service.tokenizer.encode_plain("\n")
    for free in (False, True):
        with saying(server, [line_break] * 40):
            done = server.http.post("/v1/completions", json=ASKED | form | {"json_whitespace": free}).json()
        (choice,) = done["choices"]
        if free:
            assert (choice["text"].strip(), choice["finish_reason"]) == ("{", "length")
        else:
            assert (json.loads(choice["text"]).keys(), choice["finish_reason"]) == ({"sunny"}, "stop")
            assert "\n" not in choice["text"]


def test_so_do_the_arguments_of_a_call(server: Running) -> None:
    (line_break,) = server.service.tokenizer.encode_plain("\n")
    forced = CHAT | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    for free in (False, True):
        with saying(server, [line_break] * 60):
            done = server.http.post("/v1/chat/completions", json=forced | {"json_whitespace": free}).json()
        (choice,) = done["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == ("length" if free else "tool_calls")
        assert call["function"]["arguments"].strip().startswith("{")
        assert ("\n" in call["function"]["arguments"]) == free


def test_white_space_of_no_json_is_refused(server: Running) -> None:
    answer = server.http.post("/v1/completions", json=ASKED | {"json_whitespace": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "json_whitespace is for json_schema")
