"""Gives layers that run several times in a pass a module for each time.

Some models (HRM, Ouro) run stacks of layers in turn and again, each time with keys and values of their own: a layer of
such a stack is as many layers as it runs times. Each time gets a shallow copy of the module, with its weights and hooks
of its own, so that the rest of the package sees a list of layers that run once each.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn


def repeated_layers(model: nn.Module, called: Sequence[nn.Module], depth: int | None) -> list[nn.Module]:
    """Returns the modules of lists in `model`, of one class, that are called `depth` times together.

    In the order of `called`; empty if there are none.
    """
    listed = {id(member) for owner in model.modules() if isinstance(owner, nn.ModuleList) for member in owner}
    calls = [module for module in called if id(module) in listed]
    return calls if len(calls) == depth and len({type(module) for module in calls}) == 1 else []


def looped_layers(lists: Sequence[nn.ModuleList], called: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the calls of a list's layers, if all run one after another, several times; else none."""
    for layers in lists:
        calls = [module for module in called if module in {*layers}]
        loops = len(calls) // max(1, len(layers))
        if loops > 1 and calls == [*layers] * loops:
            return calls
    return []


def loops_of(layers: nn.ModuleList) -> int:
    """Returns how often the same weights come one after another in `layers`, up to the last layer."""
    weights = [[id(parameter) for parameter in layer.parameters()] for layer in layers]
    count = len(weights)
    return next(count // n for n in range(1, count + 1) if not count % n and weights == weights[:n] * (count // n))


def in_turn(model: nn.Module, calls: Sequence[nn.Module]) -> tuple[nn.Module, nn.ModuleList]:
    """Gives each of `calls`, which a pass of `model` makes in this order, a module of its own.

    Returns:
        The module that all of them are in, and these modules.
    """
    known = vars(calls[0]).get("forward")  # of an earlier search
    if isinstance(known, _Turns):
        return known.owner, nn.ModuleList(known.modules)
    owner = [one for one in model.modules() if {*calls} <= {*one.modules()} and not isinstance(one, nn.ModuleList)][-1]
    turns = _Turns(owner, [_alike(module) for module in calls])
    owner.register_forward_pre_hook(turns.begin)
    for module in calls:
        module.forward = turns
    return owner, nn.ModuleList(turns.modules)


class _Turns:
    """A forward that runs one of `modules` after another, from the first in each pass of `owner`."""

    def __init__(self, owner: nn.Module, modules: list[nn.Module]):
        self.owner, self.modules = owner, modules
        self.done: dict[int, int] = {}  # runs in this pass, by thread

    def begin(self, *_: Any) -> None:
        self.done[threading.get_ident()] = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident()
        self.done[here] += 1
        return self.modules[self.done[here] - 1](*args, **kwargs)


def _alike(module: nn.Module) -> nn.Module:
    """Returns a module that shares the parts of `module`, but not its hooks."""
    other = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            setattr(other, name, OrderedDict())
    return other
