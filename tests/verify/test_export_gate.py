"""The gate before a bundle is put in place: long enough for the windows, affordable, and it closes."""

import logging
from pathlib import Path
from types import SimpleNamespace

import onnx_ir as ir
import pytest
import torch
import transformers as tf
from tiny_configs import GROUPED

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.errors import GraphError
from tide_export.model.source import load_model
from tide_export.pipeline import flow as pipeline
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.trace import tracer
from tide_export.verify import export_gate
from tide_export.verify.export_gate import (
    LONG_PROMPT,
    check_export,
    dividing_thresholds,
    model_references,
    prompt_length,
)
from tide_export.verify.oracle import oracle

WINDOW = 100  # longer than a prompt that takes no notice of it
IDS = [(i * 37) % 500 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral and routers for it."""
    path = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    config = tf.MistralConfig(**{**GROUPED, "num_hidden_layers": 2}, sliding_window=WINDOW)
    model = tf.MistralForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.save_pretrained(path / "model")
    random_routers(load_model(path / "model"), (1,), IDS, bottleneck=8).save(path / "routers.safetensors")
    return path


def test_a_lost_window_is_found_beyond_the_window(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "layer_masks", lambda model, layers: (None,) * len(layers))
    config = TideConfig(checkpoints=(1,), min_layers=1)
    model, routers = folder / "model", folder / "routers.safetensors"
    pipeline.export(str(model), tmp_path / "out", routers=routers, config=config, validate=False)
    bundle = open_bundle(tmp_path / "out")
    arguments = (load_model(model), RouterSet.load(routers), bundle.manifest, ir.load(bundle.file(GRAPH_FILE).path))
    with pytest.raises(GraphError, match=r"does not equal the model \(full depth\)"):
        check_export(tmp_path / "out", bundle.manifest, model_references(*arguments))
    # It is the length of the prompt that finds it: a short one passes.
    monkeypatch.setattr(export_gate, "windows_of", lambda graph, source: set())
    check_export(tmp_path / "out", bundle.manifest, model_references(*arguments))


def source_of(parameters: int, vocabulary: int) -> SimpleNamespace:
    """As much of a `SourceModel` as the length depends on."""
    model = torch.nn.Linear(parameters, 1, bias=False, device="meta")
    return SimpleNamespace(model=model, vocab_size=vocabulary)


@pytest.mark.parametrize(
    ("parameters", "vocabulary", "context", "windows", "length"),
    [
        (10**6, 1000, 8192, set(), LONG_PROMPT),
        (10**6, 1000, 8192, {128, 4096}, 4096 + 8),
        (10**6, 1000, 4096, {4096}, LONG_PROMPT),  # never left within the context
        (10**9, 1000, 8192, {256}, 264),
        (10**9, 1000, 8192, {4096}, 300),  # as far as is affordable
        (10**11, 1000, 8192, {4096}, LONG_PROMPT),
        (10**6, 2**18, 8192, {4096}, 1024),  # logits of all positions would not fit
    ],
)
def test_the_prompt_leaves_the_windows_as_far_as_that_is_affordable(
    parameters: int, vocabulary: int, context: int, windows: set[int], length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert prompt_length(source_of(parameters, vocabulary), context, windows) == length
    too_short = bool(windows) and length <= max(windows) < context
    assert ("too few to leave the sliding window" in caplog.text) == too_short


def test_thresholds_divide_the_tokens_whatever_the_routers_are_like(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = load_model(folder / "model")
    routers = random_routers(source, (1,), IDS, bottleneck=8)
    routers.routers[1].up.bias.fill_(-3.0)  # none is above a half
    (threshold,) = dividing_thresholds(source, routers, IDS)
    scores = oracle(source, routers, IDS, [NEVER_EXIT]).scores[:, 0]
    assert 0.2 < float((scores > threshold).float().mean()) < 0.8
    assert caplog.text == ""
    routers.routers[1].up.weight.zero_()  # all are the same
    (threshold,) = dividing_thresholds(source, routers, IDS)
    assert f"the router at checkpoint 1 gives all {len(IDS)} tokens the score 0.047: at any threshold" in caplog.text
    assert bool((oracle(source, routers, IDS, [NEVER_EXIT]).scores > threshold).all())
