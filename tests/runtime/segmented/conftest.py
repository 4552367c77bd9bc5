"""The demo bundle's segment networks in ONNX Runtime, on the host and behind a fake of the CUDA runtime."""

from pathlib import Path

import pytest
from fake_cudart import FakeCudart
from fake_gpu import FakeGpu

from tide_export.bundle import Bundle, open_bundle
from tide_export.runtime.engine import Engine
from tide_export.runtime.segmented import cuda
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.segmented.onnxruntime import open_segments
from tide_export.runtime.segmented.state import SegmentedState


@pytest.fixture(scope="session")
def opened(demo_bundle: Path) -> Bundle:
    return open_bundle(demo_bundle, verify=False)


@pytest.fixture(scope="session")
def backend(opened: Bundle) -> SegmentBackend:
    return open_segments(opened, threads=1)


@pytest.fixture(scope="session")
def segmented(opened: Bundle, backend: SegmentBackend) -> Engine:
    return Engine(opened, backend, SegmentedState)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(cuda, "import_cudart", lambda: fake)
    return fake


@pytest.fixture
def on_fake_gpu(opened: Bundle, backend: SegmentBackend, fake: FakeCudart) -> Engine:
    return Engine(opened, FakeGpu(backend, fake).backend(opened.manifest), SegmentedState)
