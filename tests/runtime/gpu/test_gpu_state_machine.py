"""Random use of sequences and batches on a GPU against the oracle (`state_machine`)."""

import pytest
from caller_networks import CallersNetworks, callers_engine
from fake_cudart import FakeCudart
from judge import Judge
from state_machine import Player, play
from stepped_engines import Batched, Singles
from tiny_configs import CONTEXT
from tiny_engines import MAX_BATCH_SIZE, MAX_TOKENS, TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.runtime.engine import Engine

PENDING_LIMIT = (MAX_TOKENS - 1) // 2  # before each of two segments, in a run of the networks with the next token
FORCED = ("forced", "caught up")


@pytest.fixture(scope="module")
def judge(tiny_llama: TinyLlama) -> Judge:
    return Judge(tiny_llama.source, tiny_llama.routers)


@pytest.fixture
def callers(tiny_llama: TinyLlama, cudart: FakeCudart) -> tuple[Engine, CallersNetworks]:
    return callers_engine(open_bundle(tiny_llama.exact), cudart)


def test_sequences(judge: Judge, callers: tuple[Engine, CallersNetworks], cudart: FakeCudart) -> None:
    engine, networks = callers
    gpu = Singles(lambda thresholds, max_pending: engine.start(thresholds, max_pending), networks)
    play(Player(judge, {"gpu": gpu}, CONTEXT, pending_limit=PENDING_LIMIT), 12, 30)
    assert cudart.calls("cudaGraphLaunch") > cudart.calls("cudaGraphInstantiate") > 0


def test_batches(judge: Judge, callers: tuple[Engine, CallersNetworks]) -> None:
    engine, networks = callers
    gpu = Batched(lambda share: engine.start_batch(share, MAX_BATCH_SIZE), networks)
    play(Player(judge, {"gpu": gpu}, CONTEXT, batched=True, pending_limit=PENDING_LIMIT), 12, 30)
