"""Leaves weights as the model's files have them while the model is in memory.

A module widens its own while it runs.

By accelerate's hooks, as for weights on disk: the parameter has no memory, and whoever reads such a weight gets its
float32 numbers. Packed integers, and large matrices in 16 bits beside them, stay in the model's mapped file.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tide_export.bundle.manifest import INT8_MATMULS, SOURCE_INTEGERS, Quantization
from tide_export.common.memory import FreeMemory
from tide_export.model.fp4_matrices import MXFP4_BLOCK, Nvfp4Matrix
from tide_export.model.quantized_experts import IntegerExperts, Mxfp4Experts
from tide_export.model.quantized_integers import IntegerWeight, SourceMatrix, block_size_of, is_symmetric
from tide_export.model.quantized_weights import Fp8Matrix, IntegerMatrix, QuantizedWeights
from tide_export.model.structure import offload_hooks

LARGE = 2**19  # numbers from which on a matrix in 16 bits is kept
KEPT = "_tide_kept_weights"

Kept = IntegerWeight | Nvfp4Matrix | Mxfp4Experts | IntegerExperts | torch.Tensor


def keep(module: nn.Module, name: str, weight: Kept) -> bool:
    """Notes that `weight` is parameter `name` of `module`, until `widen_when_run`.

    Returns False where it is not one to keep.
    """
    if isinstance(weight, torch.Tensor):
        kept = weight.dim() == 2 and weight.numel() >= LARGE and weight.element_size() == 2
    elif isinstance(weight, IntegerWeight):
        kept = block_size_of(weight) is not None
    else:
        kept = not isinstance(weight, IntegerExperts) or weight.is_kept
    if kept:
        vars(module).setdefault(KEPT, {})[name] = weight
    return kept


def widened(weight: Kept, inputs_first: bool) -> torch.Tensor:
    """Returns the float32 numbers of `weight`.

    They are [K, N] of integers where `inputs_first`, else a view [N, K] of that; of experts, as the model has them.
    """
    if isinstance(weight, torch.Tensor):
        return weight.float()
    if isinstance(weight, Nvfp4Matrix):
        dense = torch.from_numpy(weight.values())
        return dense.T if inputs_first else dense
    dense = weight.dequantize()
    return dense.T if isinstance(weight, IntegerWeight) and not inputs_first else dense


def kept_in_16_bits(module: nn.Module, name: str) -> torch.Tensor | None:
    """Returns parameter `name` of `module` as the model's files have it, if it is a matrix in 16 bits."""
    for hook in offload_hooks(module):
        if isinstance(hook.weights_map, _Stored):
            weight = hook.weights_map.kept.get(name)
            return weight if isinstance(weight, torch.Tensor) else None
    return None


def widen_when_run(model: PreTrainedModel) -> QuantizedWeights | None:
    """Attaches the weights that were kept to their modules.

    Returns:
        The matrices of integers; None where none was kept.
    """
    kept: dict[int, Kept] = {}
    for module in model.modules():
        for name, weight in vars(module).pop(KEPT, {}).items():
            kept[id(getattr(module, name))] = weight
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    free = FreeMemory()
    for module in list(model.modules()):
        parameters = dict(module.named_parameters(recurse=False))
        own = {name: kept[id(tensor)] for name, tensor in parameters.items() if id(tensor) in kept}
        if not own:
            continue
        others = {name: tensor.detach() for name, tensor in parameters.items() if name not in own}
        stored = _Stored(own, isinstance(module, Conv1D), others, free)
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=stored))
        vars(model)["hf_device_map"] = {"": "cpu"}  # as accelerate says that weights come and go: not for threads
    return _quantized({names[key]: weight for key, weight in kept.items() if not isinstance(weight, torch.Tensor)})


def _quantized(weights: Mapping[str, Any]) -> QuantizedWeights | None:
    """Returns the matrices of parameters that are kept, by the parameters' names."""
    integers = list[IntegerWeight]()
    for weight in weights.values():
        integers += weight.weights if isinstance(weight, IntegerExperts) else []
        integers += [weight] if isinstance(weight, IntegerWeight) else []
    if not weights:
        return None
    matrices = [weight for weight in weights.values() if isinstance(weight, Nvfp4Matrix)]
    sizes = [size for weight in integers if (size := block_size_of(weight)) is not None]
    settings = Quantization(
        method=SOURCE_INTEGERS,
        bits=integers[0].bits if integers else matrices[0].bits if matrices else 4,
        block_size=min(sizes, default=matrices[0].block_size if matrices else MXFP4_BLOCK),
        symmetric=all(map(is_symmetric, integers)),
        accuracy_level=INT8_MATMULS,
    )
    blocks = dict[str, IntegerMatrix | Fp8Matrix]()
    for name, weight in weights.items():
        if isinstance(weight, Nvfp4Matrix):
            blocks[name] = weight
            continue
        if isinstance(weight, IntegerWeight):
            blocks[name] = SourceMatrix(weight, settings.block_size, settings.symmetric)
            continue
        experts = weight.matrices(settings.block_size) if isinstance(weight, IntegerExperts) else weight.matrices
        blocks |= {f"{name}.{index}": matrix for index, matrix in enumerate(experts)}
    return QuantizedWeights(settings, blocks)


class _Stored(Mapping[str, torch.Tensor]):
    """The parameters of a module by name, float32, those of `kept` as the model's files have them."""

    def __init__(
        self, kept: Mapping[str, Kept], inputs_first: bool, others: Mapping[str, torch.Tensor], free: FreeMemory
    ):
        self.kept, self._inputs_first, self._others, self._free = kept, inputs_first, others, free

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.kept:
            return self._others[name]
        numbers = widened(self.kept[name], self._inputs_first)
        self._free.used(numbers.nbytes)
        return numbers

    def __iter__(self) -> Iterator[str]:
        return iter((*self.kept, *self._others))

    def __len__(self) -> int:
        return len(self.kept) + len(self._others)
