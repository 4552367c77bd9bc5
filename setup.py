"""Compiles the native library into the package, and puts the header of its C interface beside it."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "packaging"))
import tide_build

HEADER = Path("cpp/include/tide/tide.h")
version: dict[str, str] = {}
exec(Path("tide_export/common/version.py").read_text(), version)


class BuildWithHeader(build_py):
    """Puts tide.h into the wheel, for programs in C that link the library in it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "tide_export" / "include" / "tide"
            self.mkpath(str(folder))
            self.copy_file(str(HEADER), str(folder))


class BuildLibrary(build_ext):
    """Builds the library under the name that the package opens: it is no module, and of no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        newest = max(path.stat().st_mtime for path in tide_build.depends())
        other_machine = "TIDE_WHEEL" in os.environ  # whose library may lie there
        if other_machine or self.force or not target.is_file() or target.stat().st_mtime < newest:
            tide_build.build(target, Path(self.build_temp).resolve(), version["__version__"])


class WheelOfAnyPython(bdist_wheel):
    """Names no version of Python: what is compiled does not use it."""

    def get_tag(self) -> tuple[str, str, str]:
        machine = os.environ.get("TIDE_WHEEL")
        return "py3", "none", super().get_tag()[2] if machine is None else tide_build.wheel_of(machine)[1]


setup(
    ext_modules=[Extension("tide_export.runtime.libtide", sources=[])],
    cmdclass={"build_py": BuildWithHeader, "build_ext": BuildLibrary, "bdist_wheel": WheelOfAnyPython},
)
