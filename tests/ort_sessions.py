"""Sessions of onnxruntime's own Python package with our operators in it, for graphs that are no bundle."""

from typing import Any

import onnxruntime as ort

from tide_export.runtime.native import LIBRARY


def register_operators(options: ort.SessionOptions) -> None:
    """Adds the operators of the library."""
    options.register_custom_ops_library(str(LIBRARY))


def session_options(threads: int | None = 1) -> Any:
    """The options that the runtime opens its sessions with, as far as they decide what is computed."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    # By default it would round the inputs of dequantized matrices to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return options
