"""Fourth stage: the portable graph is rewritten for a target's own operators."""

from tide_export.lower.batch import save_batch_networks
from tide_export.lower.onnxruntime import lower_for_onnxruntime
from tide_export.lower.tensorrt import check_operators, networks_for_tensorrt

__all__ = ["check_operators", "lower_for_onnxruntime", "networks_for_tensorrt", "save_batch_networks"]
