"""Work goes to the GPU with the number that was asked for, in every thread; the stand-in refuses all other work."""

import threading

import pytest
from caller_networks import callers_engine
from fake_cudart import FakeCudart
from generations import alone, tokens_of
from tiny_engines import TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.errors import ConfigError, ProviderError
from tide_export.runtime.engine import Engine, load


@pytest.fixture
def two(cudart: FakeCudart) -> FakeCudart:
    cudart.devices = 2
    return cudart


def test_only_that_gpu_is_used(graph: Engine, tiny_llama: TinyLlama, two: FakeCudart) -> None:
    two.only = 1
    engine, _ = callers_engine(open_bundle(tiny_llama.exact), two, 1)
    expected = tokens_of(alone(graph))
    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(tokens_of(alone(engine)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tokens_of(alone(engine)), *found] == [expected] * 3


def test_engines_on_two_gpus_take_turns_in_one_thread(graph: Engine, tiny_llama: TinyLlama, two: FakeCudart) -> None:
    """The GPU is set where another was used before, not for each call."""
    expected, bundle = tokens_of(alone(graph)), open_bundle(tiny_llama.exact)
    engines = [callers_engine(bundle, two, number)[0] for number in range(2)]
    assert [tokens_of(alone(engine)) for engine in engines] == [expected] * 2
    before = two.calls("cudaSetDevice")
    for engine in [*engines, engines[1]]:
        assert tokens_of(alone(engine)) == expected
    assert two.calls("cudaSetDevice") - before == 2


def test_a_number_that_no_gpu_has_is_refused(tiny_llama: TinyLlama, two: FakeCudart) -> None:
    bundle = open_bundle(tiny_llama.exact)
    with pytest.raises(ProviderError, match="there is no GPU 2: CUDA finds 2, numbered from 0"):
        callers_engine(bundle, two, 2)
    two.failing = b"cudaSetDevice"
    with pytest.raises(ProviderError, match="the GPU cannot be used: injected"):
        callers_engine(bundle, two, 1)
    two.reset(devices=0)
    with pytest.raises(ProviderError, match="the GPU cannot be used: "):
        callers_engine(bundle, two)


def test_a_number_is_for_providers_on_gpus(tiny_llama: TinyLlama) -> None:
    for provider in ("auto", "cpu"):
        with pytest.raises(ProviderError, match="device is the number of a GPU: name a provider that runs on one"):
            load(tiny_llama.exact, provider=provider, device=1)
    with pytest.raises(ConfigError, match="device must be a whole number from 0 to 1023, not -1"):
        load(tiny_llama.exact, provider="cuda", device=-1)
