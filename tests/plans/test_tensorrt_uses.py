"""What the builder's process and the runtime use of TensorRT's Python package is there, in NVIDIA's own packages.

TensorRT 11's runs on its lean library, without a builder and a parser (real_tensorrt.py); that of TensorRT for RTX is
the whole one. Nothing is built or run here, but what tide_export derives from the package's classes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

sys.path.append(str(Path(__file__).parents[1] / "plugins"))

import tensorrt_uses
from real_tensorrt import VERSIONS, RealTensorRT, real_tensorrt

from tide_export.bundle.network_spec import TENSORRT_TYPES
from tide_export.runtime.tensorrt.gpu import compute_capability

SCRIPT = Path(tensorrt_uses.__file__)
# What TensorRT for RTX alone has, and is used for that alone.
OF_RTX = {
    "BuilderFlag.REQUIRE_USER_ALLOCATION",
    "ComputeCapability",
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
    "EngineInvalidityDiagnostics",
    "EngineValidity",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IExecutionContext.is_stream_capturable",
    "IRuntimeCache",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
    "Runtime.engine_header_size",
    "Runtime.get_engine_validity",
}
# Of every kind of use, one: the search finds them.
SOME = {
    "IBuilderConfig.clear_flag",
    "LayerType.KV_CACHE_UPDATE",
    "IAttention.decomposable",
    "IProgressMonitor.step_complete",
    "ILogger.log",
    "Severity.INTERNAL_ERROR",
    "Runtime.deserialize_cuda_engine",
    "ICudaEngine.get_aliased_input_tensor",
    "IExecutionContext.set_optimization_profile_async",
    "IRuntimeConfig.set_execution_context_allocation_strategy",
    "IPluginRegistry.load_library",
}


@pytest.fixture(scope="module", params=tiers.exhaustive_beyond(1, VERSIONS))
def tensorrt(request: pytest.FixtureRequest) -> RealTensorRT:
    return real_tensorrt(request.param)


def test_all_that_is_used_of_tensorrt_is_there(tensorrt: RealTensorRT):
    done = tensorrt.python(
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')", SCRIPT, "tensorrt"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == tensorrt.version
    assert set(found["missing"]) == OF_RTX
    assert found["misused"] == []
    assert set(found["used"]) >= SOME


def test_all_that_is_used_of_tensorrt_for_rtx_is_there():
    pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    done = subprocess.run([sys.executable, SCRIPT, "tensorrt_rtx"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == found["misused"] == []
    assert set(found["used"]) >= SOME


DERIVING = """
import json, os
import tensorrt as trt
from polygraphy.backend.trt import util
from tide_export.plans.worker import BuildLog, monitor
from tide_export.runtime.tensorrt.plans import _Runtime
from tide_export.runtime.tensorrt.flavours import TENSORRT, import_library

log, said, steps = BuildLog.install(), [], []
severity = trt.ILogger.Severity
util.TRT_LOGGER.log(severity.INFO, "Total Weights Memory: 12 bytes")
monitor = monitor(trt, lambda kind, **values: steps.append([kind, values]))
monitor.phase_start("Building", None, 3)
runtime = _Runtime(TENSORRT, import_library(TENSORRT))
print(json.dumps({
    "polygraphy": isinstance(util.TRT_LOGGER, trt.ILogger),
    "weights": log.built({})["weights_bytes"],
    "goes on": monitor.step_complete("Building", 1),
    "steps": steps,
    "errors": runtime._errors,
    "types": sorted(trt.DataType.__members__),
    "modes": sorted(trt.TensorIOMode.__members__),
}), flush=True)
os._exit(0)  # what has no CUDA crashes when it is closed
"""


def test_what_is_derived_from_its_classes_works(tensorrt: RealTensorRT):
    """Logs, to the second of which TensorRT's own library writes that it finds no CUDA here; the builder's progress;
    names that are compared as text."""
    done = tensorrt.python(DERIVING, POLYGRAPHY_AUTOINSTALL_DEPS="0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["polygraphy"]
    assert found["weights"] == 12
    assert found["goes on"]
    assert found["steps"] == [["step", {"of": 3}]]
    assert set(found["types"]) >= TENSORRT_TYPES.keys()
    assert set(found["modes"]) >= {"INPUT", "OUTPUT"}
    if compute_capability() is None:
        assert "CUDA initialization failure" in found["errors"][0]
