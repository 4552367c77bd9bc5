"""A layer with a recurrent state in one operator, against the nodes that it replaces, with the library and without."""

import numpy as np
import onnx_ir as ir
import pytest
from lower.test_layers import FLOAT, INT64, Maker
from ort_sessions import opened

from tide_export.graph.builder import OPSET
from tide_export.lower.onnxruntime.half_weights import half_matmul_function
from tide_export.lower.onnxruntime.layers import LayersPass
from tide_export.lower.onnxruntime.state_functions import StateFunctionsPass
from tide_export.names.operators import DOMAIN, OP_LAYERS

SIZE, HEADS, KEY_HEADS, WIDTH, TAPS, LOG, PLACES = 64, 4, 2, 16, 4, 8, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * WIDTH
LOG_WIDTH = HEADS * (1 + WIDTH) + KEY_HEADS * WIDTH
STATES = {"conv_states": (TAPS - 1 + LOG, CHANNELS), "head_states": (HEADS, WIDTH * WIDTH + 1), "log": (LOG, LOG_WIDTH)}


class RowMaker(Maker):
    """Nodes whose outputs have shapes [1, n, ..] of their own."""

    def rows(
        self, op_type: str, inputs: list, *shapes: tuple[int, ...], domain: str = "", **attributes
    ) -> list[ir.Value]:
        made = self.node(op_type, inputs, domain=domain, outputs=len(shapes), **attributes)
        values = [made] if isinstance(made, ir.Value) else list(made)
        for value, shape in zip(values, shapes, strict=True):
            value.shape = ir.Shape([1, "n", *shape])
        return values

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        return self.weight(ir.tensor(array, name=name))


def delta_layer() -> ir.Model:
    """A gated delta rule as Qwen3.5's, a step size that scales values as Mamba 2's, and all nodes between."""
    make = RowMaker("TideBf16MatMul")
    x = make.value("x", FLOAT, 1, "n", SIZE)
    states = [make.value(name, FLOAT, "p", *shape) for name, shape in STATES.items()]
    places, lengths = make.value("places", INT64, "r", 2), make.value("lengths", INT64, "r")
    starts = make.value("starts", INT64, "s")
    taps = make.constant("taps", make.rng.standard_normal((TAPS, CHANNELS), dtype=np.float32))
    convolved, conv_states = make.node(
        "TideCausalConv", [make.matmul(x, CHANNELS), taps, states[0], places, lengths, None, starts],
        CHANNELS, DOMAIN, 2, silu=1, layer=0, number=0,
    )  # fmt: skip
    sizes = [KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * WIDTH]
    parts = make.rows(
        "Split", [convolved, make.constant("sizes", np.array(sizes))], *((size,) for size in sizes), axis=2
    )
    ones = make.constant("ones", np.ones(WIDTH, np.float32))
    heads = [make.constant(f"heads_{count}", np.array([0, 0, count, WIDTH])) for count in (KEY_HEADS, HEADS)]
    query, key = (make.rows("Reshape", [part, heads[0]], (KEY_HEADS, WIDTH))[0] for part in parts[:2])
    query, key = (
        make.rows("RMSNormalization", [value, ones], (KEY_HEADS, WIDTH), axis=-1, epsilon=1e-6)[0]
        for value in (query, key)
    )
    (value,) = make.rows("Reshape", [parts[2], heads[1]], (HEADS, WIDTH))
    (beta,) = make.rows("Sigmoid", [make.matmul(x, HEADS)], (HEADS,))
    (biased,) = make.rows("Add", [make.matmul(x, HEADS), make.vector("step_bias", HEADS)], (HEADS,))
    (step,) = make.rows("Softplus", [biased], (HEADS,))
    (slower,) = make.rows(
        "Mul", [make.constant("rates", -np.arange(1, HEADS + 1, dtype=np.float32) / 4), step], (HEADS,)
    )
    (decay,) = make.rows("Exp", [slower], (HEADS,))
    (step_axis,) = make.rows("Unsqueeze", [step, make.constant("axis", np.array([3]))], (HEADS, 1))
    (scaled,) = make.rows("Mul", [value, step_axis], (HEADS, WIDTH))
    recurred, head_states, log = make.node(
        "TideRecurrence", [query, key, scaled, decay, *states[1:], places, lengths, beta, starts], SIZE, DOMAIN, 3,
        layer=0, number=1,
    )  # fmt: skip
    recurred.shape = ir.Shape([1, "n", HEADS, WIDTH])
    (skipped,) = make.rows("Mul", [value, make.constant("skip", np.ones((HEADS, 1), np.float32) / 2)], (HEADS, WIDTH))
    (summed,) = make.rows("Add", [recurred, skipped], (HEADS, WIDTH))
    (merged,) = make.rows("Reshape", [summed, make.constant("merged", np.array([0, 0, SIZE]))], (SIZE,))
    gate = make.matmul(x)
    gated = make.node("Mul", [merged, make.node("Mul", [gate, make.node("Sigmoid", [gate])])])
    (halved,) = make.rows("Mul", [gated, make.constant("half", np.array(0.5, np.float32))], (SIZE,))
    bent = make.node("Gelu", [make.node("Gelu", [halved], approximate="tanh")])
    outputs = [make.node("Add", [x, make.matmul(bent)]), summed, conv_states, head_states, log]
    for value, (name, shape) in zip(outputs[2:], STATES.items(), strict=True):
        value.name, value.shape = f"new_{name}", ir.Shape(["p", *shape])
    imports = {"": OPSET, DOMAIN: 1}
    inputs = [x, *states, places, lengths, starts]
    graph = ir.Graph(inputs, outputs, nodes=make.nodes, initializers=make.weights, opset_imports=imports, name="layer")
    model = ir.Model(graph, ir_version=11, functions=[half_matmul_function("bf16", OPSET)])
    StateFunctionsPass()(model)
    return model


def feeds_of(lengths: list[int], tokens: list[int], states: dict[str, np.ndarray], settled: list[int]):
    rng = np.random.default_rng(sum(lengths))
    places = np.stack([PLACES - 1 - np.arange(len(lengths)), settled], -1).astype(np.int64)
    x = rng.standard_normal((1, sum(tokens), SIZE), dtype=np.float32)
    return states | {"x": x, "places": places, "lengths": np.array(lengths), "starts": np.cumsum([0, *tokens])}


def test_the_operator_is_the_nodes() -> None:
    model = delta_layer()
    LayersPass()(model)
    assert [node.op_type for node in model.graph] == [OP_LAYERS]
    sessions = [opened(model, threads=2), opened(delta_layer(), threads=2), opened(model, operators=False)]
    states = [{name: np.zeros((PLACES, *shape), np.float32) for name, shape in STATES.items()} for _ in sessions]
    for lengths, tokens, settled in (
        ([5, 1, 9], [5, 1, 9], [0, 0, 0]),
        ([6, 4, 9], [1, 3, 2], [5, 1, 7]),
        ([7], [1], [6]),
    ):
        made = []
        for session, own in zip(sessions, states, strict=True):
            outputs = session.run(None, feeds_of(lengths, tokens, own, settled))
            own.update(zip(STATES, outputs[2:], strict=True))
            made.append(outputs)
        for other in made[1:]:
            for one, expected in zip(made[0], other, strict=True):
                np.testing.assert_allclose(one, expected, rtol=2e-4, atol=2e-4)
        assert np.abs(made[0][1]).max() > 0.1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_token_is_the_same_to_the_bit_however_many_run(threads: int) -> None:
    model = delta_layer()
    LayersPass()(model)
    session, one = opened(model, threads=threads), opened(model, threads=1)
    empty = {name: np.zeros((PLACES, *shape), np.float32) for name, shape in STATES.items()}
    whole = feeds_of([7, 5], [7, 5], empty, [0, 0])
    together = session.run(None, whole)
    for begin, end in zip(whole["starts"], whole["starts"][1:], strict=False):
        own = empty
        for token in range(begin, end):
            alone = {
                "x": whole["x"][:, token : token + 1],
                "starts": np.array([0, 1]),
                "places": np.zeros((1, 2), np.int64),
            }
            alone |= {"lengths": np.array([token - begin + 1])}
            outputs = one.run(None, own | alone)
            own = dict(zip(STATES, outputs[2:], strict=True))
            np.testing.assert_array_equal(outputs[0], together[0][:, token : token + 1])
            np.testing.assert_array_equal(outputs[1], together[1][:, token : token + 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Reshape o0 = i0 shape=5,16", "a shape does not fit the hidden states"),
        ("Split o0 = i0 sizes=32,16", "a split does not fit the hidden states"),
        ("Mul o0 = i0 w1", "takes tensors that fit each other"),
    ],
)
def test_a_wrong_line_is_refused(line: str, message: str) -> None:
    make = RowMaker("TideBf16MatMul")
    x, weight = make.value("x", FLOAT, 1, "n", SIZE), make.vector("weight", 5)
    node = make.node(OP_LAYERS, [x, weight], domain=DOMAIN, nodes=f"slots 64\n{line}")
    graph = ir.Graph(
        [x], [node], nodes=make.nodes, initializers=make.weights, opset_imports={"": OPSET, DOMAIN: 1}, name="wrong"
    )
    session = opened(ir.Model(graph, ir_version=11))
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.zeros((1, 3, SIZE), np.float32)})
