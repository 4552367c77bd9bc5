"""Saves and describes the segment networks of a bundle, lowered for TensorRT or for CUDA."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

from tide_export.bundle.file_names import EMBEDDING_FILE, SEGMENTS_FOLDER, SEGMENTS_WEIGHTS_FILE, network_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.plan_fields import NetworksInfo
from tide_export.bundle.profiles import BATCH_SIZE, run_sizes, state_rows
from tide_export.compose.cut import Pieces, check_positions
from tide_export.errors import UnsupportedModelError
from tide_export.lower.tensorrt.shared_embedding import SharedEmbedding

logger = logging.getLogger("tide_export")

EXTERNAL_BYTES = 1024  # smaller tensors stay in the .onnx
ALIGNMENT = 256  # bytes; of every address a network is given (cpp/src/segmented/device.h)


def why_unbatched(pieces: Pieces) -> str | None:
    """Returns why a run cannot take several sequences, None if it can."""
    try:
        check_positions(pieces)
    except UnsupportedModelError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Networks:
    """The networks of one model, by name: `segment_name(k)`, shallowest first, and `AFTER_SEGMENTS`.

    Attributes:
        weights: fp32, fp16 or bf16, of hidden states and K/V, and of all weights but `matrices`.
        capacity: tokens the K/V buffers hold, the longest sequence.
        exit_size: width D' of the hidden states the head takes.
        max_tokens: tokens a run may take, if experts are gathered.
        unbatched: why sequences cannot be batched, if they cannot.
        matrices: int4 or fp8, of the layers' matrices; None: as `weights`.
        embedding: their input `EMBEDDING`, if they have it.
        slot_tokens: tokens that a run over several sequences may take of each; None: as many as fit.
        cumulative: whether routers give the probability of an exit there of what has not exited before.
    """

    models: dict[str, ir.Model]
    weights: str
    capacity: int
    exit_size: int
    max_tokens: int | None = None
    unbatched: str | None = None
    matrices: str | None = None
    embedding: SharedEmbedding | None = None
    slot_tokens: int | None = None
    cumulative: bool = False

    def info(self, manifest: Manifest, batch_size: int = BATCH_SIZE) -> NetworksInfo:
        """Returns the networks' entry in the manifest.

        Logs a warning if they cannot take `batch_size` sequences in a run.

        Args:
            manifest: of their bundle so far.
            batch_size: the most sequences of a run.
        """
        unbatched = self.unbatched or self._unaligned(manifest)
        if unbatched is not None and batch_size > 1:
            logger.warning("the segment networks will take one prompt at a time: %s", unbatched)
        sizes = run_sizes(self.capacity, manifest.max_pending, 1 if unbatched else batch_size, self.max_tokens)
        return NetworksInfo(
            self.weights,
            self.capacity,
            state_rows(self.capacity),
            sizes.max_tokens,
            sizes.max_logits,
            self.exit_size,
            sizes.max_batch_size,
            min(sizes.max_slot_tokens, self.slot_tokens or sizes.max_slot_tokens),
            self.matrices,
            None if self.embedding is None else self.embedding.info,
            self.cumulative or None,
        )

    def _unaligned(self, manifest: Manifest) -> str | None:
        """Returns why a run cannot start at any slot of a batch, None if it can.

        It binds the addresses of the slot's buffers.
        """
        item = 4 if self.weights == "fp32" else 2
        buffers = {("K/V", heads * width * item) for heads, width in manifest.model.kv_shapes}
        buffers |= {
            ("states", width * item) for width in (manifest.model.hidden_size - self.cumulative, self.exit_size)
        }
        for what, token in sorted(buffers):
            if self.capacity * token % ALIGNMENT:
                return (
                    f"the {what} of one, {self.capacity * token} bytes a layer, is no multiple of {ALIGNMENT}: make "
                    f"--max-length one of {ALIGNMENT // math.gcd(ALIGNMENT, token)}"
                )
        return None

    def save(self, folder: Path) -> None:
        """Writes every network to `folder`/segments.

        They share one file of weights; the embedding has another.
        """
        target = folder / SEGMENTS_FOLDER
        target.mkdir()
        if self.embedding is not None:
            (folder / EMBEDDING_FILE).write_bytes(self.embedding.matrix.tobytes())
        large: dict[str, ir.TensorProtocol] = {}
        weights = [item for model in self.models.values() for item in model.graph.initializers.items()]
        for name, value in weights:
            if value.const_value is not None and value.const_value.nbytes >= EXTERNAL_BYTES:
                large.setdefault(name, value.const_value)
        external = convert_tensors_to_external(list(large.values()), target, SEGMENTS_WEIGHTS_FILE)
        stored = dict(zip(large, external, strict=True))
        for name, value in weights:
            if name in stored:
                value.const_value = stored[name]
        for name, model in self.models.items():
            ir.save(model, folder / network_file(name))
