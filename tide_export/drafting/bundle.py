"""Checks bundles that a drafter is to be trained for, and writes it into them."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_export import names
from tide_export.bundle.engine_fields import EnginesInfo
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.store import put_files
from tide_export.compose.drafter import DrafterPieces
from tide_export.drafting.files import drafter_info, embedding_of, rows_for, save_drafter, save_drafter_segment
from tide_export.drafting.pieces import pieces_of
from tide_export.errors import DraftError
from tide_export.files import TEMPORARY, failure
from tide_export.routers.drafter import Drafter
from tide_export.trace.rewriting import FLOAT

logger = logging.getLogger("tide_export")


def check_bundle(bundle: str | os.PathLike[str], weights_sha256: str | None = None, width: int | None = None) -> Bundle:
    """Opens a bundle that a drafter can be written into.

    Args:
        weights_sha256: of the model that the drafter is trained for; None: not known yet.
        width: of that model's embeddings; None: not known yet.

    Raises:
        BundleError: it is missing or damaged.
        DraftError: it is of another model, propagates K/V, gives the states of a published head, or has no embedding to
            look up.
    """
    opened = open_bundle(Path(bundle), verify=False)
    manifest = opened.manifest
    if manifest.kv_cache_strategy == "propagate":
        raise DraftError(
            f"bundle {bundle} propagates K/V, and drafts need an exact cache: export it with kv_cache_strategy exact"
        )
    if manifest.drafter is not None and manifest.drafter.layers:
        raise DraftError(
            f"bundle {bundle} gives the hidden states that its EAGLE-3 head reads, not final states: export the model "
            "without --draft-head to train a drafter"
        )
    if weights_sha256 is not None and manifest.model.weights_sha256 != weights_sha256:
        raise DraftError(f"bundle {bundle} was exported from another model than the one given: its weights differ")
    shape = embedding_of(opened.path / names.GRAPH_FILE, FLOAT).graph.outputs[0].shape
    if width is not None and (shape is None or shape[-1] != width):
        raise DraftError(
            f"bundle {bundle} looks up {'unknown' if shape is None else shape[-1]} numbers a token first, not the "
            f"{width} of the model's embedding: a drafter cannot read it"
        )
    return opened


def write_drafter(bundle: str | os.PathLike[str], drafter: Drafter) -> None:
    """Composes the networks of `drafter` and writes them into the bundle, in place of those that are there.

    An engine of an earlier drafter is removed: `tide-export build` makes one of this.

    Raises:
        BundleError: the bundle cannot be written to, or was changed meanwhile; it is then as it was, or has no drafter.
        DraftError: as `check_bundle`; or there is no room on the disk.
    """
    opened = check_bundle(bundle, drafter.weights_sha256, drafter.shape.embedding)
    pieces = pieces_of(drafter, rows_for(opened.manifest.model.context_length))
    put_drafter(opened, pieces, dict(drafter.provenance))


def put_drafter(bundle: Bundle, pieces: DrafterPieces, record: dict[str, Any]) -> Bundle:
    """Writes a drafter's networks into `bundle`; `record`: how it was made. Raises as `write_drafter`."""
    manifest, folder = bundle.manifest, bundle.path
    drafting = manifest.drafting
    plain = replace(
        manifest,
        drafter=None,
        drafting=drafting and replace(drafting, drafter_cost=None),
        engines=manifest.engines and _without_drafter(manifest.engines),
    )
    new = replace(plain, drafter=drafter_info(pieces, manifest.model.weights_sha256, record))
    files = {names.DRAFTER_FILE: folder / f".{names.DRAFTER_FILE}.{TEMPORARY}"}
    if new.has_drafter_network:
        name = names.network_file(names.DRAFTER)
        files[name] = (folder / name).with_name(f".{names.DRAFTER_FILE}.{TEMPORARY}")
    try:
        save_drafter(folder, pieces, files[names.DRAFTER_FILE])
        if new.has_drafter_network:
            save_drafter_segment(folder, pieces, new, files[names.network_file(names.DRAFTER)])
        written = put_files(bundle, files, new, plain, removed=[names.engine_file(names.DRAFTER)])
    except OSError as error:
        raise DraftError(f"cannot write the drafter into {folder}: {failure(error, folder)}") from error
    finally:
        for temporary in files.values():
            temporary.unlink(missing_ok=True)
    if new.engines is not None:
        logger.warning(
            "the engines of %s have none for the drafter, so nothing is drafted on them: tide-export build makes it",
            folder,
        )
    return written


def _without_drafter(engines: EnginesInfo) -> EnginesInfo:
    if engines.built is None:
        return engines
    return replace(engines, built={name: one for name, one in engines.built.items() if name != names.DRAFTER})
