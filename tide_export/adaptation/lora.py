"""LoRA by the package peft: trains low-rank matrices beside frozen weights and merges them at the end.

With the matrices disabled, the model is the original: no second copy of it is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tide_export.errors import AdaptError, first_line
from tide_export.model.source import SourceModel


class Lora:
    """Low-rank matrices beside every linear layer of `source` except its head.

    Raises:
        AdaptError: peft is not installed, or finds no linear layer.
    """

    def __init__(self, source: SourceModel, rank: int, seed: int):
        try:
            from peft import LoraConfig, get_peft_model
        except ModuleNotFoundError as error:
            raise AdaptError("--lora-rank needs the package peft: pip install -e '.[adapt]' in the clone") from error
        settings: Any = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self._model = get_peft_model(source.model, settings)
        except ValueError as error:
            raise AdaptError(f"LoRA cannot be applied to {source.architecture}: {first_line(error)}") from error

    @contextmanager
    def original(self) -> Iterator[None]:
        """Disables the matrices while the context is open, so that the model computes as before training."""
        with self._model.disable_adapter():
            yield

    def merge(self) -> None:
        """Adds the matrices' products to the weights and removes the matrices."""
        merge: Callable[[], Any] = self._model.merge_and_unload
        merge()
