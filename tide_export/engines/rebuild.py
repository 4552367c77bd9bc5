"""`tide-export build`: builds new engines for a bundle with segment networks, for this machine's GPU and versions.

Needs only the flavour's extra, no PyTorch: a bundle is exported on one machine and built on the one that runs it. The
bundle is replaced in one step when all engines are built; its other files are linked.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from tide_export import names
from tide_export.bundle.opened import Bundle, BundleFile, open_bundle
from tide_export.bundle.profiles import check_batch_size, with_batch_size
from tide_export.bundle.store import write_manifest, writing_bundle
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
        target: tensorrt or tensorrt-rtx; None: the one the bundle was exported for.
        plugins: a library of plugins for tensorrt, or "none"; None: the one that `runtime.tensorrt.plugins` finds, if
            any.
        batch_size: the most sequences of a batch; None: as before.

    Raises:
        BundleError: not a bundle, damaged, or being written by another process.
        BuildError: the bundle holds no segment networks, or a batch size above 1 is requested of networks that take one
            sequence, or an engine could not be built; the bundle stays as it was.
        ProviderError: the library is not installed, or the plugin library is missing or does not fit.
        ConfigError: plugins for tensorrt-rtx, which has none; or an invalid batch size.
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
        manifest = replace(manifest, networks=with_batch_size(manifest.networks, check_batch_size(batch_size)))
    name = target or next(entry for entry in manifest.targets if entry in FLAVOURS)
    if name not in FLAVOURS:
        raise BuildError(f"target must be one of {', '.join(FLAVOURS)}, not {name!r}")
    flavour = FLAVOURS[name]
    library = plugins_to_build_with(flavour, require_builder(flavour), plugins)  # before anything is copied
    with writing_bundle(opened.path, overwrite=True) as folder:
        for file in manifest.files:
            if Path(file).parts[0] != names.ENGINES_FOLDER:
                _link_or_copy(opened.file(file), folder / file)
        others = [entry for entry in manifest.targets if entry not in FLAVOURS]
        engines = build_engines(folder, manifest, flavour, library)
        write_manifest(folder, replace(manifest, targets=(*others, name), engines=engines))
    return open_bundle(opened.path, verify=False)


def _link_or_copy(source: BundleFile, target: Path) -> None:
    """Hard-links `source` at `target`; copies it if it cannot be linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.descriptor_path, target, follow_symlinks=True)
    except OSError:
        shutil.copyfile(source.descriptor_path, target)
