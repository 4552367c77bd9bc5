"""Networks for CUDA: the operators they have, in 16 and 4 bits, and that each has a kernel in ONNX Runtime."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from families import build
from tiny_configs import small_llama
from tiny_engines import bound, engine_of, segments_of
from transformers import LlamaForCausalLM

from tide_export.bundle.attention_kernels import attention_kernel, attention_kernels
from tide_export.bundle.file_names import network_file
from tide_export.bundle.inspect import describe, render
from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.compose.cut import Pieces, cut
from tide_export.errors import BuildError, GraphError, ProviderError, UnsupportedModelError
from tide_export.graph.rewriting import FLOAT
from tide_export.lower.cuda.kernels import KERNELS, check_kernels, check_nodes, kernels
from tide_export.lower.cuda.lower import check_for_cuda, networks_for_cuda
from tide_export.model.source import SourceModel, wrap_model
from tide_export.names.networks import HEAD, segment_name
from tide_export.plans.rebuild import rebuild
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.rounding import round_with_scales_in
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import open_engine
from tide_export.verify.parity import TOLERANCES, check_full
from tide_export.verify.pytorch.networks import open_torch

CHECKPOINT = 2
BFLOAT16, HALF = ir.DataType.BFLOAT16.numpy(), np.dtype(np.float16)
INT4 = Quantization("rtn", 4, 32, True, 4)
PROMPTS = [[7], [(i * 37) % 500 + 3 for i in range(40)]]


def made(family: str, traces, quantized: np.dtype | None = None) -> tuple[SourceModel, RouterSet, Pieces]:
    source = build(family)
    if quantized is not None:
        quantize_model(source, INT4, (), round_with_scales_in(quantized))
    routers = random_routers(source, (CHECKPOINT,), range(3, 43), bottleneck=16)
    return source, routers, cut(traces(source, routers.checkpoints, bound(source)), bound(source))


def operators(graph: ir.Graph) -> Counter[str]:
    return Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in graph.all_nodes())


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_layers_have_the_fused_operators(weights: str, traces) -> None:
    source, routers, pieces = made("llama (3.1)", traces)
    check_for_cuda(pieces, weights)
    networks = networks_for_cuda(pieces, routers.arrays(), None, bound(source), weights)
    check_kernels(networks.models)
    first = networks.models[segment_name(0)]
    found = operators(first.graph)
    assert found["com.microsoft::GroupQueryAttention"] == CHECKPOINT
    assert found["com.microsoft::SkipSimplifiedLayerNormalization"] == 2 * CHECKPOINT - 1
    assert not {"RotaryEmbedding", "Attention", "Transpose", "Reshape"} & set(found)
    matmuls = [node for node in first.graph if node.op_type == "MatMul" and node.outputs[0].dtype != FLOAT]
    assert sum(str(node.inputs[1].name).endswith(".qkv") for node in matmuls) == CHECKPOINT
    own = [key for model in networks.models.values() for key in operators(model.graph) if key.startswith("tide::")]
    assert own == ["tide::TideExit"]  # of the segment with a router
    assert found["tide::TideExit"] == 1
    functions = [function for model in networks.models.values() for function in model.functions.values()]
    assert [function.name for function in functions] == ["TideExit"]
    head = operators(networks.models[HEAD].graph)  # reads the embedding as it lies
    assert head["Gemm"] == 1
    assert not {"Transpose", "MatMul"} & set(head)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_matrices_in_four_bits_compute_what_pytorch_does(weights: str, tmp_path: Path, traces) -> None:
    source, routers, pieces = made("llama (3.1)", traces, HALF)
    engine_of(source, routers, tmp_path / "b", pieces)
    bundle = segments_of(source, routers, tmp_path / "b", pieces, weights, "cuda")
    assert bundle.manifest.networks is not None
    assert (bundle.manifest.networks.matrices, bundle.manifest.networks.max_slot_tokens) == ("int4", 1)
    graph = onnx.load(bundle.path / network_file(segment_name(0)), load_external_data=False).graph
    matmuls = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(matmuls) == 5 * CHECKPOINT
    engine = open_engine(bundle, "cpu-networks", threads=1)
    check = check_full(engine, source, PROMPTS, 12, tolerance=TOLERANCES[weights])
    assert check.holds, check.differences


def test_outlier_columns_compute_what_pytorch_does(tmp_path: Path, traces) -> None:
    torch.manual_seed(0)
    source = wrap_model(LlamaForCausalLM(small_llama(512, 256, 4, 512)), "wide")
    quantize_model(source, replace(INT4, budget=5.0), (), round_with_scales_in(HALF), widest=4)
    assert source.quantized is not None
    found = Counter((matrix.bits, matrix.outliers is None) for matrix in source.quantized.blocks.values())
    assert found[4, False] > source.num_layers
    assert found[8, True] == 1, "only the embedding has 8 bits"
    routers = random_routers(source, (CHECKPOINT,), range(3, 43), bottleneck=16)
    pieces = cut(traces(source, routers.checkpoints, bound(source)), bound(source))
    engine_of(source, routers, tmp_path / "b", pieces)
    bundle = segments_of(source, routers, tmp_path / "b", pieces, "fp32", "cuda")
    engine = open_engine(bundle, "cpu-networks", threads=1)
    check = check_full(engine, source, PROMPTS, 12, tolerance=TOLERANCES["fp32"])
    assert check.holds, check.differences


def test_scales_are_numbers_of_the_networks_type(traces) -> None:
    source, _, _ = made("llama (3.1)", traces, BFLOAT16)
    assert source.quantized is not None
    for block in source.quantized.blocks.values():
        assert (block.scales.astype(BFLOAT16).astype(np.float32) == block.scales).all()


def test_the_list_of_kernels_is_of_the_pinned_version() -> None:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"onnxruntime-gpu=={kernels().version}" in pins
    assert len(KERNELS.read_text().splitlines()) > 200


@pytest.mark.parametrize(
    ("operator", "domain", "dtype", "exists"),
    [
        ("GroupQueryAttention", "com.microsoft", "FLOAT16", True),
        ("GroupQueryAttention", "com.microsoft", "FLOAT", False),
        ("LogSoftmax", "", "FLOAT", True),
        ("LogSoftmax", "", "BFLOAT16", False),
        ("Add", "", "BFLOAT16", True),
        ("NonZero", "", "BFLOAT16", False),
        ("Det", "", "FLOAT", False),  # has none
        ("Range", "", "INT64", True),  # versions 11 to 26
    ],
)
def test_a_node_without_a_kernel_is_named(operator: str, domain: str, dtype: str, exists: bool) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType[dtype]))
    node = ir.node(operator, [value], domain=domain)
    if exists:
        return check_nodes([node], "head", {})
    name = f"{domain}::{operator}" if domain else operator
    with pytest.raises(UnsupportedModelError, match=rf"{name} of \w+ \(in its head\), for which onnxruntime-gpu 1"):
        check_nodes([node], "head", {})
    return None


def test_what_cannot_be_lowered_is_refused_before_routers_are_fitted(traces) -> None:
    _, _, pieces = made("llama (3.1)", traces)
    node = next(node for node in pieces.segments[1] if node.op_type == "TideAttention")
    node.attributes["head_dim"] = ir.AttrInt64("head_dim", 20)
    with pytest.raises(UnsupportedModelError, match="has heads of 20 numbers, no multiple of 8, for which"):
        check_for_cuda(pieces, "fp16")
    source, _, large = made("llama", traces)
    weight = next(value for value in large.segments[0].initializers.values() if value.dtype == FLOAT)
    weight.const_value = ir.tensor(np.full(weight.const_value.shape.numpy(), 1e6, np.float32), name=weight.name)
    with pytest.raises(GraphError, match="holds a number too large for float16: use bf16"):
        check_for_cuda(large, "fp16")
    assert source.num_layers > CHECKPOINT


@pytest.mark.parametrize(
    ("head_dim", "group", "softcap", "kernel"),
    [
        (128, 4, False, "XQA"),
        (128, 3, False, "Flash"),  # Llama 3.2 3B
        (64, 8, True, "Flash"),
        (96, 1, False, "Flash"),
        (512, 1, False, "Efficient"),
    ],
)
def test_which_kernel_attends(head_dim: int, group: int, softcap: bool, kernel: str) -> None:
    assert attention_kernel(head_dim, group, softcap) == kernel


def test_inspect_prints_it_and_nothing_is_built(tmp_path: Path, traces) -> None:
    source, routers, pieces = made("gemma2", traces)
    engine_of(source, routers, tmp_path / "b", pieces)
    bundle = segments_of(source, routers, tmp_path / "b", pieces, "bf16", "cuda")
    (kind,) = attention_kernels(bundle)
    assert (kind["layers"], kind["softcap"], kind["kernel"]) == (source.num_layers, True, "Flash")
    text = render(describe(bundle.path))
    assert "attention  of one new token by Flash in" in text
    assert "a token at full depth reads" in text
    with pytest.raises(BuildError, match="are for provider cuda, which needs no plans: for TensorRT export it"):
        rebuild(bundle.path, "tensorrt")
    with pytest.raises(ProviderError, match="holds no segment networks for TensorRT, which PyTorch runs"):
        open_torch(open_bundle(bundle.path))
