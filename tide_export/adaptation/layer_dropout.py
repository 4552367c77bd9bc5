"""Layer dropout: skips layers for some training sequences, deeper layers more often."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from tide_export.model.outputs import first_tensor, with_first_tensor
from tide_export.model.structure import ModelStructure


def skip_rates(num_layers: int, largest: float) -> list[float]:
    """Returns the share of sequences that skip each layer, growing exponentially from 0 to `largest`.

    Equation 2 of LayerSkip, https://arxiv.org/abs/2404.16710.
    """
    return [largest * (math.exp(math.log(2) * layer / max(1, num_layers - 1)) - 1) for layer in range(num_layers)]


@contextmanager
def dropped_layers(
    structure: ModelStructure, rates: Sequence[float], sequences: int, generator: torch.Generator
) -> Iterator[None]:
    """Makes each of the batch's `sequences` skip a layer with the layer's rate while the context is open."""

    def hook(skipped: torch.Tensor):
        def skip(_module, args, kwargs, output):
            hidden = first_tensor(output)
            before = args[0] if args else kwargs["hidden_states"]
            batch = 1 if structure.streams is not None and structure.stream_axis == 0 else 0
            shape = [-1 if axis == batch else 1 for axis in range(hidden.ndim)]
            mixed = torch.where(skipped.to(hidden.device).view(shape), before.to(hidden.dtype), hidden)
            return with_first_tensor(output, mixed)

        return skip

    with ExitStack() as hooks:
        for layer, rate in zip(structure.layers, rates, strict=True):
            skipped = torch.rand(sequences, generator=generator) < rate
            if bool(skipped.any()):
                hooks.enter_context(layer.register_forward_hook(hook(skipped), with_kwargs=True))
        yield
