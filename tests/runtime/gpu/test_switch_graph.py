"""`tools/benchmarks/switch_graph.py`, which times the kernel in the body of a switch node, on the stand-in for CUDA."""

import ctypes
import sys

import pytest
from fake_cudart import ROOT, FakeCudart

sys.path.append(str(ROOT / "tools" / "benchmarks"))
from switch_graph import SwitchGraph


@pytest.fixture
def stream(cudart: FakeCudart) -> int:
    made = ctypes.c_void_p()
    assert cudart.functions.cudaSetDevice(0) == 0
    assert cudart.functions.cudaStreamCreateWithFlags(ctypes.byref(made), 1) == 0
    yield made.value
    cudart.functions.cudaStreamDestroy(made)


@pytest.mark.parametrize("switches", [1, 3])
def test_the_work_runs_in_a_body_at_each_launch(cudart: FakeCudart, stream: int, switches: int) -> None:
    done: list[int] = []
    chosen, objects = cudart.chosen, cudart.objects
    graph = SwitchGraph(
        cudart.functions, stream, lambda: [cudart.queue(stream, lambda: done.append(1)) for _ in (1, 2)], switches
    )
    assert done == []
    for launches in (1, 2, 3):
        graph.launch()
        assert cudart.functions.cudaStreamSynchronize(ctypes.c_void_p(stream)) == 0
        assert len(done) == 2 * switches * launches
    assert cudart.chosen == chosen + 3 * switches
    graph.close()
    assert cudart.objects == objects


@pytest.mark.parametrize("function", ["GraphAddNode", "StreamBeginCaptureToGraph", "GraphInstantiate"])
def test_what_cuda_refuses_is_an_error(cudart: FakeCudart, stream: int, function: str) -> None:
    cudart.failing = f"cuda{function}".encode()
    with pytest.raises(RuntimeError, match=f"cuda{function} gave CUDA error"):
        SwitchGraph(cudart.functions, stream, lambda: None)
