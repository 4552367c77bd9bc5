"""Fixes, while a model is traced, rotary angles that depend on the length of the pass.

"dynamic" and "longrope" scaling compute their angles from the longest position of the pass. Up to the length the model
was first trained for, the angles are those of a short pass, and a bundle holds no longer sequences
(`SourceModel.context_length`). So the switch is disabled and the short angles are traced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn

SWITCHING = ("dynamic", "longrope")  # rope types whose angles depend on the length of the pass


@contextmanager
def static_rope(model: nn.Module) -> Iterator[None]:
    """While open, rotary modules of a switching type give the angles of a short pass, whatever the length."""
    changed: list[tuple[Any, dict[str, Any]]] = []  # modules, with the attributes to restore
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        types = kinds if isinstance(kinds, dict) else {"": kinds}
        switching = [name for name, kind in types.items() if isinstance(kind, str) and kind in SWITCHING]
        if not switching:
            continue
        fixed = {name: "default" if name in switching else kind for name, kind in types.items()}
        values: dict[str, Any] = {"rope_type": fixed if isinstance(kinds, dict) else "default"}
        values |= _of_short_passes(module)
        for prefix in (f"{name}_" if name else "" for name in switching):
            values[f"{prefix}inv_freq"] = getattr(module, f"{prefix}original_inv_freq").clone()
        changed.append((module, {name: getattr(module, name) for name in values}))
        _set(module, values)
    try:
        yield
    finally:
        for module, values in changed:
            _set(module, values)


def _of_short_passes(module: Any) -> dict[str, Any]:
    """Returns what PhiMoE's rotary module reads in every pass: the angles of a short one and their factor."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    if "short_mscale" not in parameters:
        return {}
    short = module.original_inv_freq, parameters["short_mscale"]
    return {
        "config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
        "rope_init_fn": lambda _config: short,
    }


def _set(module: nn.Module, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)
