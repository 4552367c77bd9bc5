"""Puts an installed C++ runtime into the wheel, as `tide_export/native`, where TIDE_CPP_PREFIX names its folder.

Without that variable the wheel is pure Python, and everything about it is in pyproject.toml.
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREFIX = os.environ.get("TIDE_CPP_PREFIX")
PARTS = ("include/tide/tide.h", "lib/libtide.so", "lib/cmake/tide_runtime/tide_runtime-config.cmake")


class BuildWithRuntime(build_py):
    """Copies the runtime's folders too."""

    def run(self) -> None:
        super().run()
        if PREFIX is None:
            return
        for part in PARTS:
            if not (Path(PREFIX) / part).is_file():
                raise SystemExit(
                    f"TIDE_CPP_PREFIX is '{PREFIX}', but there is no {part} in it: name the folder of "
                    "'cmake --install', with CMAKE_INSTALL_LIBDIR=lib"
                )
        for folder in ("include", "lib"):  # a wheel holds no links: what they name is copied
            target = Path(self.build_lib) / "tide_export" / "native" / folder
            shutil.copytree(Path(PREFIX) / folder, target, dirs_exist_ok=True)


class OfThisMachine(Distribution):
    """Is for this kind of machine where it holds the runtime."""

    def has_ext_modules(self) -> bool:
        return PREFIX is not None


class WheelOfAnyPython(bdist_wheel):
    """Names no version of Python: the runtime does not use it."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if PREFIX is None else ("py3", "none", tag[2])


setup(distclass=OfThisMachine, cmdclass={"build_py": BuildWithRuntime, "bdist_wheel": WheelOfAnyPython})
