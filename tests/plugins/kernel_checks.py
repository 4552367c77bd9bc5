"""The kernels' references in float64 NumPy, and a check of each kernel, for the tests on the CPU and on a GPU."""

from dataclasses import dataclass, replace

import numpy as np
from kernel_runner import Runner, decode, encode, poison, rounded, tk


@dataclass(frozen=True)
class RouteCase:
    """Sizes and types of one call of TideRoute."""

    rows: int
    hidden: int
    bottleneck: int
    shortlist: int = 0
    states: int = tk.FLOAT32
    weights: int = tk.FLOAT32
    norm: int = tk.NORM_NONE
    shift: bool = False
    scale_offset: float = 0.0
    padding: int = 0  # elements between rows
    row_thresholds: bool = False
    seed: int = 0

    @property
    def tensor_cores(self) -> bool:
        return self.states == self.weights != tk.FLOAT32


@dataclass
class RouteData:
    """Inputs of one call, encoded."""

    states: np.ndarray  # [rows, hidden + padding]
    weights: dict[str, np.ndarray]
    norm: dict[str, np.ndarray]
    threshold: np.ndarray


def route_data(case: RouteCase) -> RouteData:
    rng = np.random.default_rng(case.seed)
    states = rng.normal(0.3, 1.0, (case.rows, case.hidden + case.padding)) * rng.uniform(0.5, 2, (case.rows, 1))
    spread = 1 / np.sqrt(case.hidden)
    weights = {
        "down": rng.normal(0, spread, (case.hidden, case.bottleneck)),
        "up": rng.normal(0, 1 / np.sqrt(case.bottleneck), case.bottleneck),
        "bias": rng.normal(0, 1, 1),
    }
    if case.shortlist:
        weights["shortlist_weight"] = rng.normal(0, 3 * spread, (case.hidden, case.shortlist))
        weights["confidence"] = rng.normal(0, 1, (2, case.bottleneck))
    norm = {}
    if case.norm != tk.NORM_NONE:
        norm["scale"] = rng.normal(1 - case.scale_offset, 0.3, case.hidden)
        if case.shift:
            norm["shift"] = rng.normal(0, 0.3, case.hidden)
    threshold = rng.uniform(0.2, 0.8, case.rows if case.row_thresholds else 1)
    return RouteData(
        encode(states, case.states),
        {name: encode(array, case.weights) for name, array in weights.items()},
        {name: encode(array, case.weights) for name, array in norm.items()},
        encode(threshold, tk.FLOAT32),
    )


def normed(states: np.ndarray, kind: int, epsilon: float, norm: dict[str, np.ndarray], offset: float) -> np.ndarray:
    """float64 [rows, hidden] after RMSNorm or LayerNorm."""
    if kind == tk.NORM_NONE:
        return states
    centred = states - states.mean(-1, keepdims=True) if kind == tk.NORM_LAYER else states
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * (decode(norm["scale"]) + offset)
    return scaled + decode(norm["shift"]) if "shift" in norm else scaled


def route_reference(case: RouteCase, data: RouteData, epsilon: float) -> np.ndarray:
    """float64 scores [rows]."""
    weights = {name: decode(array) for name, array in data.weights.items()}
    x = normed(decode(data.states[:, : case.hidden]), case.norm, epsilon, data.norm, case.scale_offset)
    if case.tensor_cores and case.norm != tk.NORM_NONE:
        x = rounded(x, case.states)  # as a graph's norm would give it
    z = x @ weights["down"]
    if case.shortlist:
        logits = x @ weights["shortlist_weight"]
        peak = logits.max(-1, keepdims=True)
        logs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        z = z + np.sort(logs, -1)[:, :-3:-1] @ weights["confidence"]
    with np.errstate(over="ignore"):
        z = z / (1 + np.exp(-z))
        return 1 / (1 + np.exp(-(z @ weights["up"] + weights["bias"])))


def run_route(runner: Runner, case: RouteCase, data: RouteData, epsilon: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """float32 scores and int32 exits, [rows]."""
    args = tk.RouteArgs()
    args.states_type, args.weights_type, args.threshold_type = case.states, case.weights, tk.FLOAT32
    args.rows, args.hidden, args.bottleneck, args.shortlist = case.rows, case.hidden, case.bottleneck, case.shortlist
    args.states_stride = case.hidden + case.padding
    args.threshold_stride = 1 if case.row_thresholds else 0
    args.norm.kind, args.norm.epsilon, args.norm.scale_offset = case.norm, epsilon, case.scale_offset
    scores, exits = poison((case.rows,), np.float32), poison((case.rows,), np.int32)
    inputs = {"states": data.states, "threshold": data.threshold, **data.weights}
    runner.run("tide_route", args, inputs, {"scores": scores, "exits": exits}, data.norm)
    return scores, exits


def check_route(runner: Runner, case: RouteCase, tolerance: float) -> None:
    data = route_data(case)
    scores, exits = run_route(runner, case, data)
    expected = route_reference(case, data, 1e-5)
    np.testing.assert_allclose(scores, expected, atol=tolerance, rtol=0)
    assert np.array_equal(exits, (scores > data.threshold).astype(np.int32))
    if case.rows > 50:
        assert scores.std() > 0.005, "the case must tell rows apart"


def check_route_rows_alone(runner: Runner, case: RouteCase, smaller: list[int]) -> None:
    """A row's score is bitwise the same whatever the other rows."""
    data = route_data(case)
    scores, _ = run_route(runner, case, data)
    for rows in smaller:
        for start in sorted({0, case.rows - rows}):
            part = replace(data, states=np.ascontiguousarray(data.states[start : start + rows]))
            again, _ = run_route(runner, replace(case, rows=rows), part)
            assert np.array_equal(again.view(np.int32), scores[start : start + rows].view(np.int32)), (rows, start)


def check_route_nan(runner: Runner, case: RouteCase) -> None:
    """A row that holds a NaN gets a NaN and stays; neither it nor an infinite row changes other rows."""
    data = route_data(case)
    scores, _ = run_route(runner, case, data)
    bad = case.rows // 2
    states = decode(data.states)
    states[bad, case.hidden // 2] = np.nan
    again, exits = run_route(runner, case, replace(data, states=encode(states, case.states)))
    assert np.isnan(again[bad])
    assert exits[bad] == 0
    others = np.arange(case.rows) != bad
    assert np.array_equal(again[others], scores[others])


@dataclass(frozen=True)
class ScatterCase:
    """Sizes and types of one call of TideExitScatter."""

    rows: int
    hidden: int
    lens_rank: int = 0
    states: int = tk.FLOAT32
    weights: int = tk.FLOAT32
    norm: int = tk.NORM_RMS
    shift: bool = False
    output_rows: int = 0  # 0: as many as rows
    padding: int = 0
    seed: int = 0


def check_scatter(runner: Runner, case: ScatterCase, tolerance: float) -> None:
    """Values, exit layers and counts; rows that stay, exited before or have no destination change nothing."""
    rng = np.random.default_rng(case.seed)
    output_rows = case.output_rows or case.rows
    states = encode(rng.normal(0.2, 1.5, (case.rows, case.hidden + case.padding)), case.states)
    lens = {}
    if case.lens_rank:
        lens["lens_down"] = rng.normal(0, 1 / np.sqrt(case.hidden), (case.hidden, case.lens_rank))
        lens["lens_up"] = rng.normal(0, 1 / np.sqrt(case.lens_rank), (case.lens_rank, case.hidden))
        lens["lens_bias"] = rng.normal(0, 0.3, case.hidden)
    lens = {name: encode(array, case.weights) for name, array in lens.items()}
    norm = {}
    if case.norm != tk.NORM_NONE:
        norm["scale"] = encode(rng.normal(1, 0.3, case.hidden), case.weights)
        if case.shift:
            norm["shift"] = encode(rng.normal(0, 0.3, case.hidden), case.weights)
    exits = rng.integers(0, 2, case.rows).astype(np.int32) * 7  # any value but 0 is an exit
    destination = rng.permutation(max(output_rows, case.rows) + 2)[: case.rows].astype(np.int32) - 1
    before_layers = np.where(rng.random(output_rows) < 0.3, 3, 0).astype(np.int32)

    args = tk.ExitScatterArgs()
    args.states_type, args.weights_type, args.layer, args.checkpoint = case.states, case.weights, 8, 1
    args.rows, args.hidden, args.lens_rank = case.rows, case.hidden, case.lens_rank
    args.states_stride = args.output_stride = case.hidden + case.padding
    args.output_rows = output_rows
    args.norm.kind, args.norm.epsilon = case.norm, 1e-6
    output = poison((output_rows, case.hidden + case.padding), states.dtype)
    untouched = output.copy()
    layers, counts = before_layers.copy(), np.array([5, 6, 7], np.int64)
    inputs = {"states": states, "exits": exits, "destination": destination, **lens}
    runner.run("tide_exit_scatter", args, inputs, {"output": output, "exit_layers": layers, "counts": counts}, norm)

    x = decode(states[:, : case.hidden])
    if case.lens_rank:
        inner = rounded(x @ decode(lens["lens_down"]), case.states)
        x = x + inner @ decode(lens["lens_up"]) + decode(lens["lens_bias"])
    x = normed(x, case.norm, 1e-6, norm, 0.0)
    inside = (destination >= 0) & (destination < output_rows)
    leaves = [i for i in range(case.rows) if exits[i] and inside[i] and before_layers[destination[i]] == 0]
    rows = destination[leaves]
    np.testing.assert_allclose(decode(output[rows, : case.hidden]), x[leaves], atol=tolerance, rtol=tolerance)
    kept = np.setdiff1d(np.arange(output_rows), rows)
    assert np.array_equal(output[kept].view(np.uint8), untouched[kept].view(np.uint8))
    assert np.array_equal(output[:, case.hidden :].view(np.uint8), untouched[:, case.hidden :].view(np.uint8))
    expected_layers = before_layers.copy()
    expected_layers[rows] = 8
    assert np.array_equal(layers, expected_layers)
    assert counts.tolist() == [5, 6 + len(leaves), 7]


def check_compact(runner: Runner, rows: int, row_bytes: int, share: float, seed: int = 0, padding: int = 0) -> None:
    """Stable split; memory after the written rows stays poisoned."""
    rng = np.random.default_rng(seed)
    states = rng.integers(0, 255, (rows, row_bytes + padding)).astype(np.uint8)
    exits = (rng.random(rows) < share).astype(np.int32) * 3
    args = tk.CompactArgs()
    args.rows, args.row_bytes, args.states_stride = rows, row_bytes, row_bytes + padding
    outputs = {name: poison((rows, row_bytes), np.uint8) for name in ("staying", "leaving")}
    outputs |= {name: poison((rows,), np.int32) for name in ("staying_rows", "leaving_rows")}
    outputs |= {name: poison((1,), np.int64) for name in ("staying_size", "leaving_size")}
    runner.run("tide_compact", args, {"states": states, "exits": exits}, outputs)
    for name, expected in (("staying", np.flatnonzero(exits == 0)), ("leaving", np.flatnonzero(exits))):
        size = len(expected)
        assert outputs[f"{name}_size"] == [size]
        assert np.array_equal(outputs[f"{name}_rows"][:size], expected)
        assert np.array_equal(outputs[name][:size], states[expected, :row_bytes])
        assert (outputs[name][size:] == 0xFF).all()
        assert (outputs[f"{name}_rows"][size:] == -1).all()


def check_gather(runner: Runner, batch: int, tokens: int, capacity: int, token_bytes: int, seed: int = 0) -> None:
    """Appended in place where they fit; positions of all pending states; else a count above the capacity."""
    rng = np.random.default_rng(seed)
    states = rng.integers(0, 255, (batch, tokens, token_bytes)).astype(np.uint8)
    take = rng.integers(0, 2, batch).astype(np.int32)
    lengths = rng.integers(0, 1000, batch).astype(np.int32)
    counts = rng.integers(0, capacity + 1, batch).astype(np.int32)
    pending = rng.integers(0, 255, (batch, capacity, token_bytes)).astype(np.uint8)
    expected, after = pending.copy(), counts.copy()
    for b in np.flatnonzero(take):
        if counts[b] + tokens <= capacity:
            expected[b, counts[b] : counts[b] + tokens] = states[b]
        after[b] += tokens
    steps = np.arange(capacity)
    positions = poison((batch, capacity), np.int32)

    args = tk.GatherPendingArgs()
    args.batch, args.tokens, args.capacity, args.token_bytes = batch, tokens, capacity, token_bytes
    inputs = {"states": states, "take": take, "lengths": lengths}
    runner.run("tide_gather_pending", args, inputs, {"pending": pending, "counts": counts, "positions": positions})
    assert np.array_equal(pending, expected)
    assert np.array_equal(counts, after)
    assert np.array_equal(positions, np.where(steps < after[:, None], lengths[:, None] + steps, -1))
