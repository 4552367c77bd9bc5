"""A tiny Llama as a graph, and as segment networks on the host and on a stand-in for a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from caller_networks import CallersNetworks, callers_engine
from fake_cudart import OLD, SOURCE, FakeCudart, compiled, compiled_exit
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.runtime.engine import Engine
from tide_export.runtime.native import onnxruntime_library
from tide_export.verify.export_gate import dividing_thresholds

Callers = tuple[Engine, CallersNetworks]


@pytest.fixture(scope="session")
def cudart_library(shared: Path) -> Path:
    return compiled(SOURCE, shared / "fake_cudart.so")


@pytest.fixture(scope="module")
def machine(cudart_library: Path) -> Iterator[FakeCudart]:
    """This machine, with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CUDART", str(cudart_library))
        cudart = FakeCudart(cudart_library)
        cudart.reset()
        yield cudart
        cudart.reset(devices=0)
        cudart.kept.clear()


@pytest.fixture(scope="session")
def ort_on_gpu(cudart_library: Path, shared: Path) -> dict[str, str]:
    """Environment variables of a process in which the stand-ins are CUDA and ONNX Runtime with its provider for it."""
    library = compiled(SOURCE.with_name("fake_ort_cuda.cpp"), shared / "fake_ort_cuda.so", "-ldl")
    variables = {"TIDE_ONNXRUNTIME": library, "FAKE_ORT_REAL": onnxruntime_library(), "TIDE_CUDART": cudart_library}
    return {name: str(value) for name, value in (variables | {"FAKE_CUDA_EXIT": compiled_exit(shared)}).items()}


@pytest.fixture
def cudart(machine: FakeCudart) -> Iterator[FakeCudart]:
    """The same, for a test that changes it."""
    machine.reset()
    yield machine
    machine.reset()


@pytest.fixture(scope="module")
def graph(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module")
def thresholds(tiny_llama: TinyLlama) -> list[float]:
    """That divide TEXT's tokens."""
    return dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)


@pytest.fixture(scope="module", params=["host", "gpu"])
def device(request: pytest.FixtureRequest) -> FakeCudart | None:
    return request.getfixturevalue("machine") if request.param == "gpu" else None


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama, device: FakeCudart | None) -> Engine:
    """On segment networks."""
    return tiny_llama.networks() if device is None else callers_engine(open_bundle(tiny_llama.exact), device)[0]


@pytest.fixture(scope="module", params=["graph", "host", "gpu"])
def batching(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Engine:
    """On the graph and its networks for batches, or on segment networks."""
    if request.param == "gpu":
        return callers_engine(open_bundle(tiny_llama.exact), request.getfixturevalue("machine"))[0]
    return tiny_llama.networks() if request.param == "host" else tiny_llama.graph(tiny_llama.exact)


@pytest.fixture
def callers(tiny_llama: TinyLlama, device: FakeCudart | None) -> Callers:
    """The same on networks that a test changes."""
    return callers_engine(open_bundle(tiny_llama.exact), device)


@pytest.fixture
def on_host(tiny_llama: TinyLlama, device: FakeCudart | None) -> Iterator[Callers]:
    """The same where the host decides how deep a step goes."""
    if device is not None:
        device.driver = device.runtime = OLD
    yield callers_engine(open_bundle(tiny_llama.exact), device)
    if device is not None:
        device.reset()


@pytest.fixture
def on_gpu(tiny_llama: TinyLlama, cudart: FakeCudart) -> Callable[[], Callers]:
    """Opens an engine on the GPU."""
    return lambda: callers_engine(open_bundle(tiny_llama.exact), cudart)
