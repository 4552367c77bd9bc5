"""Work goes to the GPU with the number that was asked for, in every thread, on a stand-in for the CUDA runtime."""

import threading
from types import SimpleNamespace

import pytest
from fake_cudart import Error, FakeCudart

from tide_export.errors import ConfigError, ProviderError
from tide_export.runtime.engine import load
from tide_export.runtime.segmented import cuda


class TwoGpus(FakeCudart):
    """Keeps what is called, and in every thread the GPU that is current; work for another is an error, as in CUDA."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.current: dict[int, int] = {}  # by thread
        self.streams = 0

    def cudaGetDeviceCount(self):
        self.calls.append("count")
        return Error.cudaSuccess, self.count

    def cudaSetDevice(self, device: int):
        self.calls.append(f"set {device}")
        self.current[threading.get_ident()] = device
        return (Error.cudaSuccess,)

    def cudaStreamCreateWithFlags(self, flags: int):
        self.calls.append("stream")
        self.streams += 1
        return Error.cudaSuccess, 100 * self.current[threading.get_ident()] + self.streams

    def cudaMalloc(self, size: int):
        self.calls.append(f"allocate on {self.current[threading.get_ident()]}")
        return super().cudaMalloc(size)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int):
        assert stream // 100 == self.current[threading.get_ident()], "the stream is another GPU's"
        return super().cudaMemsetAsync(address, value, size, stream)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    fake = TwoGpus()
    monkeypatch.setattr(cuda, "import_cudart", lambda: fake)
    monkeypatch.setattr(cuda, "_current", threading.local())
    return fake


def test_the_gpu_is_set_before_anything_else(fake: TwoGpus) -> None:
    device = cuda.CudaDevice(gpu=1)
    device.allocate(256)
    device.allocate(256)
    assert fake.calls == ["count", "set 1", "stream", "allocate on 1", "allocate on 1"]  # set once, not for each call


def test_engines_on_two_gpus_take_turns_in_one_thread(fake: TwoGpus) -> None:
    first, second = cuda.CudaDevice(gpu=0), cuda.CudaDevice(gpu=1)
    fake.calls.clear()
    for device in (first, first, second, first):
        device.allocate(256)
    assert [call for call in fake.calls if call.startswith("allocate")] == [f"allocate on {n}" for n in (0, 0, 1, 0)]
    assert [call for call in fake.calls if call.startswith("set")] == ["set 0", "set 1", "set 0"]


def test_another_thread_sets_it_too(fake: TwoGpus) -> None:
    device = cuda.CudaDevice(gpu=1)
    fake.calls.clear()
    thread = threading.Thread(target=device.allocate, args=(256,))
    thread.start()
    thread.join()
    assert fake.calls == ["set 1", "allocate on 1"]


def test_a_number_that_no_gpu_has_is_refused(fake: TwoGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderError, match="there is no GPU 2: CUDA finds 2, numbered from 0"):
        cuda.CudaDevice(gpu=2)
    assert fake.calls == ["count"]
    failing = SimpleNamespace(
        **{**vars(FakeCudart), "cudaGetDeviceCount": lambda: (Error.cudaErrorMemoryAllocation, 0)}
    )
    monkeypatch.setattr(cuda, "import_cudart", lambda: failing)
    with pytest.raises(ProviderError, match="the GPU cannot be used: "):
        cuda.CudaDevice()


def test_a_number_is_for_providers_on_gpus(tiny_bundle) -> None:
    for provider in ("auto", "cpu"):
        with pytest.raises(ProviderError, match="device is the number of a GPU: name a provider that runs on one"):
            load(tiny_bundle, provider=provider, device=1)
    with pytest.raises(ConfigError, match="device must be a whole number from 0 to 1023, not -1"):
        load(tiny_bundle, provider="cuda", device=-1)
