"""Hidden states after several layers of any family, whose states between segments may hold more than these."""

from pathlib import Path

import numpy as np
import pytest
import tiers
import torch
from families import build
from random_heads import prompt
from tiny_configs import CHECKPOINTS
from tiny_engines import bound
from torch import nn

from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.calibration.config import TideConfig
from tide_export.compose.cut import cut
from tide_export.compose.step_graph import compose
from tide_export.drafting.heads.head import DraftHead
from tide_export.drafting.heads.pieces import fuse_of
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.names import step_graph as names
from tide_export.pipeline.contents import make_manifest, save_graph
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.step_graph import StepGraph

LAYERS = (2, 1, 3)  # the first two are checkpoints, the last is the depth


@pytest.mark.parametrize("family", tiers.exhaustive_beyond(1, ["gemma3n (text)", "gemma4 (text)", "gpt2"]))
def test_they_are_the_model_s(family: str, traces, tmp_path: Path) -> None:
    source = build(family)
    width, length, ids = source.hidden_size, bound(source), prompt(source.vocab_size, 12)
    routers = random_routers(source, CHECKPOINTS, ids, bottleneck=16)
    pieces = cut(traces(source, CHECKPOINTS, length, every_layer=True), length, LAYERS)
    fc = torch.randn(width, 3 * width, generator=torch.Generator().manual_seed(0)) * (3 * width) ** -0.5
    head = DraftHead("EAGLE-3", "head", nn.Identity(), source.model, np.arange(3), layers=LAYERS, fc=fc)
    fuse = fuse_of(head, quantized=False)
    graph = lower_for_onnxruntime(compose(pieces, routers.arrays(), routers.lens_arrays(), fuse))
    with writing_bundle(tmp_path / "bundle") as folder:
        manifest = make_manifest(source, routers, TideConfig(), pieces, graph, length)
        save_graph(graph, folder, manifest)
        write_manifest(folder, manifest)
    sequence = StepGraph(open_bundle(tmp_path / "bundle")).start([NEVER_EXIT] * len(CHECKPOINTS), 0)
    sequence.step(ids)
    with torch.no_grad():
        raw = source.run(torch.tensor([ids]), LAYERS).raw
    expected = torch.cat([raw[layer][0] for layer in LAYERS], -1) @ fc.T
    np.testing.assert_allclose(sequence.outputs[names.FINAL_STATES][0], expected, rtol=1e-3, atol=1e-3)
