"""The plugin library in NVIDIA's own TensorRT 11, as far as a machine without a GPU allows (real_tensorrt.py).

It registers, is created and asked for its capabilities, by NVIDIA's Python package, which NVIDIA compiled with its own
headers, and by a program in C++. No engine is built, loaded or run.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import tiers
from native_builds import cuda_headers, need, tensorrt_root
from real_tensorrt import VERSIONS, RealTensorRT, real_tensorrt

from tide_export.compose.exit_op import exit_attributes
from tide_export.names.operators import OP_EXIT


@pytest.fixture(scope="module", params=tiers.exhaustive_beyond(1, VERSIONS))
def tensorrt(request: pytest.FixtureRequest) -> RealTensorRT:
    return real_tensorrt(request.param)


@pytest.fixture(scope="module")
def library(kernel_build: Path) -> Path:
    return kernel_build / "libtide_plugins.so"


USING = """
import ctypes, json, sys
import numpy, tensorrt as trt

registry = trt.get_plugin_registry()
found = {}

def ours():
    return [c.name for c in registry.all_creators if (c.plugin_version, c.plugin_namespace) == ("1", "tide")]

def interface(of):
    return [of.interface_info.kind, of.interface_info.major, of.interface_info.minor, type(of).__name__]

def field(name, value):
    if isinstance(value, str):
        return trt.PluginField(name, value.encode(), trt.PluginFieldType.CHAR)
    kind = trt.PluginFieldType.FLOAT32 if isinstance(value, float) else trt.PluginFieldType.INT32
    array = numpy.array([value], numpy.float32 if isinstance(value, float) else numpy.int32)
    kept.append(array)
    return trt.PluginField(name, array, kind)

kept = []
library, attributes = sys.argv[1], json.loads(sys.argv[2])
found["version"] = trt.__version__
found["before"] = ours()
for step in sys.argv[3:]:
    if step == "dlopen":
        ctypes.CDLL(library)
    else:
        registry.load_library(library)
    found[step] = ours()
creator = registry.get_creator("TideExit", "1", "tide")
found["creator"] = interface(creator)
found["fields"] = {f.name: f.type.name for f in creator.field_names}
found["plugins"] = {}
for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
    fields = trt.PluginFieldCollection([field(name, value) for name, value in attributes.items()])
    plugin = creator.create_plugin("node", fields, phase)
    types = trt.PluginCapabilityType.__members__
    of_type = {name: plugin.get_capability_interface(kind) for name, kind in types.items()}
    core, build = of_type["CORE"], of_type["BUILD"]
    found["plugins"][phase.name] = {
        "plugin": interface(plugin),
        "capabilities": {name: interface(capability) for name, capability in of_type.items()},
        "names": [core.plugin_name, core.plugin_version, core.plugin_namespace],
        "outputs": build.num_outputs,
        "more": [build.format_combination_limit, build.timing_cache_id, build.metadata_string],
    }
wrong = trt.PluginFieldCollection([field("norm", "group")])
found["created wrong"] = creator.create_plugin("node", wrong, trt.TensorRTPhase.BUILD) is not None
print(json.dumps(found))
"""
# As the parser passes them: without the two that it reads itself.
ATTRIBUTES = {
    key: value for key, value in exit_attributes("rms", 1e-6, True, True).items() if not key.startswith("plugin_")
}


def using(tensorrt: RealTensorRT, library: Path, *steps: str) -> dict:
    done = tensorrt.python(USING, library, json.dumps(ATTRIBUTES), *steps)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tensorrt: RealTensorRT, library: Path) -> dict:
    return using(tensorrt, library, "load")


def test_load_library_registers_a_creator_with_our_nodes_attributes(tensorrt: RealTensorRT, found: dict):
    assert found["version"] == tensorrt.version
    assert found["before"] == []
    assert found["load"] == [OP_EXIT]
    assert found["creator"] == ["PLUGIN CREATOR_V3ONE", 1, 0, "IPluginCreatorV3One"]
    kinds = {str: "CHAR", float: "FLOAT32", int: "INT32"}
    assert found["fields"] == {key: kinds[type(value)] for key, value in ATTRIBUTES.items()}


def test_a_plugin_has_all_capabilities_in_both_phases(found: dict):
    assert found["plugins"].keys() == {"BUILD", "RUNTIME"}
    for plugin in found["plugins"].values():
        assert plugin == {
            "plugin": ["PLUGIN", 1, 0, "IPluginV3"],
            "capabilities": {
                "CORE": ["PLUGIN_V3ONE_CORE", 1, 0, "IPluginV3OneCore"],
                "BUILD": ["PLUGIN_V3ONE_BUILD", 2, 0, "IPluginV3OneBuildV2"],
                "RUNTIME": ["PLUGIN_V3ONE_RUNTIME", 1, 0, "IPluginV3OneRuntime"],
            },
            "names": [OP_EXIT, "1", "tide"],
            "outputs": 3,
            "more": [100, None, None],
        }
    assert not found["created wrong"], "a norm that there is not"


def test_opening_the_library_registers_by_itself(tensorrt: RealTensorRT, library: Path):
    """As in Triton, in `libnvinfer.so.11` without being told its name; and a later `load_library` succeeds."""
    found = using(tensorrt, library, "dlopen", "load")
    assert found["before"] == []
    assert found["dlopen"] == found["load"] == [OP_EXIT]


def test_the_package_registers_it(tensorrt: RealTensorRT, library: Path):
    """As before an engine is built or loaded; a second time changes nothing; what is no plugin library is refused."""
    code = (
        "import sys, tensorrt\n"
        "from tide_export.errors import ProviderError\n"
        "from tide_export.runtime.tensorrt.flavours import TENSORRT, import_library\n"
        "from tide_export.runtime.tensorrt.plugins import find_plugins, plugins_to_load, register\n"
        "library = import_library(TENSORRT)\n"
        "try:\n    register(library, sys.executable)\nexcept ProviderError as error:\n    print(error)\n"
        "path = find_plugins(sys.argv[1]).path\n"
        "register(library, path)\nregister(library, path)\n"
        "print(library.get_plugin_registry().get_creator('TideExit', '1', 'tide').name)"
    )
    done = tensorrt.python(code, library)
    assert done.returncode == 0, done.stderr
    refused, registered = done.stdout.splitlines()
    assert refused.startswith("TensorRT cannot load the plugin library")
    assert registered == OP_EXIT


def test_a_program_creates_clones_attaches_and_unloads_it(tensorrt: RealTensorRT, library: Path, tmp_path: Path):
    compiler, cuda = shutil.which("c++") or shutil.which("g++"), cuda_headers()
    need(compiler is not None, "there is no C++ compiler")
    need(cuda is not None, "there are no CUDA headers")
    program = tmp_path / "registry_user"
    include = ["-isystem", f"{tensorrt_root()}/include", "-isystem", str(cuda)]
    source = Path(__file__).with_name("registry_user.cpp")
    subprocess.run(
        [str(compiler), "-std=c++17", "-Wall", "-Wextra", "-Werror", *include, str(source), "-o", str(program), "-ldl"],
        check=True,
    )
    done = subprocess.run([program, tensorrt.lean, library], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    major, minor, patch, _ = map(int, tensorrt.version.split("."))
    assert int(done.stdout) == major * 10000 + minor * 100 + patch
