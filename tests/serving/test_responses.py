"""POST /v1/responses over real HTTP: OpenAI's client reads answers and typed events, also of tool calls."""

import json
from typing import Any

import pytest
from pydantic import BaseModel
from running_server import Running
from scripted import Pause, saying

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}
ASKED: dict[str, Any] = {"model": "demo", "temperature": 0}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def prompt_of(server: Running, **asked: Any) -> str:
    with saying(server, "Hi.") as prompts:
        server.openai.responses.create(**ASKED | asked)
    return server.service.tokenizer.decode(prompts[0])


def test_text(server: Running) -> None:
    with saying(server, "Hello there.") as prompts:
        done = server.openai.responses.create(input="Hi", instructions="Be brief.", metadata={"a": "b"}, **ASKED)
    assert server.service.tokenizer.decode(prompts[0]) == "# system: Be brief.\n# user: Hi\n# assistant:"
    assert (done.output_text, done.status, done.error) == ("Hello there.", "completed", None)
    assert (done.model, done.instructions, done.metadata) == ("demo", "Be brief.", {"a": "b"})
    assert done.to_dict()["store"] is False
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (
        len(prompts[0]),
        len(server.service.tokenizer.encode_plain("Hello there.")) + 1,
    )
    with saying(server, "Hello there."):
        cut = server.openai.responses.create(input="Hi", max_output_tokens=2, **ASKED)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert "Hello there.".startswith(cut.output_text)
    assert [item.to_dict()["status"] for item in cut.output] == ["incomplete"]
    with saying(server, ""):
        assert server.openai.responses.create(input="Hi", **ASKED).output_text == ""


def test_events_are_typed_and_numbered(server: Running) -> None:
    events, pause = list[Any](), Pause("Rome")
    with saying(server, "So: " + ROME, pause=pause):
        for event in server.openai.responses.create(input="Sun?", stream=True, tools=[WEATHER], **ASKED):
            events.append(event)
            if event.type == "response.function_call_arguments.delta":
                pause.reached.set()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "function_call_arguments.delta", "function_call_arguments.done",
        "completed",
    ]  # fmt: skip
    of = {kind: [event for event, one in zip(events, kinds, strict=True) if one == kind] for kind in kinds}
    assert "".join(event.delta for event in of["output_text.delta"]) == of["output_text.done"][0].text == "So:"
    arguments = [event.delta for event in of["function_call_arguments.delta"]]
    assert "".join(arguments) == of["function_call_arguments.done"][0].arguments == '{"city": "Rome"}'
    assert len(arguments) > 1, "arguments come while they are said"
    assert [event.output_index for event in of["output_item.added"]] == [0, 1]
    assert [event.item.status for event in of["output_item.added"]] == ["in_progress"] * 2
    message, call = of["completed"][0].response.output
    assert (message.content[0].text, call.name, call.arguments) == ("So:", "weather", '{"city": "Rome"}')
    assert [event.item.id for event in of["output_item.done"]] == [message.id, call.id]
    with saying(server, "So: " + ROME):
        done = server.openai.responses.create(input="Sun?", tools=[WEATHER], **ASKED)
    assert [item.type for item in done.output] == ["message", "function_call"]
    assert [tool.to_dict()["name"] for tool in done.tools] == ["weather"]


def test_the_client_s_own_loop_over_a_tool(server: Running) -> None:
    items: list[Any] = [{"role": "user", "content": "Sun?"}]
    with saying(server, ROME):
        done = server.openai.responses.create(input=items, tools=[WEATHER], tool_choice="required", **ASKED)
    (call,) = done.output
    items += [item.to_dict() for item in done.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    with saying(server, "No, rain.") as prompts:
        done = server.openai.responses.create(input=items, tools=[WEATHER], **ASKED)
    assert done.output_text == "No, rain."
    prompt = server.service.tokenizer.decode(prompts[0])
    assert prompt.endswith(f"{ROME}\n# user: <tool_response>\nrain\n</tool_response>\n# assistant:")
    answered = prompt_of(server, input=[*items, *[item.to_dict() for item in done.output], {"role": "user", "content": [
        {"type": "input_text", "text": "Thanks"}, {"type": "input_text", "text": "."}]}])  # fmt: skip
    assert answered.endswith("# assistant: No, rain.\n# user: Thanks.\n# assistant:")
    named: Any = {"type": "function", "name": "weather"}
    with saying(server, []):
        done = server.openai.responses.create(input="Sun?", tools=[WEATHER], tool_choice=named, **ASKED)
    (call,) = done.output
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


class Sun(BaseModel):
    sunny: bool


def test_text_of_a_form(server: Running) -> None:
    with saying(server, '{"sunny": true}'):
        parsed = server.openai.responses.parse(input="Sun?", text_format=Sun, **ASKED)
    assert parsed.output_parsed == Sun(sunny=True)
    with (
        saying(server, '{"sunny": false}'),
        server.openai.responses.stream(input="Sun?", text_format=Sun, **ASKED) as stream,
    ):
        assert stream.get_final_response().output_parsed == Sun(sunny=False)
    with saying(server, "Yes"):
        form: Any = {"format": {"type": "json_object"}}
        done = server.openai.responses.create(input="Sun?", text=form, max_output_tokens=6, **ASKED)
    assert done.output_text.startswith("{")


def test_other_fields_mean_what_they_mean_in_conversations(server: Running) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.8, "extra_body": {"seed": 5, "mode": "full", "n": 3}}
    done = server.openai.responses.create(input="Hi", max_output_tokens=6, store=True, **asked)
    message: Any = {"role": "user", "content": "Hi"}
    asked["extra_body"] = {"seed": 5, "mode": "full", "stream": None, "tools": None}
    chat = server.openai.chat.completions.create(messages=[message], max_completion_tokens=6, **asked)
    assert done.output_text == chat.choices[0].message.content


def test_a_failure_is_the_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "config", server.service.config.model_copy(update={"request_seconds": 0.05}))
    asked: dict[str, Any] = ASKED | {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    events: list[Any] = list(server.openai.responses.create(input="Hi", stream=True, **asked))
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert "took longer than 0.05 s" in events[-1].response.error.message
    assert (
        server.http.post("/v1/responses", json={"model": "demo", "input": "Hi", "ignore_eos": True}).status_code == 504
    )
    assert server.idle()


def test_what_nobody_foresaw_is_the_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.service, "reader", broken)
    events: list[Any] = list(server.openai.responses.create(input="Hi", stream=True, **ASKED))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the server failed: its log says how"
    assert server.idle()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: this server keeps no responses"),
        ({"background": True}, "background is not supported: this server answers while the client waits"),
        ({"tools": [{"type": "web_search"}]}, "tools.0: tools of type web_search are not supported: this server runs"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice of type file_search is not supported"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: items of type item_reference are not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0: parts of type input_image are"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "'x' is that of no call before"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "1"}]}, "input.0: the argum"),
        ({"input": []}, "messages: List should have at least 1 item"),
        ({"input": [{"role": "robot", "content": "x"}]}, "messages.0.role: Input should be"),
        ({"max_output_tokens": 0}, "max_output_tokens: Input should be greater than or equal to 1"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: Input should be"),
        ({"model": "other"}, "there is no model 'other' here"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(server: Running, body: Any, reason: str) -> None:
    answer = server.http.post("/v1/responses", json={"model": "demo", "input": "Hi"} | body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert reason in answer.json()["error"]["message"]
