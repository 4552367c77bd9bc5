"""Finds the library of TensorRT plugins, checks it, and registers it with TensorRT.

TensorRT plans may be built with the plugins of `plugins/` in place of the functions in their networks (TensorRT for
RTX has no plugins). `plans.build` records the library in the manifest; `runtime.tensorrt.plans` needs the same
release of it to load such plans. Opening a library runs its code, so none is taken from a bundle: it is named by the
user or installed. Its version is read in another process, so that a damaged library cannot crash this one.
"""

import ctypes
import hashlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_export.bundle.plan_fields import PluginsInfo
from tide_export.common.version import __version__
from tide_export.errors import ConfigError, ProviderError
from tide_export.names.operators import OP_EXIT, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.names.segment_networks import EXIT_STATES
from tide_export.runtime.tensorrt.flavours import Flavour

logger = logging.getLogger("tide_export")

VARIABLE = "TIDE_PLUGINS"
NONE = "none"  # in place of a path: use no plugins
LIBRARY = "libtide_plugins.so"
PACKAGE = Path(__file__).parents[2]
# Paths of an installed library: `cmake --install`ed into the package, or built in a checkout.
INSTALLED = (PACKAGE / "lib" / LIBRARY, PACKAGE.parent / "build" / "plugins" / "plugins" / LIBRARY)

COPIED_BYTES = "tide_plugins_copied_bytes"  # the library's function (plugins/common/registry.cpp)

# Prints the two versions of the library, one per line.
PROBE = f"""
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("tide_plugins_version", "tide_plugins_tensorrt_version"):
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    print(function().decode())
library.{COPIED_BYTES}
"""


@dataclass(frozen=True)
class PluginLibrary:
    """Describes a plugin library of this release.

    Attributes:
        path: its absolute path.
        version: its version of tide_export.
        tensorrt: the version of the TensorRT headers it was compiled with.
        sha256: the file's checksum.
    """

    path: Path
    version: str
    tensorrt: str
    sha256: str


def plugins_to_build_with(
    flavour: Flavour, version: str, library: str | os.PathLike[str] | None
) -> PluginLibrary | None:
    """Finds the library for plans that `version` of a flavour builds; None: no plugins.

    Args:
        library: as in `find_plugins`.

    Raises:
        ConfigError: a library was given for a flavour that has no plugins.
        ProviderError: as `find_plugins` raises it, or the library is for another major version of TensorRT.
    """
    if not flavour.has_plugins:
        if library is not None and os.fspath(library) != NONE:
            raise ConfigError(f"{flavour.title} has no plugins, its plans use the networks' functions: omit --plugins")
        return None
    plugins = find_plugins(library)
    if plugins is not None:
        _check_fits(plugins, version)
    return plugins


def plugins_to_load(
    bundle: Path, needed: PluginsInfo, version: str, library: str | os.PathLike[str] | None
) -> PluginLibrary:
    """Finds the library that the plans of the bundle at a path need in this `version` of TensorRT.

    Raises:
        ProviderError: it is missing, of another release, or for another major version of TensorRT.
    """
    plugins = find_plugins(library)
    without = f"build the plans again without with `tide-export build {bundle} --plugins {NONE}`"
    if plugins is None:
        raise ProviderError(
            f"the plans of bundle '{bundle}' hold plugins of tide_export {needed.version} and there is no plugin "
            f"library here: name it with --plugins or the variable {VARIABLE}, or {without}"
        )
    if plugins.version != needed.version:
        raise ProviderError(
            f"the plans of bundle '{bundle}' hold plugins of tide_export {needed.version}, but the library "
            f"'{plugins.path}' is of {plugins.version}: use the other library and release, or {without}"
        )
    _check_fits(plugins, version)
    if plugins.sha256 != needed.sha256:
        logger.info(
            "the plugin library '%s' is another build than the plans of '%s' were built with", plugins.path, bundle
        )
    return plugins


def find_plugins(library: str | os.PathLike[str] | None) -> PluginLibrary | None:
    """Finds the library at a path, else that of TIDE_PLUGINS, else an installed one; None: none.

    Args:
        library: a path; "none" for no library.

    Raises:
        ProviderError: the library does not exist, cannot be opened, is not a plugin library, or is of another release.
    """
    named = os.fspath(library) if library is not None else os.environ.get(VARIABLE) or None
    if named == NONE:
        return None
    if named is not None:
        return open_plugins(Path(named), f"the plugin library '{named}'")
    installed = next((path for path in INSTALLED if path.is_file()), None)
    return open_plugins(installed, f"the installed plugin library '{installed}'") if installed is not None else None


def open_plugins(path: Path, what: str) -> PluginLibrary:
    """Checks the library at `path` and reads its versions in another process.

    Args:
        what: its name in messages.

    Raises:
        ProviderError: as `find_plugins` raises it.
    """
    if not path.is_file():
        raise ProviderError(f"{what} does not exist: build it (plugins/README.md), or do without it: --plugins {NONE}")
    path = path.resolve()
    command = [sys.executable, "-c", PROBE, str(path)]
    probe = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if probe.returncode:
        errors = [line for line in probe.stderr.splitlines() if line.strip()]
        reason = errors[-1] if errors else "it does not say why"
        if probe.returncode < 0:
            reason = f"opening it crashes ({signal.Signals(-probe.returncode).name})"
        raise ProviderError(f"{what} is damaged or no plugin library of tide_export: {reason}")
    version, tensorrt = probe.stdout.split()[-2:]
    if version != __version__:
        raise ProviderError(
            f"{what} belongs to tide_export {version}, but this is {__version__}: build it from this release's "
            f"plugins/, or do without it: --plugins {NONE}"
        )
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return PluginLibrary(path, version, tensorrt, digest)


def _check_fits(plugins: PluginLibrary, tensorrt: str) -> None:
    """Checks that the library was compiled for the same major version of TensorRT."""
    if plugins.tensorrt.split(".")[0] != tensorrt.split(".")[0]:
        raise ProviderError(
            f"the plugin library '{plugins.path}' was compiled for TensorRT {plugins.tensorrt} and {tensorrt} is "
            "installed: build it with the headers of that version"
        )


def register(library: Any, path: str | os.PathLike[str]) -> None:
    """Registers the plugins with `library`, the module tensorrt, once per process.

    Raises:
        ProviderError: TensorRT does not load the library.
    """
    registry, exit_op = library.get_plugin_registry(), (OP_EXIT, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    if registry.get_creator(*exit_op) is None:
        registry.load_library(os.fspath(path))
        if registry.get_creator(*exit_op) is None:
            raise ProviderError(f"TensorRT cannot load the plugin library '{path}'")


class CopyReport:
    """Warns once per network whose plugin TensorRT makes copy buffers instead of updating them."""

    def __init__(self, path: Path) -> None:
        """Reads the plugin library at `path`; never warns if another library was registered first."""
        self._reported = set[str]()
        try:
            self._take = getattr(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD), COPIED_BYTES)
        except OSError:
            self._take = None
        else:
            self._take.restype = ctypes.c_int64

    def after_run(self, network: str, batch_size: int) -> None:
        """Checks a run over `batch_size` sequences; call it in the thread that queued the run."""
        copied = 0 if self._take is None else self._take()
        if copied and network not in self._reported:
            self._reported.add(network)
            logger.warning(
                "TensorRT does not let the plugin in %s update %s in place: a run over %d sequences copies %d bytes",
                *(network, EXIT_STATES, batch_size, copied),
            )
