"""Values that follow from the token ids, or that an earlier layer computed beside its hidden states, are concatenated
to the hidden states before markers and split off after."""

import onnx_ir as ir
import pytest

from tide_export.compose.passes.carried_values import CarriedValuesPass, uncarried
from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import FLOAT, INT64, dims, nodes_of, typed_value
from tide_export.names.operators import DOMAIN, OP_CAUSAL_CONV, OP_MARKER

WIDTHS = {"embed": 6, "extra_0": 2, "extra_1": 3}


def traced(extra: tuple[str, str] = ("extra_0", "extra_1"), dtype: ir.DataType = FLOAT) -> ir.Model:
    """Two layers, each of which adds a value made of the ids, with markers before, between and after."""
    ids, shape = typed_value("ids", INT64, ["b", "s"]), ["b", "s"]
    nodes: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value, width: int, layer: int | None = None, to: ir.DataType = FLOAT) -> ir.Value:
        attributes = {} if layer is None else {"layer": layer}
        node = ir.node(op_type, list(inputs), attributes=attributes, domain="" if layer is None else DOMAIN)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(to), ir.Shape([*shape, width])
        node.outputs[0].name = f"value_{len(nodes)}"
        nodes.append(node)
        return node.outputs[0]

    values = {
        name: op("Embed", ids, width=width, to=dtype if name != "embed" else FLOAT) for name, width in WIDTHS.items()
    }
    x = values["embed"]
    for layer in (0, 1):
        x = op(OP_MARKER, x, width=6, layer=layer)
        x = op("Layer", x, values[extra[layer]], width=6)
    x = op(OP_MARKER, x, width=6, layer=2)
    graph = ir.Graph([ids], [x], nodes=nodes, opset_imports={"": 23, DOMAIN: 1}, name="traced")
    return ir.Model(graph, ir_version=10)


def widths(model: ir.Model) -> list[int]:
    return [dims(node.outputs[0])[-1] for node in nodes_of(model.graph, OP_MARKER, DOMAIN)]


def test_each_segment_gets_what_it_and_later_ones_read() -> None:
    model = traced()
    CarriedValuesPass((0, 1, 2))(model)
    assert widths(model) == [6 + 2 + 3, 6 + 3, 6]
    for layer in nodes_of(model.graph, "Layer"):
        hidden, extra = layer.inputs
        assert hidden.producer() is extra.producer()
        assert hidden.producer().op_type == "Split"


def test_a_value_that_several_layers_read_is_carried_once() -> None:
    model = traced(("extra_1", "extra_1"))
    CarriedValuesPass((0, 1, 2))(model)
    assert widths(model) == [6 + 3, 6 + 3, 6]


def test_a_value_that_is_no_vector_of_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"reads the token ids \(Layer\), so the model cannot be cut there"):
        CarriedValuesPass((0, 1, 2))(traced(dtype=INT64))


def test_an_operator_with_a_state_is_run_in_its_layer_though_it_reads_ids_alone() -> None:
    model = traced()
    reader = next(node for node in nodes_of(model.graph, "Layer") if node.inputs[1].producer().op_type == "Embed")
    ids, width = reader.inputs[1], dims(reader.inputs[1])[-1]
    conv = ir.node(OP_CAUSAL_CONV, [ids], attributes={"layer": 1, "number": 0}, domain=DOMAIN)
    conv.outputs[0].type, conv.outputs[0].shape = ids.type, ids.shape
    model.graph.insert_after(ids.producer(), conv)  # before every marker
    second = list(nodes_of(model.graph, "Layer"))[1]
    second.replace_input_with(1, conv.outputs[0])
    CarriedValuesPass((0, 1, 2))(model)
    assert conv.inputs[0].producer().op_type == "Split"
    assert conv.inputs[0].producer().inputs[0].producer().attributes["layer"].as_int() == 1
    assert width == 2
    assert second.inputs[1] is conv.outputs[0]


def passed_on(widths_of_layers: tuple[int, ...]) -> ir.Model:
    """Layers that each make a value of a width beside their states, which the next one adds to its own."""
    ids, nodes = typed_value("ids", INT64, ["b", "s"]), list[ir.Node]()

    def op(op_type: str, *inputs: ir.Value, width: int, layer: int | None = None) -> ir.Value:
        attributes = {} if layer is None else {"layer": layer}
        node = ir.node(op_type, list(inputs), attributes=attributes, domain="" if layer is None else DOMAIN)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(FLOAT), ir.Shape(["b", "s", width])
        node.outputs[0].name = f"value_{len(nodes)}"
        nodes.append(node)
        return node.outputs[0]

    x, beside = op("Embed", ids, width=6), list[ir.Value]()
    for layer, width in enumerate(widths_of_layers):
        x = op(OP_MARKER, x, width=6, layer=layer)
        beside = [op("Beside", x, *beside, width=width)]
        x = op("Layer", x, *beside, width=6)
    x = op(OP_MARKER, x, width=6, layer=len(widths_of_layers))
    graph = ir.Graph([ids], [x], nodes=nodes, opset_imports={"": 23, DOMAIN: 1}, name="traced")
    return ir.Model(graph, ir_version=10)


def test_what_a_layer_passes_on_beside_its_states_is_carried_to_the_next() -> None:
    model = passed_on((2, 2, 5))
    CarriedValuesPass((0, 1, 2, 3))(model)
    assert widths(model) == [6, 6 + 2, 6 + 2, 6]
    for layer in nodes_of(model.graph, "Beside")[1:]:
        hidden, passed = layer.inputs
        assert hidden.producer() is passed.producer()
        assert hidden.producer().op_type == "Split"


def test_values_of_other_widths_after_another_checkpoint_are_followed_by_zeros() -> None:
    model = passed_on((2, 4, 5))
    CarriedValuesPass((0, 1, 2, 3))(model)
    assert widths(model) == [6, 6 + 4, 6 + 4, 6]
    (pad,) = nodes_of(model.graph, "Pad")
    (marker,) = (use.node for use in pad.outputs[0].uses())
    assert marker.attributes["layer"].as_int() == 1
    (split,) = (use.node for use in marker.outputs[0].uses())
    assert [dims(value)[-1] for value in split.outputs] == [6, 2, 2]
    assert len(split.outputs[1].uses()) == 1
    assert not split.outputs[2].uses()
    values = uncarried(marker)
    assert values[split.outputs[1]] is pad.inputs[0].producer().inputs[1]
    assert split.outputs[2] not in values
