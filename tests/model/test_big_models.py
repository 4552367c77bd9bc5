"""What big models need, on small ones: shards, half precision sources, weights that are not in memory while the model
is traced, and nothing of the model left in memory once its graph is written."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiers
import torch
from tiny_configs import GROUPED
from tiny_engines import engine_of, pieces_of
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.errors import ConfigError
from tide_export.lower.tensorrt.lower import networks_for_tensorrt
from tide_export.model.source import load_model
from tide_export.pipeline import flow as pipeline
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.fp8 import quantize_to_fp8
from tide_export.quantize.settings import quantization_settings
from tide_export.routers.random_routers import random_routers
from tide_export.trace.offloaded_weights import LARGE, placeholder_weights
from tide_export.verify import export_gate as export_check
from tide_export.verify.parity import check_full

CONFIG = TideConfig(checkpoints=(1,), min_layers=1)
IDS = [(i * 37) % 500 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Llama in shards, its embedding tied to its head, with matrices as large as those that are left where
    they are; and routers for it."""
    path = tmp_path_factory.mktemp("big")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LARGE // 64 + 1,
        hidden_size=64,
        intermediate_size=LARGE // 64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.bfloat16().save_pretrained(path / "model", max_shard_size="2MB")
    assert len(list((path / "model").glob("*.safetensors"))) > 2
    random_routers(load_model(path / "model"), (1,), IDS, bottleneck=8).save(path / "routers.safetensors")
    return path


@pytest.fixture(scope="module")
def plain_and_left(folder: Path) -> tuple[Path, int]:
    """The bundle of the model loaded whole, and how many of its weights were in memory when the bundle was checked."""
    weights: list[StorageWeakRef] = []
    left: list[int] = []

    def load(*arguments, **options):
        source = load_model(*arguments, **options)
        weights.extend(StorageWeakRef(parameter.untyped_storage()) for parameter in source.model.parameters())
        return source

    def check(*arguments):
        left.append(sum(not weight.expired() for weight in weights))
        export_check.check_export(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "load_model", load)
        patch.setattr(pipeline, "check_export", check)
        routers = folder / "routers.safetensors"
        bundle = pipeline.export(str(folder / "model"), folder / "plain", routers=routers, config=CONFIG)
    assert weights
    return bundle, left[0]


@pytest.fixture(scope="module")
def plain(plain_and_left: tuple[Path, int]) -> Path:
    return plain_and_left[0]


def test_weights_left_on_disk_make_the_same_bundle(folder: Path, plain: Path, tmp_path: Path) -> None:
    on_disk, modules = ("model.embed_tokens", "lm_head", "model.layers.1"), ("model.rotary_emb", "model.norm")
    placed = {**dict.fromkeys(on_disk, "disk"), **dict.fromkeys(modules, "cpu"), "model.layers.0": "cpu"}
    model, routers = str(folder / "model"), folder / "routers.safetensors"
    made = pipeline.export(model, tmp_path / "out", routers=routers, config=CONFIG, device_map=placed)
    expected, found = open_bundle(plain).manifest, open_bundle(made).manifest
    assert found.model == expected.model
    weights, same = (ir.load(bundle / GRAPH_FILE).graph.initializers for bundle in (plain, made))
    assert set(weights) == set(same)
    for name in weights:
        assert np.array_equal(weights[name].const_value.numpy(), same[name].const_value.numpy()), name


@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_weights_left_on_disk_are_not_rounded(folder: Path, weights: str) -> None:
    source, settings = load_model(folder / "model", device_map={"": "disk"}), quantization_settings(weights)
    fp8 = partial(quantize_to_fp8, source, [IDS], np.dtype(np.float16))
    rounding = fp8 if settings is None else partial(quantize_model, source, settings)
    with pytest.raises(ConfigError, match=f"weights {weights}: .* only where all are in memory: omit --device-map"):
        rounding()


def test_large_weights_are_stood_in_for_and_everything_is_put_back(folder: Path) -> None:
    source = load_model(folder / "model", device_map={"": "disk"})
    hidden, parameters = source.run(torch.tensor([IDS]), [1]).raw[1], dict(source.model.named_parameters())
    with placeholder_weights(source) as placeholders:
        names = set(placeholders.tensors)
        assert all(parameter.device.type == "cpu" for parameter in source.model.parameters())
        norm = source.model.get_parameter("model.norm.weight")
        assert torch.equal(norm, load_model(folder / "model").model.get_parameter("model.norm.weight"))
    assert {name.split(".")[-2] for name in names} == {"embed_tokens", "gate_proj", "up_proj", "down_proj"}
    assert {name: id(value) for name, value in source.model.named_parameters()} == {
        name: id(value) for name, value in parameters.items()
    }
    assert torch.equal(source.run(torch.tensor([IDS]), [1]).raw[1], hidden)
    with placeholder_weights(load_model(folder / "model")) as placeholders:
        assert not placeholders.tensors


def test_the_model_is_gone_when_the_graph_is_loaded(plain_and_left: tuple[Path, int]) -> None:
    """Or both would be in memory: the model and ONNX Runtime's weights."""
    assert plain_and_left[1] == 0


def test_the_command_takes_a_device_map(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(pipeline, "export", lambda *arguments, **options: asked.update(options))
    assert main(["export", str(demo_model), "-o", str(tmp_path / "out"), "--device-map", "auto"]) == 0
    assert asked.pop("device_map") == "auto"
    assert main(["export", str(demo_model), "-o", str(tmp_path / "out")]) == 0
    assert asked.get("device_map") is None


@pytest.mark.parametrize("stored", tiers.exhaustive_beyond(1, ["bfloat16", "float16"]))
def test_half_precision_sources_become_any_weights(stored: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED | {"num_hidden_layers": 2})).to(getattr(torch, stored))
    model.save_pretrained(tmp_path / "model")
    source = load_model(tmp_path / "model")
    weight = source.model.get_parameter("model.layers.1.self_attn.o_proj.weight")
    original = model.get_parameter("model.layers.1.self_attn.o_proj.weight")
    assert weight.dtype == torch.float32
    assert torch.equal(weight, original.float())

    pieces, routers = pieces_of(source, (1,)), random_routers(source, (1,), IDS, bottleneck=8)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces)
    assert check_full(engine, source, [IDS[:9], [5]], 12).holds
    for weights, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        networks = networks_for_tensorrt(pieces, routers.arrays(), None, 32, weights)
        tensors = [value.const_value for value in networks.models["segment_01"].graph.initializers.values()]
        found = [torch.from_numpy(one.numpy().astype(np.float32)) for one in tensors if list(one.shape) == [64, 64]]
        assert any(torch.equal(one, original.float().to(dtype).float().T) for one in found), weights
