"""Measures the fastest mode here within bounds of what it changes; it becomes mode `auto`.

`export` measures the thresholds that calibration chose, `tune` those it certified, or its drafting. Modes are
interleaved on the same prompts and seeds, sampled at temperature 0.8: greedy text of small models repeats itself, which
makes drafts look better than in real use.
"""

import logging
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import ceil, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

from tide_export.bundle.auto_mode import EXIT_ERROR, AutoMode, bounds_of, sentence
from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.common.changed_tokens import TEMPERATURE
from tide_export.common.progress import stage
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.tuning.request import LosslessRequest
from tide_export.tuning.slots import slot_speedup

logger = logging.getLogger("tide_export")

PROVIDER = "cpu"  # the provider that `export` and `tune` measure on
PROMPTS = (
    "The history of the city begins with a settlement on the river, where",
    "Question: Why is the sky blue in the day and red in the evening?\nAnswer:",
    'def read_table(path):\n    """Return the rows of a CSV file as dictionaries."""\n',
    "Dear Anna, thank you for your letter. I am writing to tell you that",
)
Steps = dict[int, list[float]]  # layers run -> seconds of each step
NEW_TOKENS = 48  # after each prompt, in each mode and round
MIN_NEW_TOKENS = 8  # if more tokens would take longer than SECONDS
ROUNDS = 3  # over all prompts, at least
STEADY_SECONDS = 2.0  # of a small model there are more rounds
SECONDS = 30.0
PAYS = 1.02  # least speed-up over full depth, and 2 standard errors above 1
WORTH = 0.002  # share of the operations that exits must save to be measured


def measure_auto(bundle: Path, manifest: Manifest, epsilon: float, perplexity_epsilon: float) -> AutoMode | None:
    """Measures the exits that calibration chose within both bounds, if by its count they save anything.

    Args:
        bundle: the bundle's folder.
        manifest: its manifest.
        epsilon: largest share of changed tokens.
        perplexity_epsilon: largest change of perplexity.

    Returns:
        Mode `auto`; None if the routers have no `calibration.operating_points`.
    """
    if not manifest.checkpoints:
        return _unmeasured(manifest, epsilon, None, "the bundle has no checkpoints, so no token exits")
    if "operating_points" not in (manifest.calibration or {}):
        return None
    point, reason = None, ""
    try:
        points = (manifest.calibration or {})["operating_points"]
        point = _point(points, epsilon, perplexity_epsilon, len(manifest.checkpoints))
    except (KeyError, TypeError, ValueError):  # a router file of another program, or without changes of perplexity
        reason = "the operating points in the routers' record cannot be read: calibrate again"
    if point is None:
        bounds = f"an epsilon of {epsilon:g} and a perplexity_epsilon of {perplexity_epsilon:g}"
        reason = reason or f"the routers have no thresholds for {bounds}"
    elif point["tokens"] * point["epsilon"] < 1:
        reason = (
            f"{point['tokens']} held-out tokens of the calibration text are too few to show at most "
            f"{100 * point['epsilon']:g} % changed tokens: {ceil(1 / point['epsilon'])} or more are needed, so "
            "calibrate on more text"
        )
    elif not point["saved"] > WORTH:
        reason = f"no exits with {bounds_of(epsilon, perplexity_epsilon)} save more than they cost"
    if point is None or reason:
        auto = _unmeasured(manifest, epsilon, None, reason)
        logger.info("%s", sentence(auto))
        return auto
    thresholds = tuple(point["thresholds"])
    with stage("measuring what exits gain here"):
        speedup, error = exit_speedup(load(bundle, provider=PROVIDER, verify=False), thresholds)
    auto = replace(_unmeasured(manifest, epsilon, None), thresholds=thresholds, exit_speedup=speedup)
    point |= {"perplexity_epsilon": perplexity_epsilon, EXIT_ERROR: error}
    auto = chosen(replace(auto, evidence=_evidence("calibration", point)))
    logger.info("%s", sentence(auto))
    return auto


def with_exits(
    engine: Engine,
    thresholds: Sequence[float],
    epsilon: float,
    change: dict[str, Any],
    threads: int | None,
    slots: Sequence[int] = (),
) -> AutoMode:
    """Measures thresholds that `tune` certified for `epsilon`; keeps the measurement of lossless mode.

    Args:
        change: what they changed, for the evidence: the fields of `Change`, and `perplexity_epsilon`.
        slots: numbers of sequences to measure as well, if exits are faster for one.
    """
    pays = any(value < MAX_THRESHOLD for value in thresholds)
    speedup, error = exit_speedup(engine, thresholds) if pays else (None, None)
    auto = _measured_anew(
        engine.auto or _unmeasured(engine.manifest, epsilon, threads),
        "exit",
        thresholds=tuple(thresholds),
        epsilon=epsilon,
        exit_speedup=speedup,
        machine=_machine(threads),
        evidence=_evidence(
            "tune",
            change | {EXIT_ERROR: error}
            if pays
            else {"reason": f"no exits are certified for an epsilon of {epsilon:g}"},
        ),
    )
    if auto.mode != "exit" or not slots:
        return auto
    modes, prompts = _modes(thresholds), shipped_prompts(engine)
    new_tokens = max(MIN_NEW_TOKENS, min(NEW_TOKENS, _room(engine.manifest, prompts)))
    return _for_several(engine, auto, [replace(mode, max_new_tokens=new_tokens) for mode in modes], prompts, slots)


def with_lossless(
    engine: Engine, speedup: float | None, request: LosslessRequest, prompts: Sequence[list[int]]
) -> AutoMode:
    """Adds the speed-up of `tune --mode lossless`, and measures several sequences; keeps that of exits.

    Args:
        engine: an engine with the measured drafting.
        speedup: measured with one sequence; None: drafting is off.
        request: its `slots` are measured if lossless mode is the fastest for one sequence.
        prompts: the prompts to measure with.
    """
    auto = _measured_anew(
        engine.auto or _unmeasured(engine.manifest, 0.0, request.threads),
        "lossless",
        lossless_speedup=speedup,
        machine=_machine(request.threads),
    )
    if auto.mode != "lossless" or not request.slots:
        return auto
    full = GenerationConfig(
        mode="full", max_new_tokens=request.new_tokens, temperature=request.temperature, stop_token_ids=()
    )
    return _for_several(engine, auto, [full, replace(full, mode="lossless")], prompts, request.slots)


def _measured_anew(known: AutoMode, mode: str, **measured: Any) -> AutoMode:
    """Returns `known` with new measurements of `mode`.

    The measurement of several sequences is kept only if the fastest mode remains the other one.
    """
    auto = chosen(replace(known, slots=None, **measured))
    evidence = {name: value for name, value in auto.evidence.items() if name != "slots"}
    if auto.mode == known.mode != mode:
        several = {name: value for name, value in known.evidence.items() if name == "slots"}
        return replace(auto, slots=known.slots, evidence=evidence | several)
    return replace(auto, evidence=evidence)


def _for_several(
    engine: Engine,
    auto: AutoMode,
    modes: Sequence[GenerationConfig],
    prompts: Sequence[list[int]],
    slots: Sequence[int],
) -> AutoMode:
    """Measures the second of `modes` against the first for several sequences.

    `AutoMode.slots` becomes the largest number for which it is faster, as it must be for all smaller ones measured.
    """
    speedups = {count: slot_speedup(engine, modes, prompts, count) for count in sorted(slots)}
    losing = [count for count, speedup in speedups.items() if speedup < PAYS]
    paying = [count for count in speedups if count < min(losing, default=count + 1)]
    evidence = auto.evidence | {"slots": {str(count): speedup for count, speedup in speedups.items()}}
    return replace(auto, slots=max(paying, default=None), evidence=evidence)


def _modes(thresholds: Sequence[float]) -> list[GenerationConfig]:
    """Returns the two modes to compare: full depth, and exits with `thresholds`."""
    full = GenerationConfig(mode="full", temperature=TEMPERATURE, stop_token_ids=())
    return [full, replace(full, mode="exit", threshold=tuple(thresholds), min_layers=0)]


def chosen(auto: AutoMode) -> AutoMode:
    """Returns `auto` with the fastest measured mode; full depth unless another is surely 2 % faster."""
    exits = auto.exit_speedup or 0.0
    surely = exits >= max(PAYS, 1 + 2 * auto.evidence.get(EXIT_ERROR, 0.0))
    speeds = {"lossless": auto.lossless_speedup or 0.0, "exit": exits if surely else 0.0}
    best = max(speeds, key=lambda mode: speeds[mode])
    return replace(auto, mode=best if speeds[best] >= PAYS else "full")


def exit_speedup(engine: Engine, thresholds: Sequence[float]) -> tuple[float, float]:
    """Returns mode exit's speed over full depth at `thresholds`, and its standard error.

    The modes are interleaved token by token. Other programs delay single steps, so each step counts as the median of
    the steps that ran equally many layers. The error is of the mean over rounds, each with all prompts and other seeds.
    """
    modes, prompts = _modes(thresholds), shipped_prompts(engine)
    new_tokens = affordable_tokens(engine, modes, prompts)
    all_steps: list[Steps] = [{} for _ in modes]
    rounds: list[float] = []
    started = time.perf_counter()
    while len(rounds) < ROUNDS or time.perf_counter() - started < STEADY_SECONDS:
        steps: list[Steps] = [{} for _ in modes]
        for number, prompt in enumerate(prompts):
            decoded = _decode(engine, modes, prompt, new_tokens, seed=len(rounds) * len(prompts) + number)
            for mode, (times, layers) in enumerate(decoded):
                for value, count in zip(times, layers, strict=True):
                    steps[mode].setdefault(count, []).append(value)
                    all_steps[mode].setdefault(count, []).append(value)
        rounds.append(_ratio(steps))
    return _ratio(all_steps), stdev(rounds) / sqrt(len(rounds))


def _ratio(steps: Sequence[Steps]) -> float:
    full, exits = (sum(len(times) * median(times) for times in classes.values()) for classes in steps)
    return full / exits


def affordable_tokens(engine: Engine, modes: Sequence[GenerationConfig], prompts: Sequence[list[int]]) -> int:
    """Returns how many tokens to generate after each of `prompts` in each mode and round."""
    started = time.perf_counter()
    _decode(engine, modes, prompts[0], MIN_NEW_TOKENS, seed=0)  # allocates memory, and times a token
    seconds = time.perf_counter() - started
    affordable = int(MIN_NEW_TOKENS * SECONDS / (seconds * ROUNDS * len(prompts)))
    return max(MIN_NEW_TOKENS, min(NEW_TOKENS, affordable, _room(engine.manifest, prompts)))


def _decode(
    engine: Engine, modes: Sequence[GenerationConfig], prompt: Sequence[int], new_tokens: int, seed: int
) -> list[tuple[list[float], list[int]]]:
    """Decodes with each mode, tokens interleaved; returns seconds and layers of each token but the first."""
    streams = [engine.stream(prompt, mode, max_new_tokens=new_tokens, seed=seed) for mode in modes]
    times: list[list[float]] = [[] for _ in streams]
    for _ in range(new_tokens):
        for stream, seconds in zip(streams, times, strict=True):
            started = time.perf_counter()
            next(stream, None)
            seconds.append(time.perf_counter() - started)
    counts = [stream.stats.layers_run for stream in streams]
    return [(seconds[1 : len(layers)], layers[1:]) for seconds, layers in zip(times, counts, strict=True)]


def shipped_prompts(engine: Engine) -> list[list[int]]:
    """Returns the token ids of `PROMPTS`, or single tokens where the bundle has no tokenizer for them."""
    manifest = engine.manifest
    with suppress(GenerationError):  # a tokenizer that knows no token of a prompt
        if TOKENIZER_FILE in engine.bundle.files:
            tokenizer = BundleTokenizer(engine.bundle)
            prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
            if all(max(ids) < manifest.model.vocab_size for ids in prompts):
                return [ids[: max(1, (manifest.model.context_length or len(ids)) // 2)] for ids in prompts]
    return [[(7919 * (number + 1)) % manifest.model.vocab_size] for number in range(len(PROMPTS))]


def _room(manifest: Manifest, prompts: Sequence[Sequence[int]]) -> int:
    context = manifest.model.context_length
    return NEW_TOKENS if context is None else context - max(map(len, prompts))


def _unmeasured(manifest: Manifest, epsilon: float, threads: int | None, reason: str = "") -> AutoMode:
    off = (MAX_THRESHOLD,) * len(manifest.checkpoints)
    evidence = {"reason": reason} if reason else {}
    return AutoMode("full", off, epsilon, PROVIDER, None, None, _machine(threads), evidence)


def _point(points: Any, epsilon: float, perplexity_epsilon: float, checkpoints: int) -> dict[str, Any] | None:
    """Checks and returns the operating point that saves most within both bounds; None: there is none.

    Raises:
        KeyError, TypeError, ValueError: it does not fit the number of checkpoints, or is damaged.
    """
    allowed = [
        point
        for point in points
        if float(point["epsilon"]) <= epsilon and float(point["perplexity_epsilon"]) <= perplexity_epsilon
    ]
    if not allowed:
        return None
    point = max(allowed, key=lambda point: (float(point["saved"]), float(point["epsilon"])))
    thresholds = [float(value) for value in point["thresholds"]]
    if len(thresholds) != checkpoints or not all(0 <= value <= 1 for value in thresholds):
        raise ValueError("thresholds")
    share, saved, tokens = float(point["epsilon"]), float(point["saved"]), int(point["tokens"])
    return point | {"epsilon": share, "saved": saved, "tokens": tokens, "thresholds": thresholds}


def _evidence(source: str, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": source,
        "temperature": TEMPERATURE,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **values,
    }


def _machine(threads: int | None) -> str:
    """Returns the processor's name and the threads of a step."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count() if threads is None else threads} threads"
