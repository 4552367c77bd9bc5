"""Converts messages and tools from OpenAI's form to that of chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tide_export.common.values import parse_json

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, text: str) -> str:
        read_arguments(text)
        return text


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Returns the call in the form of chat templates, with the arguments as an object."""
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_other_parts(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"parts of type {kind} are not supported: this server reads text")
        return content

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are for messages of the assistant")
        return self

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(BaseModel):
    """A function; if `strict`, its calls must follow `parameters`, a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool in the form of chat templates."""
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.function.parameters or NO_ARGUMENTS}}


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


def read_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call; ValueError if they are not a JSON object."""
    try:
        value = parse_json(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    return value


def check_results(messages: Sequence[Message]) -> None:
    """Checks that messages of the role tool answer calls before them; raises ValueError."""
    called = set[str]()
    for number, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in called:
            raise ValueError(f"messages.{number}: tool_call_id {message.tool_call_id!r} is that of no call before it")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages in the form of chat templates; a tool's result has the name of the tool."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    plain = list[dict[str, Any]]()
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        plain.append({"role": role, "content": message.text()})
        if message.tool_calls:
            plain[-1]["tool_calls"] = [call.plain() for call in message.tool_calls]
        if message.tool_call_id is not None:
            plain[-1] |= {"tool_call_id": message.tool_call_id, "name": names.get(message.tool_call_id, "")}
    return plain
