"""The actions that Python's engines are tested with (`state_machine`) on the C++ runtime, against the same oracle."""

from collections.abc import Callable

import pytest
from cpp_builds import cuda_headers
from cpp_engine import CppBatch, CppEngine
from judge import Judge
from state_machine import ALWAYS, EXACT, Player, play
from stepped_engines import Batched, Singles
from tiny_engines import MAX_BATCH_SIZE, MAX_TOKENS

CONTEXT = 256
PENDING_LIMIT = (MAX_TOKENS - 1) // 2  # before each of two segments, in a run of the networks with the next token


@pytest.fixture(scope="module")
def judge(tiny_llama) -> Judge:
    return Judge(tiny_llama.source, tiny_llama.routers)


def singles(engine: CppEngine) -> Singles:
    return Singles(lambda thresholds, max_pending: engine.start(thresholds, max_pending, 0))


def batched(engine: CppEngine, slots: int = 8) -> Batched:
    return Batched(lambda share: CppBatch(engine, share, slots))


def test_sequences(judge: Judge, tiny_llama, open_cpp: Callable[..., CppEngine]) -> None:
    devices = ["host", "gpu", "cuda"] if cuda_headers() else ["host"]
    engines = {device: singles(open_cpp(tiny_llama.exact, networks=device)) for device in devices}
    engines["graph"] = singles(open_cpp(tiny_llama.exact))
    play(Player(judge, engines, CONTEXT, pending_limit=PENDING_LIMIT), 20, *ALWAYS[:-2], *EXACT[:3])


@pytest.mark.parametrize("networks", ["host", "gpu", "cuda"])
def test_batches_on_segment_networks(judge: Judge, tiny_llama, open_cpp: Callable[..., CppEngine], networks) -> None:
    if networks != "host" and not cuda_headers():
        pytest.skip("there are no CUDA headers")
    engine = open_cpp(tiny_llama.exact)
    CppBatch.load(engine, tiny_llama.exact, networks)
    engines = {networks: batched(engine, MAX_BATCH_SIZE)}
    player = Player(judge, engines, CONTEXT, batched=True, pending_limit=PENDING_LIMIT)
    play(player, 25, *ALWAYS[:-2], *EXACT[:3])


def test_batches(judge: Judge, tiny_llama, open_cpp: Callable[..., CppEngine]) -> None:
    engine = open_cpp(tiny_llama.exact)
    CppBatch.load(engine, tiny_llama.exact)
    play(Player(judge, {"graph": batched(engine)}, CONTEXT, batched=True), 30, *ALWAYS[:-2], *EXACT[:3])


def test_propagated(judge: Judge, tiny_llama, open_cpp: Callable[..., CppEngine]) -> None:
    engine = open_cpp(tiny_llama.propagating)
    play(Player(judge, {"graph": singles(engine)}, CONTEXT, propagates=True), 15, *ALWAYS[:-2])
    CppBatch.load(engine, tiny_llama.propagating)
    player = Player(judge, {"graph": batched(engine)}, CONTEXT, batched=True, propagates=True)
    play(player, 15, *ALWAYS[:-2])
