"""Writes the nodes of an operator of layers as text: its attribute `nodes`.

    slots 576 1536
    RMSNormalization s0 = i0 w5 epsilon=1e-05
    TideInt4MatMul s1 = s0 w6 w7

`i` and `w` are the operator's inputs, `w` those that are initializers, `o` its outputs, all by number; `s` are hidden
states [1, N, ..] between nodes, in memory that the first line gives the widths of; `-` is absent.
`cpp/ops/layers_program.h` has the whole form, for who reads it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import last_dim, numbers_of, required
from tide_export.lower.onnxruntime.layer_runs import (
    FIRST_ALONE,
    NORMS,
    RESHAPES,
    SKIP_NORMS,
    read_by,
    strided,
    width_of,
)
from tide_export.names.operators import OP_CAUSAL_CONV, OP_LORA, OP_PAGED_ATTENTION

ATTENTION_ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "rotary_interleaved")
LORA_ATTRIBUTES = ("offset", "rank", "column", "width")
IN_PLACE = (OP_LORA, *RESHAPES)  # may change a hidden state that nothing reads after them


def text_of(nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> str:
    """Returns the attribute `nodes` of an operator that has these inputs and outputs."""
    places, lines = _Places(nodes, inputs, outputs), list[str]()
    for node in nodes:
        made = places.make(node)
        name, count = ("Reshape", 1) if node.op_type in RESHAPES else (node.op_type, len(node.inputs))
        read = places.of(node.inputs[: 1 if name in FIRST_ALONE else count])
        lines.append(" ".join([name, *made, "=", *read, *_attributes(node)]))
        places.release(node)
    return "\n".join([" ".join(["slots", *map(str, places.widths)]), *lines])


class _Places:
    """Names where values are: inputs, weights, outputs and hidden states of the operator.

    Attributes:
        widths: of hidden states, which values share where none is needed at the same time.
    """

    def __init__(self, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]):
        self.widths = list[int]()
        self._of: dict[ir.Value | None, str] = {None: "-"}
        self._of |= {value: f"{'w' if value.is_initializer() else 'i'}{i}" for i, value in enumerate(inputs)}
        self._of |= {value: f"o{i}" for i, value in enumerate(outputs)}
        self._last_reader = {value: node for node in nodes for value in read_by(node)}
        self._free = set[int]()

    def of(self, values: Sequence[ir.Value | None]) -> list[str]:
        return [self._of[value] if value is None or value.name else "-" for value in values]

    def make(self, node: ir.Node) -> list[str]:
        """Returns the places of the outputs of `node`, new ones of those that are read within."""
        for value in node.outputs:
            if value.name and value not in self._of:
                self._of[value] = self._state(node, value) if value in self._last_reader else "-"
        return self.of(node.outputs)

    def release(self, node: ir.Node) -> None:
        """Lets others have the hidden states that nothing reads after `node`."""
        made = self.of(node.outputs)
        for value in read_by(node):
            place = self._of[value]
            if self._last_reader[value] is node and place.startswith("s") and place not in made:
                self._free.add(int(place[1:]))

    def _state(self, node: ir.Node, value: ir.Value) -> str:
        first = required(node.inputs[0])
        if node.op_type in IN_PLACE and self._last_reader[first] is node and self._of[first].startswith("s"):
            return self._of[first]
        width = required(width_of(value))
        slot = min(self._free, key=lambda each: abs(self.widths[each] - width), default=len(self.widths))
        if slot == len(self.widths):
            self.widths.append(width)
        self._free.discard(slot)
        self.widths[slot] = max(self.widths[slot], width)
        return f"s{slot}"


def _attributes(node: ir.Node) -> Iterator[str]:
    """Yields what the node says about itself, as name=value."""
    shape = required(node.outputs[0].shape)
    if node.op_type in RESHAPES:
        yield f"shape={','.join(map(str, shape[2:]))}"
    if node.op_type == "Split":
        yield f"sizes={','.join(str(last_dim(value)) for value in node.outputs)}"
    if node.op_type == "Clip":
        for name, value in zip(("low", "high"), node.inputs[1:], strict=False):
            if value is not None:
                yield f"{name}={np.float32(required(numbers_of(value))[0])!s}"
    if node.op_type == "Slice":
        yield "start={} step={}".format(*required(strided(node)))
    names: Sequence[str] = ("epsilon",) if (node.domain, node.op_type) in NORMS | SKIP_NORMS else ()
    if node.op_type in OP_PAGED_ATTENTION.values():
        names = ATTENTION_ATTRIBUTES
    elif node.op_type == OP_LORA:
        names = LORA_ATTRIBUTES
    elif node.op_type == OP_CAUSAL_CONV:
        names = ("silu",)
    elif node.op_type == "Gelu":
        names = ("approximate",)
    for name in names:
        if name in node.attributes:
            value = node.attributes[name].value
            yield f"{name}={str(np.float32(value)) if isinstance(value, float) else value}"
