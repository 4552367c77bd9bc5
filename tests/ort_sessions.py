"""Sessions of onnxruntime's own Python package with our operators in it, for graphs that are no bundle."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort

from tide_export.runtime.native import LIBRARY


def register_operators(options: ort.SessionOptions, library: Path = LIBRARY) -> None:
    """Adds the operators of the library."""
    options.register_custom_ops_library(str(library))


def opened(
    model: bytes | onnx.ModelProto | ir.Model,
    profile: Path | None = None,
    threads: int = 0,
    operators: bool = True,
    library: Path = LIBRARY,
) -> ort.InferenceSession:
    """A session without messages.

    Args:
        profile: a folder for what `operators_of` reads.
        threads: 0: as many as the machine has.
        operators: with those of `library`; else functions in the model, where it has them, compute what they do.
    """
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    options.enable_cpu_mem_arena = False  # in which a session would keep what its largest run took
    if operators:
        register_operators(options, library)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile / "profile")
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return ort.InferenceSession(proto if isinstance(proto, bytes) else proto.SerializeToString(), options)


def operators_of(session: ort.InferenceSession) -> set[str]:
    """Ends the session's profile; returns the operators that ran."""
    events = json.loads(Path(session.end_profiling()).read_text())
    return {event.get("args", {}).get("op_name") for event in events}


def session_options(threads: int | None = 1) -> Any:
    """The options that the runtime opens its sessions with, as far as they decide what is computed."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    # By default it would round the inputs of dequantized matrices to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return options
