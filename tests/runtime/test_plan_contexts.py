"""Execution contexts of plans, on stand-ins for the library: compiled kernels that are kept, and recording."""

import gc
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tide_export.bundle.network_spec import ONE_TOKEN, NetworkSpec
from tide_export.bundle.plan_fields import Profile
from tide_export.runtime.tensorrt import plans
from tide_export.runtime.tensorrt.flavours import TENSORRT, TENSORRT_RTX, kernel_cache
from tide_export.runtime.tensorrt.kernel_cache import KernelCache
from tide_export.runtime.tensorrt.plans import TrtNetwork

VERSION = b"1.7:"


class Cache:
    """As `IRuntimeCache`: takes what this version has serialized."""

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(VERSION):
            self.kernels = data.removeprefix(VERSION)
        return data.startswith(VERSION)

    def serialize(self) -> bytes:
        return VERSION + self.kernels


class Config:
    def __init__(self) -> None:
        self.cache: Any = None

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> None:
        self.cache = cache


def test_kernels_are_shared_saved_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rtx.kernels"
    kernels, configs = KernelCache(path), [Config(), Config()]
    for config in configs:
        kernels.attach(config)
    assert configs[0].cache is configs[1].cache
    configs[0].cache.kernels = b"compiled"
    del kernels
    gc.collect(1)  # young objects: all take seconds in a process of many tests
    assert path.read_bytes() == VERSION + b"compiled"
    again, config = KernelCache(path), Config()
    again.attach(config)
    assert config.cache.kernels == b"compiled"
    written = path.stat().st_mtime_ns
    del again
    gc.collect(1)
    assert path.stat().st_mtime_ns == written, "nothing new was compiled"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_kernels_of_another_version_are_compiled_again_with_a_sentence(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO, "tide_export")
    path = tmp_path / "rtx.kernels"
    path.write_bytes(b"1.6:older")
    kernels, config = KernelCache(path), Config()
    kernels.attach(config)
    (sentence,) = caplog.messages
    assert sentence == (
        f"the kernels in '{path}' are damaged, or of another GPU, driver or version: they are compiled again"
    )
    config.cache.kernels = b"newer"
    del kernels
    gc.collect(1)
    assert path.read_bytes() == VERSION + b"newer"


def test_only_rtx_has_kernels_to_keep_and_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache(TENSORRT, "11.1") is None
    kernels = kernel_cache(TENSORRT_RTX, "1.7.1.116")
    assert kernels is not None
    assert kernels.path.parent == tmp_path / "tide_export"
    assert kernels.path.name.startswith("tensorrt-rtx-1.7.1.116-")


@pytest.mark.parametrize("can", [True, False])
def test_a_run_that_rtx_cannot_record_is_said(monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    monkeypatch.setattr(plans, "synchronize", lambda stream: None)
    context = SimpleNamespace(
        set_device_memory=lambda *memory: None,
        set_optimization_profile_async=lambda *profile: True,
        is_stream_capturable=lambda stream: can,
        execute_async_v3=lambda stream: True,
    )
    config = SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)
    engine = SimpleNamespace(create_runtime_config=lambda: config, create_execution_context=lambda config: context)
    strategies = {
        "ExecutionContextAllocationStrategy": SimpleNamespace(USER_MANAGED=1),
        "ProfilingVerbosity": SimpleNamespace(NONE=1),
        "CudaGraphStrategy": SimpleNamespace(DISABLED=0),
        "DynamicShapesKernelSpecializationStrategy": SimpleNamespace(EAGER=1),
    }
    library, memory = SimpleNamespace(**strategies), SimpleNamespace(address=0, size=0)
    spec, profiles = NetworkSpec("segment_00", {}, {}), (Profile("decode", 1, 1, 2, 1),)
    network = TrtNetwork(TENSORRT_RTX, library, engine, spec, profiles, 7, memory)
    assert network.run({}, ONE_TOKEN) == can
    assert network.run({}, ONE_TOKEN, recording=1, captured=True)
