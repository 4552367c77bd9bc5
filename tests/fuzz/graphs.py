"""Mutations of an ONNX graph's bytes and fields, drawn by a `random.Random`."""

from random import Random

from mutations import mutated_bytes
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

SIZES = (0, 1, -1, 2, 3, 7, 16, 17, 48, 255, 65536, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
# ONNX Runtime 1.31 divides by the 32 lower bits of GroupQueryAttention's numbers of heads: if those are 0, it dies
# of SIGFPE. SECURITY.md: a graph is a program.
ATTRIBUTES = tuple(size for size in SIZES if size == 0 or size % 2**32)
PATHS = (
    "",
    "model.onnx.data",
    "../model.onnx.data",
    "/etc/passwd",
    "/proc/kmsg",
    "/dev/zero",
    "nowhere",
    "a\0b",
    "tide.json",
    ".",
)
OPERATORS = (
    "Add",
    "MatMul",
    "Gather",
    "GatherND",
    "Reshape",
    "Concat",
    "Squeeze",
    "Unsqueeze",
    "Slice",
    "ConstantOfShape",
)
OPERATORS += (
    "Identity",
    "If",
    "Loop",
    "Expand",
    "Tile",
    "Range",
    "Where",
    "Tanh",
    "Shape",
    "Cast",
    "NoSuchOperator",
    "NonZero",
)
KINDS = ("node", "input", "output", "initializer", "attribute", "opset", "metadata", "loop", "nest")


def mutated_graph(random: Random, model: ModelProto, times: int = 3) -> bytes:
    """`model` with up to `times` fields changed, or some bytes of it."""
    if random.random() < 0.2:
        return mutated_bytes(random, model.SerializeToString())
    changed = ModelProto()
    changed.CopyFrom(model)
    for _ in range(random.randint(1, times)):
        graph = random.choice(_graphs(changed.graph))
        _change(random, changed, graph, random.choice(KINDS))
    data = changed.SerializeToString()
    return mutated_bytes(random, data, 1) if random.random() < 0.1 else data


def _graphs(graph: GraphProto) -> list[GraphProto]:
    inner = [a.g for node in graph.node for a in node.attribute if a.type == AttributeProto.GRAPH]
    return [graph, *(each for one in inner for each in _graphs(one))]


def _change(random: Random, model: ModelProto, graph: GraphProto, kind: str) -> None:
    if kind == "node" and graph.node:
        _change_node(random, graph, random.choice(graph.node))
    elif kind in ("input", "output"):
        values = getattr(graph, kind)
        if values:
            _change_value(random, random.choice(values))
    elif kind == "initializer" and graph.initializer:
        _change_tensor(random, random.choice(graph.initializer))
    elif kind == "attribute":
        nodes = [node for node in graph.node if node.attribute]
        if nodes:
            _change_attribute(random, random.choice(random.choice(nodes).attribute))
    elif kind == "opset" and model.opset_import:
        random.choice(model.opset_import).version = random.choice((0, 1, 13, 99, 2**40))
        model.ir_version = random.choice((0, 3, 10, 99))
    elif kind == "metadata" and model.metadata_props:
        random.choice(model.metadata_props).value = random.choice(("", "2", "2,5", "x" * 1000, "\0"))
    elif kind == "loop":
        _add_loop(random, graph)
    elif kind == "nest":
        _nest(graph, random.choice((2, 10, 30)))


def _change_node(random: Random, graph: GraphProto, node: NodeProto) -> None:
    change = random.randrange(6)
    names = [name for other in graph.node for name in (*other.input, *other.output)] or [""]
    if change == 0:
        node.op_type = random.choice(OPERATORS)
    elif change == 1 and node.input:
        node.input[random.randrange(len(node.input))] = random.choice(names)
    elif change == 2 and node.output:
        node.output[random.randrange(len(node.output))] = random.choice(names)
    elif change == 3 and node.input:
        del node.input[-1]
    elif change == 4:
        graph.node.remove(node)
    else:
        node.domain = random.choice(("", "tide", "com.microsoft", "ai.onnx.ml", "x"))


def _change_value(random: Random, value: ValueInfoProto) -> None:
    tensor, change = value.type.tensor_type, random.randrange(4)
    if change == 0:
        value.name = random.choice(("", "x", value.name + "x", "logits", "input_ids"))
    elif change == 1:
        tensor.elem_type = random.choice((0, 1, 6, 7, 9, 10, 11, 16, 99))
    elif change == 2 and tensor.shape.dim:
        random.choice(tensor.shape.dim).dim_value = random.choice(SIZES)
    else:
        tensor.shape.dim.add().dim_value = random.choice(SIZES)


def _change_tensor(random: Random, tensor: TensorProto) -> None:
    change = random.randrange(6)
    if change == 0 and tensor.dims:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice(SIZES)
    elif change == 1:
        tensor.data_type = random.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 16, 17, 22, 99))
    elif change == 2:
        tensor.raw_data = mutated_bytes(random, tensor.raw_data or b"\0")
    elif change == 3 and tensor.external_data:
        entry = random.choice(tensor.external_data)
        entry.value = random.choice((*PATHS, *map(str, SIZES), "9" * 30, "-"))
    elif change == 4:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        fields = {
            "location": random.choice(PATHS),
            "offset": str(random.choice(SIZES)),
            "length": str(random.choice(SIZES)),
        }
        for key in random.sample(sorted(fields), random.randint(1, 3)):
            tensor.external_data.add(key=key, value=fields[key])
    else:
        tensor.name = random.choice(("", "x", "embed", "head", "input_ids"))


def _change_attribute(random: Random, attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.INT:
        attribute.i = random.choice(ATTRIBUTES)
    elif attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[random.randrange(len(attribute.ints))] = random.choice(ATTRIBUTES)
    elif attribute.type == AttributeProto.TENSOR:
        _change_tensor(random, attribute.t)
    else:
        attribute.type = random.choice((0, 1, 2, 3, 4, 5, 6, 7))


def _add_loop(random: Random, graph: GraphProto) -> None:
    """A loop over nothing, which replaces the input of some node. Not without end: a graph is a program, and nothing
    bounds its time (SECURITY.md)."""
    if not graph.node or not graph.node[0].input:
        return
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["value"], ["new"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            ValueInfoProto(name="value"),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), ValueInfoProto(name="new")],
    )
    turns = helper.make_tensor("turns", TensorProto.INT64, [], [random.choice((0, 1, 10, -1))])
    node = random.choice([node for node in graph.node if node.input])
    graph.initializer.append(turns)
    graph.node.insert(0, helper.make_node("Loop", ["turns", "", node.input[0]], ["looped"], body=body))
    node.input[0] = "looped"


def _nest(graph: GraphProto, depth: int) -> None:
    """An If in an If in an If ..."""

    def body(node: NodeProto) -> GraphProto:
        return helper.make_graph([node], "g", [], [ValueInfoProto(name="o")])

    leaf = inner = body(helper.make_node("Identity", ["yes"], ["o"]))
    for _ in range(depth):
        inner = body(helper.make_node("If", ["yes"], ["o"], then_branch=inner, else_branch=leaf))
    graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    graph.node.insert(0, inner.node[0])
