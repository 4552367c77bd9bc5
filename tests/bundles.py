"""Small bundles of names and bytes, for the tests of what becomes of bundles on disk."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from tide_export.bundle.file_names import GRAPH_FILE, MANIFEST_FILE, PLANS_FOLDER, SEGMENTS_FOLDER, plan_file
from tide_export.bundle.manifest import Manifest, TensorInfo
from tide_export.bundle.model_info import ModelInfo
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import PlansInfo, Profile
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.names.networks import AFTER_SEGMENTS, segment_name


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


def put_text(bundle: Path, name: str, text: str) -> None:
    """Writes a file of a bundle, and lists it in its tide.json."""
    (bundle / name).write_text(text)
    data = text.encode()
    edit(bundle, "files", name, value={"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def tuned(manifest: Manifest) -> Manifest:
    return replace(manifest, thresholds=(0.25, 0.75), tuning={"epsilon": 0.05, "path": [{"risk": 0.5, "p": None}]})


def with_manifest(bundle: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a bundle in a new folder under `folder`; its manifest and graph have other `fields`."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(dir=folder)) / bundle.name
    shutil.copytree(bundle, copy)
    manifest = replace(open_bundle(copy, verify=False).manifest, **fields)
    graph = onnx.load(copy / GRAPH_FILE, load_external_data=False)
    onnx.helper.set_model_props(graph, manifest.graph_metadata)
    onnx.save(graph, copy / GRAPH_FILE)
    write_manifest(copy, replace(manifest, files={}))
    return copy


PROFILES = (Profile("decode", 1, 1, 1, 8), Profile("catch-up", 1, 16, 32, 8), Profile("prefill", 1, 512, 1024, 1))


def with_engines(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle with segment networks, with files in the place of their engines, which no engine can read."""
    shutil.copytree(bundle, folder)
    manifest = open_bundle(bundle, verify=False).manifest
    (folder / PLANS_FOLDER).mkdir()
    for part in (*(segment_name(k) for k in range(len(manifest.segment_sizes))), *AFTER_SEGMENTS):
        (folder / plan_file(part)).write_bytes(b"engine" * 1000)
    engines = PlansInfo("tensorrt", "11.1.0.106", ("8.9",), manifest.model.weights_sha256, PROFILES, 12.5)
    write_manifest(folder, replace(manifest, engines=engines))
    return folder


def without(bundle: Path, folder: Path, lost: str) -> Path:
    """A copy of a bundle, no links to it, without segment networks, engines and the files whose paths start with
    `lost`."""
    for file in bundle.rglob("*"):
        name = file.relative_to(bundle).as_posix()
        omitted = (lost, MANIFEST_FILE, f"{SEGMENTS_FOLDER}/", f"{PLANS_FOLDER}/")
        if file.is_file() and not name.startswith(omitted):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
    manifest = Manifest.from_json((bundle / MANIFEST_FILE).read_text())
    write_manifest(folder, replace(manifest, networks=None, engines=None, files={}))
    return folder
