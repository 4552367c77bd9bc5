"""Weights stored in bfloat16: the kernels for every instruction set, the graphs against the oracle, with the operators
and without them."""

import ctypes
import json
import logging
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from families import build
from tiny_configs import CHECKPOINTS, LAYERS
from tiny_engines import engine_of, pieces_of

from tide_export import names
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import ConfigError, ProviderError
from tide_export.lower.onnxruntime.bf16_weights import bf16_matmul_function
from tide_export.model.source import load_model
from tide_export.names import DOMAIN, OP_BF16_MATMUL
from tide_export.pipeline import flow, weights
from tide_export.quantize.bf16 import round_to_bf16
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import load
from tide_export.runtime.onnxruntime import operators
from tide_export.runtime.onnxruntime.operators import load_operators, register_operators
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full
from tide_export.verify.quantized import restore

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
NEW_TOKENS = 16
FAMILIES = ("llama (3.1)", "gpt2", "qwen3_moe")  # a tied head, biases and Conv1D, experts


def bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers."""
    return np.ascontiguousarray((array.view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "baseline"])
@pytest.mark.parametrize(("n_size", "k_size"), [(1, 1), (7, 31), (5, 64), (9, 200), (64, 576)])
def test_a_kernel(operator_library: Path, instruction_set: str, n_size: int, k_size: int) -> None:
    library = load_operators(operator_library)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((19, k_size), dtype=np.float32)
    weights = bf16(rng.standard_normal((n_size, k_size), dtype=np.float32))
    exact = x.astype(np.float64) @ (weights.astype(np.uint32) << 16).view(np.float32).T.astype(np.float64)
    rows: dict[int, np.ndarray] = {}
    for m_size in (*range(1, 15), 19):
        y, split = np.full((m_size, n_size), np.nan, np.float32), np.empty((m_size, k_size), np.float32)
        sizes = (ctypes.c_int64(size) for size in (m_size, n_size, k_size))
        arrays = (ctypes.c_void_p(array.ctypes.data) for array in (x, weights))
        results = (ctypes.c_void_p(array.ctypes.data) for array in (split, y))
        if library.tide_ops_bf16_matmul(instruction_set.encode(), *arrays, *sizes, *results):
            pytest.skip(f"this CPU has no {instruction_set}")
        np.testing.assert_allclose(y, exact[:m_size], rtol=1e-5, atol=1e-6 * k_size)
        rows[m_size] = y
    for m_size, y in rows.items():  # not even rounding depends on how many rows there are
        np.testing.assert_array_equal(y[:1], rows[1])
        np.testing.assert_array_equal(y, rows[19][:m_size])


def operator_model(columns: int = 64) -> bytes:
    """x [m, 2, K] times weights [48, 64]."""
    values = np.random.default_rng(1).standard_normal((48, 64), dtype=np.float32)
    weights = ir.tensor(torch.from_numpy(values).bfloat16(), name="weights")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["m", 2, columns]))
    stored = ir.Value(name="weights", type=ir.TensorType(weights.dtype), shape=weights.shape, const_value=weights)
    node = ir.node(OP_BF16_MATMUL, [x, stored], domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[stored], opset_imports=imports, name="product")
    model = ir.Model(graph, ir_version=11, functions=[bf16_matmul_function(23)])
    return ir.to_proto(model).SerializeToString()


@pytest.mark.parametrize("rows", [0, 1, 9, 1200])
def test_the_operator_is_the_function(operator_library: Path, rows: int, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    register_operators(options, "bf16")
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session, plain = ort.InferenceSession(operator_model(), options), ort.InferenceSession(operator_model())
    x = np.random.default_rng(2).standard_normal((rows, 2, 64), dtype=np.float32)
    (y,), (expected,) = session.run(None, {"x": x}), plain.run(None, {"x": x})
    assert y.shape == (rows, 2, 48)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    events = json.loads(Path(session.end_profiling()).read_text())
    assert OP_BF16_MATMUL in {event.get("args", {}).get("op_name") for event in events}


def test_the_operator_refuses_another_width(operator_library: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_operators(options, "bf16")
    session = ort.InferenceSession(operator_model(32), options)
    with pytest.raises(Exception, match=r"takes x \[\.\., K\] and weights"):
        session.run(None, {"x": np.zeros((1, 2, 32), np.float32)})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_equals_the_model(family: str, operator_library: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    source = build(family)
    assert 0 < round_to_bf16(source) < 0.01
    assert round_to_bf16(source) == 0
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=8)
    pieces = pieces_of(source, CHECKPOINTS)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces, batch=True, bf16=True)
    assert engine.manifest.weights == "bf16"
    graph = ir.load(tmp_path / "bundle" / names.GRAPH_FILE)
    nodes = list(graph.graph.all_nodes())
    assert sum(node.op_type == OP_BF16_MATMUL for node in nodes) > 4 * LAYERS
    wide = [v for v in graph.graph.initializers.values() if v.dtype == ir.DataType.FLOAT and v.const_value.size > 4096]
    assert [value.name for value in wide] == (["model.transformer.wpe.weight"] if family == "gpt2" else [])

    full = check_full(engine, source, PROMPTS, NEW_TOKENS)
    assert full.holds, full.differences
    assert full.max_error < 1e-4 * full.largest_logit
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, middle, 4)
    assert check.holds, check.differences
    expected = engine.generate(PROMPTS[2], max_new_tokens=NEW_TOKENS, mode="full", stop_token_ids=[]).tokens
    lossless = engine.generate(PROMPTS[2], max_new_tokens=NEW_TOKENS, mode="lossless", threshold=0.3, stop_token_ids=[])
    assert lossless.tokens == expected
    for mode in ("full", "exit", "lossless"):
        options = {} if mode == "full" else {"threshold": middle}
        options |= {"max_new_tokens": NEW_TOKENS, "mode": mode, "stop_token_ids": []}
        alone = [engine.generate(prompt, **options) for prompt in PROMPTS]
        for one, other in zip(engine.generate(PROMPTS, **options), alone, strict=True):
            assert one.tokens == other.tokens
            # Drafts of several are verified when others go deep, so which tokens exited differs.
            assert mode == "lossless" or one.stats.exit_layer == other.stats.exit_layer

    monkeypatch.setattr(operators, "LIBRARY", tmp_path / "none.so")
    operators._warn_missing.cache_clear()
    with caplog.at_level(logging.WARNING, "tide_export"):
        widened = load(tmp_path / "bundle", threads=1)
        load(tmp_path / "bundle", threads=1)
    assert caplog.text.count("operators for weights in bfloat16 are not installed") == 1
    assert widened.generate(PROMPTS[2], max_new_tokens=NEW_TOKENS, mode="full", stop_token_ids=[]).tokens == expected


def test_a_library_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch, operator_library: Path) -> None:
    other = tmp_path / "libtide_ops.so"
    other.write_bytes(b"not for this machine")
    monkeypatch.setattr(operators, "LIBRARY", other)
    with pytest.raises(ProviderError, match=r"libtide_ops.so' is no library of operators for this machine"):
        register_operators(ort.SessionOptions(), "bf16")
    monkeypatch.setattr(operators, "LIBRARY", operator_library)
    monkeypatch.setattr(operators, "__version__", "99.0")
    load_operators.cache_clear()
    with pytest.raises(ProviderError, match=r"is of tide_export [\d.]+, not 99.0: install tide_export again"):
        register_operators(ort.SessionOptions(), "bf16")


def test_export_and_validate(tmp_path: Path, operator_library: Path, capsys: pytest.CaptureFixture) -> None:
    source = build("llama")
    source.model.save_pretrained(tmp_path / "model")
    random_routers(source, CHECKPOINTS, PROMPTS[2]).save(tmp_path / "routers.safetensors")
    arguments = ["--routers", str(tmp_path / "routers.safetensors"), "--weights", "bf16"]
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "bundle"), *arguments]) == 0
    assert "rounded the weights to bfloat16, which changed them by 0.1" in capsys.readouterr().err
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.manifest.weights == "bf16"
    assert bundle.manifest.quantization is None
    loaded = load_model(str(tmp_path / "model"))
    assert not loaded.exact_in_bf16
    assert 0 < restore(loaded, bundle) < 0.01
    loaded.model.save_pretrained(tmp_path / "exact")
    exact = load_model(str(tmp_path / "exact"))
    assert exact.exact_in_bf16
    assert restore(exact, bundle) is None


def test_weights_by_default(operator_library: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    source = build("llama")
    round_to_bf16(source)
    source.model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model, routers = str(tmp_path / "model"), tmp_path / "routers.safetensors"
    random_routers(load_model(model), CHECKPOINTS, PROMPTS[2]).save(routers)
    with caplog.at_level(logging.INFO, "tide_export"):
        bundle = open_bundle(flow.export(model, tmp_path / "bundle", routers=routers))  # compared with the model there
    assert bundle.manifest.weights == "bf16"
    assert "are bfloat16 numbers and are stored as such" in caplog.text
    nodes = ir.load(bundle.file(names.GRAPH_FILE).path).graph.all_nodes()
    assert any(node.op_type == OP_BF16_MATMUL for node in nodes)

    chosen = []

    def stop(_source, request, *_) -> None:
        chosen.append(request.weights)
        raise ConfigError("enough")

    monkeypatch.setattr(flow, "prepare_weights", stop)
    caplog.clear()
    for options in ({}, {"weights": "fp32"}):
        with pytest.raises(ConfigError, match="enough"):
            flow.export(model, tmp_path / "other", routers=routers, **options)
    monkeypatch.setattr(weights, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(ConfigError, match="enough"):
        flow.export(model, tmp_path / "other", routers=routers)
    assert chosen == ["bf16", "fp32", "fp32"]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "stored in float32, because the operators for bfloat16 are not installed" in warnings[0]
