"""The forms of tool calls: each is read back from its text however it is cut, and found in chat templates."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from bundles import edit
from running_server import Running
from scripted import saying, with_template

from tide_export.serving.call_reader import CallReader
from tide_export.serving.tool_forms import FORMS, form_of

HERMES, MISTRAL, TAGS = "<tool_call>\n{}\n</tool_call>", "[TOOL_CALLS] [{}]", "<function={}>{}</function>"
F, G = ("f", '{"a": "}\\"{", "b": [1, {}]}'), ("g", '{"c": null}')


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def read(form: str, text: str, several: bool, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of a text that comes in pieces of `size` characters."""
    reader, parts = CallReader(FORMS[form], {"f", "g"}, several), []
    for start in range(0, len(text), size):
        parts += [] if reader.done else reader.push(text[start : start + size])
    parts += [] if reader.done else reader.push("", ended=True)
    names = [part.name for part in parts if part.name]
    pieces = [[part.text for part in parts if part.number == number] for number in range(len(names))]
    calls = ["".join(some) for some in pieces]
    return "".join(part.text for part in parts if part.number is None), list(zip(names, calls, strict=True))


LLAMA = "; ".join(call(*one, key="parameters") for one in (F, G))
# Half of a surrogate pair is no text, and infinity no JSON.
HALF = '{"arguments": {"x": "é\\ud83d"}, "name": "f"}'
QUOTED_HALF = '{"arguments": "{\\"x\\": \\"\\ud83d\\"}", "name": "f"}'
HUGE = '{"arguments": {"x": 1e999}, "name": "f"}'
CASES = [
    ("hermes", "So.\n" + HERMES.format(call(*F)) + "\n" + HERMES.format(call(*G)), "So.", [F, G]),
    ("hermes", HERMES.format(call(*F)) + "\nBye.\n", "\nBye.", [F]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', "", [("f", "{}")]),
    ("hermes", f"<tool_call>{HALF}</tool_call>", "", [("f", '{"x": "é\\ud83d"}')]),
    ("hermes", f"<tool_call>{QUOTED_HALF}</tool_call>", "", [("f", '{"x": "\\ud83d"}')]),
    ("hermes", f"<tool_call>{HUGE}</tool_call>", f"<tool_call>{HUGE}</tool_call>", []),
    ("hermes", HERMES.format(call(*F))[:50], "", [("f", F[1][: 50 - HERMES.format(call(*F)).index(F[1])])]),
    ("hermes", HERMES.format(call("h", "{}")), HERMES.format(call("h", "{}")), []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    ("hermes", " <tool_call> is a tag <tool_ca", " <tool_call> is a tag <tool_ca", []),
    ("hermes", "plain \n", "plain \n", []),
    ("llama3", LLAMA, "", [F, G]),
    ("llama3", " <|python_tag|>" + LLAMA + "\nBye.", "\nBye.", [F, G]),
    ("llama3", '{"name": "f"}', "", [("f", "{}")]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("llama3", "Call " + LLAMA, "Call " + LLAMA, []),
    ("llama3", "<b> {", "<b> {", []),
    ("mistral", "So." + MISTRAL.format(call(*F) + ", " + call(*G)), "So.", [F, G]),
    ("mistral", "[TOOL_CALLS]" + call(*F), "", [F]),
    ("mistral", MISTRAL.format(call("h", "{}")), MISTRAL.format(call("h", "{}")), []),
    ("functionary", TAGS.format(*F) + TAGS.format(*G) + " Bye.", " Bye.", [F, G]),
    ("functionary", "<function=f>" + F[1][:5], "", [("f", F[1][:5])]),
    ("functionary", TAGS.format("h", "{}"), TAGS.format("h", "{}"), []),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES)
def test_calls_are_read_however_the_text_is_cut(form: str, text: str, said: str, calls: list[Any]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        assert read(form, text, True, size) == (said, calls)
        first = read(form, text, False, size)
        assert first[1] == calls[:1]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read(form: str) -> None:
    text = FORMS[form].written([F, G])
    assert read(form, text, True, 5) == ("", [F, G])


def test_the_form_is_found_in_the_template() -> None:
    for name, template in (
        ("hermes", "return a json object within <tool_call></tool_call> XML tags:"),
        ("mistral", "{{- '[TOOL_CALLS] [' }}"),
        ("functionary", "<function=example>{{ '{' }}</function> {{ '<|python_tag|>' }}"),
        ("llama3", 'Respond in the format {"name": function name, "parameters": dictionary of argument name'),
        ("llama3", """{{- '"parameters": ' }}"""),
    ):
        assert form_of(template) is FORMS[name]
    for template in ("<tool_call>\n<function=f>\n<parameter=x>", "<tool_call>f<arg_key>", "[TOOL_CALLS]f[ARGS]", ""):
        assert form_of(template) is None


TOOL: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}}}  # fmt: skip


@pytest.mark.parametrize("special", [True, False])
def test_marks_may_be_special_tokens(demo_bundle: Path, tmp_path: Path, special: bool) -> None:
    """Which the text of an answer does not show elsewhere, and which a grammar writes as tokens."""
    bundle = with_template(demo_bundle, tmp_path / "demo", "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}")
    file = bundle / "tokenizer.json"
    described = json.loads(file.read_text())
    model, mark = described["model"], len(described["model"]["vocab"]) - 1
    last = next(text for text, token in model["vocab"].items() if token == mark)
    del model["vocab"][last]
    model["merges"] = [pair for pair in model["merges"] if last not in (part := "".join(pair), part)]
    model["vocab"]["[TOOL_CALLS]"] = mark
    described["added_tokens"].append(described["added_tokens"][0] | {
        "id": mark, "content": "[TOOL_CALLS]", "special": special})  # fmt: skip
    data = json.dumps(described).encode()
    file.write_bytes(data)
    edit(bundle, "files", file.name, value={"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    running = Running(bundle)
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    tokenizer = running.service.tokenizer
    plain = tokenizer.encode_plain('[{"name": "f", "arguments": {"a": 1}}]')
    try:
        for script, options in (
            ([*tokenizer.encode_plain("So."), mark, *plain], {}),
            ([*tokenizer.encode_plain("So."), mark, *plain], {"stop": ["never"]}),
            ([mark, *plain], {"tool_choice": "required", "parallel_tool_calls": False}),
        ):
            tool = TOOL | {"function": TOOL["function"] | {"strict": "stop" not in options}}
            with saying(running, script):
                done = running.openai.chat.completions.create(tools=[tool], max_tokens=60, **asked, **options)
            (choice,) = done.choices
            assert [one.function.arguments for one in choice.message.tool_calls or ()] == ['{"a": 1}']
            assert choice.message.content == (None if "tool_choice" in options else "So.")
        with saying(running, [*tokenizer.encode_plain("So."), mark]):
            done = running.openai.chat.completions.create(**asked)
        assert done.choices[0].message.content == ("So." if special else "So.[TOOL_CALLS]")
    finally:
        running.stop()
