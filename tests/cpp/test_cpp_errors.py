"""Every mistake gives the Python runtime's class and sentence, and the engine goes on."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from bundles import edit
from cpp_builds import CppBuild
from cpp_engine import CppEngine
from tiny_model import TinyModel

from tide_export import errors
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError, ConfigError, GenerationError
from tide_export.runtime.engine import Engine, load

REQUESTS: list[tuple[list[int], dict[str, Any], str]] = [
    ([], {}, "the prompt is empty"),
    ([1, 48], {}, r"the prompt holds token id 48, outside the vocabulary 0\.\.47"),
    ([-1], {}, "the prompt holds token id -1"),
    ([1] * 257, {}, "the prompt has 257 tokens but the model's context holds 256"),
    ([1], {"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, not 0"),
    ([1], {"mode": "fast"}, "mode must be 'auto', 'full', 'exit' or 'lossless', not 'fast'"),
    ([1], {"threshold": 1.5}, r"threshold must lie in \[0, 1\], not 1.5"),
    ([1], {"threshold": -0.25}, r"threshold must lie in \[0, 1\], not -0.25"),
    ([1], {"threshold": float("nan")}, r"threshold must lie in \[0, 1\], not nan"),
    ([1], {"threshold": [0.5, 0.5, 0.5]}, r"threshold has 3 values but the model has 2 checkpoints \(2, 4\)"),
    ([1], {"threshold": [0.5, 2.0]}, r"threshold must lie in \[0, 1\], not 2.0"),
    ([1], {"min_layers": -1}, "min_layers must be a whole number, 0 or more, not -1"),
    ([1], {"max_pending": -1}, "max_pending must be a whole number, 0 or more, not -1"),
    ([1], {"mode": "lossless", "max_pending": -2}, "max_pending must be a whole number, 0 or more, not -2"),
    ([1], {"prompt_lookup": 3}, "prompt_lookup is for mode 'lossless', not 'auto': elsewhere nothing is drafted"),
    ([1], {"mode": "exit", "prompt_lookup": 3}, "prompt_lookup is for mode 'lossless', not 'exit': elsewhere"),
    ([1], {"mode": "lossless", "prompt_lookup": -3}, "prompt_lookup must be a whole number, 0 or more, not -3"),
    ([1], {"temperature": -0.5}, "temperature must be 0 or more, not -0.5"),
    ([1], {"temperature": float("inf")}, "temperature must be a number, not inf"),
    ([1], {"top_k": -1}, "top_k must be a whole number, 0 or more, not -1"),
    ([1], {"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
    ([1], {"top_p": float("nan")}, "top_p must be a number, not nan"),
    ([1], {"top_k": 5}, "top_k is for a temperature above 0: without one the most likely token is taken"),
    ([1], {"top_p": 0.5}, "top_p is for a temperature above 0"),
    ([1], {"mode": "full", "threshold": 0.5}, "threshold is for modes 'exit' and 'lossless', not 'full'"),
    ([1], {"mode": "full", "min_layers": 2}, "min_layers is for modes 'exit' and 'lossless', not 'full'"),
    ([1], {"mode": "full", "max_pending": 2}, "max_pending is for modes 'exit' and 'lossless', not 'full'"),
    ([1], {"stop_token_ids": [-1]}, r"stop_token_ids holds token id -1, outside the vocabulary 0\.\.47"),
    ([1], {"stop_token_ids": [3, 48]}, "stop_token_ids holds token id 48, outside the vocabulary"),
    ([1], {"seed": -1}, "seed must be a whole number, 0 or more, not -1"),
]


@pytest.mark.parametrize(("ids", "options", "sentence"), REQUESTS)
def test_requests_are_refused(tiny_engine: Any, ids: list[int], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        tiny_engine.generate(ids, **options)


def test_a_sequence_is_refused(tiny_engines: dict[str, Any]) -> None:
    cpp = tiny_engines["cpp"]
    for thresholds, limit, room, sentence in [
        ([0.5], 4, 8, "1 thresholds for 2 checkpoints"),
        ([0.5, float("nan")], 4, 8, "a threshold must be a number, not nan"),
        ([0.5, 0.5], -1, 8, "max_pending must be a whole number, 0 or more, not -1"),
        ([0.5, 0.5], 4, -8, "room must be a whole number, 0 or more, not -8"),
    ]:
        with pytest.raises(GenerationError, match=sentence):
            cpp.start(thresholds, limit, room)
    state = cpp.start([0.5, 0.5])
    state.step([1, 2])
    for length in (-1, 3):
        with pytest.raises(GenerationError, match=f"a sequence of 2 tokens cannot be rewound to {length}"):
            state.rewind(length)
    with pytest.raises(GenerationError, match="logits_to_keep must be a whole number, 1 or more, not 0"):
        state.step([1], logits_to_keep=0)
    with pytest.raises(GenerationError, match="1 thresholds for 2 checkpoints"):
        state.set_thresholds([0.5])
    assert state.length == 2


def test_logits_that_are_not_finite(open_cpp: Callable[..., CppEngine], tmp_path: Path) -> None:
    class Broken(TinyModel):
        def weights(self) -> dict[str, Any]:
            made = super().weights()
            made["head"][0, 5] = float("nan")
            return made

    engine = open_cpp(Broken().write(tmp_path / "broken"))
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"mode": "lossless"}):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            engine.generate([1, 2], **options)


# --- bundles ---------------------------------------------------------------------------------------------------------


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda bundle: (bundle / name).write_bytes(data)


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(bundle: Path) -> None:
        data = json.loads((bundle / "tide.json").read_text())
        change(data)
        (bundle / "tide.json").write_text(json.dumps(data))

    return damage


def field(*keys: str | int, value: Any) -> Callable[[Path], object]:
    return lambda bundle: edit(bundle, *keys, value=value)


def graph_of(model: TinyModel) -> Callable[[Path], object]:
    """Another model's graph under this manifest, hashed anew."""

    def damage(bundle: Path) -> None:
        other = model.write(bundle.with_name("other"))
        shutil.copy(other / "model.onnx", bundle)
        files = json.loads((other / "tide.json").read_text())["files"]
        edit(bundle, "files", value=files)

    return damage


def flip_last_byte(bundle: Path) -> None:
    data = (bundle / "model.onnx").read_bytes()
    (bundle / "model.onnx").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def no_graph(bundle: Path) -> None:
    text = b"this is no graph"
    (bundle / "model.onnx").write_bytes(text)
    edit(bundle, "files", "model.onnx", value={"size": len(text), "sha256": hashlib.sha256(text).hexdigest()})


def external(**place: str) -> Callable[[Path], object]:
    """The weights in a file of their own, and the entries `place` of the first one changed."""

    def damage(bundle: Path) -> None:
        path = bundle / "model.onnx"
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="model.onnx.data", size_threshold=100)
        graph = onnx.load(path, load_external_data=False)
        first = next(one for one in graph.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL)
        for entry in first.external_data:
            entry.value = place.get(entry.key, entry.value)
        path.write_bytes(graph.SerializeToString())
        write_manifest(bundle, Manifest.from_json((bundle / "tide.json").read_text()))

    return damage


def no_weights(bundle: Path) -> None:
    """The file of the weights is empty, and listed as that."""
    external()(bundle)
    (bundle / "model.onnx.data").write_bytes(b"")
    write_manifest(bundle, Manifest.from_json((bundle / "tide.json").read_text()))


LINK = "is a symbolic link, or in a folder that is one: copy the bundle with the files themselves"


def linked(name: str, to: str | None = None, inside: str | None = None) -> Callable[[Path], object]:
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


def pipe(name: str) -> Callable[[Path], object]:
    def damage(bundle: Path) -> None:
        (bundle / name).unlink()
        os.mkfifo(bundle / name)

    return damage


def folder(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "does not exist"),
    "no manifest": (lambda bundle: (bundle / "tide.json").unlink(), r"is not a bundle: it has no tide\.json"),
    "empty manifest": (write("tide.json", b""), "is not valid JSON"),
    "cut manifest": (write("tide.json", b'{"schema": "tide'), "is not valid JSON"),
    "no text": (write("tide.json", b'{"schema": "\xff"}'), "is not valid JSON"),
    "no finite number": (write("tide.json", b'{"schema": 1e999}'), "is not valid JSON|has no field 'schema'"),
    "NaN": (field("compaction_threshold", value=float("nan")), "is not valid JSON"),
    "no object": (write("tide.json", b"[1]"), "is not the manifest of a bundle"),
    "deep": (write("tide.json", b'{"schema": ' + b"[" * 100_000), "is not valid JSON"),
    "no schema": (field("schema", value=...), "has no field 'schema'"),
    "other schema": (
        field("schema", value="tide_export.bundle/99"),
        "has schema 'tide_export.bundle/99' but this release reads 'tide_export.bundle/9'",
    ),
    "missing field": (field("max_pending", value=...), "field 'max_pending' is missing"),
    "missing inner field": (field("model", "vocab_size", value=...), r"field 'model\.vocab_size' is missing"),
    "unknown field": (field("colour", value="red"), "field 'colour' is unknown"),
    "wrong type": (field("max_pending", value="4"), "field 'max_pending' must be a whole number, not \"4\""),
    "true is no number": (field("min_layers", value=True), "field 'min_layers' must be a whole number, not true"),
    "a real layer": (field("checkpoints", 0, value=2.0), r"field 'checkpoints\.0' must be a whole number, not 2\.0"),
    "no list": (field("thresholds", value=0.5), "field 'thresholds' must be a list, not 0.5"),
    "no object of files": (field("files", value=None), "field 'files' must be an object, not null"),
    "threshold": (field("thresholds", 1, value=1.25), r"field 'thresholds' must lie in \[0, 1\]"),
    "thresholds": (field("thresholds", value=[0.5]), "field 'thresholds' must have one value per checkpoint"),
    "layers": (field("model", "num_layers", value=0), r"field 'model\.num_layers' must be 1 or more"),
    "last layer": (field("checkpoints", value=[2, 6]), r"field 'checkpoints' must lie in 1\.\.5"),
    "order": (field("checkpoints", value=[4, 2]), "field 'checkpoints' must be distinct and ascending"),
    "shapes": (field("model", "kv_shapes", value=[[1, 8]]), r"'model\.kv_shapes' must have one entry per layer"),
    "kv layers": (field("model", "kv_layers", value=[0]), r"'model\.kv_layers' must have one entry per layer"),
    "a later kv layer": (
        field("model", "kv_layers", value=[1, 1, 2, 3, 4, 5]),
        r"'model\.kv_layers' must name the layer itself, or an earlier one with K/V of its own",
    ),
    "strategy": (
        field("kv_cache_strategy", value="guess"),
        "field 'kv_cache_strategy' must be one of exact, propagate",
    ),
    "weights": (field("weights", value="fp4"), "field 'weights' must be one of fp32, bf16, fp16, int8, int4"),
    "no graph": (field("files", value={}), r"field 'files' does not list model\.onnx"),
    "outside": (
        rewritten(lambda data: data["files"].update({"../x": data["files"]["model.onnx"]})),
        r"field 'files\.\.\./x' is not a path inside the bundle",
    ),
    "hash": (field("files", "model.onnx", "sha256", value="ab"), "must be 64 lower-case hex digits"),
    "missing file": (lambda bundle: (bundle / "model.onnx").unlink(), r"model\.onnx' is missing; export the bundle"),
    "truncated": (write("model.onnx", b"onnx"), r"model\.onnx' is truncated: 4 of \d+ bytes"),
    "too long": (
        lambda bundle: (bundle / "model.onnx").write_bytes((bundle / "model.onnx").read_bytes() + b"x"),
        r"model\.onnx' has \d+ bytes instead of \d+",
    ),
    "flipped": (flip_last_byte, r"model\.onnx' is corrupt: its sha256 is not the manifest's"),
    "a link to a device": (linked("model.onnx", "/proc/kmsg"), rf"model\.onnx' {LINK}"),
    "a link to the right file": (linked("model.onnx"), rf"model\.onnx' {LINK}"),
    "a manifest that is a link": (linked("tide.json"), rf"tide\.json' {LINK}"),
    "a folder that is a link": (linked("batch", inside="a.bin"), rf"batch/a\.bin' {LINK}"),
    "a pipe": (pipe("model.onnx"), r"model\.onnx' is not a file"),
    "a manifest that is a pipe": (pipe("tide.json"), r"tide\.json' is not a file"),
    "a folder": (folder, r"model\.onnx' is not a file"),
    "weights elsewhere": (external(location="tide.json"), r"ONNX Runtime cannot load '.*model\.onnx': "),
    "weights on the disk": (external(location="../other.data"), r"ONNX Runtime cannot load '.*model\.onnx': "),
    "weights after the end": (external(offset="4096000"), r"has the tensor \w+ outside of the file of its weights"),
    "no weights": (no_weights, r"has the tensor \w+ outside of the file of its weights"),
    "no ONNX": (no_graph, r"ONNX Runtime cannot load '.*model\.onnx': "),
    "another graph": (
        graph_of(TinyModel(layers=5)),
        r"has no input past_key_values\.5\.key, which its manifest calls for",
    ),
    "more graph": (
        graph_of(TinyModel(layers=7)),
        r"has the input past_key_values\.6\.key, which its manifest does not know",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_bundles_are_refused(tiny: TinyModel, cpp: CppBuild, tmp_path: Path, name: str) -> None:
    bundle = tiny.write(tmp_path / "bundle")
    damage, sentence = DAMAGE[name]
    damage(bundle)
    with pytest.raises(BundleError, match=sentence):
        CppEngine(cpp.driver, bundle).close()
    with pytest.raises(BundleError, match=sentence):
        load(bundle)


def test_weights_in_a_file_of_their_own(tiny: TinyModel, tiny_engine: Any, cpp: CppBuild, tmp_path: Path) -> None:
    bundle = tiny.write(tmp_path / "bundle")
    external()(bundle)
    engine = load(bundle, threads=1) if isinstance(tiny_engine, Engine) else CppEngine(cpp.driver, bundle)
    assert engine.generate([1, 2]).tokens == tiny_engine.generate([1, 2]).tokens
    if isinstance(engine, CppEngine):
        engine.close()


def test_hashes_of_every_length_of_file(tiny: TinyModel, cpp: CppBuild, tmp_path: Path) -> None:
    """Around the block of 64 bytes, the length behind it, and the chunk of a mebibyte."""
    bundle = tiny.write(tmp_path / "bundle")
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 56, 2 << 20):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        (bundle / f"{size}.bin").write_bytes(data)
        edit(bundle, "files", f"{size}.bin", value={"size": size, "sha256": hashlib.sha256(data).hexdigest()})
    CppEngine(cpp.driver, bundle).close()
    (bundle / "1000.bin").write_bytes(b"x" * 1000)
    with pytest.raises(BundleError, match=r"1000\.bin' is corrupt"):
        CppEngine(cpp.driver, bundle).close()
    CppEngine(cpp.driver, bundle, verify=False).close()


@pytest.mark.parametrize("threads", [0, -2, 1025, 2**31, 2**40])
def test_threads(tiny_bundle: Path, cpp: CppBuild, threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads must be a whole number from 1 to 1024, not {threads}"):
        CppEngine(cpp.driver, tiny_bundle, threads=threads).close()


# --- the example program, the build ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ids", "1"], "no bundle is given"),
        (["BUNDLE"], "the prompt is empty: give at least one token"),
        (["BUNDLE", "--ids", "1,x"], "--ids must be whole numbers, not 'x'"),
        (["BUNDLE", "--ids", "1", "--top-p", "a"], "--top-p must be a number, not 'a'"),
        (["BUNDLE", "--ids", "1", "--seed", "99999999999999999999"], "--seed must be whole numbers"),
        (["BUNDLE", "--ids"], "--ids needs a value"),
        (["BUNDLE", "--ids-file", "/nowhere"], "--ids-file '/nowhere' cannot be read"),
        (["BUNDLE", "--ids", "1", "--threshold", "7"], "threshold must lie in [0, 1], not 7.0"),
        (["BUNDLE", "--colour"], "unknown argument '--colour'"),
        (["BUNDLE", "another"], "unknown argument 'another'"),
        (["nowhere", "--ids", "1"], "bundle 'nowhere' does not exist"),
    ],
)
def test_the_program_explains_mistakes(cpp: CppBuild, tiny_bundle: Path, arguments: list[str], sentence: str) -> None:
    given = [str(tiny_bundle) if word == "BUNDLE" else word for word in arguments]
    done = subprocess.run([cpp.program, *given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tide_generate: {sentence}")
    assert done.stderr.count("\n") == 1


def test_the_help_names_every_option(cpp: CppBuild) -> None:
    done = subprocess.run([cpp.program, "--help"], capture_output=True, text=True, check=True)
    for name in ("--ids-file", "--max-pending", "--prompt-lookup", "--top-p", "--ignore-eos", "--no-verify"):
        assert name in done.stdout


def test_classes_have_the_names_of_the_python_ones(cpp: CppBuild) -> None:
    text = (cpp.prefix / "include" / "tide" / "errors.h").read_text()
    named = [line.split()[1] for line in text.splitlines() if line.startswith("struct ")]
    assert len(named) == 6
    assert all(issubclass(getattr(errors, name), errors.TideError) for name in named)


def test_the_headers_script_explains_what_is_missing(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "tools" / "onnxruntime_headers.sh"
    (tmp_path / "sources").mkdir()
    environment = {**os.environ, "TIDE_APT_SOURCES": str(tmp_path / "sources")}
    run = [script, tmp_path / "headers"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "-DONNXRUNTIME_INCLUDE_DIR" in done.stderr
    assert done.stderr.count("\n") == 1
