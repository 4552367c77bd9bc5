"""CUDA graphs of a `CudaDevice`, over the fake CUDA runtime: freed with the device, omitted where recording fails."""

import gc
import logging

import numpy as np
import pytest
from fake_cudart import FakeCudart

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine
from tide_export.runtime.segmented import cuda


def run_often(device: cuda.CudaDevice, numbers: list[int]) -> list[int]:
    """Copies each number through the device, three times; the numbers that come back."""
    buffer, host = device.allocate(8), device.staging(8).view(np.int64)

    def work() -> None:
        device.upload(buffer.address, host.view(np.uint8))
        device.download(host.view(np.uint8), buffer.address)

    results = []
    for number in numbers * 3:
        host[0] = number
        device.launch(("work", number), work)
        device.synchronize()
        results.append(int(host[0]))
    return results


def test_graphs_are_freed_with_their_device(fake: FakeCudart) -> None:
    device = cuda.CudaDevice()
    assert run_often(device, [3, 5]) == [3, 5] * 3
    assert (fake.executables, fake.launches) == (2, 2)
    del device
    gc.collect()
    assert fake.executables == 0
    assert fake.blocks == {}


@pytest.mark.parametrize("function", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_what_cannot_be_recorded_is_queued_with_one_warning(fake: FakeCudart, function: str, caplog) -> None:
    cuda._warn_of_no_recording.cache_clear()
    fake.fails = function
    for _ in range(2):
        assert run_often(cuda.CudaDevice(), [3, 5]) == [3, 5] * 3
    assert (fake.launches, fake.executables, fake.capture) == (0, 0, None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"runs are not recorded as CUDA graphs, which makes decoding slower: CUDA failed ({function})" in (
        record.getMessage()
    )


def test_tokens_are_the_same_without_recording(segmented: Engine, on_fake_gpu: Engine, fake, demo_text_ids) -> None:
    fake.fails = "cudaStreamEndCapture"
    options = {"threshold": 0.5, "max_new_tokens": 12}
    expected = segmented.generate(demo_text_ids[:20], **options).tokens
    assert on_fake_gpu.generate(demo_text_ids[:20], **options).tokens == expected
    assert fake.launches == 0


def test_an_engine_that_refuses_to_be_recorded_ends_recording(fake: FakeCudart, caplog) -> None:
    cuda._warn_of_no_recording.cache_clear()
    device, ran = cuda.CudaDevice(), []

    def work() -> None:
        if device.recording:
            raise GenerationError("TensorRT refused a run over 1 tokens in segment_00")
        ran.append(1)

    for _ in range(4):
        device.launch("key", work)
    assert len(ran) == 4
    assert "slower: TensorRT refused a run over 1 tokens in segment_00" in caplog.text
    device.end_recording("it is told so")
    assert "slower: it is told so" in caplog.text
