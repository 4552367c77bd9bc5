"""The requests of OpenAI's API as far as the server takes them, and its errors.

A field that the server does not know is ignored, as OpenAI's own clients send more from release to release. One that it
knows and cannot do is refused, unless it has the value that changes nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tide_export.runtime.config import GenerationConfig

MAX_STOPS = 16
MAX_CHOICES = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "repetition_penalty": (1, 1.0),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
Stop = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    mode: Literal["auto", "exit", "full", "lossless"] = "auto"
    threshold: float | None = Field(None, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _refuse_what_cannot_be_done(self) -> "GenerationRequest":
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this server")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def config(self, max_tokens: int, choice: int) -> GenerationConfig:
        """How to generate choice number `choice`. Raises GenerationError."""
        greedy = self.temperature == 0
        return GenerationConfig(
            max_new_tokens=max_tokens,
            mode=self.mode,
            threshold=self.threshold,
            temperature=self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy else self.top_k,
            seed=None if self.seed is None else self.seed + choice,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        ids = [token for token in self.prompt if isinstance(token, int)]
        return [*several, ids] if ids else several


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)


class ApiError(Exception):
    """An answer with an error of OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", retry_after: int | None = None):
        super().__init__(message)
        self.status, self.kind, self.retry_after = status, kind, retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": None}}


def refusal(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request, as one sentence."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    said = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place}: {said}" if place else said)
