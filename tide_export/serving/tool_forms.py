"""Defines the forms in which models write tool calls, and builds grammars for them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tide_export.errors import GenerationError
from tide_export.runtime.grammar import ONE_LINE
from tide_export.serving.conversation import NO_ARGUMENTS, Function

ToolParser = Literal["auto", "hermes", "llama3", "mistral", "functionary"]


@dataclass(frozen=True)
class ToolForm:
    """Describes how calls are written: a mark, then one JSON object for each call.

    Attributes:
        mark: text before calls; "": calls can only begin the text.
        head: matches from the mark to the object; if it matches the name, the object is the arguments.
        end: text after each call.
        between: text between a call and another object without a mark; "": each call has a mark.
        special: special tokens of the form.
        before, after: text around the arguments of a written call, with {name}.
        joint: text between written calls.
        first, last: text around all written calls.
    """

    mark: str
    head: re.Pattern[str]
    before: str
    after: str
    joint: str
    end: str = ""
    between: str = ""
    special: tuple[str, ...] = ()
    first: str = ""
    last: str = ""

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns the text of calls, each a name and arguments as JSON."""
        each = [self.before.replace("{name}", name) + arguments + self.after for name, arguments in calls]
        return self.first + self.joint.join(each) + self.last


FORMS = {
    "hermes": ToolForm(
        mark="<tool_call>",
        head=re.compile(r"<tool_call>\s*"),
        end="</tool_call>",
        special=("<tool_call>", "</tool_call>"),
        before='<tool_call>\n{"name": "{name}", "arguments": ',
        after="}\n</tool_call>",
        joint="\n",
    ),
    "llama3": ToolForm(
        mark="",
        head=re.compile(r"\s*(?:<[|a-z_]*>?)?\s*"),
        between=";",
        special=("<|python_tag|>",),
        before='{"name": "{name}", "parameters": ',
        after="}",
        joint="; ",
    ),
    "mistral": ToolForm(
        mark="[TOOL_CALLS]",
        head=re.compile(r"\[TOOL_CALLS\]\s*\[?\s*"),
        end="]",
        between=",",
        special=("[TOOL_CALLS]",),
        first="[TOOL_CALLS][",
        before='{"name": "{name}", "arguments": ',
        after="}",
        joint=", ",
        last="]",
    ),
    "functionary": ToolForm(
        mark="<function=",
        head=re.compile(r"<function=(?P<name>[^>{\s]*)(?:>\s*)?"),
        end="</function>",
        before="<function={name}>",
        after="</function>",
        joint="",
    ),
}
LEXEMES = r'"[^"]*"|: |, |[{}]'
# Patterns that a template must and must not contain for a form; the first that fits counts.
SIGNS = (
    ("hermes", r"<tool_call>", r"<function=|<arg_key>"),
    ("mistral", r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    ("functionary", r"<function=", r"<parameter="),
    ("llama3", r"<\|python_tag\|>|\"parameters\": ", r"<function="),
)


def form_of(template: str) -> ToolForm | None:
    """Detects the form of calls in a chat template; None: unknown."""
    for name, sign, other in SIGNS:
        if re.search(sign, template) and not re.search(other, template):
            return FORMS[name]
    return None


@dataclass(frozen=True)
class CallGrammar:
    """Writes Lark grammars of calls.

    Attributes:
        functions: the functions that may be called.
        several: whether more than one call may be written.
        whitespace: whether JSON may have spaces and line breaks anywhere.
        token: returns the id of the added token with a text, or None.
        schema_error: returns why a JSON schema cannot be made a grammar; "": it can.
    """

    form: ToolForm
    functions: Sequence[Function]
    several: bool
    whitespace: bool
    token: Callable[[str], int | None]
    schema_error: Callable[[str], str]

    def forced(self) -> str:
        """Returns a grammar of calls and nothing else."""
        return f"start: calls\n{self._calls()}"

    def or_json(self, schema: dict[str, Any]) -> str:
        """Returns a grammar of calls, or JSON of a schema."""
        return f"start: calls | answer\nanswer: %json {self._json(schema)}\n{self._calls()}"

    def or_text(self) -> str:
        """Returns a grammar of any text in which calls follow their schemas."""
        form = self.form
        if not form.mark:
            return f"start: calls | OTHER\nOTHER: /\\s*([^{{\\s](.|\\n)*)?/\n{self._calls()}"
        mark = self._literally(form.mark)
        begun = "begun" if self.token(form.mark) is not None else "begun[lazy]"
        lines = ["%llguidance {}", "start: block* TEXT", "TEXT: /(.|\\n)*/", f"{begun}: TEXT {mark}"]
        if form.first:
            lines += [f"block: begun {self._listed()}", *self._each(form.before)]
        else:
            lines += ["block: begun call", *self._each(form.before.removeprefix(form.mark))]
        return "\n".join(lines)

    def _calls(self) -> str:
        """Returns the rule `calls` and the rules that it needs."""
        form, more = self.form, f"({self._literally(self.form.joint)} call)*" if self.several else ""
        calls = f"{self._literally(form.mark)} {self._listed()}" if form.first else f"call {more}"
        return "\n".join([f"calls: {calls}", *self._each(form.before)])

    def _listed(self) -> str:
        """Returns the expression after the mark of a list of calls; some models write a space first."""
        form, more = self.form, f"({self._literally(self.form.joint)} call)*" if self.several else ""
        opening = self._literally(form.first.removeprefix(form.mark))
        return f'" "? {opening} call {more} {self._literally(form.last)}'

    def _each(self, before: str) -> list[str]:
        """Returns the rule `call` and one rule per function, whose arguments follow `before`."""
        rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(self.functions)))]
        for number, one in enumerate(self.functions):
            opening, closing = self._literally(before.replace("{name}", one.name)), self._literally(self.form.after)
            rules.append(f"call_{number}: {opening} %json {self._json(self._schema_of(one))} {closing}")
        return rules

    def _json(self, schema: dict[str, Any]) -> str:
        defaults = {} if self.whitespace else ONE_LINE
        return json.dumps(schema | {"x-guidance": defaults | _guidance(schema)})

    def _literally(self, text: str) -> str:
        """Returns a text as a Lark expression of special tokens and JSON lexemes.

        Single lexemes let other JSON begin with the same characters.
        """
        tokens = {one: f"<[{token}]>" for one in self.form.special if (token := self.token(one)) is not None}
        parts = re.split("(" + "|".join([*map(re.escape, tokens), LEXEMES]) + ")", text)
        return " ".join(tokens.get(part) or json.dumps(part) for part in parts if part)

    def _schema_of(self, function: Function) -> dict[str, Any]:
        """Returns the schema of a function's arguments.

        Unless the function is strict, keywords that a grammar does not support are ignored.

        Raises:
            GenerationError: it is strict and cannot be made a grammar; or it is not a schema.
        """
        schema = function.parameters or NO_ARGUMENTS
        if not function.strict:
            schema = schema | {"x-guidance": {"lenient": True} | _guidance(schema)}
        if reason := self.schema_error(json.dumps(schema)):
            raise GenerationError(f"no grammar can hold the parameters of tool {function.name!r}: {reason}")
        return schema


def _guidance(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema's options for llguidance; GenerationError if they are no object."""
    found = schema.get("x-guidance", {})
    if not isinstance(found, dict):
        raise GenerationError("x-guidance in a schema must be an object")
    return found
