"""The plugin library in a TensorRT: its creators, their fields, and the parser's plugin for the graph that we export.

The TensorRT is TensorRT-RTX, which runs no plugins but has the same registry and parser. In processes of their own,
because its parser aborts when it has created a plugin and adds the layer.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
from native_builds import ROOT

from tide_export import names
from tide_export.compose.router_op import route_attributes, route_function
from tide_export.engines.build import run_worker
from tide_export.errors import BuildError
from tide_export.routers.router import RouterArrays
from tide_export.runtime.tensorrt.flavours import TENSORRT_RTX
from tide_export.runtime.tensorrt.plugins import find_plugins
from tide_export.trace.tracer import OPSET
from tide_export.version import __version__

PLUGINS = ["TideRoute", "TideExitScatter", "TideCompact", "TideGatherPending"]


@pytest.fixture(scope="module")
def library(kernel_build: Path) -> Path:
    found = kernel_build / "libtide_plugins.so"
    if not found.exists():
        pytest.skip("TENSORRT_ROOT has no TensorRT headers")
    pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    return found


LISTING = """
import ctypes, json, sys
import tensorrt_rtx as trt

registry = trt.get_plugin_registry()

def ours():
    return [c.name for c in registry.all_creators if (c.plugin_version, c.plugin_namespace) == ("1", "tide")]

found = {"before": ours()}
for step in sys.argv[2:]:
    if step == "dlopen":
        ctypes.CDLL(sys.argv[1])
    else:
        registry.load_library(sys.argv[1])
    found[step] = ours()
creator = registry.get_creator("TideRoute", "1", "tide")
if creator is not None:
    found["fields"] = {f.name: str(f.type).split(".")[-1].rstrip(">").split(":")[0] for f in creator.field_names}
    none = trt.PluginFieldCollection([])
    found["created"] = creator.create_plugin("node", none, trt.TensorRTPhase.BUILD) is not None
    wrong = trt.PluginFieldCollection([trt.PluginField("norm", b"group", trt.PluginFieldType.CHAR)])
    found["created wrong"] = creator.create_plugin("node", wrong, trt.TensorRTPhase.BUILD) is not None
print(json.dumps(found))
"""


def listing(library: Path, *steps: str, registry: str | None = None) -> dict:
    environment = os.environ | ({"TIDE_TENSORRT_LIBRARY": registry} if registry else {})
    command = [sys.executable, "-c", LISTING, str(library), *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_load_library_registers_the_creators(library):
    found = listing(library, "load")
    assert found["before"] == []
    assert found["load"] == PLUGINS
    assert found["fields"] == {"norm": "CHAR", "epsilon": "FLOAT32", "scale_offset": "FLOAT32"}
    assert found["created"]
    assert not found["created wrong"]


def test_the_fields_are_the_attributes_of_our_nodes(library):
    fields = listing(library, "load")["fields"]
    attributes = {key: value for key, value in route_attributes().items() if not key.startswith("plugin_")}
    assert attributes.keys() <= fields.keys()


def test_a_field_takes_the_type_that_our_attribute_has(library):
    fields = listing(library, "load")["fields"]
    kinds = {str: "CHAR", float: "FLOAT32", int: "INT32"}
    for key, value in route_attributes().items():
        if not key.startswith("plugin_"):
            assert fields[key] == kinds[type(value)], key


def test_the_library_s_versions(library):
    found = find_plugins(library)
    assert found.version == __version__
    assert re.fullmatch(r"11\.\d+", found.tensorrt)
    register = "import sys, tensorrt_rtx; from tide_export.runtime.tensorrt.plugins import register as r;"
    twice = f"{register} r(tensorrt_rtx, sys.argv[1]); r(tensorrt_rtx, sys.argv[1])"
    subprocess.run([sys.executable, "-c", twice, str(library)], check=True, cwd=ROOT)


def test_opening_the_library_registers_by_itself(library):
    """As in Triton; and a later `load_library` succeeds."""
    found = listing(library, "dlopen", "load", registry="libtensorrt_rtx.so.1")
    assert found["dlopen"] == PLUGINS
    assert found["load"] == PLUGINS
    assert found["created"]


def test_nothing_is_registered_with_tensorrt_rtx(library):
    """It would prefer the plugins to the functions' bodies and abort."""
    assert listing(library, "dlopen")["dlopen"] == []


PARSING = """
import sys
import tensorrt_rtx as trt

class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
    def log(self, severity, text):
        print(text, flush=True)

logger = Logger()
if len(sys.argv) > 2:
    trt.get_plugin_registry().load_library(sys.argv[2])
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parsed = trt.OnnxParser(network, logger).parse_from_file(sys.argv[1])
print("parsed", parsed, network.num_layers)
"""


@pytest.fixture(scope="module")
def route_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TideRoute node as `compose` writes it, with the function that is its body."""
    import numpy as np

    rng = np.random.default_rng(0)
    down, up, shortlist, confidence = (
        rng.normal(size=s).astype(np.float32) for s in ((64, 8), (8, 1), (64, 5), (2, 8))
    )
    router = RouterArrays(down, up, 0.5, shortlist, confidence)
    states = ir.Value(name="states", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 1, 64]))
    threshold = ir.Value(name="threshold", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    weights = [
        ir.Value(
            name=f"weight_{i}", const_value=ir.tensor(x), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(x.shape)
        )
        for i, x in enumerate((down, up, np.array([router.bias], np.float32), shortlist, confidence))
    ]
    inputs = [states, threshold, *weights]
    node = ir.node(names.OP_ROUTE, inputs, attributes=route_attributes(), domain=names.DOMAIN, num_outputs=2)
    score, leaves = node.outputs
    score.name, score.type, score.shape = "score", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", 1, 1])
    cast = ir.node("Cast", [leaves], attributes={"to": int(ir.DataType.INT32)})
    flag = cast.outputs[0]
    flag.name, flag.type, flag.shape = "leaves", ir.TensorType(ir.DataType.INT32), ir.Shape(["batch", 1, 1])
    graph = ir.Graph(
        [states, threshold],
        [score, flag],
        nodes=[node, cast],
        initializers=weights,
        opset_imports={"": OPSET, names.DOMAIN: 1},
        name="route",
    )
    path = tmp_path_factory.mktemp("graph") / "route.onnx"
    ir.save(ir.Model(graph, ir_version=10, functions=[route_function(router)]), path)
    return path


def parsing(*arguments: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PARSING, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_the_plugin_the_parser_takes_the_function_s_body(library, route_graph):
    done = parsing(route_graph)
    assert done.returncode == 0, done.stderr
    assert "parsed True" in done.stdout


def test_with_the_plugin_the_parser_creates_it(library, route_graph):
    done = parsing(route_graph, library)
    assert "Successfully created plugin: TideRoute" in done.stdout
    assert "parsed" not in done.stdout, "TensorRT-RTX takes the layer now: test more of it"


def test_the_parser_creates_the_plugin_for_every_exported_network(library, demo_bundle):
    """Of the files that are built, not of a graph made for the test."""
    for part in ("segment_00", "segment_02"):
        done = parsing(demo_bundle / names.network_file(part), library)
        assert "Successfully created plugin: TideRoute" in done.stdout, part
        assert "parsed" not in done.stdout, part
    done = parsing(demo_bundle / names.network_file("segment_03"), library)
    assert "parsed True" in done.stdout, "the last segment has no router"


def test_the_builder_hands_the_library_to_the_parser(library, route_graph, tmp_path):
    """With it the builder ends as TensorRT for RTX does when a plugin is to be added; without it an engine is built."""
    profile = {"states": [[1, 1, 64]] * 3, "threshold": [[1]] * 3}
    network = {"name": "segment_00", "source": str(route_graph), "engine": str(tmp_path / "e"), "profiles": [profile]}
    job = {"networks": [network], "timing_cache": None, "plugins": None}
    assert run_worker(job, TENSORRT_RTX, "1.7", lambda amount: None)["segment_00"]["plugins"] == 0
    with pytest.raises(BuildError, match=r"crashed while building segment_00 \(SIG"):
        run_worker({**job, "plugins": str(library)}, TENSORRT_RTX, "1.7", lambda amount: None)
