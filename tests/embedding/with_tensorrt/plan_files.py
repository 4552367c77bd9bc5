"""Engines of a bundle that the stand-ins for TensorRT read (fake_nvinfer.cpp): text files."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_export.bundle.file_names import PLANS_FOLDER, plan_file
from tide_export.bundle.network_spec import BATCH, KEYS, TOKENS, of_network, specs
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import PlansInfo, Profile
from tide_export.bundle.profiles import profiles_for
from tide_export.bundle.store import write_manifest
from tide_export.names.networks import segment_name

SIZES = {TOKENS: -1, BATCH: -2, KEYS: -3}


def with_engines(
    bundle: Path, folder: Path, flavour: str, version: str, wrong: str = "", profiles: tuple[Profile, ...] | None = None
) -> Path:
    """A copy of a bundle with engines; `wrong`: a defect of segment 1's, and `profiles`: that the files have."""
    shutil.copytree(bundle, folder)
    manifest = open_bundle(folder).manifest
    info = manifest.networks
    assert info is not None
    (folder / PLANS_FOLDER).mkdir()
    for name in specs(manifest, info):
        write_engine(folder, name, wrong if name == segment_name(1) else "", profiles)
    built_for = ("8.9",) if flavour == "tensorrt" else ()
    engines = PlansInfo(flavour, version, built_for, manifest.model.weights_sha256, profiles_for(info), 12.5)
    write_manifest(folder, replace(manifest, engines=engines))
    return folder


def write_engine(bundle: Path, name: str, wrong: str = "", profiles: tuple[Profile, ...] | None = None) -> None:
    """Writes the engine of a network into a bundle, whose manifest does not list it yet."""
    manifest = open_bundle(bundle, verify=False).manifest
    info = manifest.networks
    assert info is not None
    spec = specs(manifest, info)[name]
    lines = ["an engine", name, wrong]
    takes = of_network(name, profiles or profiles_for(info), info)
    lines += [f"profile {profile.max_tokens} {profile.batch_size} {spec.keys}" for profile in takes]
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        for key, tensor in tensors.items():
            lines.append(f"{kind} {key} {tensor.dtype} {' '.join(str(SIZES.get(d, d)) for d in tensor.shape)}")
    (bundle / plan_file(name)).write_text("\n".join(lines) + "\n")


def change(bundle: Path, **changes: Any) -> None:
    """Changes what the manifest says of the engines."""
    manifest = open_bundle(bundle, verify=False).manifest
    assert manifest.engines is not None
    write_manifest(bundle, replace(manifest, engines=replace(manifest.engines, **changes)))


def with_header(bundle: Path, header: str) -> None:
    """Gives the engine of segment 1 another header; an empty one is all there is."""
    manifest, file = open_bundle(bundle, verify=False).manifest, bundle / plan_file(segment_name(1))
    lines = file.read_text().splitlines()[1:] if header else []
    file.write_text("\n".join([header, *lines]))
    write_manifest(bundle, manifest)
