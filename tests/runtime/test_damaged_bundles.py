"""Every way in which a bundle is damaged is one sentence: of the library, which programs in C and C++ load it with, and
of the package, which reads it first and also refuses damage that the library has no use for."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from bundles import edit
from tiny_engines import TinyLlama
from tiny_model import TinyModel

from tide_export.bundle.file_names import batch_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError
from tide_export.names import batch_networks as names
from tide_export.names import networks, paged
from tide_export.names.networks import segment_name
from tide_export.runtime.engine import load
from tide_export.runtime.native import created, onnxruntime_library

Damage = Callable[[Path], object]


def by_the_library(bundle: Path, **options: Any) -> object:
    given = {"threads": 1, "onnxruntime": onnxruntime_library(), **options}
    text = json.dumps({name: value for name, value in given.items() if value is not None})
    return created("load", os.fsencode(bundle), text.encode())


READERS = {"library": by_the_library, "package": load}


def write(name: str, data: bytes) -> Damage:
    return lambda bundle: (bundle / name).write_bytes(data)


def appended(name: str, data: bytes) -> Damage:
    return lambda bundle: (bundle / name).write_bytes((bundle / name).read_bytes() + data)


def rewritten(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(bundle: Path) -> None:
        data = json.loads((bundle / "tide.json").read_text())
        change(data)
        (bundle / "tide.json").write_text(json.dumps(data))

    return damage


FIRST, SECOND, THIRD = (batch_file(segment_name(k)) for k in range(3))
HEAD = batch_file(networks.HEAD)


def field(*keys: str | int, value: Any) -> Damage:
    return lambda bundle: edit(bundle, *keys, value=value)


def listed_again(bundle: Path) -> None:
    write_manifest(bundle, Manifest.from_json((bundle / "tide.json").read_text()))


def graph_of(model: TinyModel) -> Damage:
    """Another model's networks under this manifest, hashed anew."""

    def damage(bundle: Path) -> None:
        other = model.write(bundle.with_name("other"))
        shutil.copytree(other, bundle, ignore=lambda folder, names: ["tide.json"], dirs_exist_ok=True)
        edit(bundle, "files", value=json.loads((other / "tide.json").read_text())["files"])

    return damage


def flip_last_byte(bundle: Path) -> None:
    data = (bundle / "model.onnx").read_bytes()
    (bundle / "model.onnx").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def no_graph(bundle: Path) -> None:
    (bundle / HEAD).write_bytes(b"this is no graph")
    listed_again(bundle)


def no_networks(bundle: Path) -> None:
    """A bundle of an early release: the step graph alone."""
    shutil.rmtree(bundle / "batch")
    listed_again(bundle)


def external(**place: str) -> Damage:
    """A network's weights in a file of their own, and the entries `place` of the first one changed."""

    def damage(bundle: Path) -> None:
        path, file = bundle / "model.onnx", bundle / FIRST
        onnx.save(onnx.load(file), path, save_as_external_data=True, location="model.onnx.data", size_threshold=100)
        graph = onnx.load(path, load_external_data=False)
        first = next(one for one in graph.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL)
        for entry in first.external_data:
            entry.value = place.get(entry.key, entry.value)
        file.write_bytes(graph.SerializeToString())
        listed_again(bundle)

    return damage


def no_weights(bundle: Path) -> None:
    """The file of the weights is empty, and listed as that."""
    external()(bundle)
    (bundle / "model.onnx.data").write_bytes(b"")
    listed_again(bundle)


LINK = "is a symbolic link, or in a folder that is one: copy the bundle with the files themselves"


def linked(name: str, to: str | None = None, inside: str | None = None) -> Damage:
    """A link in place of a file, or of the folder of file `inside`, which is listed; by default to where it is now."""

    def damage(bundle: Path) -> None:
        path, moved = bundle / name, bundle.with_name("moved")
        if inside is not None:
            path.mkdir()
            (path / inside).write_bytes(b"")
            empty = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
            edit(bundle, "files", f"{name}/{inside}", value=empty)
        path.rename(moved)
        path.symlink_to(to or moved)

    return damage


def pipe(name: str) -> Damage:
    def damage(bundle: Path) -> None:
        (bundle / name).unlink()
        os.mkfifo(bundle / name)

    return damage


def folder(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").mkdir()


DAMAGE: dict[str, tuple[Damage, str]] = {
    "gone": (shutil.rmtree, "does not exist"),
    "no manifest": (lambda bundle: (bundle / "tide.json").unlink(), r"is not a bundle: it has no tide\.json"),
    "empty manifest": (write("tide.json", b""), "is not valid JSON"),
    "cut manifest": (write("tide.json", b'{"schema": "tide'), "is not valid JSON"),
    "no text": (write("tide.json", b'{"schema": "\xff"}'), "is not valid JSON"),
    "deep": (write("tide.json", b'{"schema": ' + b"[" * 100_000), "is not valid JSON"),
    "no object": (write("tide.json", b"[1]"), "is not the manifest of a bundle"),
    "other schema": (
        field("schema", value="tide_export.bundle/99"),
        "has schema 'tide_export.bundle/99' but this release reads 'tide_export.bundle/11'",
    ),
    "missing field": (field("model", "vocab_size", value=...), r"field 'model\.vocab_size' is missing"),
    "wrong type": (field("max_pending", value="4"), "field 'max_pending' must be a whole number, not \"4\""),
    "outside": (
        rewritten(lambda data: data["files"].update({"../x": data["files"]["model.onnx"]})),
        r"field 'files\.\.\./x' is not a path inside the bundle",
    ),
    "missing file": (lambda bundle: (bundle / "model.onnx").unlink(), r"model\.onnx' is missing; export the bundle"),
    "truncated": (write("model.onnx", b"onnx"), r"model\.onnx' is truncated: 4 of \d+ bytes"),
    "too long": (appended("model.onnx", b"x"), r"model\.onnx' has \d+ bytes instead of \d+"),
    "flipped": (flip_last_byte, r"model\.onnx' is corrupt: its sha256 is not the manifest's"),
    "a link to a device": (linked("model.onnx", "/proc/kmsg"), rf"model\.onnx' {LINK}"),
    "a link to the right file": (linked("model.onnx"), rf"model\.onnx' {LINK}"),
    "a manifest that is a link": (linked("tide.json"), rf"tide\.json' {LINK}"),
    "a folder that is a link": (linked("engines", inside="a.bin"), rf"engines/a\.bin' {LINK}"),
    "a pipe": (pipe("model.onnx"), r"model\.onnx' is not a file"),
    "a manifest that is a pipe": (pipe("tide.json"), r"tide\.json' is not a file"),
    "a folder": (folder, r"model\.onnx' is not a file"),
    "weights elsewhere": (external(location="tide.json"), r"ONNX Runtime cannot load '.*segment_00\.onnx': "),
    "weights on the disk": (external(location="../other.data"), r"ONNX Runtime cannot load '.*segment_00\.onnx': "),
    "weights after the end": (external(offset="4096000"), r"has the tensor \w+ outside of the file of its weights"),
    "no weights": (no_weights, r"has the tensor \w+ outside of the file of its weights"),
    "no ONNX": (no_graph, r"ONNX Runtime cannot load '.*batch/head\.onnx': "),
    "no networks": (no_networks, "holds no networks of its segments: export it again"),
    "another graph": (
        graph_of(TinyModel(layers=5)),
        r"has no input pages\.5\.key, which its manifest calls for",
    ),
    "more graph": (
        graph_of(TinyModel(layers=7)),
        r"has the input pages\.6\.key, which its manifest does not know",
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", DAMAGE)
def test_bundles_are_refused(tiny: TinyModel, tmp_path: Path, reader: str, name: str) -> None:
    bundle = tiny.write(tmp_path / "bundle")
    damage, sentence = DAMAGE[name]
    damage(bundle)
    with pytest.raises(BundleError, match=sentence) as error:
        READERS[reader](bundle)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (field("colour", value="red"), "field 'colour' is unknown"),
        (field("model", "name", value=...), r"field 'model\.name' is missing"),
        (field("targets", value=["abacus"]), "field 'targets' must be some of"),
        (field("files", "model.onnx", value=...), r"field 'files' does not list model\.onnx"),
    ],
)
def test_the_library_ignores_fields_that_it_has_no_use_for(
    tiny: TinyModel, tmp_path: Path, damage: Damage, sentence: str
) -> None:
    bundle = tiny.write(tmp_path / "bundle")
    damage(bundle)
    assert by_the_library(bundle)
    with pytest.raises(BundleError, match=sentence):
        load(bundle)


def test_weights_in_a_file_of_their_own(tiny: TinyModel, tmp_path: Path) -> None:
    bundle = tiny.write(tmp_path / "bundle")
    expected = load(bundle, threads=1).generate([1, 2]).tokens
    external()(bundle)
    assert load(bundle, threads=1).generate([1, 2]).tokens == expected


def test_hashes_of_every_length_of_file(tiny: TinyModel, tmp_path: Path) -> None:
    """Around the block of 64 bytes, the length behind it, and the chunk of a mebibyte."""
    bundle = tiny.write(tmp_path / "bundle")
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 56, 2 << 20):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        (bundle / f"{size}.bin").write_bytes(data)
        edit(bundle, "files", f"{size}.bin", value={"size": size, "sha256": hashlib.sha256(data).hexdigest()})
    by_the_library(bundle)
    (bundle / "1000.bin").write_bytes(b"x" * 1000)
    with pytest.raises(BundleError, match=r"1000\.bin' is corrupt"):
        by_the_library(bundle)
    by_the_library(bundle, verify=False)


# --- networks of segments --------------------------------------------------------------------------------------------

OTHER = r", but its manifest calls for \w+ \["


def changed(file: str, change: Callable[[onnx.GraphProto], None]) -> Damage:
    def damage(bundle: Path) -> None:
        model = onnx.load(bundle / file, load_external_data=False)
        change(model.graph)
        (bundle / file).write_bytes(model.SerializeToString())

    return damage


def any_size(tensor: str, axis: int) -> Callable[[onnx.GraphProto], None]:
    """The input takes any size along an axis."""

    def change(graph: onnx.GraphProto) -> None:
        [entry] = [one for one in graph.input if one.name == tensor]
        entry.type.tensor_type.shape.dim[axis].dim_param = "any"

    return change


def omitted(tensor: str) -> Callable[[onnx.GraphProto], None]:
    return lambda graph: graph.output.remove(next(one for one in graph.output if one.name == tensor))


def copied(source: str, target: str) -> Damage:
    return lambda bundle: (bundle / target).write_bytes((bundle / source).read_bytes())


KV = paged.pages(0, "key")
NETWORKS: list[tuple[Damage, str]] = [
    (copied(FIRST, SECOND), r"segment_01\.onnx' has no input hidden_states, which its manifest calls for"),
    (copied(SECOND, THIRD), r"segment_02\.onnx' has no input pages\.\d\.\w+, which its"),
    (changed(THIRD, omitted(names.EXIT_STATES)), r"segment_02\.onnx' has no output exit_states, which its"),
    (changed(SECOND, any_size(names.HIDDEN_STATES, 2)), rf"input hidden_states is .*{OTHER}1, 'tokens', "),
    (changed(FIRST, any_size(KV, 3)), rf"segment_00\.onnx': input pages\.0\.key is .*{OTHER}'tokens', "),
    (changed(HEAD, any_size(names.EXIT_STATES, 2)), rf"input exit_states is .*{OTHER}1, 'tokens', 0"),
    (copied(FIRST, HEAD), r"head\.onnx' has no input exit_states, which its manifest calls for"),
    (write(SECOND, b"no network"), r"ONNX Runtime cannot load '.*segment_01\.onnx': "),
]


@pytest.mark.parametrize(("damage", "sentence"), NETWORKS, ids=[sentence for _, sentence in NETWORKS])
def test_networks_are_refused(tiny_llama: TinyLlama, tmp_path: Path, damage: Damage, sentence: str) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_llama.exact, bundle)
    damage(bundle)
    listed_again(bundle)
    with pytest.raises(BundleError, match=sentence):
        load(bundle, provider="cpu", threads=1)
