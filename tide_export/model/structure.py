"""Finds the parts of any Hugging Face causal LM by watching it run: decoder layers, final norm, head.

No architecture is known by name. The decoder layers are the `ModuleList` of `config.num_hidden_layers` modules that
each run once on a text, or in loops, or modules of lists that run as often together. The final modules (a norm, and a
projection where there is one) lead, tensor by tensor, from the last layer's output to the backbone's
`last_hidden_state`; where layers pass several hidden states of a token, that is what the backbone's own forward does
after its layers. The head is everything the model's own forward does after its backbone, scaling and softcaps included.
`register_adapter` is for models whose parts cannot be found that way.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tide_export.errors import UnsupportedModelError
from tide_export.model.failures import explained
from tide_export.model.outputs import first_tensor, hidden_alone, hidden_of, lists_beside, with_hidden
from tide_export.model.repeated_layers import in_turn, looped_layers, loops_of, repeated_layers
from tide_export.model.replaced_forward import returning


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a causal LM.

    Attributes:
        backbone: the module that owns the layers and returns a `ModelOutput` with `last_hidden_state`, or a tuple that
            starts with it or with such an output.
        layers: its decoder layers, in order; each takes the hidden states first, or as `hidden_states`.
        final_modules: the modules from the last layer's output to `last_hidden_state`, in order (norm, projection); may
            be empty. None: the backbone's own forward leads there.
        first_position: the position id of the first token; above 0 where a model counts on from its padding id
            (RoBERTa).
        streams: number N of hidden states of each token where layers pass several, [N, B, S, D]; None: [B, S, D].
        stream_axis: where N is; 2 for [B, S, N, D].
        others: how many values such a layer gives beside its hidden states.
        beside: how many lists the backbone returns beside its output (of the states of every loop, say).
    """

    backbone: nn.Module
    layers: nn.ModuleList
    final_modules: tuple[nn.Module, ...] | None
    first_position: int = 0
    streams: int | None = None
    stream_axis: int = 0
    others: int = 0
    beside: int = 0

    @property
    def loops(self) -> int:
        """How often the same layers run, one time after another; each time is as many of `layers`."""
        return loops_of(self.layers)

    @classmethod
    def find(cls, model: PreTrainedModel) -> "ModelStructure":
        """Finds the parts of `model` by its adapter, or else by running it on two tokens.

        Raises UnsupportedModelError where a part is missing, or an adapter's part is wrong.
        """
        if getattr(model.config.get_text_config(), "hidden_size", None) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be exported: its config gives no hidden_size: add its layers' width"
            )
        adapter = next((_ADAPTERS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _ADAPTERS), None)
        if adapter is None:
            return _find(model)
        structure = adapter(model)
        _check(model, structure)
        return structure

    @contextmanager
    def captured(
        self, layers: Sequence[int], keep: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Fills the dict with this thread's raw hidden states after `layers` layers, while open.

        [B, S, D], several streams of a token one after another.

        Other threads may run the model at the same time. Each result is on the device of its layer. `keep` reduces it
        as soon as it is computed (say, to chosen rows on the CPU), so that the rest is not held until the pass ends.
        """
        hidden: dict[int, torch.Tensor] = {}
        here = threading.get_ident()

        def store(count: int) -> Callable:
            def hook(_module, _args, output):
                if threading.get_ident() == here:
                    one = self.by_token(first_tensor(output))
                    hidden[count] = one if keep is None else keep(one)

            return hook

        with ExitStack() as hooks:
            for count in layers:
                hooks.enter_context(self.layers[count - 1].register_forward_hook(store(count)))
            yield hidden

    @contextmanager
    def last_position_only(self) -> Iterator[None]:
        """While open, the backbone returns only the last position to this thread: logits are [B, 1, V]."""
        here = threading.get_ident()

        def shorten(_module, _args, output):
            return with_hidden(output, hidden_of(output)[:, -1:]) if threading.get_ident() == here else output

        with self.backbone.register_forward_hook(shorten):
            yield

    def by_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """Makes raw hidden states [B, S, D] of what a layer takes or gives."""
        return hidden if self.streams is None else hidden.movedim(self.stream_axis, 2).flatten(2)

    def by_stream(self, raw: torch.Tensor) -> torch.Tensor:
        """Makes what a layer takes or gives of raw hidden states [B, S, D]."""
        return raw if self.streams is None else raw.unflatten(-1, (self.streams, -1)).movedim(2, self.stream_axis)

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the head reads [..., D'] of raw [..., D], by the final modules or the backbone."""
        if self.final_modules is None:
            return self._run_without_layers(hidden)
        for module in self.final_modules:
            hidden = module(hidden)
        return hidden

    def head(self, model: PreTrainedModel, normalized: torch.Tensor) -> torch.Tensor:
        """Computes logits [B, S, V] by the model's own forward.

        Its backbone only returns `normalized` [B, S, D'].
        """
        tokens = normalized.reshape(-1, 1, normalized.shape[-1])  # sequences of one token: there may be more than fit
        ids = torch.zeros(tokens.shape[:2], dtype=torch.long, device=normalized.device)
        with returning([self.backbone], hidden_alone(tokens, self.beside)):
            return model(input_ids=ids, use_cache=False).logits.unflatten(0, normalized.shape[:2]).squeeze(2)

    def _run_without_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, 1, hidden.shape[-1])  # sequences of one token: the masks stay small
        given = self.by_stream(tokens)
        with returning(self.layers, (given, *[None] * self.others) if self.others else given):
            ids = torch.zeros(tokens.shape[:2], dtype=torch.long, device=hidden.device)
            return hidden_of(self.backbone(input_ids=ids, use_cache=False)).reshape(*hidden.shape[:-1], -1)


Adapter = Callable[[PreTrainedModel], ModelStructure]
_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(architecture: str, adapter: Adapter | None) -> None:
    """Registers a function that names the parts of an architecture.

    Needed where they cannot be found by watching it run.

    Args:
        architecture: class name of the model, or of one of its base classes.
        adapter: maps the loaded model to its `ModelStructure`, or to a subclass that overrides `normalize` or `head`;
            checked against a run of the model. None removes an earlier adapter.
    """
    if adapter is None:
        _ADAPTERS.pop(architecture, None)
    else:
        _ADAPTERS[architecture] = adapter


def input_device(model: PreTrainedModel) -> torch.device:
    """Returns the device of the embedding, which takes the token ids.

    It also works while the weights are offloaded.
    """
    embedding = model.get_input_embeddings()
    for module in (embedding, model):
        for hook in offload_hooks(module):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return next(embedding.parameters()).device


def offload_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks by which accelerate moves `module`'s weights and inputs between devices.

    None by default.
    """
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook holds several
    return [hook for hook in hooks if hasattr(hook, "execution_device")]


@dataclass
class _Run:
    """A recorded run on two tokens.

    Attributes:
        calls: module, input and output of every call with a tensor for both, in order.
        others: module and tensor of every input of these calls but the first.
        counts: how often each module was called, by id.
        outputs: the last output of each module, by id.
    """

    calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor]]
    others: list[tuple[nn.Module, torch.Tensor]]
    counts: Counter[int]
    outputs: dict[int, Any]


def _watch(model: PreTrainedModel, layers: Iterable[nn.Module] = (), ids: torch.Tensor | None = None) -> _Run:
    run = _Run([], [], Counter(), {})

    def record(module, args, output):
        run.counts[id(module)] += 1
        run.outputs[id(module)] = output
        tensor = first_tensor(output)
        if args and isinstance(args[0], torch.Tensor) and isinstance(tensor, torch.Tensor):
            run.calls.append((module, args[0], tensor))
            run.others += [(module, other) for other in args[1:] if isinstance(other, torch.Tensor)]

    with ExitStack() as hooks, torch.no_grad():
        for module in {*model.modules(), *layers}:
            hooks.enter_context(module.register_forward_hook(record))
        with explained(model, "run on token ids alone", "export the model that it is a part of, or mend its code"):
            model(input_ids=two_tokens(model) if ids is None else ids, use_cache=False)
    return run


def two_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Returns one token id twice, not that of padding, [1, 2]."""
    token = int(getattr(model.config.get_text_config(), "pad_token_id", None) == 0)
    return torch.full((1, 2), token, dtype=torch.long, device=input_device(model))


def _find(model: PreTrainedModel) -> ModelStructure:
    kind = type(model).__name__
    run = _watch(model)
    backbone, layers = _layers(model, run)
    if id(layers[-1]) not in run.outputs:  # made for one of the times that a module runs
        run = _watch(model, layers)
    if backbone is model:
        raise UnsupportedModelError(
            f"{kind} has its layers and its head in one module, so the head cannot be run alone: the layers and the "
            "final norm must be in a submodule that returns last_hidden_state, as in transformers' own models"
        )
    inside_layers = {id(m) for layer in layers for m in layer.modules()}
    around = {id(m) for m in backbone.modules()} - inside_layers
    steps = [call for call in run.calls if id(call[0]) in around]

    last, hidden = first_tensor(run.outputs[id(layers[-1])]), _last_hidden(kind, backbone, run)
    chain = None if last.ndim == 4 else _chain(steps, last, hidden)
    if chain is None:
        return _finished_by_forward(model, backbone, layers)
    first, beside = _first_position(model, run), lists_beside(run.outputs[id(backbone)])
    return ModelStructure(backbone, layers, tuple(chain), first, beside=beside)


def _chain(
    steps: Sequence[tuple[nn.Module, torch.Tensor, torch.Tensor]], current: torch.Tensor, stop: torch.Tensor
) -> list[nn.Module] | None:
    """Returns modules that lead from tensor to tensor, from `current` to `stop`; None if there are none."""
    if _same(current, stop):
        return []
    for module, taken, given in steps:
        if _same(taken, current) and not _same(given, current):
            rest = _chain(steps, given, stop)
            if rest is not None:
                return [module, *rest]
    return None


def _first_position(model: PreTrainedModel, run: _Run) -> int:
    """Returns the id that the model's embedding of positions gets for the first token.

    Raises:
        UnsupportedModelError: it is not 0, and the model computes something else from ids that are given to it.
    """
    numbered = (
        inputs[0].tolist()
        for module, inputs, _ in run.calls
        if isinstance(module, nn.Embedding) and not inputs.is_floating_point() and inputs.shape == (1, 2)
    )
    first = next((start for start, following in numbered if following == start + 1), 0)
    if first:
        positions = torch.arange(first, first + 2, device=input_device(model))[None]
        with torch.no_grad():
            logits = model(input_ids=two_tokens(model), position_ids=positions, use_cache=False).logits
        if not torch.allclose(logits, run.outputs[id(model)].logits, atol=1e-4, rtol=1e-4):
            raise UnsupportedModelError(
                f"{type(model).__name__} numbers its tokens from {first} and does not read position_ids, so it cannot "
                "be exported"
            )
    return first


def _layers(model: PreTrainedModel, run: _Run) -> tuple[nn.Module, nn.ModuleList]:
    """Returns the decoder layers and the module that owns them.

    A vision tower may be as deep as the text model, and other lists as long: on text, only the layers run once each.
    """
    kind, depth = type(model).__name__, getattr(model.config.get_text_config(), "num_hidden_layers", None)
    owners = [
        (owner, child) for owner in model.modules() for child in owner.children() if isinstance(child, nn.ModuleList)
    ]
    ran = [owner for owner in owners if len(owner[1]) and all(run.counts[id(layer)] == 1 for layer in owner[1])]
    for backbone, layers in ran:
        if len(layers) == depth:
            return backbone, layers
    for backbone, layers in owners:
        on_text = [layer for layer in layers if run.counts[id(layer)]]
        if len(layers) == depth and on_text and all(run.counts[id(layer)] == 1 for layer in on_text):
            return backbone, nn.ModuleList(on_text)  # the others read images
    called = [module for module, *_ in run.calls]
    if calls := looped_layers([layers for _, layers in owners if len(layers) == depth], called):
        return in_turn(model, calls)
    runs = [sum(run.counts[id(layer)] for layer in layers) for _, layers in owners if len(layers) == depth]
    if runs:
        raise UnsupportedModelError(f"{kind} ran {max(runs)} decoder layers but its config says {depth}")
    # The config may count something else: the layers of an encoder, or attentions.
    if calls := repeated_layers(model, called, depth):
        return in_turn(model, calls)
    alike = [owner for owner in ran if len(owner[1]) > 1 and len({type(layer) for layer in owner[1]}) == 1]
    if not alike:
        raise UnsupportedModelError(f"{kind} has no list of {depth} decoder layers (config.num_hidden_layers)")
    return max(alike, key=lambda owner: len(owner[1]))


def _finished_by_forward(model: PreTrainedModel, backbone: nn.Module, layers: nn.ModuleList) -> ModelStructure:
    """Describes a model that computes something between last layer and head outside any module.

    Raises:
        UnsupportedModelError: it does so to one hidden state of each token, which is left to adapters, or what it
            computes depends on more than the last layer gives; or the modules taken for layers are parts of them.
    """
    kind = type(model).__name__
    other = torch.tensor([[1, 2]], device=input_device(model))  # than the tokens that `ModelStructure.normalize` gives
    run = _watch(model, layers, other)
    last, hidden = first_tensor(run.outputs[id(layers[-1])]), _last_hidden(kind, backbone, run)
    if last.ndim == 4 and (1, 2) in (last.shape[1:3], last.shape[:2]):
        axis = 0 if last.shape[1:3] == (1, 2) else 2
        output = run.outputs[id(layers[-1])]
        others = len(output) - 1 if isinstance(output, tuple) else 0
        structure = ModelStructure(backbone, layers, None, streams=last.shape[axis], stream_axis=axis, others=others)
        if _leads_to(structure, last, hidden):
            return structure
    reader = next((module for module, other in run.others if _same(other, last)), None)
    if reader is not None:
        raise UnsupportedModelError(
            f"{kind}: its {type(reader).__name__} between its last layer and its head reads more than the last layer's "
            "hidden states, so it cannot be applied at a checkpoint"
        )
    taken = {id(module): hidden for module, hidden, _ in run.calls}
    for one, following in pairwise(layers):
        if id(following) in taken and not _same(first_tensor(run.outputs[id(one)]), taken[id(following)]):
            raise UnsupportedModelError(
                f"{kind} has no module for each decoder layer: what one {type(one).__name__} gives is not what the "
                "next takes, so it cannot be cut between layers"
            )
    raise UnsupportedModelError(
        f"{kind}: between its last layer and its head something happens outside any module, "
        "so its final norm cannot be applied at a checkpoint (see register_adapter)"
    )


def _check(model: PreTrainedModel, structure: ModelStructure) -> None:
    """Checks that an adapter's parts run and compute what the model computes.

    Raises UnsupportedModelError.
    """
    kind = type(model).__name__
    run = _watch(model, structure.layers)
    calls = [run.counts[id(layer)] for layer in structure.layers]
    if calls != [1] * len(calls) or not calls:
        raise UnsupportedModelError(f"the adapter for {kind} names {len(calls)} layers that ran {sum(calls)} times")
    hidden = _last_hidden(kind, structure.backbone, run)
    if not _leads_to(structure, first_tensor(run.outputs[id(structure.layers[-1])]), hidden):
        raise UnsupportedModelError(
            f"the adapter for {kind} names final modules that do not lead from its last layer to its last_hidden_state"
        )


@torch.no_grad()
def _leads_to(structure: ModelStructure, last: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Returns whether `normalize` computes `hidden` of the last layer's output."""
    normalized = structure.normalize(structure.by_token(last))
    return normalized.shape == hidden.shape and torch.allclose(normalized, hidden, atol=1e-4, rtol=1e-4)


def _last_hidden(kind: str, backbone: nn.Module, run: _Run) -> torch.Tensor:
    """Returns the backbone's `last_hidden_state`."""
    output = run.outputs.get(id(backbone))
    if isinstance(output, torch.Tensor) or not isinstance(hidden := hidden_of(output), torch.Tensor):
        raise UnsupportedModelError(f"{kind}: its {type(backbone).__name__} gives no last_hidden_state")
    return hidden


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors share their data, views included."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
