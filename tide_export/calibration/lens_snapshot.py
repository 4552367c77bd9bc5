"""Saves lenses while they are fitted, so that a killed run can resume.

The folder gets one file for each combination of model, text and settings, which is replaced atomically.
"""

import hashlib
import io
import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tide_export.calibration.config import TideConfig
from tide_export.calibration.lens_fit import LensFit
from tide_export.common.files import failure, replace_files
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel

SETTINGS = ("exit_strategy", "label", "kl_bound", "convergence_threshold", "calibration_batch", "seed")
SAVE_SECONDS = 30.0  # a killed run loses at most the work since the last save, which takes milliseconds


class LensSnapshot:
    """The snapshot of one fit; without a folder nothing is saved."""

    def __init__(
        self, source: SourceModel, config: TideConfig, text: str, checkpoints: Sequence[int], folder: Path | None
    ):
        settings = {
            "weights_sha256": source.weights_sha256,
            "quantized": source.quantized is not None,
            "text": text,
            "checkpoints": list(checkpoints),
            "settings": {name: value for name, value in config if name.startswith("lens_") or name in SETTINGS},
            "versions": {package: version(package) for package in ("torch", "transformers")},
        }
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self.device = source.device
        self.file = None if folder is None else folder / "lenses" / f"{key}.pt"
        self._saved = time.monotonic()

    def restore(self, fits: dict[int, LensFit]) -> int:
        """Restores `fits` as saved and returns the number of passes over the text that they have seen.

        Raises:
            CalibrationError: the file is damaged.
        """
        if self.file is None or not self.file.exists():
            return 0
        try:
            saved: dict[str, Any] = torch.load(self.file, map_location=self.device, weights_only=True)
            for layers, fit in fits.items():
                stored = saved["fits"][layers]
                fit.lens.load_state_dict(stored["lens"])
                fit.optimizer.load_state_dict(stored["optimizer"])
                fit.curve, fit.best, fit.given_up = stored["curve"], stored["best"], stored["given_up"]
            return int(saved["passes"])
        except Exception as error:  # torch.load raises many types for a damaged file
            raise CalibrationError(
                f"calibration folder {self.file.parent} is damaged ({self.file.name}): delete it or use another"
            ) from error

    def save(self, fits: dict[int, LensFit], passes: int, last: bool) -> None:
        """Saves `fits` after `passes` passes, if `SAVE_SECONDS` have passed or it was the last.

        Raises:
            CalibrationError: the file cannot be written.
        """
        if self.file is None or not (last or time.monotonic() - self._saved >= SAVE_SECONDS):
            return
        saved = {
            layers: {
                "lens": fit.lens.state_dict(),
                "optimizer": fit.optimizer.state_dict(),
                "curve": fit.curve,
                "best": fit.best,
                "given_up": fit.given_up,
            }
            for layers, fit in fits.items()
        }
        content = io.BytesIO()
        torch.save({"passes": passes, "fits": saved}, content)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_files({self.file: content.getvalue()})
        except OSError as error:
            raise CalibrationError(
                f"cannot write the calibration folder {self.file.parent}: {failure(error, self.file.parent)}"
            ) from error
        self._saved = time.monotonic()
