"""Checks before a model is loaded that this machine has the memory for it."""

import torch

from tide_export.common.formatting import size
from tide_export.common.progress import quiet_transformers
from tide_export.errors import ProbeError
from tide_export.model.older_code import older_code
from tide_export.model.pretrained import bounded_sizes, read_config
from tide_export.model.source import auto_class
from tide_export.runtime.memory import memory_left

FLOAT32 = 4  # bytes
WORKING = 1.25  # of the weights: the copy that is written, states and logits
OTHER = 500_000_000  # bytes: PyTorch and what a probe holds of any model


def check_memory(name: str, trust_remote_code: bool) -> int:
    """Builds the model without its weights and compares what they need with the memory that is left.

    Returns:
        The number of parameters.

    Raises:
        ProbeError: it needs more than there is.
        ModelError: there is no such model, or it cannot be read.
    """
    config = read_config(name, trust_remote_code)
    kind = auto_class(config, name, trust_remote_code)
    options = {"trust_remote_code": True} if trust_remote_code else {}
    with quiet_transformers(), bounded_sizes(name), older_code(), torch.device("meta"):
        parameters: int = kind.from_config(config, **options).num_parameters()
    needed, left = int(parameters * FLOAT32 * WORKING) + OTHER, memory_left()
    if needed > left:
        raise ProbeError(
            f"model {name!r} needs about {size(needed)} of memory to be probed ({parameters:,} parameters in float32) "
            f"and {size(left)} are free: probe a smaller model of its family, or export it with --device-map auto"
        )
    return parameters
