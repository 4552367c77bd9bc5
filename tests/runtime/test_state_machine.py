"""Random use of sequences and batches on every engine of Python's runtime against the oracle (`state_machine`)."""

import sys
from pathlib import Path

import pytest
from judge import Judge
from state_machine import ALWAYS, EXACT, Player, play
from stepped_engines import Batched, Singles
from tiny_engines import MAX_TOKENS

from tide_export.runtime.engine import Engine
from tide_export.runtime.pytorch.segments import open_torch
from tide_export.runtime.segmented import cuda

sys.path.append(str(Path(__file__).parent / "segmented"))  # the stand-ins for a GPU

from fake_cudart import FakeCudart
from fake_gpu import FakeGpu

PENDING_LIMIT = (MAX_TOKENS - 1) // 2  # before each of two segments, in a run of the networks with the next token


@pytest.fixture(scope="module")
def judge(tiny_llama) -> Judge:
    return Judge(tiny_llama.source, tiny_llama.routers)


@pytest.fixture
def exact(tiny_llama, monkeypatch: pytest.MonkeyPatch) -> dict[str, Engine]:
    """Engines by name: the graph with its networks for batches, and segment networks on the host and on a stand-in."""
    fake = FakeCudart()
    monkeypatch.setattr(cuda, "import_cudart", lambda: fake)
    graph, networks = tiny_llama.graph(tiny_llama.exact), tiny_llama.networks()
    gpu = Engine(networks.bundle, FakeGpu(networks.backend, fake).backend(networks.manifest))
    return {"graph": graph, "networks": networks, "networks on a GPU": gpu}


def of_graph(sequence, k):
    return [(sequence._session, "run_with_iobinding", None)]


def of_buffers(owner, k):
    return [(owner._buffers, "run", k)]


def of_packed(engine: Engine):
    """Of a step of several sequences, and of a step of one, which the graph of one sequence runs."""
    return lambda batch, k: [(batch._segments[k], "run", None), (engine.backend.session, "run_with_iobinding", None)]


def singles(engine: Engine, segment_of, checks_ids: bool = True) -> Singles:
    return Singles(lambda thresholds, max_pending: engine.start(thresholds, max_pending, 0), segment_of, checks_ids)


def batched(engine: Engine, segment_of, checks_ids: bool = True) -> Batched:
    return Batched(lambda share: engine.start_batch(share, 3), segment_of, checks_ids)


def test_sequences(judge: Judge, exact: dict[str, Engine]) -> None:
    context = exact["graph"].manifest.model.context_length
    engines = {
        name: singles(engine, of_graph if name == "graph" else of_buffers, name != "networks on a GPU")
        for name, engine in exact.items()
    }
    play(Player(judge, engines, context, pending_limit=PENDING_LIMIT), 40, *ALWAYS, *EXACT)


def test_batches(judge: Judge, exact: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_export.runtime.packed.sequence.ROOM", 0)  # so that K/V buffers grow
    context = exact["graph"].manifest.model.context_length
    engines = {
        name: batched(engine, of_packed(engine) if name == "graph" else of_buffers, name != "networks on a GPU")
        for name, engine in exact.items()
    }
    play(Player(judge, engines, context, batched=True, pending_limit=PENDING_LIMIT), 40, *ALWAYS, *EXACT)


@pytest.mark.parametrize("several", [False, True])
def test_segment_networks_in_pytorch(judge: Judge, exact: dict[str, Engine], several: bool) -> None:
    bundle = exact["networks"].bundle
    engine, context = Engine(bundle, open_torch(bundle, "cpu")), bundle.manifest.model.context_length
    engines = {"PyTorch": (batched if several else singles)(engine, of_buffers)}
    play(Player(judge, engines, context, batched=several, pending_limit=PENDING_LIMIT), 8)


def test_propagated_sequences(judge: Judge, tiny_llama) -> None:
    graph = tiny_llama.graph(tiny_llama.propagating)
    player = Player(judge, {"graph": singles(graph, of_graph)}, graph.manifest.model.context_length, propagates=True)
    play(player, 20, *ALWAYS)


def test_propagated_batches(judge: Judge, tiny_llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_export.runtime.packed.sequence.ROOM", 0)
    graph = tiny_llama.graph(tiny_llama.propagating)
    context = graph.manifest.model.context_length
    play(
        Player(judge, {"graph": batched(graph, of_packed(graph))}, context, batched=True, propagates=True), 20, *ALWAYS
    )
