"""Defines and checks the requests of `tune`, one class per mode."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tide_export.common.changed_tokens import EPSILON, TEMPERATURE
from tide_export.common.values import Options, not_negative, real_number, whole_number
from tide_export.errors import ConfigError

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
class TuneRequest(Options):
    """Options of both modes.

    Attributes:
        dataset: SPEC of the text; documents that the routers were fitted on are omitted.
        prompts: the most to draw; a third of the documents is for choosing, the others for testing the choice.
        prompts_per_document: the most to draw from one document; with 1, prompts are as independent as documents.
        prompt_length: tokens before the first position that is scored or generated.
        slots: numbers of sequences, each 2 or more, for which the mode is also compared with full depth; beyond the
            largest for which it is faster, mode `auto` is full depth.
        threads: CPU threads, as in deployment; None: one per physical core.
        seed: seeds the draw of prompts.
        dry_run: do not change the bundle.

    Raises:
        ConfigError: a number is out of range.
    """

    error = ConfigError
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
    """Options of mode exit: thresholds with a guarantee.

    Attributes:
        epsilon: largest share of changed tokens, in (0, 1).
        delta: largest probability that the guarantee is wrong, in (0, 1).
        model: checks that the bundle was made from this model's weights; None: not checked.
        trust_remote_code: run Python code in the folder of `model`.
        perplexity_epsilon: largest change of perplexity, measured without a guarantee.
        temperature: at which tokens are compared; 0: greedy.
        positions: positions scored per prompt.
        min_layers: checkpoints after fewer layers never exit; stored as well. None: the bundle's.
    """

    mode = "exit"
    epsilon: float
    delta: float
    perplexity_epsilon: float = EPSILON
    temperature: float = TEMPERATURE
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
        not_negative("perplexity_epsilon", self.perplexity_epsilon, ConfigError)
        not_negative("temperature", self.temperature, ConfigError)
        super().__post_init__()

    @property
    def drawn_length(self) -> int:
        """Tokens of text drawn for a prompt."""
        return self.prompt_length + self.positions - 1

    @property
    def binary(self) -> bool:
        """Whether the sum of the losses is binomial: each is 0 or 1, and no two come from one document."""
        return self.positions == 1 and self.prompts_per_document == 1


@dataclass(frozen=True, kw_only=True)
class LosslessRequest(TuneRequest):
    """Options of mode lossless: the fastest drafting on this machine.

    Attributes:
        new_tokens: tokens generated after each prompt.
        temperature: their sampling temperature; 0: greedy.
    """

    mode = "lossless"
    prompts: int = 48
    prompts_per_document: int = 4
    prompt_length: int = 48
    new_tokens: int = 64
    temperature: float = TEMPERATURE

    def __post_init__(self) -> None:
        not_negative("temperature", self.temperature, ConfigError)
        super().__post_init__()

    @property
    def drawn_length(self) -> int:
        """Tokens of text drawn for a prompt."""
        return self.prompt_length


REQUESTS: dict[str, type[ExitRequest] | type[LosslessRequest]] = {"exit": ExitRequest, "lossless": LosslessRequest}


def make_request(mode: str, options: Mapping[str, Any]) -> ExitRequest | LosslessRequest:
    """Creates the request of a mode; options that are None get its defaults.

    Raises:
        ConfigError: the mode is unknown, an option is of the other mode, missing, or out of range.
    """
    if mode not in REQUESTS:
        raise ConfigError(f"mode must be exit or lossless, not {mode!r}")
    values = {name: value for name, value in options.items() if value is not None}
    names = {name: {field.name for field in fields(request)} for name, request in REQUESTS.items()}
    for other in REQUESTS.keys() - {mode}:
        if wrong := sorted(values.keys() & names[other] - names[mode]):
            raise ConfigError(f"{wrong[0]} belongs to mode {other}, not to mode {mode}")
    if mode == "exit" and not {"epsilon", "delta"} <= values.keys():
        raise ConfigError(
            "mode exit needs epsilon, a share of changed tokens, and delta, the risk that it is more: give both, such "
            "as 0.05 and 0.1"
        )
    return REQUESTS[mode](**values)
