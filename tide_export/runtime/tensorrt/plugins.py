"""The library of TensorRT plugins: where it is found, whether it is ours and fits, and how TensorRT comes to know it.

TensorRT engines may be built with the plugins of `plugins/` in place of the functions in their networks (TensorRT for
RTX has no plugins). `build` finds the library and records it in the manifest; `segmented.tensorrt` needs the same
release of it to load such engines. A library is native code that runs when it is opened, so none is ever taken out of a
bundle: it is named, or is part of the installation. It is asked for its version in a process of its own, so that a
damaged one cannot take this one down.
"""

import hashlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_export.bundle.manifest import PluginsInfo
from tide_export.errors import ConfigError, ProviderError
from tide_export.names import OP_ROUTE, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.runtime.tensorrt.flavours import Flavour
from tide_export.version import __version__

logger = logging.getLogger("tide_export")

VARIABLE = "TIDE_PLUGINS"
NONE = "none"  # instead of a library: do without, also where there is one
LIBRARY = "libtide_plugins.so"
PACKAGE = Path(__file__).parents[2]
# Where one is part of the installation: `cmake --install`ed into the package, or built in a checkout.
INSTALLED = (PACKAGE / "lib" / LIBRARY, PACKAGE.parent / "build" / "plugins" / "plugins" / LIBRARY)

# Prints the two versions the library says, one a line.
PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("tide_plugins_version", "tide_plugins_tensorrt_version"):
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    print(function().decode())
"""


@dataclass(frozen=True)
class PluginLibrary:
    """A library of this release.

    Attributes:
        path: absolute.
        version: the release of tide_export it belongs to.
        tensorrt: the version of TensorRT's headers it was compiled with.
        sha256: of the file.
    """

    path: Path
    version: str
    tensorrt: str
    sha256: str


def plugins_to_build_with(flavour: Flavour, version: str, given: str | os.PathLike[str] | None) -> PluginLibrary | None:
    """The library for engines that `version` of a flavour builds; None: functions keep their bodies.

    Args:
        given: as `find_plugins` takes it.

    Raises:
        ConfigError: a library is given for a flavour that has no plugins.
        ProviderError: as `find_plugins`, or the library is for another major version of TensorRT.
    """
    if not flavour.has_plugins:
        if given is not None and os.fspath(given) != NONE:
            raise ConfigError(
                f"{flavour.title} has no plugins, its engines use the networks' functions: leave --plugins"
            )
        return None
    found = find_plugins(given)
    if found is not None:
        _check_fits(found, version)
    return found


def plugins_to_load(
    bundle: Path, needed: PluginsInfo, version: str, given: str | os.PathLike[str] | None
) -> PluginLibrary:
    """The library that the engines of the bundle at a path need in this `version` of TensorRT.

    Raises:
        ProviderError: there is none here, or it is of another release or for another major version of TensorRT.
    """
    found = find_plugins(given)
    without = f"build the engines again without with `tide-export build {bundle} --plugins {NONE}`"
    if found is None:
        raise ProviderError(
            f"the engines of bundle '{bundle}' hold plugins of tide_export {needed.version} and there is no plugin "
            f"library here: name it with --plugins or the variable {VARIABLE}, or {without}"
        )
    if found.version != needed.version:
        raise ProviderError(
            f"the engines of bundle '{bundle}' hold plugins of tide_export {needed.version}, but the library "
            f"'{found.path}' is of {found.version}: use the other library and release, or {without}"
        )
    _check_fits(found, version)
    if found.sha256 != needed.sha256:
        logger.info(
            "the plugin library '%s' is another build than the engines of '%s' were built with", found.path, bundle
        )
    return found


def find_plugins(given: str | os.PathLike[str] | None) -> PluginLibrary | None:
    """The library that is given, else that of the variable TIDE_PLUGINS, else one that is installed, if there is one.

    Args:
        given: a path; "none" for no library at all.

    Raises:
        ProviderError: what was named is not there, cannot be opened, is no plugin library, or is of another release.
    """
    named = os.fspath(given) if given is not None else os.environ.get(VARIABLE) or None
    if named == NONE:
        return None
    if named is not None:
        return open_plugins(Path(named), f"the plugin library '{named}'")
    installed = next((path for path in INSTALLED if path.is_file()), None)
    return open_plugins(installed, f"the installed plugin library '{installed}'") if installed is not None else None


def open_plugins(path: Path, what: str) -> PluginLibrary:
    """Asks the library at `path` who it is.

    Args:
        what: how messages call it.

    Raises:
        ProviderError: see `find_plugins`.
    """
    if not path.is_file():
        raise ProviderError(f"{what} does not exist: build it (plugins/README.md), or do without it: --plugins {NONE}")
    path = path.resolve()
    command = [sys.executable, "-c", PROBE, str(path)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if asked.returncode:
        said = [line for line in asked.stderr.splitlines() if line.strip()]
        reason = said[-1] if said else "it does not say why"
        if asked.returncode < 0:
            reason = f"opening it crashes ({signal.Signals(-asked.returncode).name})"
        raise ProviderError(f"{what} is damaged or no plugin library of tide_export: {reason}")
    version, tensorrt = asked.stdout.split()[-2:]
    if version != __version__:
        raise ProviderError(
            f"{what} belongs to tide_export {version}, but this is {__version__}: build it from this release's "
            f"plugins/, or do without it: --plugins {NONE}"
        )
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return PluginLibrary(path, version, tensorrt, digest)


def _check_fits(plugins: PluginLibrary, tensorrt: str) -> None:
    """Whether the library goes with a version of TensorRT: the interface of plugins is that of a major version.

    Raises:
        ProviderError: it does not.
    """
    if plugins.tensorrt.split(".")[0] != tensorrt.split(".")[0]:
        raise ProviderError(
            f"the plugin library '{plugins.path}' was compiled for TensorRT {plugins.tensorrt} and {tensorrt} is "
            "installed: build it with the headers of that version"
        )


def register(library: Any, path: str | os.PathLike[str]) -> None:
    """Makes the plugins known to `library`, the module tensorrt; once a process is enough and twice does no harm.

    Raises:
        ProviderError: TensorRT does not take the library.
    """
    registry, ours = library.get_plugin_registry(), (OP_ROUTE, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    if registry.get_creator(*ours) is None:
        registry.load_library(os.fspath(path))
        if registry.get_creator(*ours) is None:
            raise ProviderError(f"TensorRT cannot load the plugin library '{path}'")
