"""The frozen source model: loading it, finding its parts, and its quantized weights."""
