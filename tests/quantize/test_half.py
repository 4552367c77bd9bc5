"""Weights stored in bfloat16 and float16: the kernels for every instruction set, the graphs against the oracle, with
the operators and without them."""

import ctypes
import logging
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiers
import torch
from families import build
from ort_sessions import opened, operators_of
from tiny_configs import CHECKPOINTS, LAYERS, small_llama
from tiny_engines import engine_of, pieces_of
from transformers import LlamaForCausalLM

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import ConfigError
from tide_export.graph.rewriting import HALF
from tide_export.lower.onnxruntime.half_weights import half_matmul_function
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.model.source import SourceModel, load_model, wrap_model
from tide_export.names.operators import DOMAIN, OP_GATED_MATMUL, OP_HALF_MATMUL
from tide_export.pipeline import flow
from tide_export.quantize.half import round_to_half
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full
from tide_export.verify.quantized import restore
from tide_export.verify.step_graph import StepGraph

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
NEW_TOKENS = 16
# One operator for gate and up, a tied head, biases and Conv1D, experts.
MODELS = (
    ("llama", "bf16"),
    ("gpt2", "fp16"),
    ("qwen3_moe", "bf16"),
    ("llama", "fp16"),
    ("llama (3.1)", "bf16"),
    ("llama (3.1)", "fp16"),
    ("gpt2", "bf16"),
)
GATED = {"llama": LAYERS, "qwen3_moe": 1}  # MLPs with SiLU and without biases; qwen3_moe: mlp_only_layers
INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


def stored(array: np.ndarray, weights: str) -> np.ndarray:
    """float32 numbers, without their lower bits, as the 16 of that type."""
    return np.ascontiguousarray(array.astype(HALF[weights].numpy()))


def product(library: Path, instruction_set: str, x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """By the kernel of that instruction set; skips the test where this CPU has none."""
    y = np.full((len(x), len(numbers)), np.nan, np.float32)
    sizes = (ctypes.c_int64(size) for size in (*y.shape, x.shape[1]))
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (x, numbers))
    formats = [HALF[weights].numpy() for weights in OP_HALF_MATMUL]
    kernel = ctypes.CDLL(str(library)).half_matmul
    if kernel(instruction_set.encode(), formats.index(numbers.dtype), *arrays, *sizes, ctypes.c_void_p(y.ctypes.data)):
        pytest.skip(f"this CPU has no {instruction_set}")
    return y


@pytest.mark.parametrize("weights", OP_HALF_MATMUL)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("n_size", "k_size"), [(1, 1), (7, 31), (5, 64), (9, 200), (64, 576)])
def test_a_kernel(kernels: Path, instruction_set: str, n_size: int, k_size: int, weights: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((19, k_size), dtype=np.float32)
    numbers = stored(rng.standard_normal((n_size, k_size), dtype=np.float32), weights)
    exact = x.astype(np.float64) @ numbers.T.astype(np.float64)
    rows: dict[int, np.ndarray] = {}
    for m_size in (*range(1, 15), 19):
        y = product(kernels, instruction_set, x[:m_size], numbers)
        np.testing.assert_allclose(y, exact[:m_size], rtol=1e-5, atol=1e-6 * k_size)
        rows[m_size] = y
    for m_size, y in rows.items():  # not even rounding depends on how many rows there are
        np.testing.assert_array_equal(y[:1], rows[1])
        np.testing.assert_array_equal(y, rows[19][:m_size])


@pytest.mark.parametrize("weights", OP_HALF_MATMUL)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_number_is_widened_exactly(kernels: Path, instruction_set: str, weights: str) -> None:
    numbers = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(HALF[weights].numpy())
    with np.errstate(invalid="ignore"):
        values = numbers.astype(np.float32)
    one = np.ones((1, 1), np.float32)  # infinities and NaN too
    np.testing.assert_array_equal(product(kernels, instruction_set, one, numbers.reshape(-1, 1)), values[np.newaxis])
    finite = numbers[np.isfinite(values)].reshape(-1, 64)
    picked = product(kernels, instruction_set, np.eye(64, dtype=np.float32), finite)
    np.testing.assert_array_equal(picked, finite.T.astype(np.float32))


def operator_model(weights_type: str, columns: int = 64) -> ir.Model:
    """x [m, 2, K] times weights [48, 64]."""
    values = np.random.default_rng(1).standard_normal((48, 64), dtype=np.float32)
    weights = ir.tensor(values.astype(HALF[weights_type].numpy()), dtype=HALF[weights_type], name="weights")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["m", 2, columns]))
    stored = ir.Value(name="weights", type=ir.TensorType(weights.dtype), shape=weights.shape, const_value=weights)
    node = ir.node(OP_HALF_MATMUL[weights_type], [x, stored], domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[stored], opset_imports=imports, name="product")
    return ir.Model(graph, ir_version=11, functions=[half_matmul_function(weights_type, 23)])


@pytest.mark.parametrize("weights", OP_HALF_MATMUL)
@pytest.mark.parametrize("rows", [0, 1, 9, 1200])
def test_the_operator_is_the_function(rows: int, weights: str, tmp_path: Path) -> None:
    model = operator_model(weights)
    session, plain = opened(model, tmp_path), opened(model, operators=False)
    x = np.random.default_rng(2).standard_normal((rows, 2, 64), dtype=np.float32)
    (y,), (expected,) = session.run(None, {"x": x}), plain.run(None, {"x": x})
    assert y.shape == (rows, 2, 48)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert OP_HALF_MATMUL[weights] in operators_of(session)


def test_the_operator_refuses_another_width() -> None:
    session = opened(operator_model("bf16", 32))
    with pytest.raises(Exception, match=r"take x \[\.\., K\] and weights"):
        session.run(None, {"x": np.zeros((1, 2, 32), np.float32)})


@pytest.mark.parametrize(("family", "weights"), tiers.exhaustive_beyond(3, MODELS))
def test_a_graph_equals_the_model(family: str, weights: str, tmp_path: Path) -> None:
    source = build(family)
    assert 0 < round_to_half(source, weights) < 0.01
    assert round_to_half(source, weights) == 0
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=8)
    pieces = pieces_of(source, CHECKPOINTS)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces, half=weights)
    assert engine.manifest.weights == weights
    graph = ir.load(tmp_path / "bundle" / GRAPH_FILE)
    inline_layers(graph)
    nodes = list(graph.graph.all_nodes())
    kinds = [node.op_type for node in nodes]
    plain, gated = (kinds.count(op) for op in (OP_HALF_MATMUL[weights], OP_GATED_MATMUL[OP_HALF_MATMUL[weights]]))
    assert (gated, plain > 4 * LAYERS) == (GATED.get(family, 0), family != "llama")
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

    state = engine.start([NEVER_EXIT] * len(CHECKPOINTS))
    by_functions = StepGraph(engine.bundle).start([NEVER_EXIT] * len(CHECKPOINTS), 0).step(PROMPTS[2]).logits
    np.testing.assert_allclose(by_functions, state.step(PROMPTS[2]).logits, rtol=1e-3, atol=1e-3)


def two_layers() -> SourceModel:
    """A Llama that is traced in a second."""
    torch.manual_seed(0)
    return wrap_model(LlamaForCausalLM(small_llama(vocab_size=512, width=64, layers=2, context=64)), "tiny")


@pytest.mark.parametrize(
    ("weights", "changed"),
    tiers.exhaustive_beyond(1, [("bf16", "bfloat16, which changed them by 0.1"), ("fp16", "float16")]),
)
def test_export_and_validate(weights: str, changed: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = two_layers()
    source.model.save_pretrained(tmp_path / "model")
    random_routers(source, (1,), PROMPTS[2]).save(tmp_path / "routers.safetensors")
    arguments = ["--routers", str(tmp_path / "routers.safetensors"), "--weights", weights]
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "bundle"), *arguments]) == 0
    assert f"rounded the weights to {changed}" in capsys.readouterr().err
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.manifest.weights == weights
    assert bundle.manifest.quantization is None
    loaded = load_model(str(tmp_path / "model"))
    assert not loaded.exact_in
    assert 0 < restore(loaded, bundle) < 0.01
    loaded.model.save_pretrained(tmp_path / "exact")
    exact = load_model(str(tmp_path / "exact"))
    assert exact.exact_in == (weights,)
    assert restore(exact, bundle) is None


def test_a_number_too_large_is_refused() -> None:
    source = build("llama")
    source.structure.layers[1].mlp.up_proj.weight[3, 5] = 1e5
    with pytest.raises(ConfigError, match=r"weight \S*up_proj.weight holds a number too large for float16: use bf16"):
        round_to_half(source, "fp16")


@pytest.mark.parametrize("weights", tiers.exhaustive_beyond(1, OP_HALF_MATMUL))
def test_weights_by_default(weights: str, tmp_path: Path, monkeypatch, caplog) -> None:
    source, name = two_layers(), HALF[weights].numpy().name
    round_to_half(source, weights)
    source.model.to(getattr(torch, name)).save_pretrained(tmp_path / "model")
    model, routers = str(tmp_path / "model"), tmp_path / "routers.safetensors"
    random_routers(load_model(model), (1,), PROMPTS[2]).save(routers)
    with caplog.at_level(logging.INFO, "tide_export"):
        bundle = open_bundle(flow.export(model, tmp_path / "bundle", routers=routers))  # compared with the model there
    assert bundle.manifest.weights == weights
    assert f"are {name} numbers and are stored as such" in caplog.text
    nodes = ir.load(bundle.file(GRAPH_FILE).path).graph.all_nodes()
    assert any(node.op_type == OP_HALF_MATMUL[weights] for node in nodes)

    chosen = []

    def stop(_source, request, *_) -> None:
        chosen.append(request.weights)
        raise ConfigError("enough")

    monkeypatch.setattr(flow, "prepare_weights", stop)
    caplog.clear()
    for options in ({}, {"weights": "fp32"}):
        with pytest.raises(ConfigError, match="enough"):
            flow.export(model, tmp_path / "other", routers=routers, **options)
    assert chosen == [weights, "fp32"]
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
