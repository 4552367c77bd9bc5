"""Loads the source model and gives the other stages its hidden states, final norm, head and weights.

First stage of every command that needs PyTorch. `load_model` reads any `AutoModelForCausalLM` from a folder, a GGUF
file or the Hugging Face hub. No architecture is known by name: `model.structure` finds layers, norm and head.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import GgufConfig

from tide_export.common.memory import return_free_memory
from tide_export.common.progress import quiet_transformers
from tide_export.errors import ConfigError, ModelError, UnsupportedModelError, first_line
from tide_export.model.attention import reference_attention
from tide_export.model.gguf_weights import keeping_integers
from tide_export.model.paths import is_gguf
from tide_export.model.pretrained import (
    bounded_sizes,
    code_error,
    opened,
    read_config,
    remote_code_refused,
    uses_remote_code,
)
from tide_export.model.quantized_files import loading_problem, prepare_quantized
from tide_export.model.quantized_modules import kept_in_16_bits, widen_when_run
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.model.structure import ModelStructure, input_device, offload_hooks, two_tokens

logger = logging.getLogger(__name__)

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale")  # names of tensors of FP8 and NVFP4
EXIT_THRESHOLD = "early_exit_threshold"  # of a looped model and its config: of the gate's cumulative probability
HASH_CHUNK = 2**22  # numbers hashed at a time, which bounds the temporary memory


@dataclass(frozen=True)
class Hidden:
    """Result of one forward pass over `input_ids` [B, S].

    Attributes:
        raw: layer count -> the residual stream after that many layers, [B, S, D], before the final norm.
        logits: the model's logits, [B, S, V].
    """

    raw: dict[int, torch.Tensor]
    logits: torch.Tensor


@dataclass(eq=False)
class SourceModel:
    """A causal LM in evaluation mode, which is never trained.

    `load_model` or `wrap_model` creates it. `quantize.flow.quantize_model` may then round its weights in place. After
    `release` the weights are freed and it can no longer run.

    Attributes:
        model: the transformers model, float32.
        name: the folder, hub id or GGUF file it was loaded from.
        weights_sha256: hash of the weights as loaded, before any quantization.
        structure: its layers, final modules and head.
        hidden_size: width D of raw hidden states, several hidden states of a token together.
        normalized_size: width D' of normalized hidden states, which routers and head read; differs from D only where a
            projection follows the norm.
        quantized: the integers whose values the weights now have; None where they are as loaded, and not packed.
        exact_in: of "bf16" and "fp16" those that have every number of its matrices, as loaded, but for packed ones.
        remote_code: whether Python code of the model's own was run to load it or its tokenizer.
    """

    model: PreTrainedModel
    name: str
    weights_sha256: str
    structure: ModelStructure
    hidden_size: int
    normalized_size: int
    quantized: QuantizedWeights | None = None
    remote_code: bool = False
    exact_in: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.structure.layers)

    @property
    def loops(self) -> int:
        """How often the same layers run, one time after another; each counts in `num_layers`."""
        return self.structure.loops

    @property
    def text_config(self):
        return self.model.config.get_text_config()

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Device of the model's input; some layers may be on others."""
        return input_device(self.model)

    @property
    def context_length(self) -> int | None:
        """Largest number of positions the model supports, or None where its config sets no bound.

        With longrope scaling, the original number: beyond it every angle changes, also of keys already in the cache.
        """
        names = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # the last two: MPT, Whisper
        lengths = [*(getattr(self.text_config, name, None) for name in names), self.longrope_length]
        positions = min((int(length) for length in lengths if length and length > 0), default=None)  # XLNet: -1
        return positions if positions is None else positions - self.structure.first_position

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
        """The model's end-of-sequence ids, of its generation config and its config together, ascending.

        Those outside the vocabulary, which no token can have, are left out.
        """
        ids: set[int] = set()
        for config in (getattr(self.model, "generation_config", None), self.model.config, self.text_config):
            value = getattr(config, "eos_token_id", None)
            if value is not None:
                ids.update(int(item) for item in (value if isinstance(value, list | tuple) else [value]))
        return tuple(sorted(one for one in ids if 0 <= one < self.vocab_size))

    @torch.no_grad()
    def run(self, input_ids: torch.Tensor, layers: Sequence[int], attention_mask: torch.Tensor | None = None) -> Hidden:
        """Runs the model on `input_ids` [B, S] and keeps the raw hidden states after each of `layers` layers."""
        with self.structure.captured(layers) as raw:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return Hidden(raw=dict(raw), logits=output.logits)

    @torch.no_grad()
    def raw_hidden(
        self,
        input_ids: torch.Tensor,
        layers: Sequence[int],
        attention_mask: torch.Tensor | None = None,
        keep: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> dict[int, torch.Tensor]:
        """Returns only the raw hidden states of `run`, [B, S, D] each, without all logits, the largest tensor.

        `keep`, if given, is applied to each as soon as it is computed, and its result is kept instead.
        """
        with self.structure.captured(layers, keep) as raw, self.structure.last_position_only():
            self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return dict(raw)

    def head_rows(self) -> torch.Tensor | None:
        """Returns the head's matrix [V, D'], float32 on the CPU; None where the head is not a matrix."""
        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (self.vocab_size, self.normalized_size):
            return None
        return self.weight(f"{next(name for name, module in self.model.named_modules() if module is head)}.weight")

    def weight(self, key: str) -> torch.Tensor:
        """Returns the parameter or buffer `key` of `state_dict`, float32 (integers unchanged), on the CPU."""
        tensor = self.model.get_parameter_or_buffer(key)
        if tensor.is_meta:
            tensor = _offloaded(self.model, self.name, key)
        tensor = tensor.detach().cpu()
        return tensor.float() if tensor.is_floating_point() else tensor

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the final norm (and projection) to raw hidden states [..., D]; returns [..., D']."""
        return self.structure.normalize(hidden)

    def head(self, normalized: torch.Tensor) -> torch.Tensor:
        """Computes logits [B, S, V] of normalized hidden states [B, S, D'], scaling and softcaps included."""
        return self.structure.head(self.model, normalized)

    def release(self) -> None:
        """Frees the weights, even where exporters still refer to the model; running it then raises ModelError."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.model.register_forward_pre_hook(_refuse_released)


def load_model(
    name: str | os.PathLike,
    device: str = "cpu",
    device_map: str | dict[str, Any] | None = None,
    offload_folder: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
    packed: bool = False,
) -> SourceModel:
    """Loads a causal LM in float32 with `reference_attention` and checks that it is usable.

    A model that is already quantized is dequantized (see `model.quantized_files`), and so is a GGUF file
    (`model.gguf_weights`).

    Args:
        name: a folder, a hub id or a GGUF file.
        device: the device of the whole model.
        device_map: instead of `device`, for a model that does not fit on one: "auto", or a device ("cpu" and "disk"
            included) per module name, as accelerate defines it.
        offload_folder: where to write layers on "disk" whose weights cannot be read from the model's files (from
            safetensors they can).
        trust_remote_code: run Python code of the model's own (`auto_map` in its config.json), which can do anything
            that the user can.
        packed: leave the integers of GPTQ, AWQ and GGUF as they are stored, and widen each matrix while it is used; on
            the CPU, without a device map. The result's `quantized` has them.

    Raises:
        ConfigError: both `device` and `device_map`.
        ModelError: no such model, unreadable or missing weights, NaN or infinity in a weight.
        UnsupportedModelError: transformers has no causal LM for it, or only with code of the model's own, which is not
            trusted; its structure cannot be found; or its quantization cannot be read.
    """
    if device_map is not None and device != "cpu":
        raise ConfigError(f"device {device!r} and a device_map: give one of them")
    name = os.fspath(name)
    config = read_config(name, trust_remote_code)
    kind = auto_class(config, name, trust_remote_code)
    quantized = "GGUF" if is_gguf(name) else prepare_quantized(config, name, packed)
    placed: dict[str, Any] = {} if device_map is None else {"device_map": device_map, "offload_folder": offload_folder}
    if is_gguf(name):
        placed["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with (
            quiet_transformers(),
            bounded_sizes(name),
            keeping_integers() if packed else nullcontext(),
            opened(name, trust_remote_code) as (path, options),
        ):
            loaded: Any = kind.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                attn_implementation=reference_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below by name, where transformers would only say "see above"
                **placed,
                **options,
            )
            remote_code = trust_remote_code and uses_remote_code(path, config)
        model, info = loaded
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and the hub raise many kinds; all mean: not loadable
        reason = loading_problem() or first_line(error)
        failed = ModelError(f"cannot load the weights of model {name!r}: {reason}")
        raise code_error(name, error) or failed from error
    if info["missing_keys"] or info["mismatched_keys"]:
        problem = sorted(
            key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"])
        )[0]
        raise ModelError(f"model {name!r} has no usable weight for {problem}: its weights do not fit its config")
    scale = next((key for key in sorted(info["unexpected_keys"]) if key.rpartition(".")[2] in SCALES), None)
    if scale is not None:
        raise ModelError(
            f"model {name!r} is quantized, as {scale} says, and its config.json does not say how: its weights would be "
            "read without their scales; export the model it was made from"
        )
    kept = widen_when_run(model)
    if quantized is not None:
        how = "weights are read as the float32 numbers they stand for" if kept is None else "integers are kept"
        if kept is not None and is_gguf(name):  # which has types that are not
            how += f" in {len(kept.blocks)} matrices (Q8_0, Q4_0), and other weights read as float32"
        logger.info("%s is quantized (%s): its %s", name, quantized, how)
    source = wrap_model(model if packed or device_map is not None else model.to(device), name, remote_code, kept)
    return_free_memory()
    return source


def auto_class(config: PretrainedConfig, name: str = "", trust_remote_code: bool = False) -> Any:
    """Returns the transformers class that loads the causal LM of `config`.

    A text model, or one that reads images too.

    Raises:
        UnsupportedModelError: transformers has neither, and code of model `name` is not trusted.
    """
    remote = getattr(config, "auto_map", None) or {}
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping or (trust_remote_code and kind.__name__ in remote):
            return kind
    if AutoModelForCausalLM.__name__ in remote and not trust_remote_code:
        raise remote_code_refused(name)
    raise UnsupportedModelError(
        f"transformers has no causal language model of type {config.model_type!r}: models that read a whole text "
        "first, or make other things than text, are not taken"
    )


def wrap_model(
    model: PreTrainedModel, name: str, remote_code: bool = False, quantized: QuantizedWeights | None = None
) -> SourceModel:
    """Makes a `SourceModel` of a model in memory, which is set to evaluation mode without gradients.

    Raises:
        ModelError: NaN or infinity in a weight.
        UnsupportedModelError: its structure cannot be found.
    """
    _keep_scale(model)
    _run_all_loops(model)
    model.eval().requires_grad_(False)
    digest, exact = _read_weights(model, name, () if quantized is None else quantized.blocks)
    structure = ModelStructure.find(model)
    with torch.no_grad(), structure.captured([len(structure.layers)]) as raw:
        model(input_ids=two_tokens(model), use_cache=False)
    (last,) = raw.values()
    widths = last.shape[-1], structure.normalize(last).shape[-1]
    return SourceModel(model, name, digest, structure, *widths, quantized, remote_code, exact)


def _keep_scale(model: PreTrainedModel) -> None:
    """Computes without what RWKV does for float16, which changes weights when the model first runs.

    It divides weights so that hidden states are halved after every few layers. Their norms have the same results with a
    larger epsilon instead.
    """
    backbones: list[Any] = [module for module in model.modules() if hasattr(module, "_rescale_layers")]
    for backbone in backbones:
        if "_rescale_layers" in vars(backbone):
            continue  # done before
        backbone.train()
        backbone._rescale_layers()  # undoes it, if it was done
        backbone._rescale_layers = _nothing
        for number, part in enumerate((*backbone.blocks, backbone.ln_out)):
            halved = number // backbone.config.rescale_every if backbone.config.rescale_every > 0 else 0
            for norm in part.modules():
                if isinstance(norm, nn.LayerNorm):
                    norm.eps *= 4**halved


def _run_all_loops(model: PreTrainedModel) -> None:
    """Makes a looped model give its last loop's logits, whatever loop its config and gate choose (Ouro)."""
    for name in ("early_exit_step", EXIT_THRESHOLD):
        if vars(model).get(name) is not None:
            setattr(model, name, None)


def _nothing() -> None:
    pass


def _read_weights(model: nn.Module, name: str, packed: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Reads every tensor once; raises ModelError for NaN or infinity.

    Returns:
        The hash of their names, shapes and float32 bytes, in name order; the types that all matrices are exact in, but
        for those `packed`.
    """
    digest, exact = hashlib.sha256(), HALF
    for key, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            tensor = _offloaded(model, name, key)
        digest.update(f"{key}{tuple(tensor.shape)}".encode())
        for part in tensor.reshape(-1).split(HASH_CHUNK):
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise ModelError(f"model {name!r}: weight {key} holds NaN or infinity")
            data = part.float() if part.is_floating_point() else part
            if part.is_floating_point() and tensor.dim() > 1 and not any(one in packed for one in (key, f"{key}.0")):
                exact = {key: half for key, half in exact.items() if torch.equal(data.to(half).float(), data)}
            digest.update(memoryview(data.cpu().numpy()).cast("B") if data.numel() else b"")
        del tensor, part, data  # or one read for this alone would be held beside the next
    return digest.hexdigest(), tuple(exact)


def _offloaded(model: nn.Module, name: str, key: str) -> torch.Tensor:
    """Reads the single weight `key` that accelerate has offloaded; one that is kept in 16 bits in these."""
    path, _, attribute = key.rpartition(".")
    if (half := kept_in_16_bits(model.get_submodule(path), attribute)) is not None:
        return half
    for hook in offload_hooks(model.get_submodule(path)):
        if hook.weights_map is not None:
            return hook.weights_map[attribute]
    raise ModelError(f"model {name!r}: weight {key} is on no device and was not offloaded by accelerate either")


def _refuse_released(*_: object) -> None:
    raise ModelError("the source model was released: load it again")
