"""Finds which earlier tokens each layer of a model attends to, before the model is traced.

`tracer` needs this because the trace replaces masks by "causal attention, of that window". The `sliding_window` that a
layer gets beside its mask need not be what the mask does, and some masks come alone. So the rule that `transformers`
passes to every mask function is evaluated at many pairs of positions, also far beyond any window, and compared with the
three known forms. Any other is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tide_export.errors import TideError, UnsupportedModelError
from tide_export.model.attention import attention_implementation
from tide_export.model.structure import input_device
from tide_export.trace.attention.distances import biases_by_distance
from tide_export.trace.attention.indexed import ALL_KEYS, without_indexers
from tide_export.trace.running_layer import RUNNING, running_layers

IMPLEMENTATION = "tide_export_masks"

UNKNOWN = -1  # the layer of attention before the first

ROUNDING = 0.01  # of the largest logit: in bfloat16, a token's experts are summed in the order of all tokens

# Keyword arguments that change what attention computes and that no target lowers yet.
_ADDITIONS = {
    **{"position_bias": "a position bias", "alibi": "ALiBi", "head_mask": "head masks"},
    "sinks": "sinks of each token",  # Inkling 2; those of a head are `s_aux`
}

# The rule of `transformers.masking_utils`: batch, head, query position, key position -> whether it is attended.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Mask:
    """Which keys a query at position q attends to.

    Attributes:
        kind: "causal": all k <= q; "window": q - size < k <= q; "chunk": k <= q and in the same block of `size` tokens.
        size: of the window or block in tokens; 0 for "causal".
    """

    kind: str
    size: int = 0
    dtype: ClassVar = torch.bool  # as of the tensors it stands for

    def attends(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        causal = key <= query
        if self.kind == "window":
            return causal & (query - key < self.size)
        if self.kind == "chunk":
            return causal & (query // self.size == key // self.size)
        return causal

    def __getitem__(self, index: tuple) -> "Mask":
        """Returns itself for slices that keep everything, which is all that a model may do with its masks.

        0 is the one mask for all heads.
        """
        if any(part not in (slice(None), slice(0, None), 0) for part in index):
            raise TypeError("a mask's form has no parts")
        return self

    def __and__(self, choice: torch.Tensor) -> "Mask":
        """Returns itself beside what stands for an indexer's choice of keys, which are all."""
        if choice.shape != ALL_KEYS:
            raise TypeError("a mask's form is not joined with another mask")
        return self


class _UnknownMask:
    """Stands for a mask of another form: the model is refused if a layer uses it.

    Qwen2-MoE without sliding windows makes one of zero tokens that no layer uses.
    """


def layer_masks(model: PreTrainedModel, layers: nn.ModuleList) -> tuple[Mask | None, ...] | None:
    """The mask of each of the model's `layers`, None where a layer attends without one.

    Runs the model on two tokens with attention that computes nothing.

    Returns:
        None for a model that computes attention itself, or whose masks are of layers that are not known: its attention
        is matched in the trace instead.

    Raises:
        UnsupportedModelError: a layer's mask has none of the forms above, a layer attends with several, or tokens
            attend to later ones.
    """
    if not model._can_set_attn_implementation():
        _refuse_later_tokens(model)
        return None
    seen: dict[int, Mask | None] = {}
    with _recording(model, seen), running_layers(layers), torch.no_grad():
        ids = torch.zeros((1, 2), dtype=torch.long, device=input_device(model))
        try:
            model(input_ids=ids, use_cache=False)
        except TideError:
            raise
        except Exception as error:  # it computes with a mask tensor, or looks up the attention elsewhere
            if seen:
                raise UnsupportedModelError(
                    f"{type(model).__name__} computes with its attention masks between its layers, so it cannot be "
                    "exported"
                ) from error
    # transformers decides by the names of classes whether a model uses the interface; this one never called it.
    if not seen or seen.get(UNKNOWN) not in (None, Mask("causal")):
        _refuse_later_tokens(model)
        return None
    return tuple(seen.get(layer) for layer in range(len(layers)))


def _refuse_later_tokens(model: PreTrainedModel) -> None:
    """Checks that a token's logits stay the same, up to rounding, where the token after it is another.

    Raises UnsupportedModelError.
    """
    texts = torch.tensor([[[1, 1]], [[1, 2]]], device=input_device(model))
    with torch.no_grad():
        one, other = (model(input_ids=ids, use_cache=False).logits[0, 0].float() for ids in texts)
    if (one - other).abs().max() > ROUNDING * one.abs().max():
        raise UnsupportedModelError(f"{type(model).__name__} attends to later tokens, so it cannot be exported")


def classify(rule: Rule, size: int | None, positions: int) -> Mask | None:
    """The form of `rule` on the positions below `positions`, or None if it has no known form.

    Args:
        size: of the window or block according to the model's config, if there is one.
    """
    samples = {*range(66), *(2**power + step for power in range(5, 63) for step in (-1, 0, 1))}
    for count in range(1, 4):
        samples |= {count * (size or 0) + step for step in (-2, -1, 0, 1)}
    at = torch.tensor(sorted(sample for sample in samples if 0 <= sample < positions))
    query, key = at[:, None].expand(len(at), len(at)), at[None, :].expand(len(at), len(at))
    first = torch.zeros_like(query)
    attended = rule(first, first, query, key)
    forms = [Mask("causal"), *([Mask("window", size), Mask("chunk", size)] if size else [])]
    return next((form for form in forms if torch.equal(form.attends(query, key), attended)), None)


def refuse_additions(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Checks that `arguments` of an attention function add a mask and a bias by distance alone.

    Raises UnsupportedModelError.
    """
    for name, feature in _ADDITIONS.items():
        if arguments.get(name) is not None and not (name == "position_bias" and biases_by_distance(module)):
            raise UnsupportedModelError(f"{type(module).__name__} attends with {feature}, which cannot be exported yet")


@contextmanager
def _recording(model: PreTrainedModel, seen: dict[int, Mask | None]) -> Iterator[None]:
    """Fills `seen` with the mask of each layer in forward passes of `model`, while open.

    Attention is not computed.
    """
    kind = type(model).__name__
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20

    def attend(module: nn.Module, query: torch.Tensor, key, value: torch.Tensor, attention_mask: Any, **kwargs):
        refuse_additions(module, kwargs)
        if isinstance(attention_mask, _UnknownMask):
            raise UnsupportedModelError(
                f"{kind} masks attention in a way that is neither causal nor a sliding window nor blocks of tokens, "
                "so it cannot be exported"
            )
        if attention_mask is not None and not isinstance(attention_mask, Mask):
            raise UnsupportedModelError(
                f"{kind} computes the attention mask of {type(module).__name__} itself, so it cannot be exported"
            )
        if attention_mask is None and not getattr(module, "is_causal", True):
            raise UnsupportedModelError(
                f"{kind} attends to later tokens in {type(module).__name__}, so it cannot be exported"
            )
        running = RUNNING.get()
        layer = UNKNOWN if running is None else running
        if seen.setdefault(layer, attention_mask) != attention_mask:
            raise UnsupportedModelError(f"{kind} attends with several masks in layer {layer}, so it cannot be exported")
        batch, heads, length, _ = query.shape
        return query.new_zeros(batch, length, heads, value.shape[-1]), None

    def mask(mask_function: Rule, local_size: int | None = None, **kwargs) -> "Mask | _UnknownMask":
        return classify(mask_function, local_size, positions) or _UnknownMask()

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, mask)
    with attention_implementation(model, IMPLEMENTATION), without_indexers(model):
        yield
