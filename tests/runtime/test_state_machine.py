"""Random use of sequences and batches on every engine against the oracle (`state_machine`)."""

import pytest
from caller_networks import CallersNetworks, callers_engine
from judge import Judge
from state_machine import Player, play
from stepped_engines import Batched, Singles
from tiny_engines import MAX_TOKENS, TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.runtime.engine import Engine

PENDING_LIMIT = (MAX_TOKENS - 1) // 2  # before each of two segments, in a run of the networks with the next token


@pytest.fixture(scope="module")
def judge(tiny_llama: TinyLlama) -> Judge:
    return Judge(tiny_llama.source, tiny_llama.routers)


@pytest.fixture
def exact(tiny_llama: TinyLlama) -> dict[str, tuple[Engine, CallersNetworks | None]]:
    """Engines by name: the graph with its networks for batches, segment networks, and those that the caller runs, which
    a test may let fail."""
    callers = callers_engine(open_bundle(tiny_llama.exact))
    return {
        "graph": (tiny_llama.graph(tiny_llama.exact), None),
        "networks": (tiny_llama.networks(), None),
        "the caller's networks": callers,
    }


def singles(engine: Engine, networks: CallersNetworks | None = None) -> Singles:
    return Singles(lambda thresholds, max_pending: engine.start(thresholds, max_pending), networks)


def batched(engine: Engine, networks: CallersNetworks | None = None) -> Batched:
    return Batched(lambda share: engine.start_batch(share, 3), networks)


def test_sequences(judge: Judge, exact: dict[str, tuple[Engine, CallersNetworks | None]]) -> None:
    context = exact["graph"][0].manifest.model.context_length
    engines = {name: singles(*one) for name, one in exact.items()}
    play(Player(judge, engines, context, pending_limit=PENDING_LIMIT), 15, 40)


def test_batches(judge: Judge, exact: dict[str, tuple[Engine, CallersNetworks | None]]) -> None:
    context = exact["graph"][0].manifest.model.context_length
    engines = {name: batched(*one) for name, one in exact.items()}
    play(Player(judge, engines, context, batched=True, pending_limit=PENDING_LIMIT), 15, 40)
