"""Manifests of all kinds as JSON values, to mutate; and texts that one parser or another takes for JSON."""

import json
from dataclasses import replace
from typing import Any

from bundles import make_manifest

from tide_export.bundle.drafter_field import DrafterInfo
from tide_export.bundle.file_names import DRAFTER_FILE, EMBEDDING_FILE, GRAPH_FILE, network_file, plan_file
from tide_export.bundle.manifest import Drafting, FileInfo, Manifest, Quantization
from tide_export.bundle.model_info import LoraInfo, LoraTarget, StateInfo
from tide_export.bundle.plan_fields import BuiltPlan, EmbeddingInfo, NetworksInfo, PlansInfo, PluginsInfo, Profile
from tide_export.names.networks import AFTER_SEGMENTS, DRAFTER, segment_name

STATES = (StateInfo(0, 0, (35, 8), 32), StateInfo(0, 2, (2, 17), 32), StateInfo(0, 3, (32, 12), 32))

LORA = LoraInfo(4, (LoraTarget("layers.0.q", (0, 2), 8, 8), LoraTarget("layers.1.up", (1,), 8, 16)))


def manifests() -> list[dict[str, Any]]:
    """One of each kind: plain, quantized, with networks and engines, a drafter, recurrent states, room for adapters."""
    plain = make_manifest()
    parts = [*(segment_name(k) for k in range(len(plain.segment_sizes))), *AFTER_SEGMENTS]
    networks = NetworksInfo("fp16", 64, 320, 32, 8, 16, 2, 8, "int4", EmbeddingInfo(2, 1, True))
    profiles = (Profile("decode", 1, 1, 1, 1), Profile("batch-decode", 1, 1, 1, 2))
    plugins, built = PluginsInfo("0.1.0", "cd" * 32, ("segment_00",)), dict.fromkeys(parts, BuiltPlan(9, 8, 7, 2, 1))
    engines = PlansInfo("tensorrt", "11.1", ("8.9",), "ab" * 32, profiles, 3.5, plugins, built, {parts[0]: 5})
    files = [GRAPH_FILE, EMBEDDING_FILE, *map(network_file, parts), *map(plan_file, parts)]
    kinds = [
        plain,
        replace(
            plain, weights="int4", remote_code=True, kv_cache="int8", quantization=Quantization("rtn", 4, 32, True, 4)
        ),
        replace(
            plain,
            networks=networks,
            engines=engines,
            drafting=Drafting((0.5, 1.0), 4, 3, (0.4, 0.8), (0.1, 0.2, 0.3, 0.5, 1), {"risk": 0.5}),
        ),
        replace(
            plain,
            networks=networks,
            engines=replace(engines, built={**built, DRAFTER: BuiltPlan(9, 8, 7, 1, 1)}),
            drafter=DrafterInfo(plain.model.weights_sha256, "0-3,7", (0.5,) * 8, 48, 32, (), (2, 8), {"minutes": 3}),
        ),
        replace(plain, model=replace(plain.model, kv_shapes=((0, 0), *plain.model.kv_shapes[1:]), states=STATES)),
        replace(plain, model=replace(plain.model, lora=LORA)),
        replace(
            plain,
            drafter=DrafterInfo(plain.model.weights_sha256, "0-3,7", (0.5,) * 8, 48, 32, (), kv_layers=(0, 1)),
        ),
        replace(
            plain,
            drafter=DrafterInfo(
                plain.model.weights_sha256, "0-3,7", (0.5,) * 8, 48, 32, (1,), (2, 8), num_layers=2, block_size=8
            ),
        ),
    ]
    drafts = [DRAFTER_FILE, network_file(DRAFTER), plan_file(DRAFTER)]

    def files_of(kind: Manifest) -> dict[str, FileInfo]:
        every = [*files, *(drafts if kind.drafter else ())]
        return {name: FileInfo(4 if name == EMBEDDING_FILE else 5, "0" * 64) for name in every}

    return [json.loads(replace(kind, files=files_of(kind)).to_json()) for kind in kinds]


VALID = json.dumps(manifests()[0])
INVALID = "tide.json' is not valid JSON: export the bundle again or copy it anew"


def _with(text: str, value: str) -> str:
    """The valid manifest with `value`, any text, as its field `created`; `text` names the field."""
    return VALID.replace('"2026-01-01T00:00:00+00:00"', value).replace('"created"', f'"{text}"')


# What fell, and where parsers differ: text, and the part of the sentence that refuses it (None: it is accepted).
TEXTS: dict[str, tuple[bytes, str | None]] = {
    name: (text.encode() if isinstance(text, str) else text, sentence)
    for name, (text, sentence) in {
        "valid": (VALID, None),
        "deep": ("[" * 100_000, INVALID),
        "deep inside": (_with("calibration", '{"a": ' + "[" * 99 + "]" * 99 + "}"), INVALID),
        "deep objects": ('{"a":' * 100_000, INVALID),
        "401 digits": (_with("created", "9" * 401), INVALID),
        "100,000 digits": (_with("created", "9" * 100_000), INVALID),
        "30 digits": (_with("created", "9" * 30), "field 'created' must be a string, not 1e+30"),
        "2**63": (
            VALID.replace('"max_pending": 16', f'"max_pending": {2**63}'),
            "whole number, not 9.223372036854776e+18",
        ),
        "infinite": (_with("created", "1e999"), INVALID),
        "NaN": (_with("created", "NaN"), INVALID),
        "half a pair": (_with("created", '"\\ud800"'), INVALID),
        "half a pair in a name": (_with("\\udfff", "1"), INVALID),
        "a pair": (_with("\\ud83d\\ude00", "1"), "field 'created' is missing"),
        "byte order mark": (b"\xef\xbb\xbf" + VALID.encode(), INVALID),
        "UTF-16": (VALID.encode("utf-16"), INVALID),
        "no UTF-8": (_with("created", '"@"').encode().replace(b"@", b"\xff"), INVALID),
        "NUL at the end": (VALID + "\0", INVALID),
        "NUL in a file's name": (
            VALID.replace('"segments/head.onnx"', '"a\\u0000"'),
            "'files.a\\u0000' is not a path inside",
        ),
        "line break in a file's name": (
            VALID.replace("segments/head.onnx", "a\\nb"),
            "'files.a\\nb' is not a path inside",
        ),
        "parent folder": (VALID.replace("segments/head.onnx", "a/../../b"), "'files.a/../../b' is not a path inside"),
        "two at once": (VALID.replace('"created"', '"zz": 1, "aa": 2, "created"'), "field 'aa' is unknown"),
        "the same twice": (VALID.replace('"opset"', '"opset": [], "opset"'), INVALID),
        "a long name": (VALID.replace('"created"', f'"{"x" * 1000}": 1, "created"'), f"field '{'x' * 60}' is unknown"),
        "comment": (VALID + "// done", INVALID),
        "single quotes": (VALID.replace('"', "'"), INVALID),
        "too large": (VALID + " " * (1 << 24), "tide.json' is too large: a manifest has at most 16777216 bytes"),
        "calibration": (
            VALID.replace('"calibration": {', '"calibration": [{').replace('}, "versions"', '}], "versions"'),
            "field 'calibration' must be an object, not a list",
        ),
        "shape": (
            VALID.replace('"shape": [1, "S"]', '"shape": [1, 2.5]'),
            "field 'inputs.0.shape.1' must be a whole number, not 2.5",
        ),
        "more logits than tokens": (
            json.dumps(manifests()[2]).replace('"max_logits": 8', '"max_logits": 33'),
            "field 'networks.max_logits' must be at most max_tokens",
        ),
        "more tokens than capacity": (
            json.dumps(manifests()[2]).replace('"max_tokens": 32', '"max_tokens": 65'),
            "field 'networks.max_tokens' must be at most capacity",
        ),
    }.items()
}
