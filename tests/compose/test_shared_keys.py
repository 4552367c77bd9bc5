"""Attentions of the same keys and values read one layer's K/V buffers; others keep their own."""

import onnx_ir as ir

from tide_export.compose.passes.shared_keys import KV_LAYER, SharedKeysPass
from tide_export.graph.rewriting import FLOAT, nodes_of, typed_value
from tide_export.names.operators import DOMAIN, OP_ATTENTION


def attentions(*layers: tuple[str, str]) -> ir.Model:
    """A model of one attention per layer, of named keys and values."""
    inputs = {name: typed_value(name, FLOAT, [1, 1, "n", 8]) for name in ("query", *dict.fromkeys(sum(layers, ())))}
    nodes = [
        ir.node(OP_ATTENTION, [inputs["query"], inputs[k], inputs[v]], attributes={"layer": number}, domain=DOMAIN)
        for number, (k, v) in enumerate(layers)
    ]
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(list(inputs.values()), outputs, nodes=nodes, opset_imports={"": 23, DOMAIN: 1}, name="attentions")
    return ir.Model(graph, ir_version=10)


def sources(model: ir.Model) -> list[int | None]:
    nodes = nodes_of(model.graph, OP_ATTENTION, DOMAIN)
    assert all((KV_LAYER in node.attributes) == (node.inputs[1] is None is node.inputs[2]) for node in nodes)
    return [node.attributes.get_int(KV_LAYER, None) for node in nodes]


def test_a_later_attention_of_the_same_keys_and_values_reads_the_first_layers() -> None:
    model = attentions(("k0", "v0"), ("k1", "v1"), ("k0", "v0"), ("k1", "v1"))
    assert SharedKeysPass()(model).modified
    assert sources(model) == [None, None, 0, 1]


def test_keys_alone_are_not_shared() -> None:
    model = attentions(("k0", "v0"), ("k0", "v1"))
    assert not SharedKeysPass()(model).modified
    assert sources(model) == [None, None]
