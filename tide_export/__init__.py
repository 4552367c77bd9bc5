"""tide_export: from a Hugging Face causal LM with early-exit routers to an engine that really skips layers.

`tide_export.load(bundle)` runs a bundle and needs numpy and one engine alone; everything that makes a bundle
(`pipeline.flow`, `calibrate`, `trace`, ...) is imported only when asked for and needs the `export` extra.
`tide_export.register_adapter` tells where the parts of a model are that cannot be found by themselves.
"""

from typing import TYPE_CHECKING

from tide_export.errors import TideError

if TYPE_CHECKING:
    from tide_export.model.structure import ModelStructure, register_adapter
    from tide_export.runtime.engine import Engine, load

from tide_export.version import __version__

__all__ = ["Engine", "ModelStructure", "TideError", "__version__", "load", "register_adapter"]


def __getattr__(name: str) -> object:
    # Late, so that making a bundle does not load an engine and `tide-export --help` loads neither.
    if name in ("Engine", "load"):
        from tide_export.runtime import engine

        return getattr(engine, name)
    if name in ("ModelStructure", "register_adapter"):
        from tide_export.model import structure

        return getattr(structure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
