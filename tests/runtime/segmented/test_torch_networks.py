"""The segment networks on PyTorch: the tokens, exits and counts of the graph, recorded runs, and every refusal."""

import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from batch_prompts import PROMPTS
from fake_gpu import FakeGpu

from tide_export import names
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.errors import BundleError, GenerationError, ProviderError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.pytorch.segments import open_torch

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def torch_networks(tiny_llama) -> Engine:
    bundle = open_bundle(tiny_llama.exact)
    return Engine(bundle, open_torch(bundle, "cpu"))


def assert_same(found: list, expected: list) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.stats.exit_layer) == (other.tokens, other.stats.exit_layer)


@pytest.mark.parametrize("max_pending", [1, 1000])
def test_every_mode_gives_the_graph_s_tokens_alone_and_in_a_batch(engines, torch_networks, max_pending: int) -> None:
    graph, _, thresholds = engines
    exits = {"threshold": thresholds, "max_pending": max_pending, "min_layers": 0}
    for options in ({"mode": "full"}, exits, {**exits, "mode": "lossless"}):
        options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [], **options}
        expected = [graph.generate(prompt, **options) for prompt in PROMPTS]
        assert_same([torch_networks.generate(prompt, **options) for prompt in PROMPTS], expected)
        if options["mode" if "mode" in options else "threshold"] != "lossless":
            assert_same(torch_networks.generate(PROMPTS, **options), expected)
        else:
            batched = torch_networks.generate(PROMPTS, **options)
            assert [one.tokens for one in batched] == [one.tokens for one in expected]


def test_on_a_device_that_records_its_runs(engines, torch_networks: Engine, fake) -> None:
    """Memory that is NaN until it is set, work done late, graphs replayed with the addresses they were made with."""
    graph, _, thresholds = engines
    gpu = Engine(torch_networks.bundle, FakeGpu(torch_networks.backend, fake).backend(torch_networks.manifest))
    options = {"threshold": thresholds, "max_pending": 4, "min_layers": 0, "max_new_tokens": NEW_TOKENS}
    expected = [graph.generate(prompt, stop_token_ids=[], **options) for prompt in PROMPTS]
    assert_same([gpu.generate(prompt, stop_token_ids=[], **options) for prompt in PROMPTS], expected)
    assert_same(gpu.generate(PROMPTS, stop_token_ids=[], **options), expected)
    assert fake.launches > NEW_TOKENS


def test_a_second_run_of_a_shape_computes_no_shapes_and_copies_nothing_to_the_device(
    torch_networks, monkeypatch
) -> None:
    options = {"mode": "full", "max_new_tokens": 4}
    sequence_tokens = torch_networks.generate([5, 6, 7], **options).tokens

    def refuses(*arguments, **keywords):
        raise AssertionError("computed again")

    for network in torch_networks.backend._idle[0]._networks.values():
        program = network._program
        steps = [replace(step, call=refuses) if step.static else step for step in program.steps]
        monkeypatch.setattr(program, "steps", steps)
    assert any(step.static for step in program.steps) or program.static is not None
    assert torch_networks.generate([5, 6, 7], **options).tokens == sequence_tokens


def test_provider_torch_is_taken_by_name_alone(tiny_llama) -> None:
    engine = load(tiny_llama.exact, provider="torch", threads=1)
    assert engine.backend.provider == "torch"
    assert load(tiny_llama.exact).backend.provider == "cpu"


def test_what_cannot_run_is_refused_with_one_sentence(tiny_llama, tiny_bundle: Path, monkeypatch) -> None:
    with pytest.raises(ProviderError, match="holds no segment networks: export it with --target tensorrt"):
        load(tiny_bundle, provider="torch")
    if not torch.cuda.is_available():
        with pytest.raises(ProviderError, match="PyTorch finds no GPU here"):
            open_torch(open_bundle(tiny_llama.exact), "cuda")
    monkeypatch.setitem(sys.modules, "tide_export.runtime.pytorch.segments", None)
    with pytest.raises(ProviderError, match=r"needs the packages torch and onnx .*: pip install tide_export\[torch\]"):
        load(tiny_llama.exact, provider="torch")


def changed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, change) -> Bundle:
    """The bundle with another network of segment 0."""
    file = bundle.file(names.network_file(names.segment(0)))
    model = onnx.load_model_from_string(file.read_bytes())
    change(model.graph)
    monkeypatch.setattr(file, "read_bytes", lambda: model.SerializeToString())
    return bundle


def test_a_network_that_is_not_known_or_not_the_manifest_s(tiny_llama, monkeypatch) -> None:
    def unknown(graph: onnx.GraphProto) -> None:
        graph.node[0].op_type = "Det"

    def by_data(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == "Reshape")
        node.input[1] = "past_lengths"

    def attribute(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == "MatMul")
        node.attribute.append(onnx.helper.make_attribute("folded", 1))

    def tensor(graph: onnx.GraphProto) -> None:
        graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT32

    for change, sentence in (
        (unknown, "computes with Det, which provider 'torch' does not know"),
        (by_data, "computes with Reshape, whose past_lengths depends on data, which provider 'torch' does not know"),
        (attribute, "computes with MatMul with folded and 2 inputs, which provider 'torch' does not know"),
        (tensor, "input .* is int32 .*, but its manifest calls for int64"),
    ):
        with monkeypatch.context() as patch, pytest.raises((ProviderError, BundleError), match=sentence):
            open_torch(changed(open_bundle(tiny_llama.exact), patch, change), "cpu")
    damaged = open_bundle(tiny_llama.exact)
    monkeypatch.setattr(damaged.file(names.network_file(names.HEAD)), "read_bytes", lambda: b"no model")
    with pytest.raises(BundleError, match=r"head.onnx' is no ONNX model: "):
        open_torch(damaged, "cpu")


def test_a_token_outside_the_vocabulary_is_one_sentence(torch_networks: Engine) -> None:
    with pytest.raises(GenerationError, match="PyTorch failed in segment_00: "):
        torch_networks.start([2.0, 2.0], 4).step([10**6])


def test_a_kernel_computes_an_operator_in_place_of_its_function(torch_networks: Engine) -> None:
    bundle = torch_networks.bundle
    model = onnx.load_model_from_string(bundle.file(names.network_file(names.segment(0))).read_bytes())
    (function,) = model.functions

    def kernel(*inputs, **attributes):
        raise ValueError(f"{len(inputs)} inputs, namespace {attributes['plugin_namespace']}")

    engine = Engine(bundle, open_torch(bundle, "cpu", kernels={(function.domain, function.name): kernel}))
    (node,) = [node for node in model.graph.node if node.op_type == function.name]
    with pytest.raises(
        GenerationError, match=f"PyTorch failed in segment_00: {len(node.input)} inputs, namespace tide"
    ):
        engine.start([2.0, 2.0], 4).step([5])
