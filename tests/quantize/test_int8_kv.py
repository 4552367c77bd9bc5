"""The attention operators, and K/V in int8: kernels for every instruction set, the operators against ONNX Runtime's,
graphs against the oracle on rounded keys and values, alone and in batches, and the command line."""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from families import build
from ort_sessions import register_operators
from tiny_configs import CHECKPOINTS, LAYERS
from tiny_engines import engine_of, pieces_of

from tide_export import names
from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV, SCALE_BYTES, Manifest, Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.config import TideConfig
from tide_export.errors import BundleError, ConfigError, UnsupportedModelError
from tide_export.lower.onnxruntime.cached_attention import float_attention_function
from tide_export.names import DOMAIN, OP_CACHED_ATTENTION
from tide_export.pipeline import flow
from tide_export.pipeline.request import ExportRequest
from tide_export.quantize.flow import quantize_model
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.trace.tracer import trace
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.int8_kv import round_to_int8, rounded_kv
from tide_export.verify.parity import TOLERANCES, check_exit, check_full, check_lossless
from tide_export.verify.quantized import float32_engine

BLOCK_TOKENS = 16  # of the prefix cache
PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
NEW_TOKENS = 16
INT8, FLOAT, ONNX_RUNTIMES = OP_CACHED_ATTENTION[INT8_KV], OP_CACHED_ATTENTION[FLOAT32_KV], "GroupQueryAttention"


def packed(rows: np.ndarray) -> np.ndarray:
    """Rows [.., D] as int8 [.., D + 4]: numbers and their scale."""
    largest = np.abs(rows).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.concatenate([np.rint(rows * inverse).astype(np.int8), (largest / np.float32(127)).view(np.int8)], -1)


def unpacked(rows: np.ndarray) -> np.ndarray:
    """What `packed` rows stand for."""
    return rows[..., :-SCALE_BYTES] * np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)


class Attention(ctypes.Structure):
    """As in cpp/ops/attention.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "width", "tokens", "total")),
        *((name, ctypes.c_int64) for name in ("capacity", "window")),
        ("softcap", ctypes.c_float),
        ("int8", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "bias")),
        *((name, ctypes.c_int64) for name in ("bias_head_stride", "bias_token_stride")),
        *((name, ctypes.c_void_p) for name in ("sinks", "output")),
    ]


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "baseline"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 8), (9, 3, 64), (2, 2, 32), (7, 1, 40)])
def test_a_kernel(
    operator_library: Path, instruction_set: str, heads: int, kv_heads: int, head_dim: int, int8: bool
) -> None:
    library = ctypes.CDLL(str(operator_library))
    rng, total, width = np.random.default_rng(0), 530, -(-head_dim // 16) * 16
    queries, keys, values = (
        rng.standard_normal((total, count, head_dim), dtype=np.float32) for count in (heads, kv_heads, kv_heads)
    )
    keys[3] = 0
    by_head = [np.ascontiguousarray(rows.swapaxes(0, 1)) for rows in (keys, values)]
    stored = [packed(rows) for rows in by_head] if int8 else by_head
    floats = [unpacked(rows) for rows in stored] if int8 else stored
    widened = [np.repeat(rows.astype(np.float64), heads // kv_heads, 0) for rows in floats]
    scores = np.einsum("thd,hkd->htk", queries, widened[0])
    scores[:, np.triu(np.ones((total, total), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("htk,hkd->thd", weights / weights.sum(-1, keepdims=True), widened[1])
    outputs: list[np.ndarray] = []
    for tokens in (1, 2, 3, 7, 70):
        # [kv_heads, tokens, group, width]
        rows = np.zeros((kv_heads, tokens, heads // kv_heads, width), np.float32)
        rows[..., :head_dim] = queries[-tokens:].reshape(tokens, kv_heads, -1, head_dim).swapaxes(0, 1)
        # Int8 rows of the new tokens are stored by the kernel.
        buffers = [np.concatenate([rows[:, :-tokens], rows[:, -tokens:] * (not int8)], 1) for rows in stored]
        output = np.full((tokens, heads, head_dim), np.nan, np.float32)
        at = [array.ctypes.data for array in (rows, *buffers, output)]
        attention = Attention(heads, kv_heads, head_dim, width, tokens, total, total, 0, 0, int8, *at[:3], None, 0, 0)
        attention.output = at[3]
        given = [ctypes.c_void_p(array.ctypes.data) for array in (*by_head, *buffers)]
        if library.tide_ops_attention(instruction_set.encode(), ctypes.byref(attention), *given):
            pytest.skip(f"this CPU has no {instruction_set}")
        for buffer, expected in zip(buffers, stored, strict=True):
            np.testing.assert_array_equal(buffer, expected)
        np.testing.assert_allclose(output, exact[-tokens:], atol=1e-5)
        outputs.append(output)
        np.testing.assert_array_equal(output[-1], outputs[0][-1])  # not even rounding depends on how many there are


def attention_session(
    op_type: str, heads: int, kv_heads: int, head_dim: int, inputs: dict, operators: bool = True, **attributes
) -> ort.InferenceSession:
    """One attention node, its inputs by name, "" where absent; without `operators` its function runs."""
    order = ["query", "key", "value", "past_key", "past_value", "last", "total", "cos", "sin", "", "bias", "sinks"]
    int8 = op_type == INT8
    cache = ir.DataType.INT8 if int8 else ir.DataType.FLOAT
    width = head_dim + SCALE_BYTES * int8

    def value(name: str, array: np.ndarray) -> ir.Value:
        is_cache, is_number = name.startswith("past"), array.dtype == np.int32
        dtype = cache if is_cache else ir.DataType.INT32 if is_number else ir.DataType.FLOAT
        shape = [1, kv_heads, "capacity", width] if is_cache else [None] * array.ndim
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    values = {name: value(name, array) for name, array in inputs.items()}
    attributes |= {"num_heads": heads, "kv_num_heads": kv_heads}
    domain = "com.microsoft" if op_type == ONNX_RUNTIMES else DOMAIN
    node = ir.node(op_type, [values.get(name) for name in order], attributes=attributes, domain=domain, num_outputs=3)
    for output, name in zip(node.outputs, ("output", "present_key", "present_value"), strict=True):
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT if name == "output" else cache)
    imports = {"": 23, DOMAIN: 1, "com.microsoft": 1}
    graph = ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports=imports, name="attention")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if operators:
        register_operators(options)
    functions = [float_attention_function()] if op_type == FLOAT else []
    model = ir.to_proto(ir.Model(graph, ir_version=11, functions=functions))
    return ort.InferenceSession(model.SerializeToString(), options)


attentions = pytest.mark.parametrize(
    ("heads", "head_dim", "rotates", "extras", "attributes"),
    [
        ((6, 2), 32, True, (), {"scale": 0.3}),
        ((4, 4), 16, True, (), {"rotary_interleaved": 1}),
        ((4, 2), 24, False, ("bias",), {"softcap": 3.0}),
        ((4, 1), 40, False, ("sinks", "bias"), {"local_window_size": 300}),
    ],
)


def attention_inputs(
    heads: tuple[int, int], tokens: int, total: int, head_dim: int, rotates: bool, extras: Sequence[str]
) -> dict[str, np.ndarray]:
    """Random inputs of one attention node by their names, K/V in float32."""
    rng, (query_heads, kv_heads), capacity = np.random.default_rng(1), heads, total + 3

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    past = {f"past_{kind}": normal(1, kv_heads, capacity, head_dim) for kind in ("key", "value")}
    inputs = {"query": normal(1, tokens, query_heads * head_dim)}
    inputs |= {kind: normal(1, tokens, kv_heads * head_dim) for kind in ("key", "value")} | past
    inputs |= {"last": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
    made = {"bias": normal(1, query_heads, tokens, total), "sinks": normal(query_heads)}
    inputs |= {name: made[name] for name in extras}
    if rotates:
        angles = np.outer(np.arange(capacity), 10000.0 ** (-2 * np.arange(head_dim // 2) / head_dim)).astype(np.float32)
        inputs |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    return inputs


@pytest.mark.parametrize("tokens", [1, 5, 130])
@attentions
def test_the_operator_for_float32_is_onnx_runtimes_and_so_is_its_function(
    operator_library: Path, tokens: int, heads: tuple[int, int], head_dim: int, rotates: bool, extras, attributes
) -> None:
    inputs = attention_inputs(heads, tokens, 700, head_dim, rotates, extras)
    attributes = attributes | {"do_rotary": int(rotates)}
    expected = attention_session(ONNX_RUNTIMES, *heads, head_dim, inputs, **attributes).run(None, inputs)
    inlined = attention_session(FLOAT, *heads, head_dim, inputs, operators=False, **attributes).run(None, inputs)
    for ours, theirs in zip(inlined, expected, strict=True):
        np.testing.assert_array_equal(ours[:, :, :700], theirs[:, :, :700])
    before = {name: array.copy() for name, array in inputs.items()}
    computed = attention_session(FLOAT, *heads, head_dim, inputs, **attributes).run(None, inputs)
    for ours, theirs in zip(computed, expected, strict=True):
        np.testing.assert_allclose(ours[:, :, :700], theirs[:, :, :700], atol=3e-6)
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array)


@pytest.mark.parametrize("tokens", [1, 5, 130])
@attentions
def test_the_operator_for_int8_is_onnx_runtimes_on_rounded_keys(
    operator_library: Path, tokens: int, heads: tuple[int, int], head_dim: int, rotates: bool, extras, attributes
) -> None:
    total = 700
    inputs = attention_inputs(heads, tokens, total, head_dim, rotates, extras)
    past = {name: packed(inputs[name]) for name in ("past_key", "past_value")}
    inputs |= past
    attributes = attributes | {"do_rotary": int(rotates)}
    int8 = attention_session(INT8, *heads, head_dim, inputs, **attributes)
    before = {name: array.copy() for name, array in past.items()}
    output, key, value = int8.run(None, inputs)  # other memory: the buffers are copied
    for name, present in (("past_key", key), ("past_value", value)):
        np.testing.assert_array_equal(past[name], before[name])
        np.testing.assert_array_equal(present[:, :, : total - tokens], past[name][:, :, : total - tokens])

    # The same in float32, in two steps: new keys as they were stored, and a query that attends to them.
    floats = inputs | {"past_key": unpacked(key), "past_value": unpacked(value)}
    session = attention_session(ONNX_RUNTIMES, *heads, head_dim, floats, **attributes)
    rotated = session.run(None, floats)[1][:, :, total - tokens : total]
    np.testing.assert_allclose(unpacked(packed(rotated)), unpacked(key[:, :, total - tokens : total]), atol=1e-5)
    new = unpacked(value[:, :, total - tokens : total]).swapaxes(1, 2).reshape(1, tokens, -1)
    if not rotates:
        floats["key"] = unpacked(key[:, :, total - tokens : total]).swapaxes(1, 2).reshape(1, tokens, -1)
        (expected, *_) = session.run(None, floats | {"value": new})
        np.testing.assert_allclose(output, expected, atol=3e-6)
    else:  # rotated keys would be rotated again: those of the operator are within rounding of them
        (expected, *_) = session.run(None, floats | {"value": new})
        np.testing.assert_allclose(output, expected, atol=0.02)

    joined = {"query": np.concatenate([inputs[name] for name in ("query", "key", "value")], -1)}
    rest = {name: array for name, array in inputs.items() if name not in ("query", "key", "value")}
    in_one = attention_session(INT8, *heads, head_dim, joined | rest, **attributes)
    np.testing.assert_array_equal(in_one.run(None, joined | rest)[0], output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (1, 1, 60)}, "the heads of queries, keys and buffers do not fit each other"),
        ({"key": (1, 2, 32)}, "the heads of queries, keys and buffers do not fit each other"),
        ({"query": (2, 1, 64)}, r"takes queries and keys \[1, S, \.\.\]"),
        ({"cos": (3, 8), "sin": (3, 8)}, "the tables of the rotation are too small"),
        ({"past_key": (1, 2, 4, 20), "past_value": (1, 2, 4, 20)}, "more tokens than the K/V buffers hold"),
    ],
)
def test_the_operator_refuses(operator_library: Path, change: dict, message: str) -> None:
    shapes = {"query": (1, 1, 64), "key": (1, 1, 32), "value": (1, 1, 32), "past_key": (1, 2, 9, 20)} | change
    shapes = {"past_value": (1, 2, 9, 20)} | shapes
    inputs = {name: np.zeros(shape, np.int8 if "past" in name else np.float32) for name, shape in shapes.items()}
    inputs |= {"last": np.array([4], np.int32), "total": np.array(5, np.int32)}
    session = attention_session(INT8, 4, 2, 16, inputs)
    with pytest.raises(Exception, match=message):
        session.run(None, inputs)


def test_the_reference_rounds_as_the_operator_does() -> None:
    states = np.random.default_rng(2).standard_normal((2, 3, 5, 24), dtype=np.float32)
    states[0, 1, 2] = 0
    np.testing.assert_array_equal(round_to_int8(torch.from_numpy(states)).numpy(), unpacked(packed(states)))


# Rotation inside, windows and shared K/V; further families were run by hand.
@pytest.mark.parametrize(("family", "bits"), [("llama", 32), ("gemma3n (text)", 32), ("llama", 4), ("llama", 8)])
def test_a_graph_equals_the_model_on_rounded_keys(
    family: str, bits: int, operator_library: Path, traces, tmp_path: Path
) -> None:
    source = build(family)
    if bits < 32:
        quantize_model(source, Quantization("rtn", bits, 32, symmetric=True, accuracy_level=4))
    pieces = pieces_of(source, CHECKPOINTS, traces=trace if bits < 32 else traces)
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16)
    deployed = engine_of(source, routers, tmp_path / "bundle", pieces, batch=True, kv_cache=INT8_KV)
    assert deployed.manifest.weights == ("fp32" if bits == 32 else f"int{bits}")
    bundle = deployed.bundle
    engine = deployed if bits == 32 else float32_engine(bundle, 1)
    nodes = list(ir.load(tmp_path / "bundle" / names.GRAPH_FILE).graph.all_nodes())
    assert sum(node.op_type == OP_CACHED_ATTENTION[INT8_KV] for node in nodes) == LAYERS
    assert all(node.op_type != "GroupQueryAttention" for node in nodes)
    middle, tolerance = dividing_thresholds(source, routers, PROMPTS[2]), TOLERANCES["int8 K/V"]
    exact = check_full(engine, source, PROMPTS[2:], NEW_TOKENS)
    with rounded_kv(source, engine.manifest):
        full = check_full(engine, source, PROMPTS, NEW_TOKENS, tolerance=tolerance)
        exits = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, middle, 4, tolerance=tolerance)
        lossless = check_lossless(engine, source, PROMPTS, NEW_TOKENS, 0.3, tolerance=tolerance)
    for check in (full, exits, lossless):
        assert check.holds, check.differences
    assert full.max_error < exact.max_error / 2  # than the model that does not round
    assert lossless.drafted > 0
    assert [one.tokens for one in lossless.generated] == [one.tokens for one in full.generated]
    for mode in ("full", "exit", "lossless"):
        options = {} if mode == "full" else {"threshold": middle}
        options |= {"max_new_tokens": NEW_TOKENS, "mode": mode, "stop_token_ids": []}
        alone = [deployed.generate(prompt, **options).tokens for prompt in PROMPTS]
        assert [one.tokens for one in deployed.generate(PROMPTS, **options)] == alone


def test_export_validate_and_inspect(
    demo_model: Path, demo_bundle: Path, tmp_path: Path, operator_library: Path, traces, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(flow, "trace", traces)
    model, bundle = str(demo_model), str(tmp_path / "bundle")
    options = ["--routers", str(demo_bundle / "routers.safetensors"), "--kv-cache", "int8", "--epsilon", "0", "-q"]
    assert main(["export", model, "-o", bundle, *options]) == 0
    manifest = open_bundle(bundle).manifest
    assert manifest.kv_cache == json.loads((tmp_path / "bundle" / "tide.json").read_text())["kv_cache"] == "int8"
    assert {tensor.dtype for tensor in manifest.inputs if tensor.name.startswith("past")} == {"int8"}
    capsys.readouterr()
    assert main(["inspect", bundle]) == 0
    assert "of K/V in int8 per token" in capsys.readouterr().out
    assert main(["inspect", bundle, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kv_cache"], told["kv_bytes_per_token"]) == ("int8", 12 * 2 * 2 * (32 + SCALE_BYTES))
    numbers = ["--prompts", "3", "--longest-prompt", "24", "--new-tokens", "6", "--threshold", "0.5", "-q"]
    assert main(["validate", bundle, "--model", model, *numbers]) == 0
    said = capsys.readouterr().out
    assert "both with K/V rounded to int8" in said
    assert "HOLDS" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"kv_cache_strategy": "propagate"}}, "kv_cache int8 is for kv_cache_strategy exact"),
        ({"targets": ("tensorrt",), "engines": False}, "kv_cache int8 is for target onnxruntime alone: tensorrt takes"),
    ],
)
def test_what_cannot_hold_int8_is_refused(operator_library: Path, options: dict, message: str) -> None:
    config = TideConfig(kv_cache="int8", **options.pop("config", {}))
    with pytest.raises(ConfigError, match=message):
        ExportRequest("model", "bundle", config=config, **options)


@pytest.fixture(scope="module")
def bundle(operator_library: Path, traces, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with K/V in int8."""
    source, folder = build("llama"), tmp_path_factory.mktemp("int8") / "bundle"
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16)
    engine_of(source, routers, folder, pieces_of(source, CHECKPOINTS, traces=traces), batch=True, kv_cache=INT8_KV)
    return folder


def test_the_prefix_cache_holds_int8(bundle: Path) -> None:
    engine = load(bundle, threads=1)
    block = BLOCK_TOKENS * engine.manifest.kv_token_bytes
    scheduler = engine.scheduler(SchedulerLimits(slots=2, prefix_cache_bytes=2 * block))
    answers = []
    for cached in (0, 2):
        handle = scheduler.submit(PROMPTS[2], mode="full", max_new_tokens=NEW_TOKENS, stop_token_ids=[])
        answers.append(handle.result().tokens)
        assert (handle.cached_tokens, scheduler.prefix_cache_bytes) == (cached * BLOCK_TOKENS, 2 * block)
    assert answers[0] == answers[1]


def test_a_manifest_with_another_type_is_refused(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    for changed, rule in (
        ({"kv_cache": "int4"}, "must be one of"),
        ({"kv_cache_strategy": "propagate"}, "int8 is for"),
    ):
        with pytest.raises(BundleError, match=f"field 'kv_cache' {rule}"):
            Manifest.from_json(replace(manifest, **changed).to_json())


def test_a_model_that_keeps_its_keys_to_itself_has_no_reference(bundle: Path) -> None:
    source, manifest = build("llama"), open_bundle(bundle).manifest
    model = source.model
    model.forward = lambda input_ids, **_: model.lm_head(model.get_input_embeddings()(input_ids))
    message = "does not give its keys and values to transformers' cache"
    with pytest.raises(UnsupportedModelError, match=message), rounded_kv(source, manifest):
        model(torch.tensor([[1, 2]]))
