"""Puts conversations with tools to a model, and reads its calls: by its chat template, or described in the text where
the template takes no tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tide_export.errors import GenerationError
from tide_export.runtime.chat_template import ChatTemplate
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.serving.call_reader import CallReader
from tide_export.serving.conversation import plain_messages
from tide_export.serving.protocol import ChatRequest
from tide_export.serving.tool_forms import FORMS, CallGrammar, ToolForm, ToolParser, form_of

DESCRIPTION = """You may call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>

To call a function, write its name and arguments like this:
{example}"""
RESULT = "<tool_response>\n{}\n</tool_response>"


class ToolCalling:
    """Tool calls of one model.

    Attributes:
        described: whether tools and calls are described in the text, because the template takes no tools.
        form: that calls have; None: none that is known.
    """

    def __init__(self, template: ChatTemplate, tokenizer: BundleTokenizer, parser: ToolParser) -> None:
        """Finds the form in the template, where `parser` does not name it."""
        self._template, self._tokenizer = template, tokenizer
        self.described = not template.takes_tools
        shown = FORMS["hermes"] if self.described else form_of(template.source)
        self.form = shown if parser == "auto" else FORMS[parser]

    def sentence(self) -> str:
        """How tools are called, for the log."""
        if self.form is None:
            return "tools: the chat template shows no form of calls that is known; --tool-parser names one"
        name = next(name for name, form in FORMS.items() if form is self.form)
        told = "described in the text, as the chat template takes none" if self.described else "by the chat template"
        return f"tools: {told}; calls in the form {name}"

    def encode(self, request: ChatRequest) -> list[int]:
        """The prompt of a request.

        Raises:
            GenerationError: the template refuses it; tools are given and the form of calls is not known.
        """
        messages, tools = plain_messages(request.messages), [tool.plain() for tool in request.offered]
        if self.described:
            messages, tools = described(messages, tools, self._known_form()), []
        elif tools:
            self._known_form()
        return self._template.encode(self._tokenizer, messages, tools or None)

    def config(self, request: ChatRequest, config: GenerationConfig) -> GenerationConfig:
        """How to generate where tools are offered; `config` is how it would be without.

        Raises:
            GenerationError: two things are asked of the text that exclude each other; no grammar can hold the
                parameters of a tool.
        """
        form, functions, token_of = self._known_form(), request.callable, self._tokenizer.added_token
        calls = CallGrammar(form, functions, request.several, request.json_whitespace, token_of)
        given = next((name for name in ("json_schema", "regex", "grammar") if getattr(config, name) is not None), None)
        if given is not None and (request.must_call or given != "json_schema"):
            raise GenerationError(f"{given} and calls of tools exclude each other: give one, or tool_choice 'none'")
        grammar = None
        if request.must_call:
            grammar = calls.forced()
        elif given is not None:
            grammar = calls.or_json(json.loads(str(config.json_schema)))
        elif any(function.strict for function in functions):
            grammar = calls.or_text()
        special = [token for one in form.special if (token := token_of(one)) is not None]
        return replace(config, json_schema=None, grammar=grammar, special_tokens=special)

    def reader(self, request: ChatRequest) -> CallReader:
        """Reads one answer to a request."""
        return CallReader(self._known_form(), [one.name for one in request.callable], request.several)

    def _known_form(self) -> ToolForm:
        if self.form is None:
            raise GenerationError(
                "the chat template shows no form of tool calls that this server knows: start it with --tool-parser, "
                f"one of {', '.join(FORMS)}"
            )
        return self.form


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolForm
) -> list[dict[str, Any]]:
    """Messages for a template without tools: these, calls and results are told as text.

    The tools are told in the system message, at its end where there is one.
    """
    told = list[dict[str, Any]]()
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", RESULT.format(text)
            if told and told[-1]["content"].endswith("</tool_response>"):
                told[-1]["content"] += "\n" + text
                continue
        elif calls := message.get("tool_calls"):
            called = [call["function"] for call in calls]
            written = form.written([(one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in called])
            text = f"{text}\n{written}" if text else written
        told.append({"role": role, "content": text})
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = form.written([("NAME", '{"PARAMETER": VALUE}')])
        description = DESCRIPTION.replace("{example}", example).replace("{tools}", lines)
        if told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{description}"
        else:
            told.insert(0, {"role": "system", "content": description})
    return told
