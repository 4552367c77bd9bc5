"""`tide-export build`: gives a bundle that holds segment networks new engines, for this machine's GPU and versions.

Needs the flavour's extra alone, no PyTorch: a bundle is exported on one machine and built on the one that runs it. The
bundle is replaced in one step when all engines are there; its other files are the same files.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from tide_export import names
from tide_export.bundle.profiles import check_batch_size, with_rows
from tide_export.bundle.store import Bundle, open_bundle, write_manifest, writing_bundle
from tide_export.engines.build import build_engines, require_builder
from tide_export.errors import BuildError
from tide_export.runtime.tensorrt.flavours import FLAVOURS
from tide_export.runtime.tensorrt.plugins import plugins_to_build_with


def rebuild(
    bundle: str | os.PathLike[str],
    target: str | None = None,
    plugins: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
) -> Bundle:
    """Builds engines into `bundle`, in place of those it has.

    Args:
        target: tensorrt or tensorrt-rtx; None: what the bundle was exported for. plugins: a library of plugins for
        tensorrt, or "none"; None: the one that `runtime.tensorrt.plugins` finds, if any. batch_size: sequences that may
        be decoded together; None: as many as before.

    Raises:
        BundleError: not a bundle, damaged, or being written by something else.
        BuildError: the bundle holds no segment networks, or such as take one sequence at a time where a batch is asked
            for, or they could not be built; it stays as it was.
        ProviderError: the library is not installed, or the plugin library is missing or does not fit.
        ConfigError: plugins for tensorrt-rtx, which has none; or a batch size that is none.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.networks is None:
        raise BuildError(
            f"bundle '{opened.path}' holds no segment networks to build from: export it with --target tensorrt or "
            "tensorrt-rtx"
        )
    if batch_size is not None:
        if batch_size != 1 == manifest.networks.max_batch_size:
            raise BuildError(
                f"the networks of bundle '{opened.path}' take one sequence at a time (exported with --batch-size 1, or "
                "the export said why): export it again with --batch-size"
            )
        manifest = replace(manifest, networks=with_rows(manifest.networks, check_batch_size(batch_size)))
    name = target or next(entry for entry in manifest.targets if entry in FLAVOURS)
    if name not in FLAVOURS:
        raise BuildError(f"target must be one of {', '.join(FLAVOURS)}, not {name!r}")
    flavour = FLAVOURS[name]
    found = plugins_to_build_with(flavour, require_builder(flavour), plugins)  # before anything is copied
    with writing_bundle(opened.path, overwrite=True) as folder:
        for file in manifest.files:
            if Path(file).parts[0] != names.ENGINES_FOLDER:
                _take(opened.path / file, folder / file)
        others = [entry for entry in manifest.targets if entry not in FLAVOURS]
        engines = build_engines(folder, manifest, flavour, found)
        write_manifest(folder, replace(manifest, targets=(*others, name), engines=engines))
    return open_bundle(opened.path, verify=False)


def _take(source: Path, target: Path) -> None:
    """The same file at another place, copied only where it cannot be linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
