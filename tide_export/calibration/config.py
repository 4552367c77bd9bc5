"""Settings of calibration and export, with TIDE's names and defaults if TIDE has them.

The command line, whose options and help come from its fields, or a library user fills `TideConfig`. The router file and
the bundle's manifest store it as provenance.
"""

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from tide_export.common.changed_tokens import EPSILON, TEMPERATURE
from tide_export.common.values import check_names, shown
from tide_export.errors import ConfigError

KV_CACHE_STRATEGY = "kv_cache_strategy"  # a setting of TIDE's with one value left, exact, which is not stored


class Settings(BaseModel):
    """Immutable settings, whose fields are also the options of a command and their help."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, options: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Turns what pydantic refuses into one sentence."""
        try:
            return validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            name, *inside = map(str, first["loc"])
            check_names(f"{cls.__name__} has no setting", [name], cls.model_fields, ConfigError)
            # For a union, pydantic has a message per member, with the member's name.
            layers = "must be auto, none, or a list of layer counts"
            reason = layers if inside and name == "checkpoints" and not inside[0].isdigit() else first["msg"]
            value = shown(options.get(name, first.get("input")) if isinstance(options, dict) else first.get("input"))
            raise ConfigError(f"{name} {re.sub('^[A-Z][a-z]+ should ', 'must ', reason)}, not {value}") from None

    @classmethod
    def from_options(cls, **options: object) -> Self:
        """Returns settings with `options`; an option that is None takes its default.

        Raises:
            ConfigError: an option is unknown or out of range; the message names the first one.
        """
        return cls.model_validate({name: value for name, value in options.items() if value is not None})


FULL_SIZE = 150_000_000  # parameters of the largest model that is calibrated on all of the default text
LEAST = {"calibration_samples": 24, "lens_tokens": 8_000}  # of larger ones


class TideConfig(Settings):
    """Calibration and export settings (TIDE: Token-Informed Depth Execution, 0.2.1, `config.py`)."""

    checkpoint_interval: int = Field(4, ge=1, description="layers between checkpoints")
    checkpoints: Literal["auto", "none"] | tuple[int, ...] | None = Field(
        None,
        description="layers run at each checkpoint, such as 3,6,9, or auto: a few that save time; none, of an export: "
        "nothing is calibrated and no token exits; overrides checkpoint_interval",
    )
    exit_threshold: float = Field(0.85, ge=0.0, le=1.0, description="a token exits when its score is above this")
    epsilon: float = Field(EPSILON, ge=0.0, lt=1.0, description="share of changed tokens in mode auto; 0: none")
    perplexity_epsilon: float = Field(
        EPSILON, ge=0.0, description="share by which exits may raise perplexity in mode auto"
    )
    temperature: float = Field(
        TEMPERATURE, ge=0.0, allow_inf_nan=False, description="at which changed tokens are counted; 0: greedy"
    )
    min_layers: int = Field(
        8, ge=0, description="checkpoints after fewer layers never exit; in mode auto only if this is given"
    )
    max_pending: int = Field(16, ge=0, description="tokens that may be pending before a segment is forced to run")
    compaction_threshold: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="if a smaller share of a batch than this needs a segment, only those sequences run it",
    )
    exit_strategy: Literal["auto", "identity", "lens"] = Field(
        "auto",
        description="the state that exits: unchanged (identity, TIDE's rule), translated by a lens, or auto: by a lens "
        "if it saves more than it costs",
    )
    kv_cache: Literal["float32", "int8"] = Field(
        "float32",
        description="type of the K/V cache: float32, or int8 with a scale for each token and head, a quarter of the "
        "memory; onnxruntime on the CPU",
    )
    lens_rank: int = Field(64, ge=1, description="width of a lens, at most half the hidden size")
    lens_tokens: int = Field(40_000, ge=64, description="total tokens that lenses are fitted to")
    lens_epochs: int = Field(3, ge=1, description="maximum passes over a text with fewer tokens than lens_tokens")
    lens_learning_rate: float = Field(1e-3, gt=0.0, description="learning rate of a lens")
    calibration_dataset: str = Field("wikitext", min_length=1, description="text to calibrate on, a SPEC as below")
    self_generated: str | None = Field(
        None,
        min_length=1,
        description="file of prompts, one per line (.jsonl: field prompt or text): calibrate on the model's own "
        "answers to them, not on --dataset",
    )
    self_generated_temperature: float = Field(0.8, gt=0.0, description="sampling temperature of these answers")
    self_generated_answers: int = Field(1, ge=1, description="answers sampled per prompt")
    calibration_samples: int = Field(120, ge=2, description="maximum sequences (or prompts) to read")
    calibration_length: int = Field(512, ge=2, description="maximum tokens per sequence")
    calibration_batch: int = Field(8, ge=1, description="sequences per forward pass")
    calibration_tokens_kept: int | None = Field(
        None,
        ge=64,
        description="tokens kept of the training split, a uniform sample; by default as many as fit calibration_memory",
    )
    calibration_memory: float = Field(2.0, gt=0.0, description="GiB of hidden states kept")
    label: Literal["unchanged", "cosine", "kl"] = Field("unchanged", description="label that routers learn to predict")
    convergence_threshold: float = Field(0.98, gt=-1.0, lt=1.0, description="cosine label: similarity above this")
    kl_bound: float = Field(
        0.1, gt=0.0, description="kl label: divergence from the full model's distribution below this, in nats"
    )
    class_balance: bool = Field(False, description="give both classes equal weight in the loss, yes or no")
    router_bottleneck_dim: int = Field(128, ge=1, description="hidden width of a router")
    router_shortlist: int = Field(
        256, ge=0, description="head rows that a router reads to judge how certain the head is; 0 for TIDE's router"
    )
    router_epochs: int = Field(20, ge=1, description="passes over the kept tokens")
    router_learning_rate: float = Field(1e-3, gt=0.0, description="learning rate of a router")
    validation_fraction: float = Field(
        0.15, gt=0.0, lt=0.5, description="share of tokens for early stopping and scaling scores"
    )
    test_fraction: float = Field(0.15, gt=0.0, lt=0.5, description="share of tokens for the report only")
    seed: int = Field(0, ge=0, description="seed of every random choice in calibration")

    @model_validator(mode="before")
    @classmethod
    def _take_strategy(cls, options: Any) -> Any:
        """Removes TIDE's `kv_cache_strategy` if it is exact.

        Raises:
            ConfigError: it is something else.
        """
        if not isinstance(options, dict) or KV_CACHE_STRATEGY not in options:
            return options
        strategy = options[KV_CACHE_STRATEGY]
        if strategy == "propagate":
            raise ConfigError(
                "option kv_cache_strategy: propagate is gone, because exact K/V change 2 to 5 points fewer "
                "tokens and are as fast: omit the option, or give exact"
            )
        if strategy != "exact":
            raise ConfigError(f"kv_cache_strategy must be exact, not {strategy!r}")
        return {name: value for name, value in options.items() if name != KV_CACHE_STRATEGY}

    @model_validator(mode="after")
    def _check_fractions(self) -> Self:
        fractions = self.validation_fraction, self.test_fraction
        if 1 - sum(fractions) < max(fractions) - 1e-9:
            raise ConfigError(
                f"validation_fraction {fractions[0]:g} and test_fraction {fractions[1]:g} must leave the largest share "
                "for training"
            )
        return self

    @classmethod
    def names(cls) -> set[str]:
        """Returns the names of all settings that it takes."""
        return {*cls.model_fields, KV_CACHE_STRATEGY}

    def given(self, name: str, otherwise: Any) -> Any:
        """Returns the field `name` if it was set, `otherwise` if it has its default."""
        return getattr(self, name) if name in self.model_fields_set else otherwise

    def sized(self, parameters: int) -> "TideConfig":
        """Returns the settings with the defaults of a model of so many parameters: large ones read less text.

        So a calibration with defaults takes minutes up to half a billion parameters. Text that was asked for stays.
        """
        share = FULL_SIZE / parameters
        if share >= 1 or self.self_generated is not None:
            return self
        defaults = {name: max(least, round(share * getattr(self, name))) for name, least in LEAST.items()}
        return self.model_copy(update={name: n for name, n in defaults.items() if name not in self.model_fields_set})

    def tokens_kept(self, hidden_size: int, layers: int) -> int:
        """Returns how many tokens of the training split keep their hidden states after `layers` layers.

        Each other split keeps a quarter of them.
        """
        if self.calibration_tokens_kept is not None:
            return self.calibration_tokens_kept
        # One checkpoint's exit states of all three splits are in memory too: 1.5 times those of the training split.
        per_token = 4 * hidden_size * (layers + 1) * 1.5
        return max(64, int(self.calibration_memory * 2**30 / per_token))

    def check_checkpoints(self, num_layers: int) -> None:
        """Checks that a model with `num_layers` layers can have checkpoints.

        Raises:
            ConfigError: as `resolve_checkpoints`; or none can be chosen for `auto`.
        """
        if self.checkpoints != "auto":
            self.resolve_checkpoints(num_layers)
        elif max(1, self.min_layers) >= num_layers:
            raise ConfigError(
                f"checkpoints auto: a model of {num_layers} layers has none from layer {max(1, self.min_layers)} on: "
                "lower --min-layers"
            )

    def resolve_checkpoints(self, num_layers: int) -> tuple[int, ...]:
        """Returns the checkpoints of a model with `num_layers` layers, ascending; never after the last layer.

        `calibration.placement` resolves `auto` by running the model.

        Raises:
            ConfigError: none fits, or a given one lies outside 1 .. num_layers-1 or is repeated.
        """
        assert self.checkpoints != "auto"
        if self.checkpoints == "none":
            return ()
        if self.checkpoints is None:
            points = tuple(range(self.checkpoint_interval, num_layers, self.checkpoint_interval))
            if not points:
                raise ConfigError(
                    f"checkpoint_interval {self.checkpoint_interval} leaves no checkpoint in a model of "
                    f"{num_layers} layers: use a smaller interval or --checkpoints"
                )
            return points
        if not self.checkpoints or list(self.checkpoints) != sorted(set(self.checkpoints)):
            raise ConfigError(f"checkpoints must be distinct and ascending, not {list(self.checkpoints)}")
        if self.checkpoints[0] < 1 or self.checkpoints[-1] >= num_layers:
            raise ConfigError(
                f"checkpoints must lie in 1..{num_layers - 1} (the model has {num_layers} layers), "
                f"not {list(self.checkpoints)}"
            )
        return self.checkpoints
