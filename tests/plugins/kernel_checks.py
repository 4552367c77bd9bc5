"""The kernel's reference in float64 NumPy, and checks of it, for the tests on the CPU and on a GPU."""

from dataclasses import dataclass, replace

import numpy as np
from kernel_runner import Runner, decode, encode, poison, rounded, tk

EPSILON = 1e-5


@dataclass(frozen=True)
class ExitCase:
    """Sizes and types of one call of TideExit."""

    slots: int
    hidden: int
    bottleneck: int
    shortlist: int = 0
    lens_rank: int = 0
    kind: int = tk.FLOAT32
    norm: int = tk.NORM_RMS
    shift: bool = False
    tokens: int = 1
    exit_rows: int = 2
    seed: int = 0


@dataclass
class ExitData:
    """Inputs of one call, encoded."""

    states: np.ndarray  # [slots, tokens, hidden]
    last_tokens: np.ndarray
    thresholds: np.ndarray
    router: dict[str, np.ndarray]
    lens: dict[str, np.ndarray]
    norm: dict[str, np.ndarray]

    def inputs(self) -> dict[str, np.ndarray]:
        found = {"states": self.states, "last_tokens": self.last_tokens, "thresholds": self.thresholds}
        return found | self.router | self.lens


@dataclass
class ExitResult:
    """What one call wrote."""

    scores: np.ndarray
    exits: np.ndarray
    exit_states: np.ndarray


def exit_data(case: ExitCase) -> ExitData:
    rng = np.random.default_rng(case.seed)
    hidden, bottleneck, rank = case.hidden, case.bottleneck, case.lens_rank
    spread = 1 / np.sqrt(hidden)
    states = rng.normal(0.3, 1.0, (case.slots, case.tokens, hidden)) * rng.uniform(0.5, 2, (case.slots, 1, 1))
    router = {
        "down": rng.normal(0, spread, (hidden, bottleneck)),
        "up": rng.normal(0, 1 / np.sqrt(bottleneck), bottleneck),
        "bias": rng.normal(0, 1, 1),
    }
    if case.shortlist:
        router["shortlist_weight"] = rng.normal(0, 3 * spread, (hidden, case.shortlist))
        router["confidence"] = rng.normal(0, 1, (2, bottleneck))
    lens = {}
    if rank:
        lens["lens_down"] = rng.normal(0, spread, (hidden, rank))
        lens["lens_up"] = rng.normal(0, 1 / np.sqrt(rank), (rank, hidden))
        lens["lens_bias"] = rng.normal(0, 0.3, hidden)
    norm = {}
    if case.norm != tk.NORM_NONE:
        norm["scale"] = rng.normal(1, 0.3, hidden)
        if case.shift:
            norm["shift"] = rng.normal(0, 0.3, hidden)
    thresholds = rng.uniform(0.2, 0.8, case.slots)
    thresholds[0::3], thresholds[1::3] = 0.0, 2.0  # exits; never exits
    return ExitData(
        encode(states, case.kind),
        rng.integers(0, case.tokens, case.slots).astype(np.int64),
        thresholds.astype(np.float32),
        {name: array.astype(np.float32) for name, array in router.items()},
        {name: encode(array, case.kind) for name, array in lens.items()},
        {name: encode(array, case.kind) for name, array in norm.items()},
    )


def exit_reference(case: ExitCase, data: ExitData) -> tuple[np.ndarray, np.ndarray]:
    """float64 scores [slots] and what the head reads, [slots, hidden]."""
    x = decode(data.states)[np.arange(case.slots), data.last_tokens]
    if data.lens:
        lens = {name: decode(array) for name, array in data.lens.items()}
        x = x + rounded(x @ lens["lens_down"], case.kind) @ lens["lens_up"] + lens["lens_bias"]
    if case.norm != tk.NORM_NONE:
        centred = x - x.mean(-1, keepdims=True) if case.norm == tk.NORM_LAYER else x
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * decode(data.norm["scale"])
        x = x + decode(data.norm["shift"]) if "shift" in data.norm else x
    x = rounded(x, case.kind)
    weights = {name: array.astype(np.float64) for name, array in data.router.items()}
    z = x @ weights["down"]
    if case.shortlist:
        logits = x @ weights["shortlist_weight"]
        peak = logits.max(-1, keepdims=True)
        logs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        z = z + np.sort(logs, -1)[:, :-3:-1] @ weights["confidence"]
    with np.errstate(over="ignore"):
        z = z / (1 + np.exp(-z))
        return 1 / (1 + np.exp(-(z @ weights["up"] + weights["bias"]))), x


def exit_args(case: ExitCase) -> tk.ExitArgs:
    """The sizes and types, without pointers."""
    args = tk.ExitArgs(states_type=case.kind, slots=case.slots, tokens=case.tokens, hidden=case.hidden)
    args.exit_rows, args.bottleneck = case.exit_rows, case.bottleneck
    args.shortlist, args.lens_rank = case.shortlist, case.lens_rank
    args.norm.kind, args.norm.epsilon = case.norm, EPSILON
    return args


def run_exit(runner: Runner, case: ExitCase, data: ExitData) -> ExitResult:
    scores, exits = poison((case.slots,), np.float32), poison((case.slots,), np.int32)
    exit_states = poison((case.slots, case.exit_rows, case.hidden), data.states.dtype)
    outputs = {"scores": scores, "exits": exits, "exit_states": exit_states}
    runner.run(exit_args(case), data.inputs(), outputs, data.norm)
    return ExitResult(scores, exits, exit_states)


def check_exit(runner: Runner, case: ExitCase, tolerance: float) -> None:
    """Scores, verdicts, the states of the slots that exit; all other rows keep what they held."""
    data = exit_data(case)
    result = run_exit(runner, case, data)
    scores, states = exit_reference(case, data)
    np.testing.assert_allclose(result.scores, scores, atol=tolerance, rtol=0)
    assert np.array_equal(result.exits, (result.scores > data.thresholds).astype(np.int32))
    exits = result.exits != 0
    np.testing.assert_allclose(decode(result.exit_states[exits, 0]), states[exits], atol=tolerance, rtol=tolerance)
    untouched = np.ones((case.slots, case.exit_rows), bool)
    untouched[exits, 0] = False
    assert (result.exit_states[untouched].view(np.uint8) == 0xFF).all()
    if case.slots > 50:
        assert scores.std() > 0.001, "the case must tell slots apart"
        assert 0 < exits.sum() < case.slots, "some slots must exit and some stay"


def check_slots_alone(runner: Runner, case: ExitCase, fewer: list[int]) -> None:
    """A slot's results are bitwise the same whatever the other slots."""
    data = exit_data(case)
    whole = run_exit(runner, case, data)
    for slots in fewer:
        for start in sorted({0, case.slots - slots}):
            part = slice(start, start + slots)
            fields = {name: getattr(data, name)[part] for name in ("states", "last_tokens", "thresholds")}
            some = run_exit(runner, replace(case, slots=slots), replace(data, **fields))
            for name in ("scores", "exits", "exit_states"):
                ours, theirs = getattr(some, name), getattr(whole, name)[part]
                assert np.array_equal(ours.view(np.uint8), theirs.view(np.uint8)), (name, slots, start)


def check_nan(runner: Runner, case: ExitCase) -> None:
    """A slot that holds a NaN gets a NaN and stays; it changes no other slot."""
    data = exit_data(case)
    before = run_exit(runner, case, data)
    bad = case.slots // 2
    states = decode(data.states)
    states[bad, data.last_tokens[bad], case.hidden // 2] = np.nan
    after = run_exit(runner, case, replace(data, states=encode(states, case.kind)))
    assert np.isnan(after.scores[bad])
    assert after.exits[bad] == 0
    others = np.arange(case.slots) != bad
    assert np.array_equal(after.scores[others], before.scores[others])
    assert np.array_equal(after.exit_states[others].view(np.uint8), before.exit_states[others].view(np.uint8))
