"""Runs are recorded as CUDA graphs and replayed; where that fails they are queued, with one warning a process."""

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warned_once
from bundles import with_manifest
from caller_networks import Queued, callers_engine
from fake_cudart import OLD, FakeCudart
from generations import PROMPTS, alone, facts
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.network_spec import RunSize
from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError
from tide_export.names.networks import BEST, segment_name
from tide_export.runtime.engine import Engine

MOST = 256  # recordings that one set of buffers keeps
HARDLY_EXIT = 0.99999  # no score is above it, which the host does not know: segments are run one by one


def counts(cudart: FakeCudart) -> np.ndarray:
    """CUDA graphs recorded, and launches of them."""
    return np.array([cudart.calls("cudaGraphInstantiate"), cudart.calls("cudaGraphLaunch")])


def test_one_recording_for_each_network_and_size(
    graph: Engine, on_gpu: Any, cudart: FakeCudart, thresholds: list[float]
) -> None:
    """That comes again; from then on it is replayed. Where the host decides how deep a step goes."""
    cudart.driver = cudart.runtime = OLD
    engine, networks = on_gpu()
    options = {"threshold": thresholds, "min_layers": 0, "max_new_tokens": 60}
    before = counts(cudart)
    assert [facts(one) for one in alone(engine, **options)] == [facts(one) for one in alone(graph, **options)]
    recorded, launches = counts(cudart) - before
    runs = Counter(run for run in networks.runs if run[0] != BEST)  # which the head's recording has
    assert recorded == sum(times >= 2 for times in runs.values()) > 10
    assert launches == sum(max(times - 2, 0) for times in runs.values())


def test_the_recordings_least_recently_used_are_given_up(
    tiny_llama: TinyLlama, cudart: FakeCudart, tmp_path: Path
) -> None:
    """With eight slots there are more sizes and places of runs than are kept."""
    info = open_bundle(tiny_llama.exact).manifest.networks
    assert info is not None
    wider = with_manifest(tiny_llama.exact, tmp_path, networks=replace(info, max_batch_size=8, max_slot_tokens=4))
    cudart.driver = cudart.runtime = OLD
    engine, networks = callers_engine(open_bundle(wider), cudart)
    batch = engine.start_batch(1.0, 8)
    slots = [batch.join([HARDLY_EXIT, HARDLY_EXIT], 0) for _ in range(8)]

    def logits() -> list[np.ndarray]:
        """After steps of all sizes and places, and of one size again and again."""
        found = []
        for start, stop, tokens in product(slots, slots, (1, 2, 4)):
            for new in ({slot: TEXT[slot : slot + tokens] for slot in range(start, stop + 1)}, {0: TEXT[:8]}):
                found += [result.logits for result in batch.step(new).values()] if new else []
                for slot in new:
                    batch.sequences[slot].rewind(0)
        return found

    gc.collect(1)  # young objects: all take seconds in a process of many tests
    objects, recorded = cudart.objects, counts(cudart)[0]
    first = logits()
    for _ in range(3):
        np.testing.assert_array_equal(logits(), first)
    assert counts(cudart)[0] - recorded > MOST
    assert cudart.objects - objects == MOST
    assert len(set(networks.forgotten)) == counts(cudart)[0] - recorded - MOST, "the caller is told"
    assert networks.recorded[segment_name(0), 8, 1] == 1, "what is used often stays"


def test_what_cannot_be_recorded_is_queued_with_one_warning(
    graph: Engine, tiny_llama: TinyLlama, cudart_library: Path
) -> None:
    prompt = ",".join(map(str, TEXT[:5]))
    command = [sys.executable, warned_once.__file__, str(tiny_llama.exact), str(cudart_library), prompt]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = graph.generate(TEXT[:5], max_new_tokens=12, mode="full", stop_token_ids=[]).tokens
    assert done.stdout.splitlines() == [" ".join(map(str, expected))] * 2 * len(warned_once.RECORDING), done.stderr
    assert done.stderr == (
        "WARNING runs are not recorded as CUDA graphs, which makes decoding slower: CUDA failed "
        f"({warned_once.RECORDING[0]}): injected\n"
    )


@pytest.mark.parametrize("raises", [True, False])
def test_networks_that_cannot_be_recorded_end_recording(
    graph: Engine, on_gpu: Any, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """They raise an error while they are recorded, or say so before."""
    run = Queued.run

    def refuses(
        self: Queued, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool
    ) -> bool:
        if captured and raises:
            raise GenerationError(f"TensorRT refused a run over {size.tokens} tokens in {name}")
        assert not captured
        return run(self, name, addresses, size, recording, captured) and raises

    monkeypatch.setattr(Queued, "run", refuses)
    engine, _ = on_gpu()
    before = counts(cudart)
    assert [facts(one) for one in alone(engine, PROMPTS)] == [facts(one) for one in alone(graph, PROMPTS)]
    assert (counts(cudart) == before).all()
