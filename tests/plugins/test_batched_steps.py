"""The four kernels in the steps of a batch, with every row at its own depth, through the C interface.

The model has three segments with state (like a K/V cache), so that a token that runs out of order or twice changes the
result. The reference runs every row alone through every segment and takes the earliest checkpoint
whose router is above its threshold.
"""

from pathlib import Path

import numpy as np
import pytest
from kernel_runner import Runner, poison, tk

B, D, R, SEGMENTS, STEPS, CAPACITY = 5, 16, 4, 3, 12, 8
LAYERS = (2, 4, 6)  # run at each checkpoint, and at full depth


class Model:
    """Segments y = tanh(x @ W + m), m = m / 2 + x per row; a router (down, up) after each but the last."""

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        self.weights = random.normal(0, 0.4, (SEGMENTS, D, D)).astype(np.float32)
        self.down = random.normal(0, 1, (SEGMENTS - 1, D, R)).astype(np.float32)
        self.up = random.normal(0, 2, (SEGMENTS - 1, R, 1)).astype(np.float32)
        self.tokens = random.normal(0, 1, (STEPS, B, D)).astype(np.float32)

    def segment(self, k: int, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """One token [D]; `memory` [D] is updated."""
        y = np.tanh(x @ self.weights[k] + memory)
        memory[:] = memory / 2 + x
        return y.astype(np.float32)

    def score(self, k: int, y: np.ndarray) -> float:
        z = y.astype(np.float64) @ self.down[k]
        return float(1 / (1 + np.exp(-((z / (1 + np.exp(-z))) @ self.up[k])[0])))


def reference(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """The exit state of every row in every step, [STEPS, B, D], and its layers, [STEPS, B]."""
    states, layers = np.zeros((STEPS, B, D), np.float32), np.zeros((STEPS, B), int)
    for row in range(B):
        memory = np.zeros((SEGMENTS, D), np.float32)
        for step in range(STEPS):
            x = model.tokens[step, row]
            for k in range(SEGMENTS):
                x = model.segment(k, x, memory[k])
                exits = k == SEGMENTS - 1 or model.score(k, x) > 0.5
                if exits and not layers[step, row]:
                    states[step, row], layers[step, row] = x, LAYERS[k]
    return states, layers


class Batch:
    """The same rows as a batch; pending states are in each segment's input."""

    def __init__(self, model: Model, runner: Runner, max_pending: int) -> None:
        self.model, self.runner, self.max_pending = model, runner, max_pending
        self.memory = np.zeros((SEGMENTS, B, D), np.float32)
        self.pending_states = [poison((B, CAPACITY, D), np.float32) for _ in range(SEGMENTS)]
        self.pending_counts = [np.zeros(B, np.int32) for _ in range(SEGMENTS)]
        self.lengths = [np.zeros(B, np.int32) for _ in range(SEGMENTS)]
        self.counts = np.zeros(SEGMENTS, np.int64)
        self.tokens_run = np.zeros(SEGMENTS, int)

    def step(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, D] -> exit states [B, D] and their layers [B]."""
        output, exit_layers = poison((B, D), np.float32), np.zeros(B, np.int32)
        running, exited = np.ones(B, np.int32), np.zeros(B, np.int32)
        y, new = x, [x]  # each row's last token, and all its new ones by position
        counts = np.ones(B, np.int32)
        for k in range(SEGMENTS):
            for position, states in enumerate(new):
                self.gather(k, states, (counts > position).astype(np.int32))
            forced = (self.pending_counts[k] > self.max_pending).astype(np.int32)
            runs = running & ((1 - exited) | forced)
            staying = self.compact(y, 1 - runs)
            counts = np.where(np.isin(np.arange(B), staying), self.pending_counts[k], 0)
            y, new = poison((B, D), np.float32), [poison((B, D), np.float32) for _ in range(counts.max(initial=0))]
            for row in staying:
                for position, state in enumerate(self.run(k, row)):
                    y[row] = new[position][row] = state
            running = (counts > 0).astype(np.int32)
            rows = staying.astype(np.int32)
            exits = np.ones(len(rows), np.int32) if k == SEGMENTS - 1 else self.route(k, y[rows])
            self.scatter(k, y[rows], exits, rows, output, exit_layers)
            exited = (exit_layers > 0).astype(np.int32)
        return output, exit_layers

    def run(self, k: int, row: int) -> list[np.ndarray]:
        """Segment k over all pending tokens of a row, in order."""
        pending = self.pending_states[k][row, : self.pending_counts[k][row]]
        states = [self.model.segment(k, x, self.memory[k, row]) for x in pending]
        self.tokens_run[k] += len(states)
        self.lengths[k][row] += len(states)
        self.pending_counts[k][row] = 0
        return states

    def gather(self, k: int, y: np.ndarray, take: np.ndarray) -> None:
        args = tk.GatherPendingArgs()
        args.batch, args.tokens, args.capacity, args.token_bytes = B, 1, CAPACITY, 4 * D
        positions = poison((B, CAPACITY), np.int32)
        outputs = {"pending": self.pending_states[k], "counts": self.pending_counts[k], "positions": positions}
        self.runner.run("tide_gather_pending", args, {"states": y, "take": take, "lengths": self.lengths[k]}, outputs)
        assert (self.pending_counts[k] <= CAPACITY).all()
        assert ((positions >= 0).sum(axis=1) == self.pending_counts[k]).all()

    def compact(self, y: np.ndarray, exits: np.ndarray) -> np.ndarray:
        args = tk.CompactArgs()
        args.rows, args.row_bytes, args.states_stride = B, 4 * D, 4 * D
        outputs = {name: poison((B, D), np.float32) for name in ("staying", "leaving")}
        outputs |= {name: poison((B,), np.int32) for name in ("staying_rows", "leaving_rows")}
        outputs |= {name: poison((1,), np.int64) for name in ("staying_size", "leaving_size")}
        self.runner.run("tide_compact", args, {"states": y, "exits": exits}, outputs)
        return outputs["staying_rows"][: outputs["staying_size"][0]]

    def route(self, k: int, y: np.ndarray) -> np.ndarray:
        args = tk.RouteArgs(rows=len(y), hidden=D, bottleneck=R, states_stride=D)
        inputs = {"states": y, "down": self.model.down[k], "up": self.model.up[k], "bias": np.zeros(1, np.float32)}
        inputs["threshold"] = np.array([0.5], np.float32)
        outputs = {"scores": poison((len(y),), np.float32), "exits": poison((len(y),), np.int32)}
        self.runner.run("tide_route", args, inputs, outputs)
        return outputs["exits"]

    def scatter(self, k: int, y: np.ndarray, exits: np.ndarray, rows: np.ndarray, output, exit_layers) -> None:
        args = tk.ExitScatterArgs(layer=LAYERS[k], checkpoint=k, rows=len(y), hidden=D, states_stride=D)
        args.output_rows, args.output_stride = B, D
        outputs = {"output": output, "exit_layers": exit_layers, "counts": self.counts}
        self.runner.run("tide_exit_scatter", args, {"states": y, "exits": exits, "destination": rows}, outputs)


@pytest.mark.parametrize("max_pending", [1, 3])
def test_every_row_of_a_batch_equals_the_row_alone(emulated_library: Path, max_pending: int) -> None:
    model = Model()
    states, layers = reference(model)
    assert set(layers.ravel()) == set(LAYERS), "every checkpoint must take part"
    batch = Batch(model, Runner(emulated_library), max_pending)
    for step in range(STEPS):
        output, exit_layers = batch.step(model.tokens[step])
        assert exit_layers.tolist() == layers[step].tolist()
        np.testing.assert_allclose(output, states[step], atol=1e-6)
    assert batch.counts.tolist() == [(layers == count).sum() for count in LAYERS]
    assert batch.tokens_run[0] == B * STEPS
    assert batch.tokens_run[2] < B * STEPS, "deep segments ran only where needed"
    pending = sum(count.sum() for count in batch.pending_counts)
    assert pending > 0
    assert all((count <= max_pending).all() for count in batch.pending_counts)
