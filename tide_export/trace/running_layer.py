"""Tracks which decoder layer runs while a model is traced.

Modules that several layers share do not know it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

RUNNING: ContextVar[int | None] = ContextVar("running", default=None)


@contextmanager
def running_layers(layers: Iterable[nn.Module]) -> Iterator[None]:
    """While open, `RUNNING` holds the number of the layer that runs, or ran last; None before the first."""

    def begin(number: int) -> Callable:
        def hook(*_) -> None:
            RUNNING.set(number)

        return hook

    token = RUNNING.set(None)
    handles = [layer.register_forward_pre_hook(begin(number)) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        RUNNING.reset(token)
