"""Leaves weights in their checkpoint's form while the model is in memory.

A module widens its own while it runs.

By accelerate's hooks, as for weights on disk: the parameter has no memory, and whoever reads such a weight gets its
float32 numbers. Packed integers, and large matrices in 16 bits beside them, stay in the mapped file of the checkpoint.
"""

from collections.abc import Iterator, Mapping

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tide_export.bundle.manifest import CHECKPOINT, INT8_MATMULS, Quantization
from tide_export.common.memory import FreeMemory
from tide_export.model.quantized_integers import CheckpointMatrix, IntegerWeight, block_size_of, is_symmetric
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.model.structure import offload_hooks

LARGE = 2**19  # numbers from which on a matrix in 16 bits is kept
KEPT = "_tide_kept_weight"


def keep(module: nn.Module, weight: IntegerWeight | torch.Tensor) -> bool:
    """Notes that `weight` is that of `module`, until `widen_when_run`.

    Returns False where it is not one to keep.
    """
    if isinstance(weight, IntegerWeight):
        kept = block_size_of(weight) is not None
    else:
        kept = weight.dim() == 2 and weight.numel() >= LARGE and weight.element_size() == 2
    if kept:
        setattr(module, KEPT, weight)
    return kept


def widened(weight: IntegerWeight | torch.Tensor, inputs_first: bool) -> torch.Tensor:
    """Returns the float32 numbers of `weight`.

    They are [K, N] of integers where `inputs_first`, else a view [N, K] of that.
    """
    if isinstance(weight, torch.Tensor):
        return weight.float()
    return weight.dequantize() if inputs_first else weight.dequantize().T


def kept_in_16_bits(module: nn.Module, name: str) -> torch.Tensor | None:
    """Returns parameter `name` of `module` as its checkpoint has it, if it is a matrix in 16 bits."""
    for hook in offload_hooks(module):
        if name == "weight" and isinstance(hook.weights_map, _Stored):
            weight = hook.weights_map.weight
            return weight if isinstance(weight, torch.Tensor) else None
    return None


def widen_when_run(model: PreTrainedModel) -> QuantizedWeights | None:
    """Attaches the weights that were kept to their modules.

    Returns:
        The matrices of integers; None where none was kept.
    """
    kept = {id(module.weight): vars(module).pop(KEPT) for module in model.modules() if KEPT in vars(module)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {names[key]: weight for key, weight in kept.items() if isinstance(weight, IntegerWeight)}
    free = FreeMemory()
    for module in [module for module in model.modules() if id(getattr(module, "weight", None)) in kept]:
        others = {name: tensor.detach() for name, tensor in module.named_parameters(recurse=False) if name != "weight"}
        stored = _Stored(kept[id(module.weight)], isinstance(module, Conv1D), others, free)
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=stored))
        vars(model)["hf_device_map"] = {"": "cpu"}  # as accelerate says that weights come and go: not for threads
    if not weights:
        return None
    sizes = [size for weight in weights.values() if (size := block_size_of(weight)) is not None]
    settings = Quantization(
        method=CHECKPOINT,
        bits=next(iter(weights.values())).bits,
        block_size=min(sizes),
        symmetric=all(map(is_symmetric, weights.values())),
        accuracy_level=INT8_MATMULS,
    )
    matrices = {
        name: CheckpointMatrix(weight, settings.block_size, settings.symmetric) for name, weight in weights.items()
    }
    return QuantizedWeights(settings, matrices)


class _Stored(Mapping[str, torch.Tensor]):
    """The parameters of a module by name, float32, `weight` as the checkpoint has it."""

    def __init__(
        self,
        weight: IntegerWeight | torch.Tensor,
        inputs_first: bool,
        others: Mapping[str, torch.Tensor],
        free: FreeMemory,
    ):
        self.weight, self._inputs_first, self._others, self._free = weight, inputs_first, others, free

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != "weight":
            return self._others[name]
        numbers = widened(self.weight, self._inputs_first)
        self._free.used(numbers.nbytes)
        return numbers

    def __iter__(self) -> Iterator[str]:
        return iter(("weight", *self._others))

    def __len__(self) -> int:
        return 1 + len(self._others)
