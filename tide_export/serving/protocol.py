"""Defines the requests of OpenAI's API that the server takes, and its errors.

Unknown fields are ignored, because OpenAI's clients send new ones with each release. Fields that the server knows but
does not support are refused, unless their value changes nothing.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)

from tide_export.common.values import Limits
from tide_export.errors import GenerationError
from tide_export.runtime.config import NUMBERS, GenerationConfig
from tide_export.serving.conversation import Function, Message, NamedTool, TextPart, Tool, check_results

MAX_STOPS = 16
MAX_TOOLS = 128  # OpenAI's
MAX_CHOICES = 16
MAX_PROMPTS = 2048  # OpenAI's, of texts to embed
MAX_LOGPROBS = 20  # OpenAI's
ANY_OBJECT = {"type": "object"}
UNFORESEEN = "the server failed: its log says how"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "min_tokens": (0,),
    "use_beam_search": (False,),
}


def _checked_prompts(value: Any) -> Any:
    """Checks prompts as pydantic would, which tries all forms and lets no other thread run meanwhile."""
    if isinstance(value, list):
        if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
            raise ValueError(f"give at most {MAX_PROMPTS}, not {len(value)}")
        kinds = {type(one) for one in value}
        ids = chain(*value) if kinds == {list} else value
        if kinds == {str} or all(type(one) is int for one in ids):
            return value
    elif isinstance(value, str):
        return value
    raise ValueError("give a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _checked_stops(value: Any) -> Any:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ValueError("give a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"give at most {MAX_STOPS} strings, not {len(stops)}")
    return value


def _checked_tools(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise ValueError(f"give at most {MAX_TOOLS}, not {len(value)}")
    return value


TokenId = Annotated[int, Field(strict=True)]
Prompts = Annotated[str | list[TokenId] | list[str] | list[list[TokenId]], PlainValidator(_checked_prompts)]


def listed(prompts: Prompts) -> list[str | list[int]]:
    """Returns one or several prompts, as text or token ids, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    several = [prompt for prompt in prompts if not isinstance(prompt, int)]
    ids = [token for token in prompts if isinstance(token, int)]
    return several or [ids]


def _bounds(limits: Limits) -> dict[str, float]:
    """Returns limits as pydantic takes them."""
    return {"gt" if limits.above else "ge": limits.low} | ({"le": limits.high} if isfinite(limits.high) else {})


class Nullable(BaseModel):
    """A request whose fields may be null, which OpenAI's API takes as not given."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Leaves out fields that are null."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(BaseModel):
    include_usage: bool = False


class JsonSchema(BaseModel):
    """The schema of a `response_format`; its name and `strict` have no effect."""

    value: dict[str, Any] = Field(ANY_OBJECT, alias="schema")


class Prediction(BaseModel):
    """OpenAI's predicted output: text that the answer is expected to repeat in part."""

    type: Literal["content"]
    content: str | list[TextPart]


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """Constraints of the text, under vLLM's names."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def options(self) -> dict[str, Any]:
        """Returns the constraints as options of `GenerationConfig`, which allows at most one of them."""
        schema = ANY_OBJECT if self.json_object and self.json_ is None else self.json_
        choices = None if self.choice is None else "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, self.choice))
        if self.grammar is not None and choices is not None:
            raise GenerationError("grammar and choice exclude each other: give one")
        return {"json_schema": schema, "regex": self.regex, "grammar": self.grammar or choices}


if TYPE_CHECKING:
    Numbers = BaseModel
else:
    Numbers = create_model(
        "Numbers",
        **{
            name: (number.kind, Field(number.default, **_bounds(number.limits)))
            for name, number in NUMBERS.items()
            if number.default is not None and name != "max_new_tokens"  # which is max_tokens here
        },
    )


class GenerationRequest(Nullable, Numbers, ABC):
    """Fields that completions and conversations have in common; some of `Numbers` have own limits."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=10.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    seed: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[str | list[str] | None, BeforeValidator(_checked_stops)] = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    json_whitespace: bool = False
    cache_salt: str | None = Field(None, min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    mode: Literal["auto", "exit", "full", "lossless"] = "auto"
    threshold: float | None = Field(None, ge=0.0, le=1.0)
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _refuse_what_cannot_be_done(self) -> "GenerationRequest":
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this server")
        return self

    @property
    def constrained(self) -> bool:
        """Whether a grammar has to be compiled."""
        guided = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        formed = self.response_format is not None and self.response_format.type != "text"
        return formed or self.structured_outputs is not None or any(one is not None for one in guided)

    @property
    def predicted(self) -> str:
        """The text that the answer is expected to repeat in part; empty: none."""
        content = "" if self.prediction is None else self.prediction.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    @abstractmethod
    def logprobs_wanted(self) -> int | None:
        """The number of most likely tokens to return; None: no log-probabilities."""

    @property
    def offered(self) -> list[Tool]:
        """The tools that are described to the model."""
        return []

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The number of most likely tokens for each of the prompt's tokens; None: no log-probabilities."""
        return None

    def _structured(self) -> StructuredOutputs:
        """Returns the constraints of the text, from whichever field sets them."""
        outputs = self.structured_outputs or StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        form = self.response_format
        if form is None or form.type == "text":
            return outputs
        schema = form.json_schema.value if form.json_schema is not None else ANY_OBJECT
        return outputs.model_copy(update={"json_": schema if form.type == "json_schema" else ANY_OBJECT})

    def config(
        self, max_tokens: int, choice: int, eos_token_ids: Sequence[int], prediction: Sequence[int] | None = None
    ) -> GenerationConfig:
        """Returns the options of choice number `choice`; GenerationError if one is refused.

        prediction: tokens of `prediction`, which make mode auto `lossless`: others draft from nothing.
        """
        drafts = prediction is not None and self.mode == "auto" and self.threshold is None
        greedy = self.temperature == 0
        numbers = {name: getattr(self, name) for name in Numbers.model_fields if not (greedy and NUMBERS[name].drawn)}
        return GenerationConfig(
            **numbers,
            max_new_tokens=max_tokens,
            mode="lossless" if drafts else self.mode,
            prediction=prediction,
            threshold=self.threshold,
            logit_bias=self.logit_bias or {},
            logprobs=self.logprobs_wanted,
            prompt_logprobs=self.prompt_logprobs_wanted,
            stop_token_ids=[*(() if self.ignore_eos else eos_token_ids), *(self.stop_token_ids or ())],
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            detokenize=True,
            **self._structured().options(),
            json_whitespace=self.json_whitespace and not self.offered,  # tool calls have their own grammar
            seed=None if self.seed is None else self.seed + choice,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: otherwise there is nothing to answer")
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids."""
        return listed(self.prompt)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool] | None, BeforeValidator(_checked_tools)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatRequest":
        check_results(self.messages)
        names = [tool.function.name for tool in self.tools or ()]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tools holds {twice[0]!r} twice")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice 'required' needs tools")
        if named is not None and named not in names:
            raise ValueError(f"tool_choice names {named!r}, which is not among the tools")
        return self

    @property
    def offered(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def constrained(self) -> bool:
        return super().constrained or bool(self.offered)

    @property
    def callable(self) -> list[Function]:
        """The functions that the model may call."""
        functions = [tool.function for tool in self.offered]
        if isinstance(self.tool_choice, NamedTool):
            return [one for one in functions if one.name == self.tool_choice.function.name]
        return functions

    @property
    def must_call(self) -> bool:
        """Whether the model must call a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def several(self) -> bool:
        """Whether the model may call several functions at once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ApiError(Exception):
    """Answers a request with an error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", retry_after: int | None = None):
        super().__init__(message)
        self.status, self.kind, self.retry_after = status, kind, retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": None}}


def refusal(error: ValidationError) -> ApiError:
    """Returns the first error of a request as one sentence."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field}: {message}" if field else message)
