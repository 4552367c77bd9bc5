"""Engines of the demo bundle that the stand-ins for TensorRT read: text files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_export import names
from tide_export.bundle.engine_fields import Profile
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.runtime.network_spec import of_network, specs

PROFILES = (
    *(Profile("decode", 1, 1, 2, 1), Profile("catch-up", 1, 16, 32, 1), Profile("prefill", 1, 512, 1024, 1)),
    *(Profile("batch-decode", 1, 1, 1, 8), Profile("batch-catch-up", 1, 16, 32, 8)),
)


def write_engines(bundle: Path, manifest: Manifest, wrong: str = "", profiles: tuple[Profile, ...] = PROFILES) -> None:
    assert manifest.networks is not None
    (bundle / names.ENGINES_FOLDER).mkdir(exist_ok=True)
    for name in specs(manifest, manifest.networks):
        takes = [f"{p.max_tokens} {p.batch_size}" for p in of_network(name, profiles, manifest.networks)]
        lines = ["an engine", str(bundle / names.network_file(name)), wrong if name == "segment_01" else "", *takes]
        (bundle / names.engine_file(name)).write_text("\n".join(lines) + "\n")
    write_manifest(bundle, manifest)


def changed(bundle: Path, **changes: Any) -> None:
    manifest = open_bundle(bundle, verify=False).manifest
    assert manifest.engines is not None
    write_manifest(bundle, replace(manifest, engines=replace(manifest.engines, **changes)))
