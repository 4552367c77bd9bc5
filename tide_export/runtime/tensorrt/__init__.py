"""TensorRT and TensorRT for RTX: libraries, plugins and plans."""
