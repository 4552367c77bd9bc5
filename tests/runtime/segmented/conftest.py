"""Segment networks in ONNX Runtime, of the demo bundle and of a tiny Llama, on the host and behind a fake of the CUDA
runtime."""

from pathlib import Path

import pytest
from batch_prompts import TEXT
from fake_cudart import FakeCudart
from fake_gpu import FakeGpu

from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.runtime.engine import Engine
from tide_export.runtime.onnxruntime.segments import open_segments
from tide_export.runtime.segmented import cuda
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.verify.export_gate import dividing_thresholds


@pytest.fixture(scope="session")
def opened(demo_bundle: Path) -> Bundle:
    return open_bundle(demo_bundle, verify=False)


@pytest.fixture(scope="session")
def backend(opened: Bundle) -> SegmentBackend:
    return open_segments(opened, threads=1)


@pytest.fixture(scope="session")
def segmented(opened: Bundle, backend: SegmentBackend) -> Engine:
    return Engine(opened, backend)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(cuda, "import_cudart", lambda: fake)
    return fake


@pytest.fixture
def on_fake_gpu(opened: Bundle, backend: SegmentBackend, fake: FakeCudart) -> Engine:
    return Engine(opened, FakeGpu(backend, fake).backend(opened.manifest))


@pytest.fixture(scope="session")
def engines(tiny_llama) -> tuple[Engine, Engine, list[float]]:
    """A tiny Llama with routers that spread over [0, 1], as a graph and as networks; thresholds that divide tokens."""
    thresholds = dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)
    return tiny_llama.graph(tiny_llama.exact), tiny_llama.networks(), thresholds


@pytest.fixture
def fake_gpu(engines, fake: FakeCudart) -> Engine:
    _, networks, _ = engines
    return Engine(networks.bundle, FakeGpu(networks.backend, fake).backend(networks.manifest))
