"""Converts requests of POST /v1/responses to those of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from tide_export.serving.conversation import read_arguments
from tide_export.serving.protocol import ChatRequest, Nullable, refusal

TEXT_PARTS = ("input_text", "output_text", "text")
# Fields that are refused unless null or this value, and the reason.
REFUSED: dict[str, tuple[Any, str]] = {
    "previous_response_id": (None, "this server keeps no responses; give the whole conversation as input"),
    "conversation": (None, "this server keeps no conversations; give the whole one as input"),
    "prompt": (None, "this server keeps no prompts; give instructions and input"),
    "background": (False, "this server answers while the client waits"),
    "truncation": ("disabled", "input that is too long is refused"),
    "top_logprobs": (0, "/v1/chat/completions gives log-probabilities"),
}
OF_CHAT = ChatRequest.model_fields.keys() - {"messages", "n", "logprobs", "top_logprobs", "stream_options"}


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ResponsesRequest(Nullable):
    """POST /v1/responses; other fields of /v1/chat/completions, such as seed and mode, are taken too."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=10.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream: bool = False
    metadata: dict[str, str] | None = None
    _chat: ChatRequest = PrivateAttr()

    @model_validator(mode="after")
    def _as_conversation(self) -> "ResponsesRequest":
        extra = self.model_extra or {}
        for name, (neutral, why) in REFUSED.items():
            if extra.get(name) not in (None, neutral):
                raise ValueError(f"{name} is not supported: {why}")
        fields = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "parallel_tool_calls")}
        fields |= {"max_completion_tokens": self.max_output_tokens, "response_format": self._response_format()}
        fields |= {"tools": self._tools(), "tool_choice": self._tool_choice(), "stream": self.stream}
        fields = {name: value for name, value in extra.items() if name in OF_CHAT} | fields
        messages = {"messages": self._messages()}
        try:
            self._chat = ChatRequest.model_validate(fields | messages)
        except ValidationError as error:
            raise ValueError(str(refusal(error))) from None
        return self

    @property
    def chat(self) -> ChatRequest:
        """The request of /v1/chat/completions."""
        return self._chat

    def _messages(self) -> list[dict[str, Any]]:
        messages = list[dict[str, Any]]()
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            place, kind = f"input.{number}", item.get("type") or "message"
            if kind == "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), place)})
            elif kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(_call(item, place))
            elif kind == "function_call_output":
                text = _text(item.get("output"), place)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
            else:
                raise ValueError(f"{place}: items of type {kind} are not supported")
        return messages

    def _tools(self) -> list[dict[str, Any]] | None:
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function":
                raise ValueError(
                    f"tools.{number}: tools of type {tool.get('type')} are not supported: this server runs no tools, "
                    "it writes calls of functions"
                )
        return self.tools and [{"type": "function", "function": tool} for tool in self.tools]

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, dict):
            if self.tool_choice.get("type") != "function":
                raise ValueError(f"tool_choice of type {self.tool_choice.get('type')} is not supported")
            return {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        return self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        if self.text is None or self.text.format is None:
            return None
        form = self.text.format
        return {"type": form.type, "json_schema": form.model_extra if form.type == "json_schema" else None}


def _text(content: Any, place: str) -> Any:
    """Returns the text of a message or of a tool's result."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"{place}: parts of type {kind} are not supported: this server reads text")
        texts.append(part["text"])
    return "".join(texts)


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns an earlier call in the form of an assistant's message."""
    try:
        read_arguments(str(item.get("arguments")))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}
