"""Defines and checks the options of a generation.

The native library checks what depends on a bundle: its vocabulary, context, checkpoints and defaults. The command line
and the server have the options in NUMBERS from here; no NumPy is imported for a command's `--help`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, get_args, get_origin

from tide_export.common.values import Limits, Options, check_text, parse_json, real_number, shown, whole_number
from tide_export.errors import GenerationError
from tide_export.thresholds.resolve import check_mode, check_threshold

if TYPE_CHECKING:
    import numpy as np

    from tide_export.runtime.hooks import LogitsProcessor

DRAWN = "only with a temperature"  # marks an option that has no effect without one


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Options):
    """Holds the options of a generation; lists and arrays are stored as tuples.

    Attributes:
        max_new_tokens: maximum number of new tokens, 1 or more.
        mode: "full" (the source model, layer for layer), "exit" (tokens may exit at a checkpoint), "lossless" (tokens
            that exit are drafts, which the full model verifies before they are returned: the tokens of "full", also
            when sampling with the same seed) or "auto" (the mode that `export`, `draft` or `tune` measured to be
            fastest on this provider within the share of tokens that it may change; "full" if nothing was measured or is
            faster; "exit" if threshold or min_layers is given).
        threshold: a router score above it exits; one in [0, 1], or one per checkpoint. None: the bundle's.
        min_layers: tokens never exit after fewer layers. None: the bundle's, in lossless mode 0.
        max_pending: tokens that may be pending before a segment is forced to run, in lossless mode drafts that may
            await verification; changes speed, never tokens. None: the bundle's.
        prompt_lookup: lossless mode: maximum length of a prompt-lookup draft, 0 for none; changes speed, never
            tokens. None: the bundle's.
        drafter: lossless mode: maximum drafts of the bundle's drafter per verification, 0 for none; changes speed,
            never tokens. None: the bundle's.
        prediction: tokens that the new text is expected to repeat in part, as a file before an edit: lossless mode
            drafts from them. Changes speed, never tokens. None: none. Stored as a tuple.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: sample from the k most likely tokens; 0 keeps all.
        top_p: sample from the fewest most likely tokens whose probabilities sum to this or more,
            above 0 and at most 1.
        min_p: drop tokens whose probability is below this share of the most likely one's, in [0, 1]; 0 keeps all.
        repetition_penalty: above 0; divides the positive logits of tokens that occur in the prompt or the generated
            text, and multiplies the negative ones; 1 changes nothing.
        presence_penalty: in [-2, 2]; subtracted once from the logit of each token that was generated.
        frequency_penalty: in [-2, 2]; subtracted once per occurrence from the logit of each token that was generated.
        logit_bias: added to the logit of each token id given. Stored as pairs, sorted by id.
        logits_processor: called with the ids of the sequence so far, the prompt's first, and a copy of the model's
            logits, float32 [V]; returns the logits to choose from. It also receives the logits of early exits, and in
            lossless mode those after drafts, so its result must depend on its arguments alone.
        logprobs: return the log-probabilities of each token and of this many of the most likely, from the model's
            unchanged logits. None: none.
        prompt_logprobs: return the same for the prompt's tokens, which then run through every layer in any mode.
            None: none.
        seed: seeds the random numbers; None draws a new one. For a list of prompts, one seed for all or one for each.
        stop_token_ids: tokens that end the generation. None: the model's end-of-sequence ids; empty: none.
        stop: a string or several: the generation ends where its text first contains one, and `text` ends before it.
            Stored as a tuple.
        json_schema: constrains the text to JSON of this schema, a mapping or JSON text; stored as text. At most one of
            `json_schema`, `regex` and `grammar` may be given; they need the extra `grammar` and a model with an
            end-of-sequence token, which ends the text whatever `stop_token_ids` is.
        json_whitespace: allow spaces and line breaks anywhere in the JSON of a schema. Otherwise it is one line, with
            at most a space after a comma or colon, because small models tend to fill their answer with white space.
        regex: constrains the text to this regular expression, in the syntax of Rust's regex crate.
        grammar: constrains the text to this Lark grammar, in llguidance's syntax.
        detokenize: return the `text` of the generation, by the bundle's tokenizer; `stop` implies it.
        special_tokens: ids of the special tokens that `text` includes; it omits others.
        compaction_threshold: for a list of prompts, in [0, 1]: if a smaller share of the sequences needs a segment,
            only those run it; else all that have tokens pending before it catch up in the same run. Changes speed,
            never tokens. None: the bundle's; in lossless mode 0.
        adapter: name of the low-rank adapter to run with, one that the bundle was loaded with (`load`). None: none.
        cache_salt: prompts in a scheduler's prefix cache are shared with requests of the same salt alone: nobody else
            sees (by `cached_tokens`, or by time) what was asked. None: with those without one.
        states: return the final hidden states (`Generation.states`): in mode full of all tokens that are run, in mode
            exit of each new token at its exit.

    Raises:
        GenerationError: an option is of the wrong type or out of range.
    """

    max_new_tokens: Annotated[int, Limits(1)] = 64
    mode: str = "auto"
    threshold: float | Sequence[float] | None = None
    min_layers: Annotated[int | None, Limits(0)] = None
    max_pending: Annotated[int | None, Limits(0)] = None
    prompt_lookup: Annotated[int | None, Limits(0)] = None
    drafter: Annotated[int | None, Limits(0)] = None
    prediction: Sequence[int] | None = None
    temperature: Annotated[float, Limits(0)] = 0.0
    top_k: Annotated[int, Limits(0), DRAWN] = 0
    top_p: Annotated[float, Limits(0, 1, above=True), DRAWN] = 1.0
    min_p: Annotated[float, Limits(0, 1), DRAWN] = 0.0
    repetition_penalty: Annotated[float, Limits(0, above=True)] = 1.0
    presence_penalty: Annotated[float, Limits(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Limits(-2, 2)] = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logits_processor: "LogitsProcessor | None" = None
    logprobs: Annotated[int | None, Limits(0)] = None
    prompt_logprobs: Annotated[int | None, Limits(0)] = None
    seed: int | Sequence[int] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    json_schema: Mapping[str, Any] | str | None = None
    json_whitespace: bool = False
    regex: str | None = None
    grammar: str | None = None
    detokenize: bool = False
    special_tokens: Sequence[int] = ()
    compaction_threshold: Annotated[float | None, Limits(0, 1)] = None
    adapter: str | None = None
    cache_salt: str | None = None
    states: bool = False

    def __post_init__(self) -> None:
        for name, number in NUMBERS.items():
            if (value := getattr(self, name)) is not None or number.default is not None:
                self._set(name, number.checked(name, value))
        check_mode(self.mode)
        if self.threshold is not None:
            self._set("threshold", _threshold(self.threshold))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise GenerationError(
                f"logits_processor must be a function of token ids and logits, not {shown(self.logits_processor)}"
            )
        seeds = _plain(self.seed)
        if isinstance(seeds, list | tuple):
            self._set("seed", tuple(whole_number("seed", seed, minimum=0) for seed in seeds))
        elif seeds is not None:
            self._set("seed", whole_number("seed", seeds, minimum=0))
        for name in ("stop_token_ids", "prediction"):
            if (ids := getattr(self, name)) is not None:
                self._set(name, tuple(token_ids(name, ids).tolist()))
        self._set("stop", _stop(self.stop))
        if self.json_schema is not None:
            self._set("json_schema", _json_schema(self.json_schema))
        for name, what in (("adapter", "the name of an adapter"), ("cache_salt", "a text")):
            if (value := getattr(self, name)) is not None:
                if not isinstance(value, str):
                    raise GenerationError(f"{name} must be {what}, not {shown(value)}")
                check_text(name, value)
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_grammar(name, getattr(self, name))
        if sum(one is not None for one in (self.json_schema, self.regex, self.grammar)) > 1:
            raise GenerationError("json_schema, regex and grammar exclude each other: give one")
        for name in ("json_whitespace", "detokenize", "states"):
            if not isinstance(getattr(self, name), bool):
                raise GenerationError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        if self.json_whitespace and self.json_schema is None:
            raise GenerationError("json_whitespace is for json_schema")
        self._set("special_tokens", tuple(token_ids("special_tokens", self.special_tokens).tolist()))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


class Number(NamedTuple):
    """An option that is a number.

    Attributes:
        default: None: the bundle's, or none.
        drawn: whether it counts with a temperature alone.
        help: what it does, from the docstring of `GenerationConfig`.
    """

    kind: type[int] | type[float]
    limits: Limits
    default: float | None
    drawn: bool
    help: str

    def checked(self, name: str, value: Any) -> float:
        """Returns `value` as one of `kind`; GenerationError, which names it `name`, if it is out of range."""
        if self.kind is int:
            return whole_number(name, value, minimum=int(self.limits.low))
        return self.limits.checked(name, value)


def _numbers() -> dict[str, Number]:
    """Returns the options that are numbers, by name."""
    helps = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", cleandoc(GenerationConfig.__doc__ or ""), re.MULTILINE))
    numbers = {}
    for field in fields(GenerationConfig):
        if get_origin(field.type) is Annotated:
            kind, limits, *marks = get_args(field.type)
            text = " ".join(helps.get(field.name, "").split()).removesuffix(".")
            whole = int in (kind, *get_args(kind))
            default = getattr(GenerationConfig, field.name)
            numbers[field.name] = Number(int if whole else float, limits, default, DRAWN in marks, text)
    return numbers


NUMBERS = _numbers()


class GenerationOptions(TypedDict, total=False):
    """Types the fields of `GenerationConfig` as keyword arguments."""

    max_new_tokens: int
    mode: str
    threshold: float | Sequence[float] | None
    min_layers: int | None
    max_pending: int | None
    prompt_lookup: int | None
    drafter: int | None
    prediction: Sequence[int] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    logits_processor: "LogitsProcessor | None"
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | Sequence[int] | None
    stop_token_ids: Sequence[int] | None
    stop: str | Sequence[str]
    json_schema: Mapping[str, Any] | str | None
    json_whitespace: bool
    regex: str | None
    grammar: str | None
    detokenize: bool
    special_tokens: Sequence[int]
    compaction_threshold: float | None
    adapter: str | None
    cache_salt: str | None
    states: bool


def with_options(config: GenerationConfig | None, options: GenerationOptions) -> GenerationConfig:
    """Returns `config`, or the default one, with the fields in `options` replaced."""
    if config is None:
        return GenerationConfig(**options)
    if not isinstance(config, GenerationConfig):
        raise GenerationError(f"config must be a GenerationConfig, not {shown(config)}: give single options by name")
    return replace(config, **options) if options else config


def token_ids(what: str, ids: "Sequence[int] | np.ndarray") -> "np.ndarray":
    """Returns `ids` as an integer array [S].

    Raises:
        GenerationError: they are not a flat list of whole numbers.
    """
    import numpy as np

    try:
        array = np.asarray(ids)
    except Exception:  # a ragged list; and an object's conversion may raise anything
        array = None
    if array is not None and array.shape == (0,):
        return np.zeros(0, np.int64)
    if (
        array is None
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        # NumPy converts True and False in a list to 1 and 0.
        or (not isinstance(ids, np.ndarray) and any(isinstance(one, bool | np.bool_) for one in ids))
    ):
        cure = ": engine.tokenizer.encode(text) makes them of text" if _is_text(ids) else ""
        raise GenerationError(f"{what} must be a flat list of whole numbers (token ids){cure}")
    return array


def _is_text(ids: Any) -> bool:
    """Tells whether `ids` is text, or a list with text in it."""
    return isinstance(ids, str) or (isinstance(ids, list | tuple) and any(isinstance(one, str) for one in ids))


def _plain(value: Any) -> Any:
    """Returns an array of NumPy as a list, and anything else as it is."""
    import numpy as np

    return value.tolist() if isinstance(value, np.ndarray) else value


def _threshold(value: Any) -> float | tuple[float, ...]:
    values = _plain(value)
    return tuple(map(check_threshold, values)) if isinstance(values, list | tuple) else check_threshold(values)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) and one for one in stops):
        raise GenerationError(f"stop must be a string or a list of strings, none of them empty, not {shown(value)}")
    for one in stops:
        check_text("a stop string", one)
    return tuple(stops)


def _json_schema(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        schema = parse_json(text)
    except Exception:  # invalid JSON; and an object's conversion may raise anything
        schema = None
    if not isinstance(schema, dict):
        raise GenerationError(f"json_schema must be a JSON object, or text that holds one, not {shown(value)}")
    check_text("json_schema", text)
    return text


def _check_grammar(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise GenerationError(f"{name} must be a string that is not empty, not {shown(value)}")
    check_text(name, value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Returns pairs of token id and bias, sorted by id."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise GenerationError(f"logit_bias must give a number for each of some token ids, not {shown(value)}")
    biases = {
        whole_number("a token id of logit_bias", token, minimum=0): real_number("a bias of logit_bias", bias)
        for token, bias in pairs
    }
    return tuple(sorted(biases.items()))
