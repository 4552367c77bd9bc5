"""Caches the kernels that TensorRT for RTX compiles when plans are loaded, across processes.

TensorRT for RTX accepts only files that the same version wrote for the same GPU and driver.
"""

import contextlib
import logging
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

logger = logging.getLogger("tide_export")


class KernelCache:
    """Holds an `IRuntimeCache`, read from a file and saved when this object or the process ends.

    Serves several threads, as the library's object does. The file need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        """Makes a configuration of execution contexts use the cache; the GPU must be selected."""
        if self._cache is None:
            cache = config.create_runtime_cache()
            stored = _read(self.path)
            if stored and not cache.deserialize(stored):
                logger.info(
                    "the kernels in '%s' are damaged, or of another GPU, driver or version: they are compiled again",
                    self.path,
                )
                stored = b""
            weakref.finalize(self, _save, cache, self.path, stored)
            self._cache = cache
        config.set_runtime_cache(self._cache)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _save(cache: Any, path: Path, stored: bytes) -> None:
    """Replaces the file if kernels were added; ignores errors, because the cache only saves time."""
    data = bytes(cache.serialize())
    if data == stored:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        Path(part).replace(path)
