"""tide_export: from a Hugging Face causal LM with early-exit routers to an engine that really skips layers.

`tide_export.load(bundle)` runs a bundle and needs numpy and one engine alone; everything that makes a bundle (`pipeline`,
`calibrate`, `trace`, ...) is imported only when asked for and needs the `export` extra.
"""

from tide_export.errors import TideError
from tide_export.runtime.engine import Engine, load

__version__ = "0.1.0"
__all__ = ["Engine", "TideError", "__version__", "load"]
