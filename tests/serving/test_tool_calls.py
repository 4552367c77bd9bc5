"""Tool calls over real HTTP, by OpenAI's client: a scripted model's calls arrive in its shape, whole and streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import Running
from scripted import Pause, saying, with_template

from tide_export.runtime import grammar

QWEN = r"""{%- if tools %}# system: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}{"name": <function-name>, "arguments": <args>} in <tool_call></tool_call>
{% endif %}{% for m in messages %}# {{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}{{ "\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ " (" + m.name + ")" if m.role == "tool" else "" }}
{% endfor %}# assistant:"""
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Today's", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
STRICT: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
ASKED: dict[str, Any] = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "Sun?"}]}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(with_template(demo_bundle, tmp_path_factory.mktemp("tools") / "demo", QWEN))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def plain(chat_bundle: Path) -> Iterator[Running]:
    """Of a model whose template takes no tools."""
    running = Running(chat_bundle)
    yield running
    running.stop()


def told(server: Running, *texts: str, **asked: Any) -> list[tuple[str | None, list[tuple[str, str]], str]]:
    """Text, calls and finish reason of each choice, which are the same whole and streamed."""
    asked = ASKED | {"tools": [WEATHER, NOW]} | asked
    with saying(server, *texts):
        done = server.openai.chat.completions.create(**asked)
    whole, ids = [], set()
    for choice in done.choices:
        calls = choice.message.tool_calls or []
        ids |= {call.id for call in calls}
        named = [(call.function.name, call.function.arguments) for call in calls]
        whole.append((choice.message.content, named, choice.finish_reason))
    assert len(ids) == sum(len(calls) for _, calls, _ in whole)
    with saying(server, *texts), server.openai.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        try:
            final: Any = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:
            final = error.completion
    streamed = [
        (one.message.content or None, [(c.function.name, c.function.arguments) for c in one.message.tool_calls or ()],
         one.finish_reason)
        for one in final.choices
    ]  # fmt: skip
    assert [(text or None, *rest) for text, *rest in whole] == streamed
    return whole


def test_calls_and_the_text_before_them(server: Running) -> None:
    assert told(server, "Let me see.\n" + ROME) == [("Let me see.", [("weather", '{"city": "Rome"}')], "tool_calls")]
    both = [("weather", '{"city": "Rome"}'), ("now", "{}")]
    assert told(server, ROME + "\n" + TIME) == [(None, both, "tool_calls")]
    assert told(server, ROME + "\n" + TIME, parallel_tool_calls=False) == [(None, both[:1], "tool_calls")]
    assert told(server, "No.", ROME, n=2) == [("No.", [], "stop"), (None, both[:1], "tool_calls")]
    assert server.idle()


def test_what_is_no_call_is_text(server: Running) -> None:
    for text in ("Fine.", ROME.replace("weather", "rain"), "<tool_call>\nnever</tool_call>", "a <tool_call"):
        assert told(server, text) == [(text, [], "stop")]
    assert told(server, ROME, tool_choice="none") == [(ROME, [], "stop")]


def test_a_call_that_is_cut_says_length(server: Running) -> None:
    count = len(server.service.tokenizer.encode_plain(ROME[: ROME.index("Rome")]))
    ((text, calls, reason),) = told(server, ROME, max_tokens=count)
    assert (text, [name for name, _ in calls], reason) == (None, ["weather"], "length")
    assert '{"city": "Rome"}'.startswith(calls[0][1])
    assert told(server, ROME, max_tokens=8)[0][1:] == ([], "length")


def test_the_first_delta_names_the_call_and_later_ones_have_its_arguments(server: Running) -> None:
    events, pause = [], Pause("Rome")
    with saying(server, ROME, pause=pause):
        for event in server.openai.chat.completions.create(stream=True, tools=[WEATHER], **ASKED):
            events.append(event)
            if any(call.function.arguments for call in event.choices[0].delta.tool_calls or ()):
                pause.reached.set()
    deltas = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "weather")
    assert deltas[0].id
    assert all(one.id is None and one.function.name is None for one in deltas[1:])
    pieces = [one.function.arguments for one in deltas]
    assert "".join(pieces) == '{"city": "Rome"}'
    assert len([piece for piece in pieces if piece]) > 1, "arguments come while they are said"
    assert [event.choices[0].finish_reason for event in events][-1] == "tool_calls"


def test_log_probabilities_are_of_all_tokens(server: Running) -> None:
    for stream in (False, True):
        with saying(server, ROME):
            done = server.openai.chat.completions.create(tools=[WEATHER], logprobs=True, stream=stream, **ASKED)
            choices = [event.choices[0] for event in done] if stream else done.choices
        tokens = [one.token for choice in choices if choice.logprobs for one in choice.logprobs.content]
        assert "".join(tokens[:-1]) == ROME


@pytest.mark.parametrize("served", ["server", "plain"])
def test_a_call_can_be_forced_and_follows_its_schema(served: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(served)
    # What the model wants to say is forbidden, but for its end after the calls.
    ((text, calls, reason),) = told(server, [], tool_choice="required", parallel_tool_calls=False, max_tokens=80)
    assert (text, reason) == (None, "tool_calls")
    assert calls[0][0] in ("weather", "now")
    named = {"type": "function", "function": {"name": "weather"}}
    ((text, calls, reason),) = told(server, [], tool_choice=named, max_tokens=80)
    assert (text, [name for name, _ in calls], reason) == (None, ["weather"], "tool_calls")
    assert json.loads(calls[0][1])["city"] in ("Oslo", "Rome")
    ((_, calls, _),) = told(server, ROME + "\n" + TIME, tool_choice="required")
    assert [name for name, _ in calls] == ["weather", "now"]


def test_a_request_compiles_each_grammar_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of choices and prompts, and all in the time of one."""
    told(server, "No.", tools=[STRICT])  # the process has the vocabulary
    left, call = list[float](), grammar._process.call

    def counted(function: str, *arguments: Any, seconds: float) -> Any:
        left.append(seconds)
        return call(function, *arguments, seconds=seconds)

    monkeypatch.setattr(grammar._process, "call", counted)
    forced = ASKED | {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False, "n": 3}
    with saying(server, *[[]] * 3):
        choices = server.openai.chat.completions.create(max_tokens=80, **forced).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls"] * 3
    assert len(left) == 3  # of each tool, and of the calls
    assert left == sorted(left, reverse=True)
    assert left[0] == grammar.GRAMMAR_SECONDS > left[-1]
    left.clear()
    body = {"model": "demo", "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "guided_regex": "[ab]{3}"}
    assert len(server.http.post("/v1/completions", json=body).json()["choices"]) == 4
    assert len(left) == 1


def test_strict_calls_follow_their_schema_and_text_is_free(server: Running) -> None:
    wrong = ROME.replace("Rome", "Paris")
    assert told(server, wrong)[0][1] == [("weather", '{"city": "Paris"}')]
    ((_, calls, _),) = told(server, wrong, tools=[STRICT, NOW], max_tokens=60)
    assert json.loads(calls[0][1])["city"] in ("Oslo", "Rome")
    assert told(server, "It is.", tools=[STRICT]) == [("It is.", [], "stop")]
    assert told(server, "So: " + ROME, tools=[STRICT])[0][:2] == ("So:", [("weather", '{"city": "Rome"}')])


def test_tools_and_a_schema_of_the_answer_go_together(server: Running) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "sun", "schema": schema}}
    answer = '{"sunny": true}'
    assert told(server, answer, response_format=form) == [(answer, [], "stop")]
    assert told(server, ROME, response_format=form)[0][1] == [("weather", '{"city": "Rome"}')]
    assert json.loads(told(server, "Yes.", response_format=form, max_tokens=80)[0][0] or "{}").keys() <= {"sunny"}


def conversation(server: Running, **asked: Any) -> str:
    """The prompt of a conversation with a call and its result."""
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    messages = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "abc", "content": "rain"}]
    with saying(server, "No.") as prompts:
        server.openai.chat.completions.create(**ASKED | {"messages": messages} | asked)
    return server.service.tokenizer.decode(prompts[0])


def test_the_template_shows_tools_calls_and_results(server: Running) -> None:
    history = f"# user: Sun?\n# assistant: \n{ROME}\n# tool: rain (weather)\n# assistant:"
    shown = json.dumps(WEATHER) + "\n" + json.dumps(NOW | {"function": {"name": "now", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}})  # fmt: skip
    told_so = '\n{"name": <function-name>, "arguments": <args>} in <tool_call></tool_call>\n'
    assert conversation(server, tools=[WEATHER, NOW]) == "# system: " + shown + told_so + history
    assert conversation(server, tools=[WEATHER], tool_choice="none") == history


def test_tools_are_described_where_the_template_takes_none(plain: Running) -> None:
    prompt = conversation(plain, tools=[WEATHER])
    before, result, after = prompt.partition("# user: <tool_response>\nrain\n</tool_response>\n")
    assert (bool(result), after) == (True, "# assistant:")
    assert before.startswith("# system: You may call functions.")
    assert json.dumps(WEATHER) in before
    assert before.endswith(f"# user: Sun?\n# assistant: {ROME}\n")
    system = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
    with saying(plain, ROME) as prompts:
        done = plain.openai.chat.completions.create(tools=[NOW, WEATHER], **ASKED | {"messages": system})
    assert plain.service.tokenizer.decode(prompts[0]).startswith("# system: Be brief.\n\nYou may call functions.")
    assert done.choices[0].finish_reason == "tool_calls"


NO_RESULT = [{"role": "tool", "tool_call_id": "x", "content": "rain"}]
NO_OBJECT = [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "now", "arguments": "[1]"}}]}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
MISGUIDED = {"type": "function", "function": {"name": "f", "parameters": {"x-guidance": 1}}}
UNHELD = {"name": "f", "strict": True, "parameters": {"type": "object", "uniqueItems": True, "oneOf": 3}}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools holds 'weather' twice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: String should match"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "sun"}}}, "names 'sun', which is"),
        ({"messages": NO_RESULT}, "messages.0: tool_call_id 'x' is that of no call before it"),
        ({"messages": NO_OBJECT}, "the arguments of a call must be a JSON object"),
        ({"messages": IMAGE}, "messages.0.content: parts of type image_url are not supported: this server reads text"),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": NO_OBJECT[0]["tool_calls"]}]}, "JSON object"),
        ({"tools": [{"type": "function", "function": UNHELD}]}, "no grammar can hold the parameters of tool 'f': "),
        ({"tools": [MISGUIDED], "tool_choice": "required"}, "x-guidance in a schema must be an object"),
        ({"tools": [NOW], "guided_regex": "a"}, "regex and calls of tools exclude each other"),
        ({"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}}, "json_schema and"),
        ({"functions": [{}]}, "functions is not supported by this server"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_one_sentence(server: Running, body: Any, reason: str) -> None:
    answer = server.http.post("/v1/chat/completions", json=ASKED | body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert server.idle()


def test_a_form_that_is_not_known_has_to_be_named(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = with_template(demo_bundle, tmp_path / "demo", "{{ tools }}<invoke>{{ messages[0].content }}")
    for parser, reason in (("auto", "start it with --tool-parser, one of hermes, llama3"), ("llama3", None)):
        running = Running(bundle, tool_parser=parser)
        try:
            if reason is None:
                call = '{"name": "weather", "parameters": {"city": "Rome"}}'
                assert told(running, call) == [(None, [("weather", '{"city": "Rome"}')], "tool_calls")]
            else:
                answer = running.http.post("/v1/chat/completions", json=ASKED | {"tools": [NOW]})
                assert (answer.status_code, reason in answer.json()["error"]["message"]) == (400, True)
        finally:
            running.stop()
