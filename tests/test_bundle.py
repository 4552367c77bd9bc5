"""Bundles on disk: strict manifests, damage found and named, and no half bundle whatever happens to an export."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tide_export
from tide_export import bundle as bundle_module
from tide_export.bundle import (
    Manifest,
    ModelInfo,
    TensorInfo,
    open_bundle,
    replace_manifest,
    write_manifest,
    writing_bundle,
)
from tide_export.errors import BundleError
from tide_export.manifest import Quantization


def make_manifest(name: str = "model") -> Manifest:
    return Manifest(
        model=ModelInfo(
            name=name,
            architecture="LlamaForCausalLM",
            weights_sha256="ab" * 32,
            num_layers=3,
            hidden_size=16,
            vocab_size=32,
            context_length=None,
            eos_token_ids=(0, 2),
            kv_shapes=((1, 8), (1, 8), (2, 4)),
        ),
        checkpoints=(1, 2),
        thresholds=(0.5, 1.0),
        min_layers=2,
        max_pending=16,
        kv_cache_strategy="exact",
        weights="fp32",
        targets=("onnxruntime",),
        opset=23,
        inputs=(TensorInfo("input_ids", "int64", (1, "S")),),
        outputs=(TensorInfo("logits", "float32", (1, 1, 32)),),
        calibration={"dataset": "wikitext", "loss": [0.5, None]},
        versions={"torch": "2.13.0"},
        created="2026-01-01T00:00:00+00:00",
    )


def write(
    path: Path,
    content: bytes = b"graph",
    overwrite: bool = False,
    manifest: Manifest | None = None,
    then: Callable[[], object] = lambda: None,
) -> Path:
    """A small bundle at `path`; `then` is called last, just before it is put in place."""
    with writing_bundle(path, overwrite=overwrite) as folder:
        (folder / "model.onnx").write_bytes(content)
        (folder / "engines").mkdir()
        (folder / "engines" / "head.engine").write_bytes(b"engine" * 1000)
        write_manifest(folder, manifest or make_manifest())
        then()
    return path


def fail_with(error: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# --- the manifest ----------------------------------------------------------------------------------------------------


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


NETWORKS = {"weights": "fp16", "capacity": 64, "most_tokens": 32, "most_logits": 8, "exit_size": 16}
PROFILE = {"name": "decode", "least": 1, "best": 1, "most": 1}
ENGINES = {
    "flavour": "tensorrt-rtx",
    "version": "1.7",
    "compute_capabilities": [],
    "weights_sha256": "0" * 64,
    "profiles": [PROFILE],
    "seconds": 3.5,
    "plugins": None,
}
PLUGINS = {"version": "0.1.0", "sha256": "0" * 64, "engines": ["segment_0", "segment_1"]}


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
        (NETWORKS | {"most_tokens": 0}, None, "field 'networks.most_tokens' must be 1 or more"),
        (NETWORKS | {"capacity": "64"}, None, "field 'networks.capacity' must be a whole number"),
        (
            NETWORKS,
            ENGINES | {"flavour": "onnxruntime"},
            "field 'engines.flavour' must be one of tensorrt, tensorrt-rtx",
        ),
        (NETWORKS, ENGINES | {"profiles": []}, "field 'engines.profiles' must not be empty"),
        (NETWORKS, ENGINES | {"profiles": [PROFILE | {"best": 2}]}, "field 'engines.profiles' must have least <= best"),
        (NETWORKS, ENGINES | {"compute_capabilities": [8]}, "field 'engines.compute_capabilities.0' must be a string"),
        (NETWORKS, ENGINES | {"plugins": PLUGINS}, None),
        (NETWORKS, ENGINES | {"plugins": PLUGINS | {"engines": []}}, "field 'engines.plugins.engines' must be some of"),
        (NETWORKS, ENGINES | {"plugins": PLUGINS | {"engines": ["tail"]}}, "'engines.plugins.engines' must be some of"),
        (NETWORKS, ENGINES | {"plugins": {}}, "field 'engines.plugins.version' is missing"),
        (NETWORKS | {"files": False}, None, "field 'files' does not list segments/segment_0.onnx"),
        (NETWORKS, ENGINES | {"files": False}, "field 'files' does not list engines/segment_0.engine"),
    ],
)
def test_networks_and_engines_are_described_whole_or_refused(tmp_path: Path, networks, engines, message) -> None:
    parts = ["segment_0", "segment_1", "segment_2", "head"]
    with writing_bundle(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"graph")
        for name, suffix, entry in (("segments", "onnx", networks), ("engines", "engine", engines)):
            (folder / name).mkdir()
            for part in parts if entry is not None and entry.pop("files", True) else []:
                (folder / name / f"{part}.{suffix}").write_bytes(b"network")
        write_manifest(folder, make_manifest())
    edit(tmp_path / "b", "networks", value=networks)
    edit(tmp_path / "b", "engines", value=engines)
    if message is None:
        assert open_bundle(tmp_path / "b").manifest.networks is not None
    else:
        with pytest.raises(BundleError, match=re.escape(message)):
            open_bundle(tmp_path / "b")


def edit(path: Path, *keys: str | int, value: object) -> None:
    """Sets one field of a bundle's tide.json; the value `...` deletes it."""
    file = path / "tide.json"
    data = json.loads(file.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    file.write_text(json.dumps(data))


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
        (("model", "name"), None, "field 'model.name' must be a string"),
        (("model", "context_length"), 0, "field 'model.context_length' must be 1 or more"),
        (("model", "context_length"), "long", "field 'model.context_length' must be a whole number"),
        (("model", "eos_token_ids"), 0, "field 'model.eos_token_ids' must be a list"),
        (("model", "eos_token_ids"), [-1], "field 'model.eos_token_ids' holds a negative"),
        (("model", "kv_shapes"), [[1, 8]], "field 'model.kv_shapes' must have one entry per layer"),
        (("model", "kv_shapes", 1), [1, 8, 2], "field 'model.kv_shapes.1' must be a list of 2"),
        (("model", "kv_shapes", 1), [1, 0], "field 'model.kv_shapes' holds a size below 1"),
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


def test_a_manifest_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="thresholds"):
        write(tmp_path / "b", manifest=replace(make_manifest(), thresholds=(0.5,)))
    assert names_in(tmp_path) == set()


# --- opening ---------------------------------------------------------------------------------------------------------


def test_what_is_no_bundle_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        open_bundle(tmp_path / "none")
    with pytest.raises(BundleError, match=r"is not a bundle: it has no tide\.json"):
        open_bundle(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="is not a bundle"):
        open_bundle(tmp_path / "file")


@pytest.mark.parametrize("verify", [True, False])
def test_missing_truncated_and_longer_files_are_always_found(tmp_path: Path, verify: bool) -> None:
    path = write(tmp_path / "b")
    engine = path / "engines" / "head.engine"
    engine.write_bytes(engine.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"head\.engine' is truncated: 5999 of 6000 bytes"):
        open_bundle(path, verify=verify)
    engine.write_bytes(b"engine" * 1000 + b"!")
    with pytest.raises(BundleError, match=r"head\.engine' has 6001 bytes instead of 6000"):
        open_bundle(path, verify=verify)
    engine.unlink()
    with pytest.raises(BundleError, match=r"head\.engine' is missing"):
        open_bundle(path, verify=verify)
    engine.mkdir()
    with pytest.raises(BundleError, match=r"head\.engine' is not a file"):
        open_bundle(path, verify=verify)


def test_one_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    path = write(tmp_path / "b")
    content = bytearray((path / "engines" / "head.engine").read_bytes())
    content[3000] ^= 1
    (path / "engines" / "head.engine").write_bytes(content)
    with pytest.raises(BundleError, match=r"head\.engine' is corrupt"):
        open_bundle(path)
    open_bundle(path, verify=False)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_the_bundle_appears_at_the_end_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "parent" / "b"
    with writing_bundle(path) as folder:
        assert not path.exists()
        (folder / "model.onnx").write_bytes(b"graph")
        write_manifest(folder, make_manifest())
        assert not path.exists()
    assert names_in(path) == {"model.onnx", "tide.json"}
    assert names_in(path.parent) == {"b"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_export_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write(tmp_path / "made" / "b", then=fail_with(error))
    assert names_in(tmp_path) == set()


def test_a_failed_export_leaves_the_old_bundle(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    with pytest.raises(RuntimeError):
        write(path, b"new", overwrite=True, then=fail_with(RuntimeError))
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


def test_an_export_that_wrote_no_manifest_fails(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"made no tide\.json"), writing_bundle(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"graph")
    assert names_in(tmp_path) == set()


def test_an_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for output in (path, tmp_path / "file", tmp_path / "link", tmp_path):
        with pytest.raises(BundleError, match="already exists"), writing_bundle(output):
            pytest.fail("the body ran")
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwrite_replaces_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(bundle_module, "_exchange", lambda first, second: False)
    path = write(tmp_path / "b", b"old")
    (path / "extra").write_text("of the old bundle")
    write(path, b"new", overwrite=True)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"new"
    assert names_in(tmp_path) == {"b"}
    assert "extra" not in names_in(path)


def test_overwrite_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    write(tmp_path / "b", b"old")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    write(tmp_path / "link", b"new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert open_bundle(tmp_path / "b").file("model.onnx").read_bytes() == b"new"


def test_overwrite_never_replaces_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "thesis", tmp_path / "file"):
        with pytest.raises(BundleError, match="is not a bundle"), writing_bundle(output, overwrite=True):
            pytest.fail("the body ran")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_made_during_the_export_survives(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "b"

    def interfere() -> None:
        path.mkdir()
        (path / "chapter.txt").write_text("mine")

    with pytest.raises(BundleError, match="exists"):
        write(path, overwrite=overwrite, then=interfere)
    assert (path / "chapter.txt").read_text() == "mine"
    assert names_in(tmp_path) == {"b"}


def test_when_the_new_bundle_cannot_be_moved_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "b", b"old")
    monkeypatch.setattr(bundle_module, "_exchange", lambda first, second: False)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith("tide-tmp"):
            raise OSError(errno.EIO, "the disk died")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk died"):
        write(path, b"new", overwrite=True)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="file"), writing_bundle(tmp_path / "file" / "b"):
        pytest.fail("the body ran")


# --- another manifest for a bundle that is there ---------------------------------------------------------------------


def tuned(manifest: Manifest) -> Manifest:
    return replace(manifest, thresholds=(0.25, 0.75), tuning={"epsilon": 0.05, "path": [{"risk": 0.5, "p": None}]})


def test_a_manifest_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "b")

    def others() -> dict[Path, tuple[int, int, int]]:
        stats = {file: file.stat() for file in path.rglob("*") if file.name != "tide.json"}
        return {file: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()}

    before = others()
    mode = (path / "tide.json").stat().st_mode
    opened = open_bundle(path)
    replaced = replace_manifest(opened, tuned(replace(opened.manifest, files={})))
    assert replaced == open_bundle(path)
    assert replaced.manifest == tuned(opened.manifest)
    assert others() == before
    assert (path / "tide.json").stat().st_mode == mode
    assert names_in(tmp_path) == {"b"}


def test_a_manifest_is_replaced_through_a_link(tmp_path: Path) -> None:
    write(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    opened = open_bundle(tmp_path / "link")
    replace_manifest(opened, tuned(opened.manifest))
    assert (tmp_path / "link").is_symlink()
    assert open_bundle(tmp_path / "b").manifest == tuned(opened.manifest)


@pytest.mark.parametrize("broken", ["write_text", "replace"])
def test_when_the_new_manifest_cannot_be_written_the_old_one_stays(tmp_path, monkeypatch, broken) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    text = (tmp_path / "b" / "tide.json").read_bytes()

    def failing(self: Path, *arguments: object, **options: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC if broken == "write_text" else errno.EIO, "the disk died")

    with monkeypatch.context() as patch:
        patch.setattr(Path, broken, failing)
        says = "no space left" if broken == "write_text" else "stays as it was: the disk died"
        with pytest.raises(BundleError, match=says):
            replace_manifest(opened, tuned(opened.manifest))
    assert (tmp_path / "b" / "tide.json").read_bytes() == text
    assert names_in(tmp_path / "b") == {"model.onnx", "engines", "tide.json"}
    assert names_in(tmp_path) == {"b"}


def test_a_manifest_that_could_not_be_read_back_does_not_replace_one(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    with pytest.raises(BundleError, match="field 'thresholds' must lie in"):
        replace_manifest(opened, replace(opened.manifest, thresholds=(0.5, 2.0)))
    assert open_bundle(tmp_path / "b") == opened


def test_a_bundle_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    write(tmp_path / "b", b"another", overwrite=True)
    with pytest.raises(BundleError, match="was changed by something else meanwhile"):
        replace_manifest(opened, tuned(opened.manifest))
    assert open_bundle(tmp_path / "b").manifest.tuning is None


# --- two exports, killed exports, full disks --------------------------------------------------------------------------

HERE = [str(Path(__file__).parent), str(Path(tide_export.__file__).parents[1])]
EXPORT = f"""
import sys
sys.path[:0] = {HERE!r}
from test_bundle import *
with writing_bundle(sys.argv[1], overwrite=True) as folder:
    (folder / "model.onnx").write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()
    write_manifest(folder, make_manifest())
"""


def start_export(path: Path) -> "subprocess.Popen[str]":
    """An export in another process, inside the body, waiting for its stdin to close."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_second_export_to_the_same_folder_fails_at_once(tmp_path: Path) -> None:
    first = start_export(tmp_path / "b")
    try:
        with pytest.raises(BundleError, match=r"another export to .* is running"), writing_bundle(tmp_path / "b"):
            pytest.fail("the body ran")
        write(tmp_path / "other")  # another folder is nobody's business
        first.communicate("", timeout=60)
        assert first.returncode == 0
    finally:
        first.kill()
        first.wait()
    assert open_bundle(tmp_path / "b").file("model.onnx").read_bytes() == b"half"
    assert names_in(tmp_path) == {"b", "other"}


def test_a_manifest_is_not_replaced_during_an_export(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    export = start_export(tmp_path / "b")
    try:
        with pytest.raises(BundleError, match="another export to"):
            replace_manifest(opened, tuned(opened.manifest))
        export.communicate("", timeout=60)
    finally:
        export.kill()
        export.wait()
    assert open_bundle(tmp_path / "b").manifest.tuning is None


def test_of_many_threads_exporting_at_once_one_wins_and_nothing_is_mixed(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def export(number: int) -> None:
        try:
            write(tmp_path / "b", b"%d" % number, manifest=make_manifest(name=str(number)))
            outcomes.append(str(number))
        except BundleError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=export, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome.isdigit()]
    losers = [outcome for outcome in outcomes if "already exists" in outcome or "is running" in outcome]
    assert (len(winners), len(losers)) == (1, 7)
    opened = open_bundle(tmp_path / "b")
    assert opened.manifest.model.name == winners[0]
    assert opened.file("model.onnx").read_bytes() == winners[0].encode()
    assert names_in(tmp_path) == {"b"}


def test_a_killed_export_leaves_the_old_bundle_and_the_next_export_cleans_up(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    process = start_export(path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) > {"b"}  # leftovers there are, or this test shows nothing
    write(path, b"new", overwrite=True)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"new"
    assert names_in(tmp_path) == {"b"}


def test_killed_between_the_two_renames_the_old_bundle_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    path.rename(tmp_path / ".b.tide-old")  # what such a death leaves where folders cannot be exchanged
    with pytest.raises(BundleError, match="already exists"), writing_bundle(path):
        pytest.fail("the body ran")
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_one_sentence(tmp_path: Path, wrapped: bool) -> None:
    def fill() -> None:
        try:
            with open("/dev/full", "wb", buffering=0) as device:  # noqa: PTH123
                device.write(b"x")
        except OSError as error:
            if wrapped:
                raise RuntimeError("cannot serialize") from error
            raise

    path = write(tmp_path / "b", b"old")
    with pytest.raises(BundleError, match="no space left"):
        write(path, b"new", overwrite=True, then=fill)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


WRITERS = {
    "python": "(folder / 'model.onnx').write_bytes(bytes(100_000))",
    "numpy": "import numpy; numpy.zeros(100_000).tofile(folder / 'model.onnx')",
    "safetensors": "import numpy, safetensors.numpy\n"
    "    safetensors.numpy.save_file({'a': numpy.zeros(100_000)}, folder / 'model.onnx')",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_size_limit_is_a_full_disk_whoever_writes(tmp_path: Path, writer: str) -> None:
    code = f"""
import sys, resource
sys.path[:0] = {HERE!r}
from test_bundle import *
def export():
  with writing_bundle(sys.argv[1]) as folder:
    {WRITERS[writer]}
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try: export()
except BundleError as error: sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no space left on the disk for bundle")
    assert names_in(tmp_path) == set()
