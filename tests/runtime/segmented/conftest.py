"""Segment networks in ONNX Runtime, of the demo bundle and of a tiny Llama, on the host and behind a fake of the CUDA
runtime."""

from pathlib import Path

import pytest
from batch_prompts import TEXT
from fake_cudart import FakeCudart
from fake_gpu import FakeGpu
from families import CHECKPOINTS, build
from tiny_engines import engine_of, pieces_of, segments_of

from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.routers.random_routers import random_routers
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
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, list[float]]:
    """A tiny Llama with routers that spread over [0, 1], as a graph and as networks; thresholds that divide tokens."""
    source = build("llama")
    routers = random_routers(source, CHECKPOINTS, TEXT, bottleneck=16, lens_rank=4)
    pieces, folder = pieces_of(source, CHECKPOINTS), tmp_path_factory.mktemp("batch") / "bundle"
    graph = engine_of(source, routers, folder, pieces, batch=True)
    return graph, segments_of(source, routers, folder, pieces), dividing_thresholds(source, routers, TEXT)


@pytest.fixture
def fake_gpu(engines, fake: FakeCudart) -> Engine:
    _, networks, _ = engines
    return Engine(networks.bundle, FakeGpu(networks.backend, fake).backend(networks.manifest))
