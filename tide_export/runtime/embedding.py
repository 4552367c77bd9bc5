"""Makes vectors of texts: what the model's head reads of their tokens.

Full depth gives every token's last hidden state, after the final norm. A checkpoint gives that of the last token alone,
which its exit reads, for the cost of the layers before it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_export.bundle.manifest import EXACT, Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.generation import Generation
from tide_export.runtime.stepping import NO_LIMIT
from tide_export.values import shown, whole_number

POOLINGS = ("last", "mean")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How a text becomes a vector.

    Attributes:
        pooling: "last": of the last token, which has seen the whole text; "mean": of all tokens, at full depth.
        layer: the checkpoint that the text leaves at, by the layers before it; None: full depth.
        dimensions: keep so many numbers, the first; for models that were trained for it. None: all.
        normalize: give vectors of length 1.

    Raises:
        GenerationError: an option is out of range, or mean pooling is asked for at a checkpoint.
    """

    pooling: str = "last"
    layer: int | None = None
    dimensions: int | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise GenerationError(f"pooling must be 'last' or 'mean', not {shown(self.pooling)}")
        for name in ("layer", "dimensions"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=1)
        if self.layer is not None and self.pooling == "mean":
            raise GenerationError(
                "pooling 'mean' is for full depth: a checkpoint gives the state of the last token alone"
            )

    def options(self, manifest: Manifest) -> GenerationConfig:
        """How to run a text of a bundle. Raises GenerationError: it has no such checkpoint, or propagates K/V."""
        if self.layer is None:
            return GenerationConfig(max_new_tokens=1, mode="full", stop_token_ids=(), states=True)
        if self.layer not in manifest.checkpoints:
            points = ", ".join(map(str, manifest.checkpoints)) or "none"
            raise GenerationError(f"layer must be a checkpoint of the bundle ({points}), not {self.layer}")
        if manifest.kv_cache_strategy != EXACT:
            raise GenerationError(
                "layer is for an exact K/V cache: this bundle propagates, so that prompts run all layers"
            )
        return GenerationConfig(
            max_new_tokens=1,
            mode="exit",
            threshold=[0.0 if point == self.layer else 1.0 for point in manifest.checkpoints],
            min_layers=0,
            max_pending=NO_LIMIT,
            stop_token_ids=(),
            states=True,
        )

    def vector(self, made: Generation) -> NDArray[np.float32]:
        """Makes the vector [dimensions] of a text that was run with these options.

        Raises:
            GenerationError: it has fewer dimensions; or its router's score is 0, with which nothing leaves.
        """
        assert made.states is not None
        left = made.stats.exit_layer[0]
        if self.layer is not None and left != self.layer:
            raise GenerationError(f"the router of layer {self.layer} gives a text the score 0: use another layer")
        states = made.states
        vector = np.asarray(states.mean(axis=0, dtype=np.float64) if self.pooling == "mean" else states[-1], np.float32)
        if self.dimensions is not None and self.dimensions > len(vector):
            raise GenerationError(f"dimensions must be at most {len(vector)}, the model's, not {self.dimensions}")
        vector = vector[: self.dimensions]
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if self.normalize and length > 0 else vector
