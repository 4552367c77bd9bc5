"""What is fuzzed by coverage: each target takes bytes, and raises where what becomes of them is not allowed."""

import ctypes
import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bundles import make_manifest
from http_target import http, http_json
from manifests import manifests
from mutations import RAW

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # the hand-made model

from tiny_model import TinyModel

from tide_export.bundle.file_names import GRAPH_FILE, MANIFEST_FILE
from tide_export.bundle.inspect import describe_bundle, render
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.model_info import LoraInfo, LoraTarget
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.bundle.strict_json import parse_strictly
from tide_export.errors import BundleError, ConfigError, GenerationError, TideError
from tide_export.runtime.config import GenerationOptions
from tide_export.runtime.engine import load
from tide_export.runtime.native import created, int64s, onnxruntime_library
from tide_export.runtime.token_stream import TokenStream

MISSING_FILE = r"bundle file '.*' is missing; "  # whichever is looked for first

Check = Callable[[bytes], None]
Change = Callable[[bytes], bytes]  # of JSON; ValueError: these bytes are none


@dataclass(frozen=True)
class Given:
    """What targets need.

    Attributes:
        folder: an empty one, for their files.
        json_reader: the library of json_reader.cpp.
        bundle: one that a server can have.
        after: closes what targets opened.
    """

    folder: Path
    json_reader: Path
    bundle: Path
    after: ExitStack


class Target(NamedTuple):
    """What to do with bytes.

    Attributes:
        make: makes the check, once.
        json: changes the JSON in bytes of the target, and what must fit it.
        seeds: more than there are in seeds/: what is written anew for each release.
    """

    make: Callable[[Given], Check]
    json: Callable[[bytes, Change], bytes] = lambda data, change: change(data)
    seeds: Callable[[], list[bytes]] = list


def sentence_of(work: Callable[[], object], *allowed: type[TideError]) -> str | None:
    """The one sentence that refuses something; None: it is done."""
    try:
        work()
    except allowed as error:
        sentence = str(error)
        assert sentence.strip(), "an empty sentence"
        assert len(sentence.splitlines()) == 1, f"several lines: {sentence!r}"
        assert len(sentence) < 600, f"no sentence: {len(sentence)} characters"
        return sentence
    return None


# --- JSON ------------------------------------------------------------------------------------------------------------


def json_values(given: Given) -> Check:
    """The C++ reader of JSON takes what Python's strict one does, for the same values."""
    reader = ctypes.CDLL(str(given.json_reader))
    reader.tide_fuzz_json.restype = ctypes.c_char_p
    reader.tide_fuzz_json.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def check(data: bytes) -> None:
        written = reader.tide_fuzz_json(data, len(data))
        try:
            value = parse_strictly(data)
        except ValueError:
            assert written is None, f"C++ alone reads it: {written!r}"
            return
        assert written is not None, "Python alone reads it"
        assert _ordered(json.loads(written)) == _ordered(value)

    return check


def _ordered(value: Any) -> str:
    """A text that differs for other values, also for 1, 1.0 and true."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_ordered(value[key])}" for key in sorted(value)) + "}"
    return f"[{', '.join(map(_ordered, value))}]" if isinstance(value, list) else repr(value)


# --- manifests -------------------------------------------------------------------------------------------------------


def verdict(folder: Path, data: bytes) -> str | None:
    """The sentence in which the package refuses the manifest of a bundle that has no files; None: it accepts it.

    The library, which reads less of it, accepts it too then, and else it may.
    """
    (folder / MANIFEST_FILE).write_bytes(data)
    asked = str(folder).encode(), json.dumps({"provider": "cpu", "onnxruntime": onnxruntime_library()}).encode()
    python = sentence_of(lambda: open_bundle(folder, verify=False), BundleError)
    library = sentence_of(lambda: created("load", *asked), BundleError)
    assert python is not None
    assert library is not None
    if not re.match(MISSING_FILE, python):
        return python
    assert re.match(MISSING_FILE, library), library
    return None


def manifest(given: Given) -> Check:
    """The library takes the manifests that the package takes, and `inspect` describes them."""

    def check(data: bytes) -> None:
        if verdict(given.folder, data) is None:
            read = Manifest.from_json(data)
            assert render(describe_bundle(Bundle(given.folder, read, {}), verified=False))
            assert Manifest.from_json(read.to_json()) == read

    return check


def kinds_of_manifests() -> list[bytes]:
    """All kinds, and one with records as `calibrate` and `tune` write them, which `inspect` reads."""
    report = {"1": {"exit_rate": 0.5, "precision": 1.0, "tokens": 3}, "2": {"exit_rate": None}}
    tried = [{"risk": 0.5, "p_value": None}]
    records = {
        "calibration": {"dataset": "wikitext", "report": report, "document_hashes": ["ab"]},
        "tuning": {"certified": True, "thresholds": [0.5, 1.0], "min_layers": 2, "path": tried},
    }
    kinds = manifests()
    return [json.dumps(kind).encode() for kind in [*kinds, kinds[0] | records]]


# --- options ---------------------------------------------------------------------------------------------------------

PROMPT = [5, 17, 3]
PYTHON_S = {"json_schema", "json_whitespace", "regex", "grammar", "special_tokens", "logits_processor"}
SHARED = GenerationOptions.__annotations__.keys() - PYTHON_S


def options(given: Given) -> Check:
    """Options as JSON are used or refused by every function that takes some, and mean what they mean in Python."""
    tiny = TinyModel(layers=3, checkpoints=(1, 2), context=32)
    engine = load(tiny.write(given.folder / "tiny"), threads=1)
    prompt, expected = int64s(PROMPT), engine.generate(PROMPT, max_new_tokens=4).tokens

    def generated(text: bytes) -> list[int]:
        stream = created("token_stream_open", engine._handle, prompt.ctypes.data, len(prompt), text, None)
        return TokenStream(stream, None, None, False, False).finish().tokens

    def check(data: bytes) -> None:
        text = data.partition(b"\0")[0]
        outputs: list[list[int]] = []
        native = sentence_of(lambda: outputs.append(generated(text)), GenerationError, BundleError)
        sentence_of(lambda: created("scheduler_create", engine._handle, text), GenerationError)
        sentence_of(lambda: created("load", str(given.folder / "none").encode(), text), TideError)
        try:
            asked = parse_strictly(text)
        except ValueError:
            assert native == "the options are not valid JSON"
            return
        if not isinstance(asked, dict) or not asked.keys() <= SHARED or not _same_in_python(asked):
            return
        asked = {name: value for name, value in asked.items() if value is not None}
        if isinstance(asked.get("logit_bias"), dict):
            asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
        python = sentence_of(lambda: outputs.append(engine.generate(PROMPT, **asked).tokens), GenerationError)
        assert (native is None) == (python is None), f"C++ says {native!r}, Python {python!r}"
        assert native is not None or outputs[0] == outputs[1] or ("temperature" in asked and "seed" not in asked)
        assert engine.generate(PROMPT, max_new_tokens=4).tokens == expected

    return check


def _same_in_python(asked: dict[str, Any]) -> bool:
    """Whether Python's numbers are those of JSON here: it takes whole numbers of any size."""
    values = [entry for value in asked.values() for entry in (value if isinstance(value, list) else [value])]
    biases = asked.get("logit_bias")
    ids = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", name) for name in biases) if isinstance(biases, dict) else True
    return ids and all(not isinstance(value, float) or abs(value) < 2**53 for value in values)


# --- adapters --------------------------------------------------------------------------------------------------------

ROOM = LoraInfo(4, (LoraTarget("layers.0.q", (0,), 8, 6), LoraTarget("layers.1.up", (1,), 8, 16)))


def adapter(given: Given) -> Check:
    """An adapter (its configuration, a line break, its matrices) is read, or refused in one sentence."""
    plain = make_manifest()
    bundle, folder = given.folder / "bundle", given.folder / "adapter"
    bundle.mkdir()
    folder.mkdir()
    (bundle / GRAPH_FILE).write_bytes(b"no graph")  # and no networks, which are opened after the adapters
    write_manifest(bundle, replace(plain, model=replace(plain.model, lora=ROOM)))
    library = onnxruntime_library()
    asked = json.dumps({"provider": "cpu", "onnxruntime": library, "adapters": {"a": str(folder)}}).encode()

    def check(data: bytes) -> None:
        config, _, matrices = data.partition(b"\n")
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(matrices)
        sentence = sentence_of(lambda: created("load", str(bundle).encode(), asked), ConfigError, BundleError)
        assert sentence is not None
        assert sentence.startswith(
            (f"adapter 'a' in '{folder}' cannot be used: ", f"bundle '{bundle}' holds no networks of its segments")
        ), sentence

    return check


def adapter_json(data: bytes, change: Change) -> bytes:
    """Changes the configuration, or if that is none the header of the matrices."""
    config, _, matrices = data.partition(b"\n")
    size = int.from_bytes(matrices[:8], "little")
    if len(config) % 2:  # else always the same one would be changed
        return change(config) + b"\n" + matrices
    header = change(matrices[8 : 8 + size])
    return config + b"\n" + len(header).to_bytes(8, "little") + header + matrices[8 + size :]


TARGETS = {
    "json": Target(json_values, seeds=lambda: [text.encode() for text in RAW]),
    "manifest": Target(manifest, seeds=kinds_of_manifests),
    "options": Target(options),
    "adapter": Target(adapter, adapter_json),
    "http": Target(http, http_json),
}
