"""Traces a model and cuts its graph: two stages of the flow, which `probe` runs too."""

from tide_export.common.progress import stage
from tide_export.compose.cut import Pieces, cut
from tide_export.lower.cuda.lower import check_for_cuda
from tide_export.lower.tensorrt.lower import check_pieces
from tide_export.model.failures import explained
from tide_export.model.source import SourceModel
from tide_export.pipeline.request import ExportRequest
from tide_export.trace.tracer import trace


def trace_and_cut(
    source: SourceModel, request: ExportRequest, checkpoints: tuple[int, ...], length: int, taps: tuple[int, ...] = ()
) -> Pieces:
    """Traces the model for sequences of `length` tokens and cuts the graph at its checkpoints."""
    with stage("tracing the model"), explained(source.model, "be traced"):
        traced = trace(source, checkpoints, length, bool(taps), request.lora_rank)
    with stage("cutting the graph"), explained(source.model, "be cut at its checkpoints"):
        pieces = cut(traced, length, taps)
    if request.network_target is not None:
        check = check_for_cuda if request.for_cuda else check_pieces
        check(pieces, request.network_weights(source.exact_in))
    return pieces
