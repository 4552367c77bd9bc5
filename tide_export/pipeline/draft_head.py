"""The stages of the flow for a published draft head: reading, tracing, composing, writing, measuring."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from tide_export.bundle.auto_mode import sentence
from tide_export.bundle.file_names import DRAFTER_FILE, network_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.common.progress import stage
from tide_export.compose import step_graph
from tide_export.compose.cut import Pieces
from tide_export.compose.drafter_networks import DrafterPieces
from tide_export.drafting.files import drafter_info, rows_for, save_drafter, save_drafter_segment
from tide_export.drafting.heads.assistant import ASSISTANTS, read_assistant
from tide_export.drafting.heads.dflash import is_dflash, read_dflash
from tide_export.drafting.heads.eagle3 import read_eagle3
from tide_export.drafting.heads.files import head_config, head_folder
from tide_export.drafting.heads.head import DraftHead
from tide_export.drafting.heads.mtp import mtp_weights, read_mtp
from tide_export.drafting.heads.pieces import fuse_of, head_pieces
from tide_export.errors import DraftError
from tide_export.graph.rewriting import required
from tide_export.model.source import HALF, SourceModel
from tide_export.names.networks import DRAFTER
from tide_export.names.step_graph import DRAFT_HEAD_FUSION
from tide_export.pipeline.request import ExportRequest
from tide_export.pipeline.weights import Lowering, lowering
from tide_export.routers.model_gate import MODEL_GATE
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.tensorrt.plugins import NONE
from tide_export.tuning.drafter_gain import with_exits, with_head

logger = logging.getLogger("tide_export")


@dataclass(frozen=True, eq=False)
class GivenHead:
    """The draft head and the pieces of its drafter; both None if there is none."""

    head: DraftHead | None = None
    pieces: DrafterPieces | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of layers after which it reads hidden states."""
        return () if self.head is None else self.head.layers


def given_head(source: SourceModel, request: ExportRequest, length: int) -> GivenHead:
    """Reads the draft head and traces it for sequences of `length` tokens.

    Its matrices get the type of the graph's. A head that was not asked for and cannot be used is left out.

    Raises:
        DraftError: the requested head cannot be read or traced, or is for another model.
    """
    if request.looks_for_own_head and mtp_weights(source):
        try:
            return _given(source, request, length)
        except DraftError as error:
            logger.warning("%s; the model is exported without it (--no-draft-head leaves it out)", error)
    if request.draft_head in (None, NONE):
        return GivenHead()
    return _given(source, request, length)


def _given(source: SourceModel, request: ExportRequest, length: int) -> GivenHead:
    own = request.draft_head is None or request.reads_own_head
    with stage("reading the draft head"):
        head = read_mtp(source) if own else _published(request.draft_head or "", source)
        if request.half is not None and head.fc is not None:
            head = replace(head, fc=head.fc.to(HALF[request.half]).float())
        rows = rows_for(max(length, 2 * head.block_size))
        return GivenHead(head, head_pieces(head, length if head.kv_layers else rows))


def _published(name: str, source: SourceModel) -> DraftHead:
    config = head_config(head_folder(name), name)
    if config.get("model_type") in ASSISTANTS:
        return read_assistant(name, source)
    return read_dflash(name, source) if is_dflash(config) else read_eagle3(name, source)


def compose(
    source: SourceModel, request: ExportRequest, pieces: Pieces, routers: RouterSet, given: GivenHead
) -> ir.Model:
    """Composes and lowers the step graph, whose final states are those that the draft head reads."""
    fuse, lower = fusion(source, request, given)
    return lower(step_graph.compose(pieces, routers.arrays(), routers.lens_arrays(), fuse))


def fusion(source: SourceModel, request: ExportRequest, given: GivenHead) -> tuple[ir.Graph | None, Lowering]:
    """Returns what makes the states that the draft head reads of several layers, and how to lower graphs."""
    head = given.head
    if head is None or head.fc is None:
        return None, lowering(source, request)
    fuse = fuse_of(head, quantized=source.quantized is not None)
    return fuse, lowering(source, request, {DRAFT_HEAD_FUSION: head.fc.numpy()})


def write_drafter(folder: Path, manifest: Manifest, given: GivenHead) -> Manifest:
    """Writes the drafter, if there is one; returns the updated manifest."""
    if given.head is None or given.pieces is None:
        return manifest
    record = {"layout": given.head.kind, "head": given.head.name}
    manifest = replace(manifest, drafter=drafter_info(given.pieces, manifest.model.weights_sha256, record))
    save_drafter(folder, given.pieces, folder / DRAFTER_FILE, manifest.kv_dtype)
    if manifest.has_drafter_network:
        save_drafter_segment(folder, given.pieces, manifest, folder / network_file(DRAFTER))
    return manifest


def measure_drafts(folder: Path, manifest: Manifest, request: ExportRequest) -> None:
    """Measures what drafts gain in the new bundle: by its exits, or by a head that was not asked for."""
    if manifest.drafter is not None and request.looks_for_own_head:
        _keep_if_it_pays(folder, manifest)
    elif manifest.drafter is None and _exits_may_pay(manifest, request):
        with stage("measuring what exits gain as drafts"):
            measured = with_exits(folder)
        logger.info("%s", sentence(measured.auto))
        write_manifest(folder, measured, manifest.files)


def _exits_may_pay(manifest: Manifest, request: ExportRequest) -> bool:
    """Whether exits save anything by their calibration, or the model was trained with them."""
    calibrated = manifest.auto is not None and manifest.auto.exit_speedup is not None
    return calibrated or (request.routers == MODEL_GATE and request.config.epsilon > 0)


def _keep_if_it_pays(folder: Path, manifest: Manifest) -> None:
    """Measures the head, and removes it if it gains nothing."""
    with stage("measuring what the draft head gains here"):
        measured, comparison = with_head(folder)
    if required(measured.drafting).max_learned == 0:
        logger.info(
            "drafts by the model's MTP layer do not pay here (%.2fx): the bundle is without it (--draft-head with the "
            "model again keeps it)",
            comparison.speedup,
        )
        measured = replace(manifest, drafter=None)
        for name in (DRAFTER_FILE, network_file(DRAFTER)):
            (folder / name).unlink(missing_ok=True)
    write_manifest(folder, measured, manifest.files)
