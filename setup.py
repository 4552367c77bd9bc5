"""Compiles the operators for ONNX Runtime (cpp/ops), and puts an installed C++ runtime into the wheel.

The operators need a C++ compiler alone; where there is none the package is installed without them, and bundles run
without them, slower. The runtime goes into `tide_export/native` where TIDE_CPP_PREFIX names its folder.
"""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
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


class BuildOperators(build_ext):
    """Names the library as the runtime looks for it: it is no module, and of no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols


class WheelOfAnyPython(bdist_wheel):
    """Names no version of Python: what is compiled does not use it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


version: dict[str, str] = {}
exec(Path("tide_export/version.py").read_text(), version)
operators = Extension(
    "tide_export.runtime.onnxruntime.libtide_ops",
    sources=sorted(map(str, Path("cpp/ops").glob("*.cpp"))),
    depends=sorted(map(str, [*Path("cpp/ops").glob("*.h"), *Path("cpp/ops").glob("*.inc")])),
    define_macros=[("TIDE_EXPORT_VERSION", f'"{version["__version__"]}"')],
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-g0"],
    language="c++",
    optional=True,
)
setup(
    ext_modules=[operators],
    cmdclass={"build_py": BuildWithRuntime, "build_ext": BuildOperators, "bdist_wheel": WheelOfAnyPython},
)
