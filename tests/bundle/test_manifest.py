"""Manifests are read strictly: what is wrong in one is named, what is written is what is read."""

import json
import re
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bundles import edit, make_manifest, names_in, write

from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import BuiltPlan
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.errors import BundleError


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    assert opened.path == tmp_path / "b"
    assert set(opened.manifest.files) == {"model.onnx", "engines/head.engine"}
    assert opened.manifest.files["engines/head.engine"].size == 6000
    without_files = {**vars(opened.manifest), "files": {}}
    assert without_files == vars(make_manifest())
    assert opened.file("model.onnx").read_bytes() == b"graph"
    with pytest.raises(BundleError, match=r"no file tokenizer\.json"):
        opened.file("tokenizer.json")


def test_every_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    with writing_bundle(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"graph")
        (folder / "model.onnx").chmod(0o600)  # as safetensors leaves its files
        write_manifest(folder, make_manifest())
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "b" / "model.onnx").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_segment_sizes_add_up_to_the_depth() -> None:
    assert make_manifest().segment_sizes == (1, 1, 1)
    full_depth = replace(make_manifest(), checkpoints=(), thresholds=())
    assert full_depth.segment_sizes == (3,)


NETWORKS = {"weights": "fp16", "capacity": 64, "state_rows": 320, "max_tokens": 32, "max_logits": 8, "exit_size": 16}
NETWORKS |= {"max_batch_size": 2, "max_slot_tokens": 8}
PROFILE = {"name": "decode", "min_tokens": 1, "opt_tokens": 1, "max_tokens": 1, "batch_size": 2}
ENGINES = {
    "flavour": "tensorrt-rtx",
    "version": "1.7",
    "compute_capabilities": [],
    "weights_sha256": "0" * 64,
    "profiles": [PROFILE],
    "seconds": 3.5,
    "plugins": None,
}
PARTS = ["segment_00", "segment_01", "segment_02", "head", "best", "candidates"]
BUILT = {part: asdict(BuiltPlan(1000, 200, 12, 2, 1)) for part in PARTS}
PLUGINS = {"version": "0.1.0", "sha256": "0" * 64, "engines": ["segment_00", "segment_01"]}


QUANTIZATION = {"method": "rtn", "bits": 4, "block_size": 32, "symmetric": True, "accuracy_level": 4}


def test_a_manifest_without_quantization_does_not_speak_of_it(tmp_path: Path) -> None:
    """So that bundles of before there was any are read, and read by releases of then."""
    write(tmp_path / "b")
    assert "quantization" not in json.loads((tmp_path / "b" / "tide.json").read_text())
    assert open_bundle(tmp_path / "b").manifest.quantization is None


def test_quantization_comes_back(tmp_path: Path) -> None:
    quantized = replace(make_manifest(), weights="int4", quantization=Quantization(**QUANTIZATION))
    write(tmp_path / "b", manifest=quantized)
    assert open_bundle(tmp_path / "b").manifest.quantization == quantized.quantization


@pytest.mark.parametrize(
    ("weights", "quantization", "message"),
    [
        ("int4", None, "field 'quantization' must be there for weights int8 and int4 alone"),
        ("fp32", QUANTIZATION, "field 'quantization' must be there for weights int8 and int4 alone"),
        ("int8", QUANTIZATION, "field 'quantization.bits' must be 8 for weights int8"),
        ("int4", QUANTIZATION | {"method": "awq"}, "field 'quantization.method' is none of rtn, gptq"),
        ("int4", QUANTIZATION | {"block_size": 48}, "field 'quantization.block_size' is none of 16, 32"),
        ("int4", QUANTIZATION | {"symmetric": 1}, "field 'quantization.symmetric' must be true or false"),
        ("int4", QUANTIZATION | {"accuracy_level": 7}, "field 'quantization.accuracy_level' must lie in 0..4"),
    ],
)
def test_quantization_that_makes_no_sense_is_refused(tmp_path: Path, weights, quantization, message: str) -> None:
    write(tmp_path / "b")
    path = tmp_path / "b" / "tide.json"
    data = json.loads(path.read_text()) | {"weights": weights}
    path.write_text(json.dumps(data if quantization is None else data | {"quantization": quantization}))
    with pytest.raises(BundleError, match=message):
        open_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    ("networks", "engines", "message"),
    [
        (NETWORKS, ENGINES, None),
        (NETWORKS, None, None),
        (None, ENGINES, "field 'engines' needs the field 'networks'"),
        (NETWORKS | {"weights": "int3"}, None, "field 'networks.weights' must be one of fp32, fp16, bf16"),
        (NETWORKS | {"state_rows": 33}, None, "field 'networks.state_rows' must be 2 more than max_tokens or larger"),
        (
            NETWORKS | {"embedding": {"rows": 8, "width": 4, "tied": True}},
            None,
            "field 'networks.embedding' must have the shape of the file segments/embedding.data",
        ),
        (NETWORKS | {"embedding": {"rows": 8, "width": 4}}, None, "field 'networks.embedding.tied' is missing"),
        (NETWORKS | {"max_tokens": 0}, None, "field 'networks.max_tokens' must be 1 or more"),
        (NETWORKS | {"max_batch_size": 0}, None, "field 'networks.max_batch_size' must be 1 or more"),
        (
            NETWORKS | {"max_batch_size": 5},
            None,
            "field 'networks.max_slot_tokens' must fit max_batch_size times into max_tokens",
        ),
        (
            NETWORKS,
            ENGINES | {"profiles": [PROFILE | {"batch_size": 1}]},
            "must have the batch size networks.max_batch_size",
        ),
        (NETWORKS | {"capacity": "64"}, None, "field 'networks.capacity' must be a whole number"),
        (
            NETWORKS,
            ENGINES | {"flavour": "onnxruntime"},
            "field 'engines.flavour' must be one of tensorrt, tensorrt-rtx",
        ),
        (NETWORKS, ENGINES | {"profiles": []}, "field 'engines.profiles' must not be empty"),
        (
            NETWORKS,
            ENGINES | {"profiles": [PROFILE | {"opt_tokens": 2}]},
            "field 'engines.profiles' must have min_tokens <= opt",
        ),
        (NETWORKS, ENGINES | {"compute_capabilities": [8]}, "field 'engines.compute_capabilities.0' must be a string"),
        (NETWORKS, ENGINES | {"plugins": PLUGINS}, None),
        (NETWORKS, ENGINES | {"plugins": PLUGINS | {"engines": []}}, "field 'engines.plugins.engines' must be some of"),
        (NETWORKS, ENGINES | {"plugins": PLUGINS | {"engines": ["tail"]}}, "'engines.plugins.engines' must be some of"),
        (NETWORKS, ENGINES | {"plugins": {}}, "field 'engines.plugins.version' is missing"),
        (NETWORKS, ENGINES | {"built": BUILT}, None),
        (
            NETWORKS,
            ENGINES | {"built": BUILT | {"tail": BUILT["head"]}},
            "'engines.built' must have one entry per plan",
        ),
        (NETWORKS, ENGINES | {"built": {**BUILT, "head": {}}}, "field 'engines.built.head.weights_bytes' is missing"),
        (
            NETWORKS,
            ENGINES | {"built": {**BUILT, "head": BUILT["head"] | {"layers": -1}}},
            "field 'engines.built.head' holds a negative value",
        ),
        (
            NETWORKS,
            ENGINES | {"built": {**BUILT, "head": BUILT["head"] | {"fused_attention_layers": 3}}},
            "field 'engines.built.head.fused_attention_layers' must be at most attention_layers",
        ),
        (NETWORKS, ENGINES | {"copied": {"segment_01": 4096}}, None),
        (NETWORKS, ENGINES | {"copied": {"tail": 4096}}, "field 'engines.copied.tail' must be a plan's bytes, 1"),
        (NETWORKS, ENGINES | {"copied": {"head": 0}}, "field 'engines.copied.head' must be a plan's bytes, 1 or"),
        (NETWORKS | {"files": False}, None, "field 'files' does not list segments/segment_00.onnx"),
        (NETWORKS, ENGINES | {"files": False}, "field 'files' does not list engines/segment_00.engine"),
    ],
)
def test_networks_and_engines_are_described_whole_or_refused(tmp_path: Path, networks, engines, message) -> None:
    with writing_bundle(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"graph")
        for name, suffix, entry in (("segments", "onnx", networks), ("engines", "engine", engines)):
            (folder / name).mkdir()
            for part in PARTS if entry is not None and entry.pop("files", True) else []:
                (folder / name / f"{part}.{suffix}").write_bytes(b"network")
        write_manifest(folder, make_manifest())
    edit(tmp_path / "b", "networks", value=networks)
    edit(tmp_path / "b", "engines", value=engines)
    if message is None:
        assert open_bundle(tmp_path / "b").manifest.networks is not None
    else:
        with pytest.raises(BundleError, match=re.escape(message)):
            open_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("model",), ..., "field 'model' is missing"),
        (("model", "hidden_size"), ..., "field 'model.hidden_size' is missing"),
        (("colour",), "red", "field 'colour' is unknown"),
        (("model", "colour"), "red", "field 'model.colour' is unknown"),
        (("model",), [1], "field 'model' must be an object"),
        (("model", "num_layers"), "3", "field 'model.num_layers' must be a whole number, not \"3\""),
        (("model", "num_layers"), True, "field 'model.num_layers' must be a whole number, not true"),
        (("model", "num_layers"), 3.0, "field 'model.num_layers' must be a whole number, not 3.0"),
        (("model", "num_layers"), 0, "field 'model.num_layers' must be 1 or more"),
        (("model", "loops"), 0, "field 'model.loops' must be 1 or more, and divide num_layers"),
        (("model", "loops"), 2, "field 'model.loops' must be 1 or more, and divide num_layers"),
        (("model", "name"), None, "field 'model.name' must be a string"),
        (("model", "context_length"), 0, "field 'model.context_length' must be 1 or more"),
        (("model", "context_length"), "long", "field 'model.context_length' must be a whole number"),
        (("model", "eos_token_ids"), 0, "field 'model.eos_token_ids' must be a list"),
        (("model", "eos_token_ids"), [-1], "field 'model.eos_token_ids' holds a token id outside the vocabulary"),
        (("model", "eos_token_ids"), [10**9], "field 'model.eos_token_ids' holds a token id outside the vocabulary"),
        (("model", "kv_shapes"), [[1, 8]], "field 'model.kv_shapes' must have one entry per layer"),
        (("model", "kv_shapes"), [[1, 8]] * 4, "field 'model.kv_shapes' must have one entry per layer, or as many for"),
        (("model", "kv_shapes", 1), [1, 8, 2], "field 'model.kv_shapes.1' must be a list of 2"),
        (("model", "kv_shapes", 1), [1, 0], "field 'model.kv_shapes' holds a size below 1"),
        (("model", "kv_layers"), [], "field 'model.kv_layers' must have one entry per layer"),
        (("model", "kv_layers"), [0, 1], "field 'model.kv_layers' must have one entry per layer"),
        (("model", "kv_layers"), [0, 2, 2], "field 'model.kv_layers' must name the layer itself, or an earlier one"),
        (("model", "kv_layers"), [0, 0, 1], "field 'model.kv_layers' must name the layer itself, or an earlier one"),
        (("model", "kv_layers"), [0, 1, 0], "field 'model.kv_shapes' must be equal where layers share K/V"),
        (("checkpoints",), [2, 1], "field 'checkpoints' must be distinct and ascending"),
        (("checkpoints",), [1, 3], "field 'checkpoints' must lie in 1..2"),
        (("thresholds",), [0.5], "field 'thresholds' must have one value per checkpoint"),
        (("thresholds",), [0.5, 1.5], "field 'thresholds' must lie in"),
        (("thresholds", 0), "0.5", "field 'thresholds.0' must be a number"),
        (("max_pending",), -1, "field 'max_pending' must be 0 or more"),
        (("min_layers",), -1, "field 'min_layers' must be 0 or more"),
        (("weights",), "int3", "field 'weights' must be one of fp32"),
        (("targets",), ["abacus"], "field 'targets' must be some of onnxruntime"),
        (("inputs", 0, "shape", 1), 1.5, "field 'inputs.0.shape.1' must be"),
        (("calibration",), 3, "field 'calibration' must be an object"),
        (("tuning",), [], "field 'tuning' must be an object"),
        (("tuning",), ..., "field 'tuning' is missing"),
        (("versions", "torch"), 2, "field 'versions.torch' must be a string"),
        (("files", "model.onnx"), ..., "field 'files' does not list model.onnx"),
        (("files", "model.onnx", "size"), -1, "field 'files.model.onnx.size' must be 0 or more"),
        (("files", "model.onnx", "sha256"), "AB" * 32, "field 'files.model.onnx.sha256' must be 64 lower-case"),
        (("files", "../x"), {"size": 0, "sha256": "0" * 64}, "field 'files.../x' is not a path inside"),
        (("files", "/etc/x"), {"size": 0, "sha256": "0" * 64}, "field 'files./etc/x' is not a path inside"),
        (("schema",), "tide_export.bundle/1", "has schema 'tide_export.bundle/1' but this release reads"),
        (("schema",), ..., "it has no field 'schema'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, keys: tuple, value: object, message: str) -> None:
    path = write(tmp_path / "b")
    edit(path, *keys, value=value)
    with pytest.raises(BundleError) as error:
        open_bundle(path)
    assert message in str(error.value)
    assert str(path / "tide.json") in str(error.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"schema": NaN}'])
def test_a_broken_manifest_is_one_sentence(tmp_path: Path, text: bytes) -> None:
    path = write(tmp_path / "b")
    (path / "tide.json").write_bytes(text)
    with pytest.raises(BundleError, match=r"tide\.json"):
        open_bundle(path)


def test_a_manifest_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "b")
    with (path / "tide.json").open("r+b") as file:
        file.truncate(3 << 30)
    tracemalloc.start()
    with pytest.raises(BundleError, match=r"tide\.json' is too large: a manifest has at most 16777216 bytes"):
        open_bundle(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 27
    tracemalloc.stop()


def test_a_manifest_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="thresholds"):
        write(tmp_path / "b", manifest=replace(make_manifest(), thresholds=(0.5,)))
    assert names_in(tmp_path) == set()
