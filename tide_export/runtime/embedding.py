"""Computes the embedding of a text from the hidden states that the model's head reads.

Full depth gives the final hidden state of every token, after the final norm. A checkpoint gives that of the last token
alone, for the cost of the layers before it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_export.bundle.manifest import Manifest
from tide_export.common.values import shown, whole_number
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.generation import Generation
from tide_export.runtime.stepping import NO_LIMIT

POOLINGS = ("last", "mean")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Sets how the vector of a text is computed.

    Attributes:
        pooling: "last": the hidden state of the last token, which has seen the whole text; "mean": the mean over all
            tokens, at full depth.
        layer: the checkpoint at which the text exits, as the number of layers before it; None: full depth.
        dimensions: keep the first so many numbers, for models trained for it; None: all.
        normalize: scale vectors to length 1.
        adapter: as in `GenerationConfig`.

    Raises:
        GenerationError: an option is out of range, or mean pooling is combined with a layer.
    """

    pooling: str = "last"
    layer: int | None = None
    dimensions: int | None = None
    normalize: bool = True
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise GenerationError(f"pooling must be 'last' or 'mean', not {shown(self.pooling)}")
        for name in ("layer", "dimensions"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=1)
        if self.layer is not None and self.pooling == "mean":
            raise GenerationError(
                "pooling 'mean' is for full depth: a checkpoint gives the hidden state of the last token alone"
            )

    def options(self, manifest: Manifest) -> GenerationConfig:
        """Returns the generation options that run a text.

        Raises:
            GenerationError: the bundle has no such checkpoint.
        """
        if self.layer is None:
            return GenerationConfig(max_new_tokens=1, mode="full", stop_token_ids=(), states=True, adapter=self.adapter)
        if self.layer not in manifest.checkpoints:
            points = ", ".join(map(str, manifest.checkpoints)) or "none"
            raise GenerationError(f"layer must be a checkpoint of the bundle ({points}), not {self.layer}")
        return GenerationConfig(
            max_new_tokens=1,
            mode="exit",
            threshold=[0.0 if point == self.layer else 1.0 for point in manifest.checkpoints],
            min_layers=0,
            max_pending=NO_LIMIT,
            stop_token_ids=(),
            states=True,
            adapter=self.adapter,
        )

    def vector(self, generation: Generation) -> NDArray[np.float32]:
        """Computes the vector [dimensions] of a text that was run with these options.

        Raises:
            GenerationError: it has fewer dimensions; or its router's score is 0, which is never above a threshold.
        """
        hidden = generation.states
        assert hidden is not None
        if self.layer is not None and generation.stats.exit_layer[0] != self.layer:
            raise GenerationError(f"the router of layer {self.layer} gives a text the score 0: use another layer")
        vector = np.asarray(hidden.mean(axis=0, dtype=np.float64) if self.pooling == "mean" else hidden[-1], np.float32)
        if self.dimensions is not None and self.dimensions > len(vector):
            raise GenerationError(f"dimensions must be at most {len(vector)}, the model's, not {self.dimensions}")
        vector = vector[: self.dimensions]
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if self.normalize and length > 0 else vector
