"""Finds the parts of any Hugging Face causal LM by watching it run: decoder layers, final norm, head.

Used by `model.SourceModel`. No architecture is known by name. The decoder layers are the `ModuleList` as long as the
config says the model is deep; the *tail* (final norm, and a projection where there is one) is the chain of modules that
leads, tensor by tensor, from the last layer's output to the backbone's `last_hidden_state`; the head is everything the
model's own forward does after its backbone, scaling and softcaps included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from tide_export.errors import UnsupportedModelError


def first_tensor(output) -> torch.Tensor:
    """The hidden states in a layer's return value, which is a tensor or a tuple that starts with one."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Anatomy:
    """The parts of a causal LM.

    Attributes:
        backbone: the module that owns the layers and whose output carries `last_hidden_state`.
        layers: its decoder layers, in order.
        tail: modules from the last layer's output to `last_hidden_state`, in order (norm, projection); may be empty.
    """

    backbone: nn.Module
    layers: nn.ModuleList
    tail: tuple[nn.Module, ...]

    @classmethod
    def find(cls, model: PreTrainedModel) -> "Anatomy":
        """Watches `model` run on two tokens.

        Raises:
            UnsupportedModelError: naming the part that is missing.
        """
        kind = type(model).__name__
        depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
        owners = [
            (owner, child)
            for owner in model.modules()
            for child in owner.children()
            if isinstance(child, nn.ModuleList) and len(child) == depth
        ]
        if not owners:
            raise UnsupportedModelError(f"{kind} has no list of {depth} decoder layers (config.num_hidden_layers)")
        backbone, layers = owners[0]
        return cls(backbone, layers, _find_tail(model, backbone, layers))

    @contextmanager
    def captured(
        self, layers: Sequence[int], keep: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Iterator[dict[int, torch.Tensor]]:
        """While open, forward passes fill the dict with the raw states after each of `layers` layers, [B, S, D].

        They are on the device their layer computed on. `keep` makes less of each as it comes (chosen rows, moved to the
        CPU), so that the rest need not be held until the pass ends.
        """
        states: dict[int, torch.Tensor] = {}

        def store(count: int) -> Callable:
            def hook(_module, _args, output):
                state = first_tensor(output)
                states[count] = state if keep is None else keep(state)

            return hook

        handles = [self.layers[count - 1].register_forward_hook(store(count)) for count in layers]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def last_position_only(self) -> Iterator[None]:
        """While open, the backbone hands only its last position on, so that the head makes [B, 1, V] logits."""

        def shorten(_module, _args, output):
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=output[0][:, -1:])

        handle = self.backbone.register_forward_hook(shorten)
        try:
            yield
        finally:
            handle.remove()

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The tail on raw states [..., D]."""
        for module in self.tail:
            hidden = module(hidden)
        return hidden

    def head(self, model: PreTrainedModel, normed: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] by the model's own forward, its backbone doing nothing but hand out `normed` [B, S, D']."""
        backbone = self.backbone
        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=normed)
        own = backbone.__dict__.get("forward")  # accelerate puts one there for a backbone that is dispatched whole
        backbone.forward = lambda *args, **kwargs: output
        try:
            ids = torch.zeros(normed.shape[:2], dtype=torch.long, device=normed.device)
            return model(input_ids=ids, use_cache=False).logits
        finally:
            del backbone.forward  # uncovers the class's own
            if own is not None:
                backbone.forward = own


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids: the device of its embedding, also while its weights are offloaded."""
    embedding = model.get_input_embeddings()
    for module in (embedding, model):
        for hook in offload_hooks(module):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return next(embedding.parameters()).device


def offload_hooks(module: nn.Module) -> list[Any]:
    """The hooks by which accelerate moves `module`'s weights and inputs between devices; none on a plain model."""
    hook = getattr(module, "_hf_hook", None)
    found = getattr(hook, "hooks", (hook,))  # a SequentialHook holds several
    return [one for one in found if hasattr(one, "execution_device")]


def _find_tail(model: PreTrainedModel, backbone: nn.Module, layers: nn.ModuleList) -> tuple[nn.Module, ...]:
    kind = type(model).__name__
    inside_layers = {id(m) for layer in layers for m in layer.modules()}
    calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
    ends: dict[str, torch.Tensor] = {}
    layer_calls = [0]

    def record(module, args, output):
        tensor = first_tensor(output)
        if args and isinstance(args[0], torch.Tensor) and isinstance(tensor, torch.Tensor):
            calls.append((module, args[0], tensor))

    def record_layer(_module, _args, output):
        layer_calls[0] += 1
        ends["start"] = first_tensor(output)

    def record_backbone(_module, _args, output):
        ends["stop"] = output[0]

    handles = [layer.register_forward_hook(record_layer) for layer in layers]
    handles += [m.register_forward_hook(record) for m in backbone.modules() if id(m) not in inside_layers]
    handles.append(backbone.register_forward_hook(record_backbone))
    try:
        with torch.no_grad():
            ids = torch.zeros((1, 2), dtype=torch.long, device=input_device(model))
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if layer_calls[0] != len(layers):
        raise UnsupportedModelError(f"{kind} ran {layer_calls[0]} decoder layers but its config says {len(layers)}")

    chain: list[nn.Module] = []
    current, stop = ends["start"], ends["stop"]
    while not _same(current, stop):
        step = next((call for call in calls if _same(call[1], current) and not _same(call[2], current)), None)
        if step is None:
            raise UnsupportedModelError(
                f"{kind}: between its last layer and its head something happens outside any module, "
                "so its final norm cannot be applied at a checkpoint"
            )
        chain.append(step[0])
        current = step[2]
    return tuple(chain)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one, views included."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
