"""Worker threads: results in order, the bits of one thread, mistakes told, PyTorch's threads left as found."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.calibration.parallel import in_parallel


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def a_source(device: str = "cpu", **model) -> Any:
    return SimpleNamespace(device=torch.device(device), model=SimpleNamespace(**model))


def test_two_workers_share_the_work_in_order(two_threads):
    together = threading.Barrier(2, timeout=60)  # passed only if two of them are at work at the same time

    def work(number):
        together.wait()
        return number, threading.get_ident(), torch.get_num_threads()

    found = list(in_parallel(a_source(), work, range(20)))
    assert [number for number, _, _ in found] == list(range(20))
    assert len({thread for _, thread, _ in found} - {threading.get_ident()}) == 2
    assert {threads for _, _, threads in found} == {1}


@pytest.mark.parametrize("source", [a_source("meta"), a_source(hf_device_map={"": "cpu"})], ids=["gpu", "placed"])
def test_one_after_the_other_where_a_model_cannot_be_shared(two_threads, source):
    assert set(in_parallel(source, lambda _: threading.get_ident(), range(4))) == {threading.get_ident()}


def test_work_inside_of_work_starts_no_threads(two_threads):
    def work(_):
        return threading.get_ident(), set(in_parallel(a_source(), lambda _: threading.get_ident(), range(4)))

    for thread, inner in in_parallel(a_source(), work, range(4)):
        assert inner == {thread}


def test_what_work_raises_is_raised_and_the_rest_is_left(two_threads):
    started = []

    def work(number):
        started.append(number)
        if number == 3:
            raise KeyError("three")
        return number

    found = in_parallel(a_source(), work, range(1000))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        next(found)
    assert len(started) < 20


def test_one_thread_and_two_collect_the_same_bits(demo, sequences, two_threads):
    def sample():
        return collect(demo, sequences, (3, 12), TideConfig(calibration_batch=2), 200, "test")

    shared = sample()
    torch.set_num_threads(1)
    alone = sample()
    torch.set_num_threads(2)
    assert all(torch.equal(shared.raw[layers], alone.raw[layers]) for layers in (3, 12))


def test_heads_in_several_threads_answer_each_its_own(demo, two_threads):
    """While one thread asks the head alone, another runs the whole model."""
    ids = torch.arange(6)[None]
    states = torch.randn(8, 1, 6, demo.normalized_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [demo.head(state) for state in states]
        whole = demo.model(input_ids=ids, use_cache=False).logits

        @torch.no_grad()
        def work(number):
            if number % 3 == 0:
                return demo.model(input_ids=ids, use_cache=False).logits
            return demo.head(states[number % 8])

        for number, found in enumerate(in_parallel(demo, work, range(60))):
            assert torch.allclose(found, whole if number % 3 == 0 else expected[number % 8], atol=1e-4)
    assert "forward" not in demo.structure.backbone.__dict__
