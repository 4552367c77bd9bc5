"""Finds the parts of any Hugging Face causal LM by watching it run: decoder layers, final norm, head.

Used by `model.SourceModel`. No architecture is known by name. The decoder layers are the `ModuleList` as long as the
config says the model is deep, each of whose modules runs once on a text; the *tail* (final norm, and a projection where
there is one) is the chain of modules that leads, tensor by tensor, from the last layer's output to the backbone's
`last_hidden_state`; the head is everything the model's own forward does after its backbone, scaling and softcaps
included. What cannot be found that way can be told by `register_adapter`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, ModelOutput

from tide_export.errors import UnsupportedModelError


def first_tensor(output) -> torch.Tensor:
    """The hidden states in a layer's return value, which is a tensor or a tuple that starts with one."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Anatomy:
    """The parts of a causal LM.

    Attributes:
        backbone: the module that owns the layers and whose output carries `last_hidden_state`, or is a tuple that
            starts with it.
        layers: its decoder layers, in order; each takes the hidden states [B, S, D] first, or as `hidden_states`.
        tail: modules from the last layer's output to `last_hidden_state`, in order (norm, projection); may be empty.
    """

    backbone: nn.Module
    layers: nn.ModuleList
    tail: tuple[nn.Module, ...]

    @classmethod
    def find(cls, model: PreTrainedModel) -> "Anatomy":
        """The adapter's word for `model`, or else what watching it run on two tokens shows.

        Raises:
            UnsupportedModelError: naming the part that is missing, or that an adapter got wrong.
        """
        adapter = next((_ADAPTERS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _ADAPTERS), None)
        if adapter is None:
            return _find(model)
        anatomy = adapter(model)
        _check(model, anatomy)
        return anatomy

    @contextmanager
    def captured(
        self, layers: Sequence[int], keep: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Iterator[dict[int, torch.Tensor]]:
        """While open, forward passes fill the dict with the raw states after each of `layers` layers, [B, S, D].

        Passes of this thread alone: others may run the model at the same time. The states are on the device their layer
        computed on. `keep` makes less of each as it comes (chosen rows, moved to the CPU), so that the rest need not be
        held until the pass ends.
        """
        states: dict[int, torch.Tensor] = {}
        here = threading.get_ident()

        def store(count: int) -> Callable:
            def hook(_module, _args, output):
                if threading.get_ident() == here:
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
        """While open, the backbone hands this thread its last position alone: the head makes [B, 1, V] logits."""
        here = threading.get_ident()

        def shorten(_module, _args, output):
            return with_states(output, output[0][:, -1:]) if threading.get_ident() == here else output

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
        with _StandIn.of(self.backbone) as stand_in:
            stand_in.here.answer = _NoOtherOutputs(last_hidden_state=normed)
            try:
                ids = torch.zeros(normed.shape[:2], dtype=torch.long, device=normed.device)
                return model(input_ids=ids, use_cache=False).logits
            finally:
                del stand_in.here.answer


class _StandIn:
    """Takes the place of a backbone's forward as long as any thread is in `Anatomy.head`.

    Hands such a thread what it put there; others get what the backbone gives.
    """

    _lock = threading.Lock()

    def __init__(self, backbone: nn.Module):
        self.own = backbone.__dict__.get("forward")  # accelerate puts one there for a backbone that is dispatched whole
        self.forward = backbone.forward
        self.here = threading.local()
        self.threads = 0

    def __call__(self, *args, **kwargs):
        answer = getattr(self.here, "answer", None)
        return self.forward(*args, **kwargs) if answer is None else answer

    @classmethod
    @contextmanager
    def of(cls, backbone: nn.Module) -> "Iterator[_StandIn]":
        with cls._lock:
            there = backbone.__dict__.get("forward")
            found = there if isinstance(there, cls) else cls(backbone)
            found.threads += 1
            backbone.forward = found
        try:
            yield found
        finally:
            with cls._lock:
                found.threads -= 1
                if found.threads == 0:
                    del backbone.forward  # uncovers the class's own
                    if found.own is not None:
                        backbone.forward = found.own


Adapter = Callable[[PreTrainedModel], Anatomy]
_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(architecture: str, adapter: Adapter | None) -> None:
    """Says where the parts of an architecture are that cannot be found by watching it.

    Args:
        architecture: class name of the model, or of one of its base classes.
        adapter: takes the loaded model and gives its `Anatomy`, or a subclass of it with a `normed` or `head` of its
            own; None takes an earlier adapter away. What it gives is checked against a run of the model.
    """
    if adapter is None:
        _ADAPTERS.pop(architecture, None)
    else:
        _ADAPTERS[architecture] = adapter


class _NoOtherOutputs(BaseModelOutputWithPastAndCrossAttentions):
    """What a backbone gives beside its states (router logits and the like) is None, whatever the head asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


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


@dataclass
class _Run:
    """What a run on two tokens showed.

    Attributes:
        calls: module, input and output of every call with a tensor for both, in order.
        counts: how often each module was called, by id.
        outputs: the last output of each module, by id.
    """

    calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor]]
    counts: Counter[int]
    outputs: dict[int, Any]


def _watch(model: PreTrainedModel) -> _Run:
    run = _Run([], Counter(), {})

    def record(module, args, output):
        run.counts[id(module)] += 1
        run.outputs[id(module)] = output
        tensor = first_tensor(output)
        if args and isinstance(args[0], torch.Tensor) and isinstance(tensor, torch.Tensor):
            run.calls.append((module, args[0], tensor))

    handles = [module.register_forward_hook(record) for module in model.modules()]
    try:
        with torch.no_grad():
            ids = torch.zeros((1, 2), dtype=torch.long, device=input_device(model))
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return run


def _find(model: PreTrainedModel) -> Anatomy:
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
    run = _watch(model)
    # A vision tower may be as deep as the text model, and lists beside the layers as long: on text, layers run once.
    ran = [found for found in owners if all(run.counts[id(layer)] == 1 for layer in found[1])]
    if not ran:
        calls = max(sum(run.counts[id(layer)] for layer in layers) for _, layers in owners)
        raise UnsupportedModelError(f"{kind} ran {calls} decoder layers but its config says {depth}")
    backbone, layers = ran[0]
    inside_layers = {id(m) for layer in layers for m in layer.modules()}
    around = {id(m) for m in backbone.modules()} - inside_layers
    steps = [call for call in run.calls if id(call[0]) in around]

    chain: list[nn.Module] = []
    current, stop = first_tensor(run.outputs[id(layers[-1])]), _states(kind, backbone, run)
    while not _same(current, stop):
        step = next((call for call in steps if _same(call[1], current) and not _same(call[2], current)), None)
        if step is None:
            raise UnsupportedModelError(
                f"{kind}: between its last layer and its head something happens outside any module, "
                "so its final norm cannot be applied at a checkpoint (see register_adapter)"
            )
        chain.append(step[0])
        current = step[2]
    return Anatomy(backbone, layers, tuple(chain))


def _check(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Raises UnsupportedModelError if an adapter's parts do not run, or do not give what the model gives."""
    kind = type(model).__name__
    run = _watch(model)
    calls = [run.counts[id(layer)] for layer in anatomy.layers]
    if calls != [1] * len(calls) or not calls:
        raise UnsupportedModelError(f"the adapter for {kind} names {len(calls)} layers that ran {sum(calls)} times")
    states = _states(kind, anatomy.backbone, run)
    with torch.no_grad():
        normed = anatomy.normed(first_tensor(run.outputs[id(anatomy.layers[-1])]))
    if normed.shape != states.shape or not torch.allclose(normed, states, atol=1e-4, rtol=1e-4):
        raise UnsupportedModelError(
            f"the adapter for {kind} names a tail that does not lead from its last layer to its last_hidden_state"
        )


def _states(kind: str, backbone: nn.Module, run: _Run) -> torch.Tensor:
    """The `last_hidden_state` that the backbone gave."""
    output = run.outputs.get(id(backbone))
    states = output[0] if isinstance(output, tuple | ModelOutput) else None
    if not isinstance(states, torch.Tensor):
        raise UnsupportedModelError(f"{kind}: its {type(backbone).__name__} gives no last_hidden_state")
    return states


def with_states(output: Any, states: torch.Tensor) -> Any:
    """A backbone's output with other states [B, S, D]."""
    if isinstance(output, ModelOutput):
        output["last_hidden_state"] = states
        return output
    return (states, *output[1:])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one, views included."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
