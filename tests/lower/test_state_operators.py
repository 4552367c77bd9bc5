"""The operators of recurrent states, and the functions that define them, against NumPy: runs of any length, of several
sequences, with tokens that are taken back, and runs that are run again."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import onnx_ir as ir
import pytest
from ort_sessions import opened

from tide_export.bundle.model_info import StateInfo
from tide_export.compose.states import advance_states, shapes_of, state_inputs, state_outputs
from tide_export.graph.rewriting import FLOAT, INT64, new_node, typed_value
from tide_export.lower.onnxruntime.state_functions import StateFunctionsPass
from tide_export.names.operators import DOMAIN, OP_CAUSAL_CONV, OP_RECURRENCE
from tide_export.runtime.native import LIBRARY

PLACES, TOKENS = 5, 150  # of all sequences; of the longest
CHANNELS, TAPS = 19, 4
KEY_HEADS, HEADS, ROWS, COLUMNS = 2, 4, 5, 21

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """An operator's node: its inputs of one token by name, and its attributes."""

    op_type: str
    tokens: dict[str, tuple[int, ...]]
    bias: bool = False
    silu: int = 0

    def text(self, rng: np.random.Generator) -> Arrays:
        """The inputs of a whole text."""
        values = {name: rng.standard_normal((TOKENS, *shape)).astype(np.float32) for name, shape in self.tokens.items()}
        for name in ("decay", "beta"):
            if name in values:
                values[name] = 1 / (1 + np.exp(-values[name]))
        return values

    def outputs(self, text: Arrays, weights: Arrays) -> np.ndarray:
        """Those of all its tokens."""
        return _convolved(text["x"], weights, self) if self.op_type == OP_CAUSAL_CONV else _recurred(text)


def _convolved(x: np.ndarray, weights: Arrays, case: Case) -> np.ndarray:
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), x])
    sums = sum(padded[tap : tap + len(x)] * weights["weights"][tap] for tap in range(TAPS))
    sums = sums + weights["bias"] if case.bias else sums
    return sums / (1 + np.exp(-sums)) if case.silu else sums


def _recurred(text: Arrays) -> np.ndarray:
    state, made = np.zeros((HEADS, ROWS, COLUMNS)), []
    for number in range(len(text["value"])):
        now = {name: values[number].astype(np.float64) for name, values in text.items()}
        key, query = (np.repeat(now[name], HEADS // KEY_HEADS, axis=0) for name in ("key", "query"))
        state = state * now["decay"].reshape(HEADS, *(*now["decay"].shape[1:], 1, 1)[:2])
        delta = now["value"]
        if "beta" in now:
            delta = now["beta"][:, None] * (delta - np.einsum("hk,hkv->hv", key, state))
        state = state + key[:, :, None] * delta[:, None, :]
        made.append(np.einsum("hk,hkv->hv", query, state))
    return np.stack(made)


RECURRENT = {"query": (KEY_HEADS, ROWS), "key": (KEY_HEADS, ROWS), "value": (HEADS, COLUMNS)}
CASES = {
    "convolution": Case(OP_CAUSAL_CONV, {"x": (CHANNELS,)}),
    "convolution, bias and SiLU": Case(OP_CAUSAL_CONV, {"x": (CHANNELS,)}, bias=True, silu=1),
    "gated": Case(OP_RECURRENCE, {**RECURRENT, "decay": (HEADS,)}),
    "gated delta": Case(OP_RECURRENCE, {**RECURRENT, "decay": (HEADS,), "beta": (HEADS,)}),
    "Kimi's delta": Case(OP_RECURRENCE, {**RECURRENT, "decay": (HEADS, ROWS), "beta": (HEADS,)}),
    "selective": Case(OP_RECURRENCE, {**RECURRENT, "decay": (HEADS, ROWS, COLUMNS)}),
}


class Network:
    """One node as a model, with the states of all sequences."""

    def __init__(self, case: Case, library: bool, operators: Path = LIBRARY) -> None:
        values = {name: typed_value(name, FLOAT, [1, "N", *shape]) for name, shape in case.tokens.items()}
        inputs = list(values.values())
        if case.op_type == OP_CAUSAL_CONV:
            inputs.append(typed_value("weights", FLOAT, [TAPS, CHANNELS]))
            inputs += [typed_value("bias", FLOAT, [CHANNELS])] if case.bias else []
        attributes = {"layer": 0, "number": 0} | ({"silu": case.silu} if case.op_type == OP_CAUSAL_CONV else {})
        node = new_node(case.op_type, inputs, attributes, name="n", domain=DOMAIN, outputs=[(FLOAT, None)])
        self.shapes: tuple[StateInfo, ...] = shapes_of([node])
        states = state_inputs(self.shapes)
        sequences = [
            typed_value("places", INT64, ["R", 2]),
            typed_value("lengths", INT64, ["R"]),
            typed_value("starts", INT64, ["S"]),
        ]
        written = state_outputs(advance_states([node], states, sequences))
        node.outputs[0].name = "y"
        for name, value in written.items():
            value.name = name
        graph = ir.Graph(
            [*inputs, *states.values(), *sequences],
            [node.outputs[0], *written.values()],
            nodes=[node],
            opset_imports={"": 23, DOMAIN: 1},
            name="one_node",
        )
        model = ir.Model(graph, ir_version=10)
        StateFunctionsPass()(model)
        self.session = opened(model, threads=1, operators=library, library=operators)
        rng = np.random.default_rng(0)  # what other sequences left
        self.states = {
            str(states[one.layer, one.number].name): rng.standard_normal((PLACES, *one.shape)).astype(np.float32)
            for one in self.shapes
        }

    def run(self, inputs: Arrays) -> np.ndarray:
        """The output; the states are changed in place."""
        binding = self.session.io_binding()
        for name, array in (inputs | self.states).items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("y")
        for name, array in self.states.items():
            shape, address = list(array.shape), array.ctypes.data
            binding.bind_output(f"new_{name}", "cpu", 0, np.float32, shape, address)
        self.session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0]


def run_of(case: Case, parts: list[tuple[Arrays, int, int, int, int]]) -> Arrays:
    """The inputs of a run over parts: text, place, tokens before, new ones, and how many are settled."""
    new = {
        name: np.concatenate([text[name][before : before + count] for text, _, before, count, _ in parts])[None]
        for name in case.tokens
    }
    return new | {
        "places": np.array([[place, settled] for _, place, _, _, settled in parts]),
        "lengths": np.array([before + count for _, _, before, count, _ in parts]),
        "starts": np.cumsum([0, *(count for _, _, _, count, _ in parts)]),
    }


@pytest.mark.parametrize("name", CASES)
def test_any_runs_give_the_outputs_of_the_whole_texts(name: str) -> None:
    """The operator's have the same bits whatever the runs; the function's are close."""
    case, random = CASES[name], Random(name)
    operator, function = Network(case, library=True), Network(case, library=False)
    rng = np.random.default_rng(7)
    weights = {"weights": rng.standard_normal((TAPS, CHANNELS)).astype(np.float32)}
    weights |= {"bias": rng.standard_normal(CHANNELS).astype(np.float32)} if case.bias else {}
    weights = weights if case.op_type == OP_CAUSAL_CONV else {}
    undo = min(one.undo for one in operator.shapes)
    texts = [case.text(rng) for _ in range(3)]
    whole = [Network(case, library=True).run(weights | run_of(case, [(text, 1, 0, TOKENS, 0)]))[0] for text in texts]
    for text, output in zip(texts, whole, strict=True):
        np.testing.assert_allclose(output, case.outputs(text, weights), atol=2e-4, rtol=2e-4)
    places, lengths, settled = [3, 0, 4], [0, 0, 0], [0, 0, 0]
    taken_back = 0
    for _ in range(24):
        parts = []
        for i in sorted(random.sample(range(3), random.randint(1, 3))):
            if random.random() < 0.3:  # drafts are rejected, as far as the log goes
                back = random.randint(0, lengths[i] - settled[i])
                lengths[i], taken_back = lengths[i] - back, taken_back + back
            if random.random() < 0.5:
                settled[i] = lengths[i]
            room = TOKENS - lengths[i] if lengths[i] == settled[i] else undo - (lengths[i] - settled[i])
            longest = min(room, TOKENS - lengths[i], random.choice([1, 1, 4, 60]))
            count = random.randint(0, max(longest, 0))
            parts.append((texts[i], places[i], lengths[i], count, settled[i], i))
        if not any(part[3] for part in parts):
            continue
        inputs = weights | run_of(case, [part[:5] for part in parts])
        runs = (
            2 if all(part[3] <= undo - (part[2] - part[4]) for part in parts) else 1
        )  # of a longer one there is no way back
        for network, compare in ((operator, _equal), (function, _close)):
            for _ in range(runs):
                found = network.run(inputs)[0]
                for (_, _, before, count, _, i), start in zip(parts, inputs["starts"], strict=False):
                    compare(found[start : start + count], whole[i][before : before + count])
        for _, _, before, count, _, i in parts:
            lengths[i] = before + count
            settled[i] = max(settled[i], lengths[i] - undo)
    assert taken_back > 5


def _equal(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found, expected)


def _close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def operators(request: pytest.FixtureRequest, kernels: Path) -> Iterator[Path]:
    """Those that use an instruction set."""
    use = ctypes.CDLL(str(kernels)).use_recurrence
    if use(request.param.encode()) != 0:
        pytest.skip(f"this CPU has no {request.param}")
    yield kernels
    use(None)


@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set(name: str, operators: Path) -> None:
    """A text in two runs: the outputs are NumPy's, and those of one run, bit for bit."""
    case, rng = CASES[name], np.random.default_rng(5)
    text = case.text(rng)
    weights = {"weights": rng.standard_normal((TAPS, CHANNELS)).astype(np.float32)}
    weights |= {"bias": rng.standard_normal(CHANNELS).astype(np.float32)} if case.bias else {}
    weights = weights if case.op_type == OP_CAUSAL_CONV else {}
    network, whole = (Network(case, library=True, operators=operators) for _ in range(2))
    found = [
        network.run(weights | run_of(case, [(text, 2, before, count, before)]))[0]
        for before, count in ((0, 70), (70, 1), (71, TOKENS - 71))
    ]
    _close(np.concatenate(found), case.outputs(text, weights))
    _equal(np.concatenate(found), whole.run(weights | run_of(case, [(text, 1, 0, TOKENS, 0)]))[0])


def test_a_sequence_that_was_taken_back_too_far_is_refused() -> None:
    case = CASES["gated delta"]
    network, text = Network(case, library=True), case.text(np.random.default_rng(3))
    network.run(run_of(case, [(text, 2, 0, 100, 0)]))
    with pytest.raises(Exception, match="taken back further than its log holds"):
        network.run(run_of(case, [(text, 2, 60, 1, 60)]))
    network.run(run_of(case, [(text, 2, 70, 1, 60)]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"starts": np.array([0, 2])}, "do not ascend"),
        ({"places": np.array([[PLACES, 0]])}, "a place that is none"),
        ({"lengths": np.array([0])}, "shorter than its new tokens"),
        ({"lengths": np.array([1, 1])}, "states take places"),
    ],
)
@pytest.mark.parametrize("name", ["convolution", "gated"])
def test_sequences_that_do_not_fit_are_refused(name: str, change: Arrays, sentence: str) -> None:
    case, rng = CASES[name], np.random.default_rng(3)
    weights = {"weights": np.ones((TAPS, CHANNELS), np.float32)} if case.op_type == OP_CAUSAL_CONV else {}
    inputs = weights | run_of(case, [(case.text(rng), 2, 0, 1, 0)]) | change
    with pytest.raises(Exception, match=sentence):
        Network(case, library=True).run(inputs)
