"""Reads Gemma 4's assistants, which have no keys and values of their own.

For a token with embedding x (as the model's layers read it) at position p, after a position with final hidden state s:

    z = norm(layers(pre_projection [x; s]))
    logits = lm_head z,  next s = post_projection z

Every layer attends to the model's keys and values of the positions before p: those of the model's last layer of the
same type that has some. They are the same for all drafts after one verification, which all are at position p. In a
sliding window of w tokens are the last w + 1 keys. With `use_ordered_embeddings` only tokens of the clusters count
whose centroids are nearest to z.

Source: transformers' models/gemma4_assistant, and SinglePositionMultiTokenCandidateGenerator, which drafts by it. That
also shows the assistant the keys and values of one rejected draft, which are overwritten here.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from tide_export.common.progress import quiet_transformers
from tide_export.drafting.heads.files import head_config, head_folder, head_weights
from tide_export.drafting.heads.head import CAUSAL, DraftHead, check_loaded
from tide_export.errors import DraftError, first_line
from tide_export.model.source import SourceModel
from tide_export.trace.attention.masks import Mask

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING = "sliding_attention"
# Of a config whose layers all read others' keys and values; transformers 5.23 refuses to say so.
ALL_READ = property(lambda text: ["reuse"] * text.num_hidden_layers)


class AssistantStep(nn.Module):
    """The assistant without the model's keys and values, in place of which it is traced with zeros.

    Args:
        kv_shapes: (kv_heads, head_dim) by type of layer.
        scale: what embeddings are multiplied by before the model's layers read them.
    """

    clusters: torch.Tensor  # by token

    def __init__(self, model: PreTrainedModel, kv_shapes: dict[str, tuple[int, int]], scale: float):
        super().__init__()
        self.model: Any = model
        self.kv_shapes = kv_shapes
        self.scale = scale
        embedder: Any = model.masked_embedding
        if embedder is not None:
            order = embedder.token_ordering.long()
            clusters = torch.empty_like(order)
            clusters[order] = torch.arange(len(order)) // embedder.vocab_size_per_centroid
            self.register_buffer("clusters", clusters)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`position_ids` are of the tokens before, whose keys and values are the last."""
        batch, length, _ = hidden.shape
        last = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([embeddings * self.scale, hidden], -1)),
            position_ids=position_ids + 1,
            attention_mask=dict.fromkeys(self.kv_shapes),
            shared_kv_states={
                kind: (hidden.new_zeros(batch, heads, length, width),) * 2
                for kind, (heads, width) in self.kv_shapes.items()
            },
            use_cache=False,
            logits_to_keep=None,  # all of them, which transformers 5.23 fails to cut off
        ).last_hidden_state
        return self._of_near_clusters(last, self.model.lm_head(last)), self.model.post_projection(last)

    def _of_near_clusters(self, last: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        embedder = self.model.masked_embedding
        if embedder is None:
            return logits
        nearness = embedder.centroids(last)
        least = nearness.topk(embedder.centroid_intermediate_top_k, -1).values[..., -1:]
        near = (nearness >= least)[..., self.clusters]
        others = torch.where(near, logits, torch.inf).amin(-1, keepdim=True) - 1
        return torch.where(near, logits, others)


def read_assistant(name: str, source: SourceModel) -> DraftHead:
    """Reads the assistant `name`, a folder or hub id, for the model `source`.

    Raises:
        DraftError: it cannot be read, or belongs to another model.
    """
    folder = head_folder(name)
    fields = head_config(folder, name)
    quantization = fields.pop("quantization_config", None)
    try:
        with quiet_transformers():
            config = AutoConfig.for_model(**fields)
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:  # transformers checks a config in many ways
        raise DraftError(f"the config.json of draft head {name!r} cannot be used: {first_line(error)}") from error
    kv_layers = _kv_layers(config, name, source)
    weights = head_weights(folder, name, quantization)
    try:
        with quiet_transformers(), patch.object(type(config.text_config), "kv_sharing_modes", ALL_READ):
            options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    except Exception as error:  # transformers raises many kinds
        raise DraftError(f"the weights of draft head {name!r} cannot be read: {first_line(error)}") from error
    check_loaded(model, info, f"draft head {name!r}")
    text, tokens = config.text_config, np.arange(source.vocab_size)
    order = model.masked_embedding and model.masked_embedding.token_ordering
    if order is not None and (len(order) % config.num_centroids or not np.array_equal(order.sort().values, tokens)):
        raise DraftError(
            f"draft head {name!r}: token_ordering has not every token once, in clusters of one size: download it again"
        )
    scale = float(getattr(source.model.get_input_embeddings(), "embed_scale", 1.0))
    shapes = {kind: _kv_shape(text, layer) for layer, kind in enumerate(text.layer_types)}
    step = AssistantStep(model.eval().requires_grad_(False), shapes, scale)
    masks = tuple(Mask("window", text.sliding_window + 1) if kind == SLIDING else CAUSAL for kind in text.layer_types)
    return DraftHead("Gemma 4 assistant", name, step, model, tokens, masks, kv_layers=kv_layers)


def _kv_shape(text: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Returns (kv_heads, head_dim) of the keys and values that a layer reads."""
    config = text.per_layer_config[layer]
    return config.num_key_value_heads, config.head_dim


def _kv_layers(config: PreTrainedConfig, name: str, source: SourceModel) -> tuple[int, ...]:
    """The layer of the model whose keys and values each layer of the assistant reads."""
    text, own = source.text_config, config.text_config
    if not text.model_type.startswith("gemma4"):
        raise DraftError(
            f"draft head {name!r} is not for this model: it is an assistant of a Gemma 4, and the model is a "
            f"{text.model_type}: give the Gemma 4 that it was published for"
        )
    for what, given, expected in (
        ("backbone_hidden_size", config.backbone_hidden_size, source.hidden_size),
        ("vocab_size", own.vocab_size, source.vocab_size),
    ):
        if given != expected:
            raise DraftError(
                f"draft head {name!r} is not for this model: its {what} is {given}, not the model's {expected}: give "
                "the assistant of this size of Gemma 4"
            )
    first_shared = text.num_hidden_layers - getattr(text, "num_kv_shared_layers", 0)
    last = {kind: layer for layer, kind in enumerate(text.layer_types[:first_shared])}
    for layer, kind in enumerate(own.layer_types):
        heads, width = _kv_shape(own, layer)
        if kind not in last or _kv_shape(text, last[kind]) != (heads, width):
            raise DraftError(
                f"draft head {name!r} is not for this model, of which no {kind} layer has keys of {heads} heads of "
                f"{width} numbers, as its layer {layer} reads: give the assistant of this size of Gemma 4"
            )
    return tuple(last[kind] for kind in own.layer_types)
