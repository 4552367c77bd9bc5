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

import numpy as np
import onnx_ir as ir
import pytest
from native_builds import ROOT

from tide_export.bundle.file_names import network_file
from tide_export.common.version import __version__
from tide_export.compose.exit_op import exit_attributes, exit_function
from tide_export.compose.segments import OPSET
from tide_export.errors import BuildError
from tide_export.names.operators import DOMAIN, OP_EXIT
from tide_export.plans.build import run_worker
from tide_export.runtime.tensorrt.flavours import TENSORRT_RTX
from tide_export.runtime.tensorrt.plugins import find_plugins

PLUGINS = [OP_EXIT]


@pytest.fixture(scope="module")
def library(kernel_build: Path) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    return kernel_build / "libtide_plugins.so"


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
creator = registry.get_creator("TideExit", "1", "tide")
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
    assert found["created"]
    assert not found["created wrong"]


def test_the_fields_are_the_attributes_of_our_nodes_and_of_their_types(library):
    fields = listing(library, "load")["fields"]
    attributes = exit_attributes("rms", 1e-6, True, True)
    ours = {key: value for key, value in attributes.items() if not key.startswith("plugin_")}
    kinds = {str: "CHAR", float: "FLOAT32", int: "INT32"}
    assert fields == {key: kinds[type(value)] for key, value in ours.items()}


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
def exit_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TideExit node as `compose` writes it, with the function that is its body."""
    rng = np.random.default_rng(0)
    float32, int64 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)
    states = ir.Value(name="states", type=float32, shape=ir.Shape(["batch", "tokens", 64]))
    last_tokens = ir.Value(name="last_tokens", type=int64, shape=ir.Shape(["batch"]))
    thresholds = ir.Value(name="thresholds", type=float32, shape=ir.Shape(["batch"]))
    exit_states = ir.Value(name="exit_states", type=float32, shape=ir.Shape(["batch", 1, 4, 64]))
    weights = []
    for shape in ((64, 8), (8, 1), (1,), (64, 5), (2, 8), (64, 4), (4, 64), (64,), (64,)):
        tensor = ir.tensor(rng.normal(size=shape).astype(np.float32))
        weights.append(ir.Value(name=f"weight_{len(weights)}", const_value=tensor, type=float32, shape=tensor.shape))
    inputs = [states, last_tokens, thresholds, exit_states]
    attributes = exit_attributes("rms", 1e-6, lens=True, shortlist=True)
    node = ir.node(OP_EXIT, [*inputs, *weights], attributes=attributes, domain=DOMAIN, num_outputs=3)
    after, score, exits = node.outputs
    after.name, after.type, after.shape = "after", float32, exit_states.shape
    score.name, score.type, score.shape = "score", float32, thresholds.shape
    exits.name, exits.type, exits.shape = "exits", ir.TensorType(ir.DataType.INT32), thresholds.shape
    graph = ir.Graph(
        inputs,
        node.outputs,
        nodes=[node],
        initializers=weights,
        opset_imports={"": OPSET, DOMAIN: 1},
        name="exit",
    )
    path = tmp_path_factory.mktemp("graph") / "exit.onnx"
    ir.save(ir.Model(graph, ir_version=11, functions=[exit_function(node, OPSET)]), path)
    return path


def parsing(*arguments: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PARSING, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_the_plugin_the_parser_takes_the_function_s_body(library, exit_graph):
    done = parsing(exit_graph)
    assert done.returncode == 0, done.stderr
    assert "parsed True" in done.stdout


def test_with_the_plugin_the_parser_creates_it(library, exit_graph):
    done = parsing(exit_graph, library)
    assert "Successfully created plugin: TideExit" in done.stdout
    assert "parsed" not in done.stdout, "TensorRT-RTX takes the layer now: test more of it"


def test_the_parser_creates_the_plugin_for_every_exported_network(library, demo_bundle):
    """Of the files that are built, not of a graph made for the test."""
    for part in ("segment_00", "segment_02"):
        done = parsing(demo_bundle / network_file(part), library)
        assert "Successfully created plugin: TideExit" in done.stdout, part
        assert "parsed" not in done.stdout, part
    done = parsing(demo_bundle / network_file("segment_03"), library)
    assert "parsed True" in done.stdout, "the last segment has no router"


def test_the_builder_hands_the_library_to_the_parser(library, exit_graph, tmp_path):
    """With it the builder ends as TensorRT for RTX does when a plugin is to be added; without it an engine is built."""
    profile = {"states": [[1, 1, 64]] * 3, "exit_states": [[1, 1, 4, 64]] * 3}
    profile |= {name: [[1]] * 3 for name in ("last_tokens", "thresholds")}
    network = {"name": "segment_00", "source": str(exit_graph), "plan": str(tmp_path / "e"), "profiles": [profile]}
    network |= {"reads_nan": False, "aliases": {}}
    job = {"networks": [network], "timing_cache": None, "plugins": None, "compute_capabilities": ()}
    assert run_worker(job, TENSORRT_RTX, "1.7", lambda amount: None)["segment_00"]["plugins"] == 0
    with pytest.raises(BuildError, match=r"crashed while building segment_00 \(SIG"):
        run_worker({**job, "plugins": str(library)}, TENSORRT_RTX, "1.7", lambda amount: None)
