"""What a step of eight sequences asks of CUDA, counted on the stand-in. `-s` prints the figures."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from batch_prompts import TEXT
from fake_cudart import FakeCudart
from fake_gpu import FakeGpu

from tide_export.runtime.engine import Engine
from tide_export.runtime.segmented import cuda
from tide_export.runtime.segmented.backend import SegmentBackend

SLOTS, STEPS, ROUNDS = 8, 100, 3
# Share of exits at a checkpoint, max_pending; calls a step when the host handed states over by copies.
SETTINGS = {"half of the tokens exit": (0.5, 4, 34.5), "most exit": (0.8, 8, 28.8), "full": (0.0, 4, 8.0)}


class Counting(FakeCudart):
    """Counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and not name.endswith("_t"):
            self.calls[name] += callable(getattr(FakeCudart, name))
        return super().__getattribute__(name)


def calls_per_step(engine: Engine, fake: Counting, thresholds: list[float], max_pending: int) -> float:
    """Of the last of several rounds, when what can be recorded mostly is."""
    for _ in range(ROUNDS):
        batch = engine.start_batch(1.0, SLOTS)
        slots = [batch.join(thresholds, max_pending) for _ in range(SLOTS)]
        batch.step({slot: TEXT[5 * slot : 6 * slot + 3] for slot in slots})
        fake.calls.clear()
        for n in range(STEPS):
            batch.step({slot: [TEXT[(7 * slot + 3 * n) % len(TEXT)]] for slot in slots})
    print(f"{sum(fake.calls.values()) / STEPS:.1f} calls a step: {dict(fake.calls)}")
    return sum(fake.calls.values()) / STEPS


def test_a_step_of_eight_takes_a_third_of_the_calls_that_copies_took(engines, monkeypatch) -> None:
    graph, networks, _ = engines
    fake = Counting()
    monkeypatch.setattr(cuda, "import_cudart", lambda: fake)
    info = replace(networks.backend._info, max_batch_size=SLOTS, max_slot_tokens=4)
    device = FakeGpu(networks.backend, fake)
    eight = SegmentBackend(networks.manifest, info, networks.backend.specs, device.open_device, "cpu")
    engine, state = Engine(networks.bundle, eight), graph.start([1.0, 1.0])
    scores = np.array([state.step([token]).scores.copy() for token in TEXT[:100]])
    for name, (exiting, max_pending, before) in SETTINGS.items():
        thresholds = np.quantile(scores, 1 - exiting, axis=0).tolist() if exiting else [2.0, 2.0]
        found = calls_per_step(engine, fake, thresholds, max_pending)
        assert found <= (before / 3 if exiting else before), name
