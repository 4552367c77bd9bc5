"""Describes tools to a model and reads its calls, by its chat template or, without one, in the text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.chat_template import ChatTemplate
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.grammar import schema_error
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
    """Encodes and reads the tool calls of one model.

    Attributes:
        described: whether tools and calls are described in the text, because the template takes no tools.
        form: the form of calls; None: unknown.
    """

    def __init__(self, bundle: Bundle, tokenizer: BundleTokenizer, parser: ToolParser) -> None:
        """Finds the form in the bundle's chat template, unless `parser` names it.

        Raises:
            BundleError, GenerationError: as `ChatTemplate` raises them.
        """
        self._template, self._tokenizer = (template := ChatTemplate(bundle)), tokenizer
        self._schema_error = partial(schema_error, bundle)
        self.described = not template.takes_tools
        detected = FORMS["hermes"] if self.described else form_of(template.source)
        self.form = detected if parser == "auto" else FORMS[parser]

    def sentence(self) -> str:
        """Says how tools are called, for the log."""
        if self.form is None:
            return "tools: the chat template shows no form of calls that is known; --tool-parser names one"
        name = next(name for name, form in FORMS.items() if form is self.form)
        told = "described in the text, as the chat template takes none" if self.described else "by the chat template"
        return f"tools: {told}; calls in the form {name}"

    def encode(self, request: ChatRequest) -> list[int]:
        """Returns the prompt of a request.

        Raises:
            GenerationError: the template refuses it; or it has tools and the form of calls is unknown.
        """
        messages, tools = plain_messages(request.messages), [tool.plain() for tool in request.offered]
        if self.described:
            messages, tools = described(messages, tools, self._known_form()), []
        elif tools:
            self._known_form()
        return self._template.encode(self._tokenizer, messages, tools or None)

    def config(self, request: ChatRequest, config: GenerationConfig) -> GenerationConfig:
        """Adds the grammar of tool calls to `config`.

        Raises:
            GenerationError: another constraint of the text excludes calls; or the parameters of a tool cannot be made
                a grammar.
        """
        form, functions, token_of = self._known_form(), request.callable, self._tokenizer.added_token
        calls = CallGrammar(form, functions, request.several, request.json_whitespace, token_of, self._schema_error)
        other = next((name for name in ("json_schema", "regex", "grammar") if getattr(config, name) is not None), None)
        if other is not None and (request.must_call or other != "json_schema"):
            raise GenerationError(f"{other} and calls of tools exclude each other: give one, or tool_choice 'none'")
        grammar = None
        if request.must_call:
            grammar = calls.forced()
        elif other is not None:
            grammar = calls.or_json(json.loads(str(config.json_schema)))
        elif any(function.strict for function in functions):
            grammar = calls.or_text()
        special = [token for one in form.special if (token := token_of(one)) is not None]
        return replace(config, json_schema=None, grammar=grammar, special_tokens=special)

    def reader(self, request: ChatRequest) -> CallReader:
        """Returns a reader of one answer."""
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
    """Returns messages for a template without tools, with tools, calls and results described as text.

    Tools are described at the end of the system message, which is added if there is none.
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
