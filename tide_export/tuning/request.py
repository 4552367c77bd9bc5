"""The validated requests of `tune`, one per mode."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, ClassVar

from tide_export.errors import ConfigError
from tide_export.values import real_number, whole_number

MINIMUM = {
    "prompts": 2,
    "prompts_per_document": 1,
    "prompt_length": 1,
    "positions": 1,
    "new_tokens": 2,
    "min_layers": 0,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The options that both modes have.

    Attributes:
        dataset: SPEC of the text; documents the routers were fitted on are omitted.
        prompts: drawn at most; a third of the documents is for choosing, the others are for testing the choice.
        prompts_per_document: at most. With 1 the prompts are as independent as the documents are.
        prompt_length: tokens before the first position that is scored or generated.
        slots: sequences at once, 2 or more, for which it is measured as well whether the mode is faster than full
            depth: mode `auto` is full depth for more than the most that it pays for.
        threads: of ONNX Runtime, as at work; None: one per physical core.
        seed: of the draw of prompts.
        dry_run: leave the bundle as it is.

    Raises:
        ConfigError: a number out of range.
    """

    mode: ClassVar[str]
    dataset: str
    prompts: int
    prompts_per_document: int
    prompt_length: int
    slots: tuple[int, ...] = ()
    threads: int | None = None
    seed: int = 0
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, minimum in MINIMUM.items():
            value = getattr(self, name, None)
            if value is not None:
                whole_number(name, value, minimum, error=ConfigError)
        for count in self.slots:
            whole_number("slots", count, 2, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class ExitRequest(TuneRequest):
    """Mode exit: thresholds with a guarantee.

    Attributes:
        epsilon: largest share of positions that may differ from full depth, in (0, 1).
        delta: largest probability that the guarantee is wrong, in (0, 1).
        model: the bundle must have been made from its weights; nothing else needs the model. None: not compared.
        trust_remote_code: run Python code of `model`, if it has any of its own.
        positions: scored per prompt.
        min_layers: checkpoints with fewer layers never exit; stored too. None: the bundle's.
    """

    mode = "exit"
    epsilon: float
    delta: float
    prompts: int = 600
    prompts_per_document: int = 1
    prompt_length: int = 32
    positions: int = 32
    model: str | None = None
    trust_remote_code: bool = False
    min_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < real_number(name, getattr(self, name), ConfigError) < 1:
                raise ConfigError(f"{name} must lie between 0 and 1, not {getattr(self, name)!r}")
        super().__post_init__()

    @property
    def drawn_length(self) -> int:
        """Tokens of text that are drawn for a prompt."""
        return self.prompt_length + self.positions - 1

    @property
    def binary(self) -> bool:
        """Whether the sum of the losses is binomial: each is 0 or 1, and no two come from one document."""
        return self.positions == 1 and self.prompts_per_document == 1


@dataclass(frozen=True, kw_only=True)
class LosslessRequest(TuneRequest):
    """Mode lossless: the fastest way to draft on this machine.

    Attributes:
        new_tokens: generated after each prompt.
        temperature: of sampling them; 0: greedy.
    """

    mode = "lossless"
    prompts: int = 48
    prompts_per_document: int = 4
    prompt_length: int = 48
    new_tokens: int = 64
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= real_number("temperature", self.temperature, ConfigError) < inf:
            raise ConfigError(f"temperature must be a finite number, 0 or more, not {self.temperature!r}")
        super().__post_init__()

    @property
    def drawn_length(self) -> int:
        """Tokens of text that are drawn for a prompt."""
        return self.prompt_length


REQUESTS: dict[str, type[ExitRequest] | type[LosslessRequest]] = {"exit": ExitRequest, "lossless": LosslessRequest}


def make_request(mode: str, options: Mapping[str, Any]) -> ExitRequest | LosslessRequest:
    """The request of a mode; options that are None take its defaults.

    Raises:
        ConfigError: an unknown mode, an option of the other mode, a required one that is missing, or as the request.
    """
    if mode not in REQUESTS:
        raise ConfigError(f"mode must be exit or lossless, not {mode!r}")
    values = {name: value for name, value in options.items() if value is not None}
    names = {name: {field.name for field in fields(request)} for name, request in REQUESTS.items()}
    for other in REQUESTS.keys() - {mode}:
        if wrong := sorted(values.keys() & names[other] - names[mode]):
            raise ConfigError(f"{wrong[0]} belongs to mode {other}, not to mode {mode}")
    if mode == "exit" and not {"epsilon", "delta"} <= values.keys():
        raise ConfigError("mode exit needs epsilon and delta")
    return REQUESTS[mode](**values)
