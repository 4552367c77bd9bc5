"""Reads GGUF files: keeps integers that the matmuls hold exactly, widens all other weights to float32.

Kept are matrices in Q8_0 and Q4_0 (ggml-quants.h of ggml-org/ggml): blocks of 32 weights with a scale in float16 and no
minimum. Names, shapes and the order of rows are transformers' work. It has two ways: one converts tensors as they are
loaded, for few architectures; an older one widens all of them first. Both leave the kept ones in their blocks here.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import modeling_gguf_pytorch_utils as older
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.utils import get_gguf_plan
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from tide_export.model.quantized_integers import IntegerWeight, consecutive
from tide_export.model.quantized_modules import keep

BLOCK = 32
SCALE = 2  # bytes
BITS = {"Q4_0": 4, "Q8_0": 8}  # of the types that are kept

# Of the older way's, those that reorder rows of a matrix or leave it as it is.
BY_ROWS = {
    older.TensorProcessor,
    older.LlamaTensorProcessor,
    older.Gemma2TensorProcessor,
    older.NemotronTensorProcessor,
}


@contextmanager
def keeping_integers() -> Iterator[None]:
    """While open, transformers reads GGUF files so that integers are kept.

    They are noted for `quantized_modules.widen_when_run`.
    """
    with patch.dict(AUTO_QUANTIZER_MAPPING, gguf=_Quantizer):
        yield


class _Quantizer(GgufHfQuantizer):
    """Reads a GGUF file as transformers does with `dequantize`, but for the matrices that are kept."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        if self.supported:
            kinds, packable, gathered = get_gguf_plan(self.header, self.mapping)
            names = [name for name in packable if GGML_NAME[kinds[name]] in BITS and name not in gathered]
            self.packed_modules = {name: module for name in names if (module := _matrix_module(model, name))}

    def get_state_dict(self, checkpoint_file: str, model: Any) -> Any:
        if self.supported:
            return super().get_state_dict(checkpoint_file, model)
        from gguf import GGMLQuantizationType, GGUFReader, dequantize
        from gguf.constants import GGML_QUANT_SIZES

        kinds = {GGMLQuantizationType[name] for name in BITS}
        architecture = older.read_field(GGUFReader(checkpoint_file), "general.architecture")[0]
        if older.TENSOR_PROCESSORS.get(architecture, older.TensorProcessor) not in BY_ROWS:
            kinds = set()

        def widened(data: np.ndarray, kind: Any) -> np.ndarray:
            return data if data.ndim == 2 and kind in kinds else dequantize(data, kind)

        with patch("gguf.dequantize", widened):
            file = older.load_gguf_checkpoint(checkpoint_file, return_tensors=True, model_to_load=model)
        tensors: dict[str, torch.Tensor] = file["tensors"]
        for name, tensor in tensors.items():
            if tensor.dtype == torch.uint8 and (module := _matrix_module(model, name)):
                self.packed_modules[name] = module
            elif tensor.dtype == torch.uint8:
                columns = model.get_parameter_or_buffer(name).shape[1]
                sizes = {columns // BLOCK * GGML_QUANT_SIZES[kind][1]: kind for kind in kinds}
                tensors[name] = torch.from_numpy(dequantize(tensor.numpy(), sizes[tensor.shape[1]]))
        return tensors

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        conversions = super().update_weight_conversions(weight_conversions, model)
        if not self.supported:
            names = [f"({re.escape(name)})" for name in self.packed_modules]
            return [*conversions, WeightConverter(names, [r"\1"], [_Keep()])] if names else conversions
        for conversion in conversions:
            if isinstance(conversion, WeightConverter):
                conversion.operations.append(_Keep())
        return conversions


def _matrix_module(model: nn.Module, name: str) -> nn.Module | None:
    """Returns the module that multiplies by parameter `name`, or looks its rows up; None: another does."""
    module = model.get_submodule(name.rpartition(".")[0])
    return module if isinstance(module, nn.Linear | nn.Embedding) and name.endswith(".weight") else None


class _Keep(ConversionOps):
    """Keeps a matrix in blocks, uint8 [N, bytes]; the model's parameter becomes one without memory."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        (blocks,) = (one[0] if isinstance(one, list) else one for one in input_dict.values())
        if blocks.dtype != torch.uint8:
            return input_dict
        name, model = kwargs["full_layer_name"], kwargs["model"]
        parameter = model.get_parameter_or_buffer(name)
        path, _, attribute = name.rpartition(".")
        keep(model.get_submodule(path), attribute, read_blocks(blocks, parameter.shape[1]))
        return {name: [torch.empty_like(parameter, device="meta")]}


def read_blocks(blocks: torch.Tensor, columns: int) -> IntegerWeight:
    """Reads a matrix [N, K] in Q4_0 or Q8_0.

    Args:
        blocks: uint8 [N, K / 32 * bytes]. A block is a scale in float16, then the weights as signed bytes; or as 16
            bytes, whose low halves are the first 16 weights and high halves the others, each 8 more than the weight.
        columns: K.
    """
    outputs, count = len(blocks), columns // BLOCK
    by_block = blocks.reshape(outputs, count, -1)
    bits = (by_block.shape[2] - SCALE) * 8 // BLOCK
    scales = by_block[..., :SCALE].contiguous().view(torch.float16)[..., 0].T
    words = by_block[..., SCALE:].contiguous().view(torch.int32)

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        stored = words.view(torch.uint8)
        integers = stored ^ 128 if bits == 8 else torch.cat([stored & 15, stored >> 4], dim=-1)
        return integers.reshape(outputs, -1).T

    zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.int16)
    return IntegerWeight(words, unpacked, bits, scales, zeros, consecutive(columns, BLOCK))
