"""The field `model` of `tide.json`: the source model's properties, with their ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

FLOAT_BYTES = 4


@dataclass(frozen=True)
class StateInfo:
    """A recurrent state of a layer, one per sequence (see `compose.states`)."""

    layer: int
    number: int  # of the layer's states, from 0
    shape: tuple[int, ...]  # of float32
    undo: int  # tokens that can be taken back


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer that low-rank adapters may change."""

    name: str  # of the module in the source model
    layers: tuple[int, ...]  # that run it; several where layers run in loops
    inputs: int  # columns of its matrix
    outputs: int  # rows of it


@dataclass(frozen=True)
class LoraInfo:
    """The room for low-rank adapters.

    An adapter is one array: of each target in order 1 if changed or 0, down [inputs, rank], and up [rank, outputs].
    """

    rank: int  # of an adapter, at most
    targets: tuple[LoraTarget, ...]

    @property
    def size(self) -> int:
        """The number of elements of one adapter."""
        return sum(1 + self.rank * (target.inputs + target.outputs) for target in self.targets)


@dataclass(frozen=True)
class ModelInfo:
    """The properties of the source model that a runtime needs."""

    name: str  # as given to `export`: a hub id or a folder
    architecture: str  # e.g. "LlamaForCausalLM"
    weights_sha256: str
    num_layers: int
    hidden_size: int  # width of the states between segments: hidden states, and what else later layers read of a token
    vocab_size: int
    context_length: int | None  # tokens; None: the model sets no limit
    eos_token_ids: tuple[int, ...]
    # Of every layer's first attention, then of every layer's second, and so on: (kv_heads, head_dim) of the K/V it
    # reads; (0, 0): there is none.
    kv_shapes: tuple[tuple[int, int], ...]
    kv_layers: tuple[int, ...] | None = None  # of each of these, the one whose K/V it reads; None: each its own
    states: tuple[StateInfo, ...] | None = None  # of layers, in their order; None, and then not written: there are none
    lora: LoraInfo | None = None  # None, and then not written: there is no room for adapters
    loops: int | None = None  # runs of the same layers, each counted in num_layers; None, and then not written: one

    @property
    def state_bytes(self) -> int:
        """The bytes of a sequence's recurrent states, including the copies for rewinding."""
        return sum(FLOAT_BYTES * prod(state.shape) for state in self.states or ())

    def attentions(self, layers: range) -> list[int]:
        """Returns the attentions of `layers`, ascending, as `kv_shapes` numbers them."""
        return [i for i, shape in enumerate(self.kv_shapes) if i % self.num_layers in layers and shape != (0, 0)]

    def kv_read(self, layers: range) -> list[int]:
        """Returns the attentions whose K/V `layers` read, ascending, including those of earlier layers."""
        return sorted({i if self.kv_layers is None else self.kv_layers[i] for i in self.attentions(layers)})


def check_model(model: ModelInfo, require: Callable[[bool, str, str], None]) -> None:
    """Checks ranges and agreement of the fields; `require` takes a condition, the field and the rule."""
    for name in ("num_layers", "hidden_size", "vocab_size"):
        require(getattr(model, name) >= 1, f"model.{name}", "must be 1 or more")
    loops = 1 if model.loops is None else model.loops
    even = loops >= 1 and model.num_layers % loops == 0
    require(even, "model.loops", "must be 1 or more, and divide num_layers")
    require(model.context_length is None or model.context_length >= 1, "model.context_length", "must be 1 or more")
    known = all(0 <= i < model.vocab_size for i in model.eos_token_ids)
    require(known, "model.eos_token_ids", "holds a token id outside the vocabulary")
    count = len(model.kv_shapes)
    whole = count > 0 and count % model.num_layers == 0
    require(whole, "model.kv_shapes", "must have one entry per layer, or as many for each")
    holds_kv = all((h >= 1 and d >= 1) or h == d == 0 for h, d in model.kv_shapes)
    require(holds_kv, "model.kv_shapes", "holds a size below 1, and not 0 for both")
    sources = tuple(range(count)) if model.kv_layers is None else model.kv_layers
    require(len(sources) == count, "model.kv_layers", "must have one entry per layer, or as many as kv_shapes")
    require(
        all(0 <= source <= layer and sources[source] == source for layer, source in enumerate(sources)),
        "model.kv_layers",
        "must name the layer itself, or an earlier one with K/V of its own",
    )
    require(
        all(model.kv_shapes[source] == shape for source, shape in zip(sources, model.kv_shapes, strict=True)),
        "model.kv_shapes",
        "must be equal where layers share K/V",
    )
    states = model.states or ()
    places = [(state.layer, state.number) for state in states]
    require(places == sorted(set(places)), "model.states", "must be distinct and ascending")
    require(all(0 <= state.layer < model.num_layers for state in states), "model.states", "holds no layer of the model")
    require(all(state.number >= 0 for state in states), "model.states", "holds a number below 0")
    require(all(state.undo >= 1 for state in states), "model.states", "holds an undo below 1")
    shaped = all(state.shape and min(state.shape) >= 1 for state in states)
    require(shaped, "model.states", "holds a size below 1, or no shape")
    if model.lora is None:
        return
    targets = model.lora.targets
    require(model.lora.rank >= 1, "model.lora.rank", "must be 1 or more")
    known = all(target.layers and set(target.layers) <= {*range(model.num_layers)} for target in targets)
    require(known, "model.lora.targets", "holds no layer of the model")
    sized = all(target.inputs >= 1 and target.outputs >= 1 for target in targets)
    require(sized, "model.lora.targets", "holds a size below 1")
