"""TensorRT and TensorRT for RTX: libraries, plugins and engines."""
