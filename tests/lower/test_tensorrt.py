"""The segment networks alone: batches, padding, windows and softcaps, precisions, operators."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from families import build
from networks_runner import Runner
from tiny_engines import bound

from tide_export.bundle.file_names import EMBEDDING_FILE, SEGMENTS_FOLDER, SEGMENTS_WEIGHTS_FILE, network_file
from tide_export.bundle.opened import open_bundle
from tide_export.compose.cut import cut
from tide_export.errors import GraphError, UnsupportedModelError
from tide_export.lower.tensorrt import lower as lowering
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass
from tide_export.lower.tensorrt.lower import check_operators, networks_for_tensorrt
from tide_export.names import segment_networks as names
from tide_export.names.networks import AFTER_SEGMENTS, HEAD, segment_name
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_EXIT
from tide_export.routers.random_routers import random_routers

CAPACITY, CHECKPOINT, WIDTH = 48, 2, 64
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def source():
    """Windows of 8 and softcaps: the most complex attention."""
    return build("gemma2")


@pytest.fixture(scope="module")
def routers(source):
    return random_routers(source, (CHECKPOINT,), range(3, 43), bottleneck=16, lens_rank=4)


@pytest.fixture(scope="module")
def pieces(source, routers, traces):
    return cut(traces(source, routers.checkpoints, bound(source)), CAPACITY)


@pytest.fixture(scope="module")
def make(pieces, routers):
    return lambda weights="fp32": networks_for_tensorrt(
        pieces, routers.arrays(), routers.lens_arrays(), CAPACITY, weights
    )


@pytest.fixture(scope="module")
def saved(make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    make().save(folder)
    return folder


def reference(source, routers, ids: list[int]) -> tuple[np.ndarray, float]:
    states = source.run(torch.tensor([ids]), [CHECKPOINT])
    state = routers.exit_state(source, CHECKPOINT, states.raw[CHECKPOINT])
    return states.logits[0, -1].numpy(), float(routers.routers[CHECKPOINT](state)[0, -1])


def test_rows_of_any_length_and_any_number_of_tokens_are_batched(source, routers, saved: Path) -> None:
    """Three sequences, padded on the right, in steps of different sizes, against each alone in PyTorch."""
    sequences = [[int(token) for token in RNG.integers(3, 500, 40)] for _ in range(3)]
    runner, lengths = Runner(saved, rows=3), [0, 0, 0]
    for sizes in ([20, 1, 9], [1, 1, 1], [3, 12, 1]):
        longest = max(sizes)
        ids = np.full((3, longest), 7)
        for row, size in enumerate(sizes):
            ids[row, :size] = sequences[row][lengths[row] : lengths[row] + size]
        logits, scores, leaves = runner.full(ids, lengths, [size - 1 for size in sizes])
        lengths = [length + size for length, size in zip(lengths, sizes, strict=True)]
        for row, length in enumerate(lengths):
            expected, score = reference(source, routers, sequences[row][:length])
            np.testing.assert_allclose(logits[row], expected, atol=1e-4)
            assert scores[row] == pytest.approx(score, abs=1e-5)
            assert leaves[row] == (scores[row] > 0.5)
    assert lengths == [24, 14, 11]


def test_first_exits_are_scattered_and_nothing_else_changes(source, routers, saved: Path) -> None:
    """Of three slots in a run the second exits: its state is PyTorch's at the checkpoint, the others' rows stay."""
    runner, ids = Runner(saved, rows=3), RNG.integers(3, 500, (3, 6))
    _, scores, _ = runner.full(ids, [0, 0, 0], [5, 3, 0], limit=2.0)
    order = np.argsort(scores)
    assert (runner.buffers[names.EXIT_STATES][:, 0, names.EXIT_ROW] == 7).all()
    runner = Runner(saved, rows=3)
    _, _, exits = runner.full(ids, [0, 0, 0], [5, 3, 0], limit=float(scores[order[1:]].mean()))
    assert exits.tolist() == [int(n == order[2]) for n in range(3)]
    rows = runner.buffers[names.EXIT_STATES][:, 0]
    assert (rows[order[:2], names.EXIT_ROW] == 7).all()
    assert (rows[:, names.FINAL_ROW + 6 :] == 7).all()
    slot, last = order[2], (5, 3, 0)[order[2]]
    raw = source.run(torch.tensor([ids[slot, : last + 1]]), [CHECKPOINT]).raw[CHECKPOINT]
    expected = routers.exit_state(source, CHECKPOINT, raw)[0, -1].detach().numpy()
    np.testing.assert_allclose(rows[slot, names.EXIT_ROW], expected, atol=1e-4)


def test_pending_states_are_appended_and_taken_from_the_first_on(source, routers, saved: Path) -> None:
    """Two slots: three tokens of one are pending when two more come, one token of the other."""
    runner, ids = Runner(saved, rows=2), RNG.integers(3, 500, (2, 8))
    steps = [([3, 1], [0, 0], [0, 0]), ([2, 2], [3, 1], [3, 1])]
    for counts, lengths, pending in steps:
        new = np.full((2, max(counts)), 9)
        for slot, count in enumerate(counts):
            new[slot, :count] = ids[slot, lengths[slot] : lengths[slot] + count]
        feeds = {names.INPUT_IDS: new, names.TOKEN_INDICES: np.arange(new.shape[1])}
        feeds |= {names.LAST_TOKENS: np.array(counts) - 1, names.PENDING_LENGTHS: np.array(pending)}
        runner.segment(0, {**feeds, names.THRESHOLDS: np.full(2, 2, np.float32)}, lengths)
    pending_states = {names.PENDING_STATES: runner.buffers[names.NEXT_PENDING_STATES]}
    runner.segment(1, {names.TOKEN_INDICES: np.arange(5), **pending_states}, [0, 0])
    logits = runner.logits([names.FINAL_ROW + 4, names.FINAL_ROW + 2])
    for slot, length in enumerate((5, 3)):
        np.testing.assert_allclose(logits[slot], reference(source, routers, ids[slot, :length].tolist())[0], atol=1e-4)


def test_the_last_positions_of_the_buffers_are_used(source, routers, saved: Path) -> None:
    ids = [int(token) for token in RNG.integers(3, 500, CAPACITY)]
    runner = Runner(saved, rows=1)
    runner.full(np.array([ids[:-1]]), [0], [CAPACITY - 2])
    logits, _, _ = runner.full(np.array([ids[-1:]]), [CAPACITY - 1], [0])
    np.testing.assert_allclose(logits[0], reference(source, routers, ids)[0], atol=1e-4)


@pytest.mark.parametrize("weights", ["fp32", "fp16", "bf16"])
def test_networks_pass_the_checker_and_hold_standard_operators(make, weights: str, tmp_path: Path) -> None:
    networks = make(weights)
    networks.save(tmp_path)
    for name, model in networks.models.items():
        onnx.checker.check_model(str(tmp_path / network_file(name)), full_check=True)
        assert {node.domain for node in model.graph.all_nodes()} <= {"", DOMAIN}
    types = {value.dtype for value in networks.models[segment_name(1)].graph.inputs if value.dtype.is_floating_point()}
    assert types == {HalfPrecisionPass(weights).dtype if weights != "fp32" else ir.DataType.FLOAT}
    assert networks.models[HEAD].graph.outputs[0].dtype == ir.DataType.FLOAT
    (exits,) = (node for node in networks.models[segment_name(0)].graph if node.op_type == OP_EXIT)
    half = [
        index for index, value in enumerate(exits.inputs) if value.dtype not in (ir.DataType.FLOAT, ir.DataType.INT64)
    ]
    assert half == ([] if weights == "fp32" else [0, 3, 9, 10, 11, 12]), "states, lens and norm, not the router"


def test_half_precision_rounds_and_no_more(source, routers, make, tmp_path: Path) -> None:
    make("fp16").save(tmp_path)
    ids = [int(token) for token in RNG.integers(3, 500, 30)]
    runner = Runner(tmp_path, rows=1, dtype=np.float16)
    logits, scores, _ = runner.full(np.array([ids]), [0], [29])
    expected, score = reference(source, routers, ids)
    error = np.abs(logits[0] - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 1e-2, "rounded as float16 is, not as float32"
    assert scores[0] == pytest.approx(score, abs=2e-2)


def test_the_networks_share_one_file_of_weights_and_store_each_once(saved: Path, make, source) -> None:
    folder = saved / SEGMENTS_FOLDER
    assert {path.name for path in folder.iterdir()} == {
        SEGMENTS_WEIGHTS_FILE,
        Path(EMBEDDING_FILE).name,
        *(f"{part}.onnx" for part in (segment_name(0), segment_name(1), *AFTER_SEGMENTS)),
    }
    parameters = sum(parameter.numel() * 4 for parameter in source.model.parameters())
    stored = sum((saved / file).stat().st_size for file in (f"segments/{SEGMENTS_WEIGHTS_FILE}", EMBEDDING_FILE))
    assert parameters <= stored < 1.2 * parameters
    embedding = np.fromfile(saved / EMBEDDING_FILE, np.float32).reshape(512, WIDTH)
    assert np.array_equal(embedding, source.model.get_input_embeddings().weight.detach().numpy())
    for part in (segment_name(0), HEAD):  # the head is tied to it
        graph = onnx.load(str(saved / network_file(part)), load_external_data=False).graph
        assert names.EMBEDDING in [value.name for value in graph.input]
        assert [512, WIDTH] not in [list(initializer.dims) for initializer in graph.initializer]


def test_a_weight_float16_cannot_hold_is_refused() -> None:
    array = np.array([1.0, -1e6], np.float32)
    weight = ir.Value(
        name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]), const_value=ir.tensor(array)
    )
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    product = ir.node("Mul", [x, weight])
    product.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], product.outputs, nodes=[product], initializers=[weight], opset_imports={"": 24})
    HalfPrecisionPass("fp16")(ir.Model(graph, ir_version=11))
    with pytest.raises(GraphError, match="weight w holds a number too large for float16: use bf16 or fp32"):
        weight.const_value.numpy()


def test_a_missing_router_is_refused(pieces, routers) -> None:
    with pytest.raises(GraphError, match="no router of width 64 for the checkpoint after layer 2"):
        networks_for_tensorrt(pieces, {}, routers.lens_arrays(), CAPACITY)


def test_an_operator_tensorrt_does_not_take_is_named_with_its_place(pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    check_operators(pieces)
    monkeypatch.setattr(lowering, "NOT_TAKEN", frozenset(["Tanh"]))
    with pytest.raises(
        UnsupportedModelError, match=r"computes with Tanh \(in its head\), which TensorRT does not take"
    ):
        check_operators(pieces)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "s", WIDTH]))
    node = ir.node("Abacus", [x], domain="ours")
    second = ir.Graph([x], node.outputs, nodes=[node], name="second")
    with pytest.raises(UnsupportedModelError, match=r"computes with ours::Abacus \(in its layers 2 to 2\)"):
        check_operators(replace(pieces, segments=(pieces.segments[0], second)))


@pytest.mark.parametrize("operator", ["ScatterND", "ScatterElements"])
def test_scatters_that_reduce_are_refused_as_the_parser_does(pieces, operator: str) -> None:
    def network(attributes: dict[str, str]) -> ir.Graph:
        number = ir.DataType.FLOAT
        values = {"x": number, "i": ir.DataType.INT64, "u": number}
        shapes = {"x": [4, 8], "i": [2, 1] if operator == "ScatterND" else [2, 8], "u": [2, 8]}
        inputs = [
            ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shapes[name]))
            for name, dtype in values.items()
        ]
        node = ir.node(operator, inputs, attributes)
        node.outputs[0].name = "y"
        node.outputs[0].type, node.outputs[0].shape = inputs[0].type, inputs[0].shape
        return ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24}, name="scatters")

    check_operators(replace(pieces, segments=(pieces.segments[0], network({}))))
    with pytest.raises(UnsupportedModelError, match=rf"with {operator} that reduces by 'add' \(in its layers 2 to 2\)"):
        check_operators(replace(pieces, segments=(pieces.segments[0], network({"reduction": "add"}))))
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    for attributes in ({}, {"reduction": "add"}):
        builder = trt.Builder(logger)
        parsed = builder.create_network(0)
        parser = trt.OnnxParser(parsed, logger)
        model = ir.to_proto(ir.Model(network(attributes), ir_version=10))
        assert parser.parse(model.SerializeToString()) == (not attributes)


def test_sinks_and_a_bias_at_once_are_refused(pieces) -> None:
    copy = pieces.segments[1].clone()
    attention = next(node for node in copy if node.op_type == OP_ATTENTION)
    attention.resize_inputs(5)
    for index in (3, 4):
        attention.replace_input_with(index, copy.inputs[0])
    with pytest.raises(UnsupportedModelError, match="the attention of layer 2 has sinks and a bias"):
        check_operators(replace(pieces, segments=(pieces.segments[0], copy)))


def test_the_parser_takes_all_operators_but_those_listed(make) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    by_name_only = {"NonZero"}
    assert not [name for name in lowering.NOT_TAKEN - by_name_only if parser.supports_operator(name)]
    used = {node.op_type for model in make().models.values() for node in model.graph if not node.domain}
    assert [name for name in used if not parser.supports_operator(name)] == []


def test_a_run_takes_as_many_tokens_as_experts_can_be_gathered_for(make, demo_bundle: Path) -> None:
    networks = make()
    assert networks.max_tokens is None, "no experts"
    manifest = open_bundle(demo_bundle, verify=False).manifest
    assert networks.info(manifest).max_tokens == CAPACITY
    few = replace(networks, max_tokens=5).info(manifest)
    assert (few.max_tokens, few.max_logits, few.max_batch_size, few.max_slot_tokens) == (5, 5, 5, 1)


def test_sequences_that_cannot_be_batched_run_alone_and_a_warning_names_the_reason(
    make, pieces, demo_bundle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks, manifest = make(), open_bundle(demo_bundle, verify=False).manifest
    shapes = ((2, 8),) * manifest.model.num_layers
    manifest = replace(manifest, model=replace(manifest.model, kv_shapes=shapes))
    assert (networks.info(manifest).max_batch_size, networks.info(manifest, 3).max_batch_size) == (8, 3)
    assert not caplog.records
    unaligned = replace(networks, capacity=50)
    assert unaligned.info(manifest).max_batch_size == 1
    assert "3200 bytes a layer, is no multiple of 256: make --max-length one of 4" in caplog.text
    assert replace(networks, capacity=52).info(manifest).max_batch_size == 8
    caplog.clear()
    assert unaligned.info(manifest, 1).max_batch_size == 1
    assert not caplog.records, "no batch was requested"

    def refuse(pieces) -> None:
        raise UnsupportedModelError("it counts on")

    monkeypatch.setattr("tide_export.lower.networks.check_positions", refuse)
    assert make().info(manifest).max_batch_size == 1
    assert "take one prompt at a time: it counts on" in caplog.text
