"""Loads the frozen source model and answers what the other stages ask of it: hidden states, final norm, real head.

First stage of every command that needs PyTorch. `load_model` reads any `AutoModelForCausalLM` from a folder or the
Hugging Face hub; `SourceModel` is what `calibrate`, `trace` and the oracle work on. Nothing here knows an architecture
by name: see `model.structure` for how layers, norm and head are found.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from tide_export.errors import ConfigError, ModelError, UnsupportedModelError
from tide_export.model.quantized_checkpoints import loading_problem, prepare_quantized
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.model.structure import Anatomy, input_device, offload_hooks

logger = logging.getLogger(__name__)

HASHED_AT_ONCE = 2**22  # numbers: what looking at them needs besides is a multiple of that, not of the embedding


@dataclass(frozen=True)
class States:
    """What one forward pass over `input_ids` [B, S] gave.

    Attributes:
        raw: for each layer count asked for, the residual stream after that many layers, [B, S, D], before the norm.
        logits: the model's own logits, [B, S, V].
    """

    raw: dict[int, torch.Tensor]
    logits: torch.Tensor


@dataclass(frozen=True)
class SourceModel:
    """A frozen causal LM with its anatomy and identity."""

    model: PreTrainedModel
    name: str
    weights_sha256: str
    anatomy: Anatomy
    quantized: QuantizedWeights | None = None  # whose values the model computes with; None: its own weights

    @property
    def num_layers(self) -> int:
        return len(self.anatomy.layers)

    @property
    def text_config(self):
        return self.model.config.get_text_config()

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        """Width D of the residual stream."""
        return int(self.text_config.hidden_size)

    @property
    def normed_size(self) -> int:
        """Width of what the routers and the head see; differs from D only where a projection follows the norm."""
        with torch.no_grad():
            return int(self.normed(torch.zeros(1, 1, self.hidden_size, device=self.device)).shape[-1])

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the model takes its input; of a model on several devices, others may hold some of its layers."""
        return input_device(self.model)

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for, or None where its config sets no bound.

        With longrope scaling the positions it was made for first: behind them every angle, also of tokens whose keys
        are in the cache by then, would change.
        """
        config = self.text_config
        lengths = [
            getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")
        ]  # the latter: MPT
        lengths.append(self.longrope_length)
        return min((int(length) for length in lengths if length), default=None)

    @property
    def longrope_length(self) -> int | None:
        """Tokens up to which longrope scaling uses its short factors; None where the model does not use it."""
        parameters = getattr(self.text_config, "rope_parameters", None) or {}
        tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
        lengths = [
            table.get("original_max_position_embeddings") for table in tables if table.get("rope_type") == "longrope"
        ]
        return min((int(length) for length in lengths if length), default=None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All of the model's end-of-sequence ids, from its generation config and its config."""
        found: set[int] = set()
        for config in (getattr(self.model, "generation_config", None), self.model.config, self.text_config):
            value = getattr(config, "eos_token_id", None)
            if value is not None:
                found.update(int(item) for item in (value if isinstance(value, list | tuple) else [value]))
        return tuple(sorted(found))

    @torch.no_grad()
    def run(self, input_ids: torch.Tensor, layers: Sequence[int], attention_mask: torch.Tensor | None = None) -> States:
        """One forward pass over `input_ids` [B, S] that also keeps the raw states after each of `layers` layers."""
        with self.anatomy.captured(layers) as raw:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return States(raw=dict(raw), logits=output.logits)

    @torch.no_grad()
    def raw_states(
        self,
        input_ids: torch.Tensor,
        layers: Sequence[int],
        attention_mask: torch.Tensor | None = None,
        keep: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> dict[int, torch.Tensor]:
        """The raw states [B, S, D] of `run` alone: no logits [B, S, V] are made, which outweigh all else in memory.

        `keep`, if given, is applied to each as soon as it is there, and what it returns is held instead.
        """
        with self.anatomy.captured(layers, keep) as raw, self.anatomy.last_position_only():
            self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return dict(raw)

    def head_rows(self) -> torch.Tensor | None:
        """The head's matrix [V, D'], float32 on the CPU; None where the head is something else."""
        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (self.vocab_size, self.normed_size):
            return None
        if weight.is_meta:
            key = next(name for name, module in self.model.named_modules() if module is head)
            weight = _offloaded(self.model, self.name, f"{key}.weight")
        return weight.detach().float().cpu()

    def weight(self, key: str) -> torch.Tensor:
        """The parameter or buffer `key` of `state_dict`, float32 (integers as they are) on the CPU, wherever it is."""
        tensor = self.model.get_parameter_or_buffer(key)
        if tensor.is_meta:
            tensor = _offloaded(self.model, self.name, key)
        tensor = tensor.detach().cpu()
        return tensor.float() if tensor.is_floating_point() else tensor

    def let_go(self) -> None:
        """Frees the weights, whoever else still holds the model: exporters and rewriters keep what they saw last.

        Nothing can be asked of the model afterwards.
        """
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm (and projection, if any) on raw states [..., D]: what the head, and every router, sees."""
        return self.anatomy.normed(hidden)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of normed states [B, S, D'], by the model's own forward: scaling and softcaps included."""
        return self.anatomy.head(self.model, normed)


def load_model(
    name: str | os.PathLike,
    device: str = "cpu",
    device_map: str | dict[str, Any] | None = None,
    offload_folder: str | os.PathLike | None = None,
) -> SourceModel:
    """Loads `name` (a folder or a hub id) in float32 with `reference_attention`, frozen, and checks that it is usable.

    Whatever type the checkpoint has; what is quantized already is dequantized (see `quantized`).

    Args:
        name: the model.
        device: where all of it goes.
        device_map: instead of `device`, for a model that does not fit one: "auto", or a device ("cpu" and "disk"
            included) per module name, as accelerate takes it.
        offload_folder: for layers on "disk" whose weights cannot be read from the checkpoint as they are (they can from
            safetensors): where they are written.

    Raises:
        ConfigError: both `device` and `device_map`.
        ModelError: no such model, unreadable or missing weights, NaN or infinity in a weight.
        UnsupportedModelError: transformers has no causal LM for it, its anatomy cannot be found, or it is quantized in
            a way that cannot be read.
    """
    if device_map is not None and device != "cpu":
        raise ConfigError(f"device {device!r} and a device_map: give one of them")
    name = os.fspath(name)
    config = _check_source(name)
    quantized = prepare_quantized(config, name)
    if quantized is not None:
        logger.info("%s is quantized (%s): its weights are read as the float32 numbers they stand for", name, quantized)
    placed = {} if device_map is None else {"device_map": device_map, "offload_folder": offload_folder}
    try:
        with quiet_transformers():
            loaded: Any = auto_class(config).from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                attn_implementation=reference_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below by name, where transformers would only say "see above"
                **placed,
            )
        model, info = loaded
    except Exception as error:  # transformers, safetensors and the hub raise many kinds; all mean: not loadable
        reason = loading_problem() or _one_line(error)
        raise ModelError(f"cannot load the weights of model {name!r}: {reason}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        problem = sorted(
            key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"])
        )[0]
        raise ModelError(f"model {name!r} has no usable weight for {problem}: the checkpoint does not fit its config")
    return wrap_model(model if device_map is not None else model.to(device), name)


def auto_class(config: PretrainedConfig) -> Any:
    """The transformers class that loads the causal LM of `config`: a text model, or one that also reads images.

    Raises:
        UnsupportedModelError: transformers has neither.
    """
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise UnsupportedModelError(f"transformers has no causal language model of type {config.model_type!r}")


def wrap_model(model: PreTrainedModel, name: str) -> SourceModel:
    """A `SourceModel` of a model already in memory (frozen and put in eval mode in place).

    Raises:
        ModelError: NaN or infinity in a weight.
        UnsupportedModelError: its anatomy cannot be found.
    """
    model.eval().requires_grad_(False)
    digest = _hash_weights(model, name)
    return SourceModel(model=model, name=name, weights_sha256=digest, anatomy=Anatomy.find(model))


def reference_attention(config: PretrainedConfig) -> str | None:
    """The attention that a model of `config` is held to: eager, or where it has attention of its own, its default.

    Of an architecture that does not use transformers' attention interface, each kind of attention is code of its own,
    and the default is what its users run. Falcon's eager attention adds ALiBi twice in transformers 5.23.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "eager" if kind is None or kind._can_set_attn_implementation() else None


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """While open, `model` attends by the registered function `name`.

    Raises:
        UnsupportedModelError: the architecture refuses any attention but its own.
    """
    before = model.config._attn_implementation
    try:
        with quiet_transformers():  # it warns of what `refuse_ignored_attention` makes an error
            model.set_attn_implementation(name)
    except (ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"{does_not_use_interface(model)} ({str(error).splitlines()[0]})") from error
    try:
        yield
    finally:
        with quiet_transformers():
            model.set_attn_implementation(before)


def does_not_use_interface(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} does not compute its attention through transformers' attention interface, "
        "so it cannot be traced"
    )


def _check_source(name: str) -> PretrainedConfig:
    """Its config; tells a wrong path, a folder that is no model and an unknown architecture apart before all else."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"folder {name!r} holds no config.json: it is not a Hugging Face model")
    if folder.is_file():
        raise ModelError(f"{name!r} is a file: give the folder of a Hugging Face model, or a hub id")
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"no model at {name!r}: the folder does not exist")
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ModelError(
            f"no model {name!r}: no such folder, and the hub has it not or cannot be reached ({_one_line(error)})"
        ) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"model {name!r} cannot be read: {_one_line(error)}") from error


def _hash_weights(model: nn.Module, name: str) -> str:
    """sha256 over every tensor's name, shape and float32 bytes, in name order; refuses NaN and infinity on the way."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            tensor = _offloaded(model, name, key)
        digest.update(f"{key}{tuple(tensor.shape)}".encode())
        for part in tensor.reshape(-1).split(HASHED_AT_ONCE):
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise ModelError(f"model {name!r}: weight {key} holds NaN or infinity")
            data = part.float() if part.is_floating_point() else part
            digest.update(memoryview(data.cpu().numpy()).cast("B") if data.numel() else b"")
    return digest.hexdigest()


def _offloaded(model: nn.Module, name: str, key: str) -> torch.Tensor:
    """The weight `key` that accelerate holds in another place, alone: the others stay there."""
    owner, _, own_name = key.rpartition(".")
    for hook in offload_hooks(model.get_submodule(owner)):
        if hook.weights_map is not None:
            return hook.weights_map[own_name]
    raise ModelError(f"model {name!r}: weight {key} is on no device and was not offloaded by accelerate either")


@contextmanager
def quiet_transformers():
    """transformers draws a progress bar per weight file and logs advice; our own progress says what matters.

    So does accelerate, about weights that are offloaded because they were asked to be.
    """
    from transformers.utils import logging as hf_logging

    placing = logging.getLogger("accelerate.big_modeling")
    level = placing.level
    placing.setLevel(logging.ERROR)

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        placing.setLevel(level)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
