"""From the command line to engines of TensorRT for RTX with weights in int4 and FP8, run by PyTorch."""

import json
from pathlib import Path

import onnx
import pytest
import tiers
from families import build

from tide_export.bundle.file_names import network_file
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import BuildError, ConfigError, TideError, UnsupportedModelError
from tide_export.model.source import load_model
from tide_export.names.networks import segment_name
from tide_export.pipeline.request import ExportRequest
from tide_export.pipeline.weights import prepare_weights
from tide_export.plans import build as building
from tide_export.plans.build import check_matrices
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.tensorrt.flavours import RTX_CAPABILITIES, TENSORRT, TENSORRT_RTX
from tide_export.verify.validate import validate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def options(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The options of export by weights: routers, and for FP8 a text of a few sequences."""
    folder = tmp_path_factory.mktemp("options")
    random_routers(load_model(str(two_layers)), (1,), range(3, 43), bottleneck=16).save(folder / "routers")
    lines = (ROOT / "calibration" / "text" / "python-stdlib.jsonl").read_text().splitlines()
    text = [json.dumps({"text": json.loads(line)["text"][:300]}) for line in lines[:8]]
    (folder / "text.jsonl").write_text("\n".join(text))
    named = {"--routers": folder / "routers", "--max-length": 64, "--epsilon": 0, "--batch-size": 1}
    named |= {"--min-layers": 1, "--target": "tensorrt-rtx"}
    common = [str(part) for pair in named.items() for part in pair]
    return {
        "text": [str(folder / "text.jsonl")],
        "int4": ["--weights", "int4", "--block-size", "64", *common],
        "fp8": ["--weights", "fp8", "--dataset", str(folder / "text.jsonl"), *common],
    }


@pytest.mark.parametrize(
    ("weights", "shown", "capabilities"),
    tiers.exhaustive_beyond(
        1,
        [
            ("int4", "bf16 with matrices in int4,", RTX_CAPABILITIES),
            ("fp8", "bf16 with matrices and their inputs in fp8,", ("8.9", "12.0", "12.1")),
        ],
    ),
)
def test_export_builds_engines_that_hold_small_weights(
    two_layers: Path, options, tmp_path: Path, weights: str, shown: str, capabilities: tuple[str, ...], capsys
) -> None:
    bundle = tmp_path / "bundle"
    assert main(["export", str(two_layers), "-o", str(bundle), *options[weights]]) == 0
    manifest = open_bundle(bundle).manifest
    assert (manifest.weights, manifest.quantization is None) == (
        ("int4", False) if weights == "int4" else ("fp32", True)
    )
    assert manifest.networks is not None
    assert (manifest.networks.weights, manifest.networks.matrices) == ("bf16", weights)  # the model's are bfloat16
    engines = manifest.engines
    assert engines is not None
    assert engines.built is not None
    assert engines.compute_capabilities == capabilities
    for part in (segment_name(0), segment_name(1)):
        network = onnx.load(str(bundle / network_file(part)))
        stored = sum(len(tensor.raw_data) for tensor in network.graph.initializer)
        assert engines.built[part].weights_bytes < 1.15 * stored
    assert main(["inspect", str(bundle), "--no-verify"]) == 0
    assert shown in capsys.readouterr().out
    report = validate(bundle, str(two_layers), options["text"][0], prompts=2, longest_prompt=20, new_tokens=6)
    assert report.holds, report.render()
    assert report.weight_error is not None
    assert report.weight_error > 0.01


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weights": "int8"}, "weights 'int8' are for target onnxruntime alone: tensorrt takes fp32, fp16, bf16, int4"),
        ({"weights": "int4", "symmetric": False}, "--symmetric no is for target onnxruntime: tensorrt takes no zero"),
        ({"weights": "fp8", "block_size": 32}, "--block-size is for weights int8 and int4, not for fp8"),
        ({"weights": "fp8", "targets": ["onnxruntime"]}, "weights 'fp8' are for targets tensorrt and tensorrt-rtx"),
    ],
)
def test_what_tensorrt_does_not_take_is_refused(fields: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExportRequest("model", "bundle", **{"targets": ["tensorrt"], "engines": False, **fields})


@pytest.mark.parametrize(
    ("family", "block_size", "kind", "says"),
    [
        (
            "llama",
            128,
            ConfigError,
            r"blocks of 128 do not divide the 64 columns of model.layers.* tensorrt needs: give --block-size 64",
        ),
        (
            "mixtral",
            32,
            UnsupportedModelError,
            "MixtralForCausalLM has experts, which tensorrt takes in 16 bits or more",
        ),
    ],
)
def test_a_model_that_tensorrt_does_not_take_so_is_refused_before_it_is_quantized(
    family: str, block_size: int, kind: type[TideError], says: str
) -> None:
    request = ExportRequest("m", "b", targets=["tensorrt"], engines=False, weights="int4", block_size=block_size)
    source = build(family)
    with pytest.raises(kind, match=says):
        prepare_weights(source, request)
    assert source.quantized is None


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_matrices(TENSORRT_RTX, "fp8")
    monkeypatch.setattr(building, "compute_capability", lambda: (8, 6))
    with pytest.raises(BuildError, match=r"weights fp8 need one of compute capability 8\.9 or later: use int4, fp16"):
        check_matrices(TENSORRT, "fp8")
    check_matrices(TENSORRT, "int4")
    monkeypatch.setattr(building, "compute_capability", lambda: (9, 0))
    check_matrices(TENSORRT, "fp8")
