"""Networks in 16 bits beside float32, at positions whose angles 16 bits do not hold."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from families import build
from networks_runner import Runner
from tiny_engines import bound, pieces_of

from tide_export.compose.cut import cut
from tide_export.graph.rewriting import FLOAT
from tide_export.lower.cuda.kernels import check_kernels
from tide_export.lower.cuda.lower import check_for_cuda, networks_for_cuda
from tide_export.lower.tensorrt.lower import networks_for_tensorrt
from tide_export.names.networks import segment_name
from tide_export.names.segment_networks import past
from tide_export.routers.random_routers import random_routers

CAPACITY, TOKENS, RUN = 2048, 1500, 500


@pytest.mark.parametrize("family", ["deepseek_v2", "ministral3"])
def test_late_positions_are_rounded_no_more_than_early_ones(family: str, traces, tmp_path: Path) -> None:
    """Rotary angles of complex numbers, and queries scaled by position: by what keys and logits differ."""
    source = build(family)
    routers = random_routers(source, (1,), range(3, 43), bottleneck=16, lens_rank=4)
    pieces = cut(traces(source, routers.checkpoints, CAPACITY), CAPACITY)
    ids = np.random.default_rng(0).integers(3, 500, (1, TOKENS))
    keys, logits = {}, {}
    for weights, dtype in {"fp32": np.float32, "fp16": np.float16}.items():
        networks = networks_for_tensorrt(pieces, routers.arrays(), routers.lens_arrays(), CAPACITY, weights)
        folder = tmp_path / weights
        folder.mkdir()
        networks.save(folder)
        runner = Runner(folder, rows=1, dtype=dtype)
        for start in range(0, TOKENS, RUN):
            logits[weights], _, _ = runner.full(ids[:, start : start + RUN], [start], [RUN - 1])
        keys[weights] = runner.buffers[past(0, "key")][0, :, :TOKENS].astype(np.float32)
    errors = np.abs(keys["fp16"] - keys["fp32"]).max((0, 2)) / np.abs(keys["fp32"]).max()
    assert 1e-5 < errors[:100].max() < 5e-3
    assert errors[-100:].max() < 3 * errors[:100].max()
    assert np.abs(logits["fp16"] - logits["fp32"]).max() < 1e-2 * np.abs(logits["fp32"]).max()


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_angles_are_float32_for_tensorrt(weights: str, traces) -> None:
    source = build("deepseek_v2")
    routers, pieces = random_routers(source, (1,), range(3, 43), bottleneck=16), pieces_of(source, (1,), traces)
    models = networks_for_tensorrt(pieces, routers.arrays(), None, bound(source), weights).models
    assert types_of("Cos", models[segment_name(1)]) == types_of("Sin", models[segment_name(1)]) == [FLOAT]


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_scales_of_queries_are_float32_for_cuda(weights: str, traces) -> None:
    """CUDA has no Floor of bfloat16: without this Ministral 3 was refused."""
    source = build("ministral3")
    routers, pieces = random_routers(source, (1,), range(3, 43), bottleneck=16), pieces_of(source, (1,), traces)
    check_for_cuda(pieces, weights)
    models = networks_for_cuda(pieces, routers.arrays(), None, bound(source), weights).models
    check_kernels(models)
    assert types_of("Floor", models[segment_name(1)]) == types_of("Log", models[segment_name(1)]) == [FLOAT]


def types_of(op_type: str, model: ir.Model) -> list[ir.DataType | None]:
    return [node.outputs[0].dtype for node in model.graph if node.op_type == op_type]
