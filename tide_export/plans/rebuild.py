"""`tide-export build`: builds a bundle's plans for this machine's GPU and versions.

Needs only the flavour's extra, no PyTorch: a bundle can be exported on one machine and built on the one that runs it.
The bundle is replaced in one step when all plans are built; its other files are hard-linked.
"""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

from tide_export.bundle.file_names import PLANS_FOLDER
from tide_export.bundle.opened import Bundle, BundleFile, open_bundle
from tide_export.bundle.profiles import check_batch_size, with_batch_size
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.errors import BuildError
from tide_export.plans.build import build_plans, require_builder
from tide_export.plans.compare import check_fp8_plans
from tide_export.runtime.tensorrt.flavours import FLAVOURS
from tide_export.runtime.tensorrt.plugins import plugins_to_build_with

logger = logging.getLogger("tide_export")


def rebuild(
    bundle: str | os.PathLike[str],
    target: str | None = None,
    plugins: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
) -> Bundle:
    """Builds plans into `bundle`, in place of those it has.

    Args:
        target: tensorrt or tensorrt-rtx; None: the bundle's target.
        plugins: a plugin library for tensorrt, or "none"; None: the one that `runtime.tensorrt.plugins` finds, if any.
        batch_size: maximum sequences of a batch; None: unchanged.

    Raises:
        BundleError: the path is not a bundle, is damaged, or another process is writing it.
        BuildError: the bundle holds no segment networks for TensorRT, they take one sequence and `batch_size` is above
            1, or a plan could not be built or is wrong; the bundle is unchanged.
        ProviderError: the library is not installed, or the plugin library is missing or does not fit.
        ConfigError: plugins are given for tensorrt-rtx, which takes none, or the batch size is invalid.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.networks is None:
        raise BuildError(
            f"bundle '{opened.path}' holds no segment networks to build from: export it with --target tensorrt or "
            "tensorrt-rtx"
        )
    if manifest.has_cuda_networks:
        raise BuildError(
            f"the networks of bundle '{opened.path}' are for provider cuda, which needs no plans: for TensorRT "
            "export it with --target tensorrt or tensorrt-rtx"
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
    if name not in manifest.targets:
        logger.warning("the networks are for another flavour: export with --target %s for its fastest attention", name)
    library = plugins_to_build_with(flavour, require_builder(flavour), plugins)  # before anything is copied
    with writing_bundle(opened.path, overwrite=True) as folder:
        for file in manifest.files:
            if Path(file).parts[0] != PLANS_FOLDER:
                _link_or_copy(opened.file(file), folder / file)
        others = [entry for entry in manifest.targets if entry not in FLAVOURS]
        plans = build_plans(folder, manifest, flavour, library)
        write_manifest(folder, replace(manifest, targets=(*others, name), engines=plans))
        check_fp8_plans(folder, library)
    return open_bundle(opened.path, verify=False)


def _link_or_copy(source: BundleFile, target: Path) -> None:
    """Hard-links `source` at `target`; copies it if it cannot be linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.descriptor_path, target, follow_symlinks=True)
    except OSError:
        shutil.copyfile(source.descriptor_path, target)
