"""Checks that a bundle can hold a drafter, and writes a drafter into it."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_export.bundle.file_names import DRAFTER_FILE, GRAPH_FILE, network_file, plan_file
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.plan_fields import PlansInfo
from tide_export.bundle.store import put_files
from tide_export.common.files import TEMPORARY, failure
from tide_export.compose.drafter_networks import DrafterPieces
from tide_export.drafting.files import drafter_info, embedding_of, rows_for, save_drafter, save_drafter_segment
from tide_export.drafting.pieces import pieces_of
from tide_export.errors import DraftError
from tide_export.graph.rewriting import FLOAT
from tide_export.names.networks import DRAFTER
from tide_export.routers.drafter_weights import Drafter

logger = logging.getLogger("tide_export")


def check_bundle(bundle: str | os.PathLike[str], weights_sha256: str | None = None, width: int | None = None) -> Bundle:
    """Opens a bundle that can hold a drafter.

    Args:
        weights_sha256: hash of the weights of the drafter's model; None: not known yet.
        width: size of that model's embeddings; None: not known yet.

    Raises:
        BundleError: the bundle is missing or damaged.
        DraftError: it is of another model, gives the hidden states of an EAGLE-3 or DFlash head, or has no single
            lookup of its embedding.
    """
    opened = open_bundle(Path(bundle), verify=False)
    manifest = opened.manifest
    if manifest.drafter is not None and manifest.drafter.layers:
        raise DraftError(
            f"bundle {bundle} gives the hidden states that its draft head reads, not final states: export the model "
            "without --draft-head to train a drafter"
        )
    if weights_sha256 is not None and manifest.model.weights_sha256 != weights_sha256:
        raise DraftError(f"bundle {bundle} was exported from another model than the one given: name that model")
    shape = embedding_of(opened.path / GRAPH_FILE, FLOAT).graph.outputs[0].shape
    if width is not None and (shape is None or shape[-1] != width):
        raise DraftError(
            f"bundle {bundle} looks up {'unknown' if shape is None else shape[-1]} numbers a token first, not the "
            f"{width} of the model's embedding: a drafter cannot read it"
        )
    return opened


def write_drafter(bundle: str | os.PathLike[str], drafter: Drafter) -> None:
    """Composes the networks of `drafter` and writes them into the bundle in place of an earlier drafter's.

    Removes the plan of an earlier drafter: `tide-export build` builds the new one.

    Raises:
        BundleError: the bundle cannot be written, or was changed meanwhile; it is unchanged or has no drafter.
        DraftError: `check_bundle` refuses the bundle, or the disk is full.
    """
    opened = check_bundle(bundle, drafter.weights_sha256, drafter.shape.embedding)
    pieces = pieces_of(drafter, rows_for(opened.manifest.model.context_length))
    put_drafter(opened, pieces, dict(drafter.provenance))


def put_drafter(bundle: Bundle, pieces: DrafterPieces, record: dict[str, Any]) -> Bundle:
    """Composes the networks of a drafter and writes them into `bundle`.

    Args:
        record: the training's provenance, for the manifest.

    Raises:
        BundleError, DraftError: as `write_drafter`.
    """
    manifest, folder = bundle.manifest, bundle.path
    drafting = manifest.drafting
    plain = replace(
        manifest,
        drafter=None,
        drafting=drafting and replace(drafting, drafter_cost=None),
        engines=manifest.engines and _without_drafter(manifest.engines),
    )
    new = replace(plain, drafter=drafter_info(pieces, manifest.model.weights_sha256, record))
    files = {DRAFTER_FILE: folder / f".{DRAFTER_FILE}.{TEMPORARY}"}
    if new.has_drafter_network:
        name = network_file(DRAFTER)
        files[name] = (folder / name).with_name(f".{DRAFTER_FILE}.{TEMPORARY}")
    try:
        save_drafter(folder, pieces, files[DRAFTER_FILE])
        if new.has_drafter_network:
            save_drafter_segment(folder, pieces, new, files[network_file(DRAFTER)])
        written = put_files(bundle, files, new, plain, removed=[plan_file(DRAFTER)])
    except OSError as error:
        raise DraftError(f"cannot write the drafter into {folder}: {failure(error, folder)}") from error
    finally:
        for temporary in files.values():
            temporary.unlink(missing_ok=True)
    if new.engines is not None:
        logger.warning(
            "the plans of %s have none for the drafter, so nothing is drafted on them: tide-export build makes it",
            folder,
        )
    return written


def _without_drafter(plans: PlansInfo) -> PlansInfo:
    if plans.built is None:
        return plans
    return replace(plans, built={name: one for name, one in plans.built.items() if name != DRAFTER})
