"""Fixtures of the whole suite: the demo model, one exported demo bundle and one trace of a kind for all workers, tiny
models of many families."""

import copy
import fcntl
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiers
from known_skips import KnownSkips

from tide_export.common.version import __version__

pytest_plugins = ("suite_memory", "quick")

# Tracing makes objects by the million, nearly all of which die of their own accord: Python's collector, at its default
# of looking every 700 of them, takes a fifteenth of the suite's time.
gc.set_threshold(50_000, 20, 50)

# What is drafted must not depend on the machine; `runtime/test_measured_costs.py` measures what steps cost.
os.environ["TIDE_DRAFT_COSTS"] = "assumed"

ROOT = Path(__file__).parents[1]
CHECKPOINTS = (3, 6, 9)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained 12-layer Llama that ships with the repository."""
    return ROOT / "demo" / "demo-llama"


@pytest.fixture(scope="session")
def demo_source(demo_model: Path):
    from tide_export.model.source import load_model

    return load_model(str(demo_model))


@pytest.fixture(scope="session")
def kernels() -> Path:
    """The operators for ONNX Runtime in a library with what tests call of their kernels (`tests/operators`)."""
    from native_builds import Builds

    return Builds().operators()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KnownSkips())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves exhaustive tests to `make test-all`, and sorts slow tests first: begun last, one would leave the other
    workers idle.

    Hides what the imports have made from Python's garbage collector: it costs half a second of each full collection,
    and every export makes one.
    """
    if not tiers.ALL:
        left = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder for what is made once for all workers."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def traces():
    """`tide_export.trace.trace`, with one trace of a kind for all workers and later runs."""
    from store import store
    from traces import Traces

    return Traces(store() / "traces")


@pytest.fixture(scope="session", autouse=True)
def _stored_traces(request: pytest.FixtureRequest) -> None:
    """Whatever exports a model takes its trace from the store."""
    if "torch" in sys.modules:  # else a test that imports it later traces by itself, which takes longer
        from tide_export.pipeline import pieces

        pieces.trace = request.getfixturevalue("traces")


@pytest.fixture(scope="session")
def demo_bundle(demo_model: Path, shared: Path) -> Path:
    """The demo model exported with checkpoints 3, 6, 9 and briefly calibrated routers; made once for all workers.

    It has the networks for TensorRT too, and no engines.
    """
    from quick import leave_pictures_out

    from tide_export.calibration.config import TideConfig
    from tide_export.pipeline import flow as pipeline

    bundle = shared / "demo-bundle"
    with (shared / "demo-bundle.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not bundle.exists():
            config = TideConfig(
                checkpoints=CHECKPOINTS,
                min_layers=3,
                calibration_dataset=str(ROOT / "calibration" / "text" / "python-stdlib.jsonl"),
                calibration_samples=40,
                calibration_length=256,
                router_epochs=8,
                exit_strategy="identity",
                epsilon=0.0,  # nothing is measured: what mode auto is does not depend on the machine
            )
            # With segment networks, as a machine without TensorRT makes them.
            with pytest.MonkeyPatch.context() as patch:
                leave_pictures_out(patch)
                pipeline.export(str(demo_model), bundle, config=config, targets=("tensorrt",), engines=False)
    return bundle


@pytest.fixture(scope="session")
def tiny_llama(shared: Path, traces):
    """A tiny Llama with random routers and its bundle (`tiny_engines.TinyLlama`); made once for all workers."""
    from judge import TEXT
    from tiny_engines import tiny_llama_at

    return tiny_llama_at(shared / "tiny-llama", TEXT, traces)


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a stand-in for the plugin library that says these versions."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")

    def make(name: str, version: str = __version__, tensorrt: str = "11.1", more: str = "") -> Path:
        source = tmp_path_factory.mktemp("library") / f"{name}.c"
        source.write_text(
            f'const char* tide_plugins_version(void) {{ return "{version}"; }}\n'
            f'const char* tide_plugins_tensorrt_version(void) {{ return "{tensorrt}"; }}\n'
            "static _Thread_local long copied;\n"
            "void copy(long bytes) { copied += bytes; }\n"  # as the plugins do where they are not in place
            f"long tide_plugins_copied_bytes(void) {{ long found = copied; copied = 0; return found; }}\n{more}"
        )
        subprocess.run([compiler, "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
        return source.with_suffix(".so")

    return make


@pytest.fixture(scope="session")
def demo_text_ids(demo_model: Path) -> list[int]:
    """1000 tokens of source code that the routers were not calibrated on."""
    import json

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids: list[int] = []
    for line in (ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl").read_text().splitlines():
        ids += tokenizer.encode(json.loads(line)["text"]).ids
    return ids[:1000]


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    """No test may depend on the network: a hub lookup fails at once instead of waiting for a time-out."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _user_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test leaves anything in the user's cache, or depends on it."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> None:
    """Nothing is flushed to the disk, for which tests would wait thousands of times: no test pulls a plug."""
    os.fsync = lambda _: None


@pytest.fixture(scope="session", autouse=True)
def _one_registry() -> None:
    """torch.onnx.export reads the sources of all its translations anew for each model, for a second; once is enough."""
    if "torch" not in sys.modules:  # no test that was collected traces anything
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        registry = copy.copy(read(opset_version=opset_version))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path):
    """The demo model's."""
    from tide_export.data.sequences import load_tokenizer

    return load_tokenizer(demo_model)


@pytest.fixture
def write_jsonl(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
