"""Quantized weights: first stage behind loading, so that all that follows sees the model that will run.

`quantize_model` rounds the matrices of a loaded model to 8 or 4 bits and puts what the integers stand for back into it.
Routers and lenses are then calibrated on that model, it is the reference the bundle is held to, and `trace` marks its
matrices so that `lower` writes these very integers.
"""

from tide_export.quantize.model import quantize_model
from tide_export.quantize.settings import CALIBRATED, QUANTIZED, quantization_settings

__all__ = ["CALIBRATED", "QUANTIZED", "quantization_settings", "quantize_model"]
