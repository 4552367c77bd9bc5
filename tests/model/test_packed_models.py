"""GPTQ and AWQ models that stay packed: the bundle holds their own integers and scales, bit for bit, and computes
what the model with the values of these computes."""

import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import packed_models
import pytest
import tiers
import torch
from packed_models import (
    AWQ,
    GPT2,
    GPTQ,
    IDS,
    INT4,
    INT8,
    LLAMA,
    MIXTRAL,
    NVFP4,
    V2,
    Quantizer,
    awq,
    compressed,
    compressed_words,
    float_twin,
    gptq,
    nvfp4,
    write,
    write_mxfp4,
)
from private_memory import peak_of_private_memory
from tiny_engines import engine_of, pieces_of
from transformers import AutoModelForCausalLM, LlamaConfig

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.calibration.parallel import in_parallel
from tide_export.compose.step_graph import compose
from tide_export.errors import ConfigError
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.fp4_matrices import Nvfp4Matrix
from tide_export.model.quantized_experts import JoinedMatrix
from tide_export.model.quantized_integers import IntegerWeight, SourceMatrix, block_size_of
from tide_export.model.quantized_modules import LARGE
from tide_export.model.source import SourceModel, load_model
from tide_export.names.operators import (
    OP_GATED_MATMUL,
    OP_HALF_MATMUL,
    OP_INTEGER_EXPERTS,
    OP_INTEGER_MATMUL,
    OP_MXFP4_EXPERTS,
)
from tide_export.pipeline.flow import export
from tide_export.pipeline.request import ExportRequest
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.verify.parity import TOLERANCES, check_full
from tide_export.verify.quantized import float32_engine, restore, stored_matrices

PROMPTS = [IDS[0].tolist(), [7], [(i * 37) % 90 + 3 for i in range(30)]]
TIED = LlamaConfig(**LLAMA.to_diff_dict() | {"tie_word_embeddings": True, "attention_bias": True})
INTEGERS = {bits: {plain, OP_GATED_MATMUL[plain]} for bits, plain in OP_INTEGER_MATMUL.items()}
WITH_ZEROS = {"MatMulNBits"}
ANY = {*INTEGERS[4], *INTEGERS[8], *WITH_ZEROS, *OP_INTEGER_EXPERTS.values()}
FUSED = [1, 1, 1, 1, 1, 2, 2, 3, 3]  # head; o and down of each layer; gate and up; q, k and v
APART = [1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3]  # gate and up apart, which have no such operator with zero points

# Model, settings, quantizer; whether there are no zero points, the operators that multiply, and the number of matrices
# in each of their nodes.
CASES: dict[str, tuple[Any, dict[str, Any], Quantizer, bool, set[str], list[int]]] = {
    "gptq": (LLAMA, GPTQ, gptq(symmetric=True), True, INTEGERS[4], FUSED),
    "gptq, zero points": (LLAMA, GPTQ, gptq(), False, WITH_ZEROS, APART),
    "gptq, second version, order of activations": (
        *(LLAMA, GPTQ | V2 | {"desc_act": True}, gptq(second_version=True, act_order=True, symmetric=True)),
        *(True, INTEGERS[4], FUSED),
    ),
    "gptq, whole columns, tied embeddings, biases": (
        *(TIED, GPTQ | {"group_size": -1}, gptq(symmetric=True, group=-1), True, INTEGERS[4], FUSED[1:]),
    ),
    "gptq, 8 bits, one projection, inputs first": (
        *(GPT2, GPTQ | {"bits": 8}, gptq(8, symmetric=True), True, {OP_INTEGER_MATMUL[8]}, [1] * 8),
    ),
    "awq": (LLAMA, AWQ, awq, False, WITH_ZEROS, APART),
    "compressed-tensors": (*(LLAMA, compressed("pack-quantized", INT4), compressed_words(), True, INTEGERS[4], FUSED),),
    "compressed-tensors, 8 bits, one scale a row": (
        *(LLAMA, compressed("pack-quantized", INT8), compressed_words(8, whole=True), True, INTEGERS[8], FUSED),
    ),
    "compressed-tensors, zero points": (
        *(LLAMA, compressed("pack-quantized", INT4 | {"symmetric": False}), compressed_words(zeros=True), False),
        *(WITH_ZEROS, APART),
    ),
    "compressed-tensors, experts": (
        *(MIXTRAL, compressed("pack-quantized", INT4), compressed_words(), True),
        *({OP_INTEGER_MATMUL[4], OP_INTEGER_EXPERTS[OP_INTEGER_MATMUL[4]]}, [1] * 3 + [3] * 2 + [4] * 4),
    ),
    "compressed-tensors, nvfp4": (
        *(LLAMA, compressed("nvfp4-pack-quantized", NVFP4), nvfp4, True, INTEGERS[8], FUSED),
    ),
    "gptq, experts": (
        *(MIXTRAL, GPTQ, gptq(symmetric=True), True, {OP_INTEGER_MATMUL[4], OP_INTEGER_EXPERTS[OP_INTEGER_MATMUL[4]]}),
        [1] * 3 + [3] * 2 + [4] * 4,  # head and o; q, k and v; the four experts' gate and up, and down, of each layer
    ),
    "awq, experts": (MIXTRAL, AWQ, awq, False, WITH_ZEROS, [1] * 19 + [3] * 2),
}
BITS_AND_SIZES = {
    "gptq, 8 bits, one projection, inputs first": (8, 32),
    "compressed-tensors, 8 bits, one scale a row": (8, 32),
    "compressed-tensors, nvfp4": (8, 16),
}


IN_BUNDLES = ("gptq, second version, order of activations", "awq", "gptq, experts")


def loaded(case: str, tmp_path: Path) -> tuple[SourceModel, dict[str, torch.Tensor]]:
    """A packed model with its integers left packed, and the values of the matrices, by their names."""
    config, settings, quantize, symmetric, *_ = CASES[case]
    tensors, _ = write(tmp_path / "model", config, settings, quantize, inputs_first=config is GPT2)
    twin = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    source, plain = load_model(tmp_path / "model", packed=True), load_model(tmp_path / "model")
    assert source.quantized is not None
    bits, size = BITS_AND_SIZES.get(case, (4, 32))
    assert source.quantized.settings == Quantization("checkpoint", bits, size, symmetric, 4)
    weights = {name: matrix_of(twin, name) for name in source.quantized.blocks}
    kept = {name if is_parameter(twin, name) else name.rpartition(".")[0] for name in weights}
    assert all(source.model.get_parameter(name).is_meta for name in kept), "a packed weight is in memory"
    assert source.weights_sha256 == plain.weights_sha256
    assert torch.equal(source.run(IDS, []).logits, twin(IDS).logits)
    rows = {name: weight.T if config is GPT2 else weight for name, weight in weights.items()}
    for name, matrix in source.quantized.blocks.items():
        assert isinstance(matrix, SourceMatrix | JoinedMatrix | Nvfp4Matrix)
        np.testing.assert_array_equal(matrix.values(), rows[name].numpy(), err_msg=name)
    return source, rows


@pytest.mark.parametrize("case", [case for case in CASES if case not in IN_BUNDLES])
def test_matrices_stay_packed(case: str, tmp_path: Path) -> None:
    loaded(case, tmp_path)


@pytest.mark.parametrize("case", tiers.exhaustive_but(IN_BUNDLES, CASES))
def test_a_bundle_holds_the_integers_of_its_model(case: str, tmp_path: Path) -> None:
    source, rows = loaded(case, tmp_path)
    *_, operators, in_a_node = CASES[case]
    assert source.quantized is not None
    deployed = engine_of(source, random_routers(source, (1,), PROMPTS[0], bottleneck=8), tmp_path / "bundle")
    bundle = deployed.bundle
    found = list(stored_matrices(bundle))
    assert sorted(len(names) for names, _ in found) == in_a_node
    assert {name for names, _ in found for name in names} == rows.keys()
    for names, whole in found:
        for name, part in zip(names, whole.split([len(rows[name]) for name in names]), strict=True):
            matrix, expected = source.quantized.blocks[name], rows[name].numpy()
            order = matrix.order if isinstance(matrix, SourceMatrix) else None
            in_order = expected if order is None else expected[:, order]
            np.testing.assert_array_equal(part.values(), in_order, err_msg=name)
    assert restore(load_model(tmp_path / "model"), bundle) is None, "the model has the values already"
    graph = inlined(bundle.path)
    assert {node.op_type for node in graph.all_nodes()} & ANY == operators
    assert not [name for name in graph.initializers if name.removesuffix(".T") in rows], "stored in float32 too"

    exact = check_full(float32_engine(bundle, 1), source, PROMPTS, 8)
    assert exact.holds, exact.differences
    assert exact.within_tolerance == 0
    assert exact.max_error < 1e-4 * exact.largest_logit
    rounded = check_full(deployed, source, PROMPTS, 8, tolerance=TOLERANCES["int8 matmuls"])
    assert rounded.holds, (rounded.max_error, rounded.largest_logit, rounded.differences)


def is_parameter(model: Any, name: str) -> bool:
    return name in dict(model.named_parameters())


def matrix_of(model: Any, name: str) -> torch.Tensor:
    """The parameter `name`, or that of the expert whose number ends the name."""
    if is_parameter(model, name):
        return model.get_parameter(name).detach()
    parameter, _, expert = name.rpartition(".")
    return model.get_parameter(parameter).detach()[int(expert)]


def inlined(bundle: Path) -> ir.Graph:
    model = ir.load(bundle / "model.onnx")
    inline_layers(model)
    return model.graph


@pytest.mark.parametrize("bits", [2, 3])
def test_integers_that_no_operator_takes_are_widened(bits: int, tmp_path: Path) -> None:
    tensors, _ = write(tmp_path / "model", LLAMA, GPTQ | {"bits": bits}, gptq(bits))
    source = load_model(tmp_path / "model", packed=True)
    assert source.quantized is None
    twin = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    assert torch.equal(source.run(IDS, []).logits, twin(IDS).logits)


def test_experts_in_another_order_are_widened_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a token's experts would read its inputs in an order of its own."""
    by_activation = gptq(second_version=True, act_order=True, symmetric=True)
    tensors, _ = write(tmp_path / "model", MIXTRAL, GPTQ | V2 | {"desc_act": True}, by_activation)
    source = load_model(tmp_path / "model", packed=True)
    assert source.quantized is not None
    kinds = {name.split(".")[-2] for name in source.quantized.blocks}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads = set(in_parallel(source, lambda _: threading.get_ident(), range(4)))
    assert threads == {threading.get_ident()}, "a module's weight is there only while one thread runs it"
    twin = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    assert torch.equal(source.run(IDS, []).logits, twin(IDS).logits)


@pytest.mark.parametrize("accuracy_level", tiers.exhaustive_beyond(1, [4, 1]))
def test_experts_in_mxfp4_stay_in_their_codes(tmp_path: Path, accuracy_level: int) -> None:
    dense = write_mxfp4(tmp_path / "model")
    source, plain = load_model(tmp_path / "model", packed=True), load_model(tmp_path / "model")
    assert source.quantized is not None
    assert source.quantized.settings == Quantization("checkpoint", 4, 32, True, 4)
    assert source.weights_sha256 == plain.weights_sha256
    assert torch.equal(source.run(IDS, []).logits, plain.run(IDS, []).logits)
    for name, values in dense.items():
        assert source.model.get_parameter(name).is_meta
        assert torch.equal(source.weight(name), values)
    bundle = open_bundle(exported(tmp_path, accuracy_level=accuracy_level))
    operators = [node.op_type for node in inlined(bundle.path).all_nodes()]
    assert operators.count(OP_MXFP4_EXPERTS) == (4 if accuracy_level == 4 else 0)
    assert operators.count("MatMulNBits") == (0 if accuracy_level == 4 else 16)
    for names, whole in stored_matrices(bundle):
        for name, part in zip(names, whole.split([whole.rows // len(names)] * len(names)), strict=True):
            parameter, _, expert = name.rpartition(".")
            np.testing.assert_array_equal(part.values(), dense[parameter][int(expert)].T)
    exact = check_full(float32_engine(bundle, 1), source, PROMPTS, 8)
    assert exact.holds, exact.differences
    assert exact.max_error < 1e-4 * exact.largest_logit


def test_groups_that_no_block_fits_are_not_cut() -> None:
    def size(groups: torch.Tensor, bits: int = 4) -> int | None:
        scales = torch.ones(int(groups.max()) + 1, 8)
        words = torch.zeros(len(groups) * bits // 32, 8, dtype=torch.int32)
        return block_size_of(IntegerWeight(words, lambda _: words, bits, scales, scales.short(), groups))

    assert size(torch.arange(2048) // 1024) == 256
    assert size(torch.arange(192) // 128) == 128  # the last group is shorter
    assert size(torch.arange(96) // 48) == 16
    assert size(torch.arange(200) * 0) == 16  # one group: the last block is padded
    assert size(torch.arange(64).flip(0) // 32) == 32
    assert size(torch.arange(64) // 8) is None
    assert size(torch.arange(64) // 32, bits=2) is None


def exported(folder: Path, **options: Any) -> Path:
    random_routers(load_model(folder / "model"), (1,), PROMPTS[0], bottleneck=8).save(folder / "routers.safetensors")
    config, routers = TideConfig(checkpoints=(1,), min_layers=1), folder / "routers.safetensors"
    return export(str(folder / "model"), folder / "out", routers=routers, config=config, **options)


def tokens(bundle: Path) -> list[int]:
    return load(bundle).generate(PROMPTS[0], max_new_tokens=8, mode="full", stop_token_ids=[]).tokens


def test_a_packed_model_is_exported_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the check packs its integers for one engine at a time."""
    opened: list[weakref.ref[Engine]] = []

    def opens(*arguments: Any, **options: Any) -> Engine:
        assert not [engine for engine in opened if engine() is not None], "the engine before is still there"
        engine = open_engine(*arguments, **options)
        opened.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr("tide_export.verify.quantized.open_engine", opens)
    tensors, _ = write(tmp_path / "model", LLAMA, GPTQ, gptq(symmetric=True))
    twin = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    bundle = exported(tmp_path)
    assert len(opened) == 2, "with matmuls in float32, and as deployed"
    assert "another precision" not in caplog.text, "routers are calibrated on the values that the integers stand for"
    assert open_bundle(bundle).manifest.weights == "int4"
    ids = twin.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens(bundle) == ids[0, len(PROMPTS[0]) :].tolist()


def test_matrices_beside_packed_experts_stay_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_models, "QUANTIZED", re.compile(r"(_proj|w[123])\.weight$"))
    write(
        tmp_path / "model", type(MIXTRAL)(**MIXTRAL.to_diff_dict() | {"dtype": "float16"}), GPTQ, gptq(symmetric=True)
    )
    source = load_model(tmp_path / "model", packed=True)
    assert any(name.endswith("experts.down_proj.3") for name in source.quantized.blocks)
    assert source.exact_in == ("fp16",)


@pytest.mark.parametrize("tied", tiers.exhaustive_beyond(1, [True, False]))
def test_matrices_in_16_bits_stay_so_beside_integers(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_models, "QUANTIZED", re.compile(r"_proj\.weight$"))
    half = LlamaConfig(
        **LLAMA.to_diff_dict() | {"dtype": "float16", "tie_word_embeddings": tied, "vocab_size": LARGE // 64}
    )
    tensors, _ = write(tmp_path / "model", half, GPTQ, gptq(symmetric=True))
    twin = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    source = load_model(tmp_path / "model", packed=True)
    assert source.exact_in == ("fp16",)
    assert {name for name, weight in source.model.named_parameters() if not weight.is_meta} == {
        name for name, weight in twin.named_parameters() if weight.dim() == 1
    }
    bundle = exported(tmp_path, accuracy_level=1)
    settings = open_bundle(bundle).manifest.quantization
    assert settings is not None
    assert settings.accuracy_level == 1
    graph = inlined(bundle)
    assert [node.op_type for node in graph.all_nodes()].count(OP_HALF_MATMUL["fp16"]) == 1  # the head
    wide = [name for name, value in graph.initializers.items() if value.dtype == ir.DataType.FLOAT and value.shape]
    assert not [name for name in wide if "embed_tokens" in name or "lm_head" in name]
    halves = [name for name, value in graph.initializers.items() if value.dtype == ir.DataType.FLOAT16]
    assert len(halves) == (1 if tied else 2)
    ids = twin.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens(bundle) == ids[0, len(PROMPTS[0]) :].tolist()


@pytest.mark.exhaustive
def test_matrices_in_16_bits_are_written_from_the_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 64 MiB in float32 was there twice, read and transposed, beside its copy in 16 bits."""
    monkeypatch.setattr(packed_models, "QUANTIZED", re.compile(r"_proj\.weight$"))
    half = LlamaConfig(**LLAMA.to_diff_dict() | {"dtype": "float16", "vocab_size": 2**18})
    write(tmp_path / "model", half, GPTQ, gptq(symmetric=True))
    source = load_model(tmp_path / "model", packed=True)
    routers = random_routers(source, (1,), PROMPTS[0], bottleneck=8)
    pieces = pieces_of(source, (1,))
    with peak_of_private_memory() as gained:
        graph = lower_for_onnxruntime(compose(pieces, routers.arrays(), None), source.quantized, "fp16")
        ir.save(graph, tmp_path / "model.onnx", external_data=WEIGHTS_FILE)
    assert (tmp_path / WEIGHTS_FILE).stat().st_size > 64 << 20
    assert gained.bytes < 24 << 20


def test_what_is_kept_packed() -> None:
    assert ExportRequest("model", "out").loading["packed"]
    for options in ({"weights": "fp32"}, {"weights": "int4"}, {"device_map": "auto"}):
        assert not ExportRequest("model", "out", **options).loading["packed"]


def test_an_accuracy_level_is_for_integers(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no integers that are kept: --accuracy-level is for int8 and int4"):
        exported(tmp_path, accuracy_level=1)
