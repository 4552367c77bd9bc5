"""`tools/benchmarks/gpu_limits.py` as far as it goes without a GPU: it refuses, finds matrices, prints shares."""

from types import ModuleType

import pytest
import torch

from tide_export.bundle.opened import open_bundle


@pytest.fixture(scope="module")
def limits() -> ModuleType:
    import gpu_limits

    return gpu_limits


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_without_a_gpu(limits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert limits.main([]) == 2
    assert capsys.readouterr().err == "gpu_limits: there is no GPU that PyTorch can use here\n"


def test_products_are_those_of_the_bundle_s_matrices(
    limits: ModuleType, tiny_llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, where a product takes what the test says."""
    calls = []

    def time_of(call, copies: int) -> float:
        calls.append((copies, [tuple(call(i).shape) for i in range(copies)]))
        return 2.0

    model = open_bundle(tiny_llama.exact).manifest.model
    monkeypatch.setattr(limits, "SMALLEST", 8)
    monkeypatch.setattr(limits, "DEVICE", "cpu")
    monkeypatch.setattr(limits, "ROTATED", 1 << 15)
    monkeypatch.setattr(limits, "bandwidth", lambda: 1e4)
    monkeypatch.setattr(limits, "time_of", time_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert limits.main([str(tiny_llama.exact)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a copy moves 10 GB/s"
    width, vocabulary = model.hidden_size, model.vocab_size
    share = 2 * width * vocabulary / 2.0 / 1e4
    assert f"1 x {width} by {width} x {vocabulary}: 2.0 us, {share:.0%} of the copy's bandwidth" in lines
    assert len(lines) == len(calls) + 1 == len(set(lines))
    for copies, shapes in calls:
        assert len(set(shapes)) == 1
        assert copies == len(shapes) <= 128


def test_switches_are_timed_in_growing_numbers(
    limits: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, launched, closed = [], [], []

    class Graph:
        def __init__(self, cudart: object, stream: int, work, switches: int) -> None:
            made.append((stream, work(), switches))
            self.launch, self.close = (lambda: launched.append(switches)), (lambda: closed.append(switches))

    class Stream:
        cuda_stream = 7

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def timed(call, copies: int) -> float:
        call(0)
        return float(sum(launched))

    monkeypatch.setattr(limits, "DEVICE", "cpu")
    monkeypatch.setattr(limits, "SwitchGraph", Graph)
    monkeypatch.setattr(limits, "load_cudart", lambda: None)
    monkeypatch.setattr(limits, "time_of", timed)
    monkeypatch.setattr(torch.cuda, "Stream", Stream, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert limits.main([]) == 0
    assert made == [(7, None, count) for count in (1, 2, 4, 8)]
    assert launched == closed == [1, 2, 4, 8]
    sums = zip(launched, (1, 3, 7, 15), strict=True)
    assert capsys.readouterr().out.splitlines()[1:] == [f"{n} empty switch nodes: {us}.0 us" for n, us in sums]
