"""The embedding is an input of the networks that read it: one memory for all of them, whatever runs, and the same
tokens."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from caller_networks import Queued, callers_engine
from drafters import drafting_copy
from fake_cudart import FakeCudart
from generations import alone, exits, facts, together, tokens_of
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.file_names import EMBEDDING_FILE
from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.names import segment_networks as names
from tide_export.names.networks import DRAFTER, HEAD, segment_name
from tide_export.runtime.engine import Engine, load, open_engine

PROMPTS = [[7], [5, 9], TEXT[:12]]
OPTIONS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "exit", "threshold": 0.6, "min_layers": 0},
    {"mode": "lossless", "threshold": 0.6},
]


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Engine:
    """The graph of a model whose head is tied to its embedding."""
    return load(demo_bundle, provider="cpu", threads=1, verify=False)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Where each network was given the embedding."""
    given, run = defaultdict[str, set[int]](set), Queued.run

    def noting(self: Queued, name: str, tensors: Any, *arguments: Any) -> bool:
        if names.EMBEDDING in tensors:
            given[name].add(tensors[names.EMBEDDING])
        return run(self, name, tensors, *arguments)

    monkeypatch.setattr(Queued, "run", noting)
    return given


@pytest.mark.parametrize("options", tiers.exhaustive_but(OPTIONS[1:], OPTIONS), ids=lambda options: options["mode"])
def test_a_tied_head_gives_the_graph_s_tokens(
    demo: Engine, demo_bundle: Path, device: FakeCudart | None, options: dict[str, Any]
) -> None:
    bundle = open_bundle(demo_bundle, verify=False)
    assert bundle.manifest.networks is not None
    assert bundle.manifest.networks.embedding is not None
    assert bundle.manifest.networks.embedding.tied
    engine, _ = callers_engine(bundle, device)
    expected = alone(demo, PROMPTS, **options)
    assert [facts(one) for one in alone(engine, PROMPTS, **options)] == [facts(one) for one in expected]
    found = together(engine, PROMPTS, **options)
    assert tokens_of(found) == tokens_of(expected)
    if options["mode"] == "exit":
        assert [exits(one) for one in found] == [exits(one) for one in expected]
        assert any(layer < 12 for one in expected for layer in one.stats.exit_layer), "some exit"


def test_onnx_runtime_reads_it_too(demo: Engine, demo_bundle: Path) -> None:
    engine = open_engine(open_bundle(demo_bundle, verify=False), "cpu-networks", threads=1)
    assert tokens_of(alone(engine, PROMPTS)) == tokens_of(alone(demo, PROMPTS))


def test_one_memory_serves_all_networks_and_sequences(
    demo_bundle: Path, machine: FakeCudart, addresses: dict[str, set[int]]
) -> None:
    before = machine.allocated
    engine, _ = callers_engine(open_bundle(demo_bundle, verify=False), machine)
    alone(engine, PROMPTS)
    together(engine, PROMPTS)
    assert addresses.keys() == {segment_name(0), HEAD}
    assert len(set().union(*addresses.values())) == 1
    del engine
    assert machine.allocated == before


def test_a_drafter_reads_the_same(
    tiny_llama: TinyLlama, machine: FakeCudart, addresses: dict[str, set[int]], tmp_path: Path
) -> None:
    """Of a model whose head is not tied."""
    folder = drafting_copy(tiny_llama.exact, tmp_path)
    free = Drafting((1.0, 1.0), 0, 0, (1.0, 1.0), (0.0,) * 5, {}, 4, 0.0)
    write_manifest(folder, replace(open_bundle(folder, verify=False).manifest, drafting=free))
    engine, _ = callers_engine(open_bundle(folder, verify=False), machine)
    options: dict[str, Any] = {"mode": "lossless", "temperature": 0.7, "seed": 1}
    (found,), (full,) = alone(engine, [TEXT], **options), alone(engine, [TEXT], **options | {"mode": "full"})
    assert found.tokens == full.tokens
    assert found.stats.learned_drafted > 0
    assert addresses.keys() == {segment_name(0), DRAFTER}
    assert len(set().union(*addresses.values())) == 1


def test_the_file_holds_the_model_s_embedding(tiny_llama: TinyLlama) -> None:
    weight = tiny_llama.source.model.get_input_embeddings().weight.detach().numpy()
    stored = np.fromfile(tiny_llama.exact / EMBEDDING_FILE, np.float32)
    assert np.array_equal(stored, weight.ravel())
