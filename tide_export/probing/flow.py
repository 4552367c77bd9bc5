"""`tide-export probe`: samples answers, measures exits and steps, and predicts each mode's speed.

Writes nothing but temporary bundles of a few layers, which are removed.
"""

import logging
import time
from math import ceil

import numpy as np

from tide_export.calibration.config import TideConfig
from tide_export.calibration.estimate import Costs, Work
from tide_export.calibration.split import Split
from tide_export.common.progress import quiet_loggers, stage
from tide_export.data.sequences import TokenSequence, load_tokenizer
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.preflight import context_length
from tide_export.probing.answers import Answers, sample
from tide_export.probing.early import measure_exits
from tide_export.probing.forecast import forecast
from tide_export.probing.memory import check_memory
from tide_export.probing.report import Minutes, ProbeReport
from tide_export.probing.steps import Steps, time_steps
from tide_export.trace.attention.masks import layer_masks
from tide_export.trace.recurrence import refuse_unknown_state
from tide_export.tuning.auto import SECONDS, TEMPERATURE

WEIGHTS = ("fp32", "bf16", "int4")
MAX_CHECKPOINTS = 8
ANSWERS_PER_STEP = 2.75  # tokens that `draft` samples in the time of a step, as measured with int4 on two models
DRAFT_TOKENS = (400_000, 1_600_000)  # of answers, after which those models' drafters accept 51 and 52 % of drafts
ANSWER_SHARE = 0.55  # of the minutes of `draft`


def probe(model: str, *, trust_remote_code: bool = False) -> ProbeReport:
    """Predicts what each mode would gain for `model` on this machine, in minutes and without text.

    Args:
        model: folder, hub id or GGUF file.
        trust_remote_code: run Python code from the model's folder (see `model.source.load_model`).

    Raises:
        ProbeError: the model does not fit the memory, answers nothing, or its first layers cannot be timed alone.
        TideError: the model cannot be read or exported.
    """
    began = time.perf_counter()
    check_memory(model, trust_remote_code)
    with stage("loading the model"):
        source = load_model(model, trust_remote_code=trust_remote_code)
    loading = time.perf_counter() - began
    refuse_unknown_state(source)
    layer_masks(source.model, source.structure.layers)
    config = TideConfig()
    checkpoints = planned(source.num_layers, config)
    answers = sample(source, load_tokenizer(model, trust_remote_code), TEMPERATURE)
    early = measure_exits(source, answers, checkpoints)
    with stage("timing parts of the calibration"), quiet_loggers(logging.WARNING, "tide_export"):
        calibration = calibration_seconds(source, answers, config) if checkpoints else 0.0
    name, depth, parameters = source.name, source.num_layers, source.model.num_parameters()
    steps = time_steps(source, answers.prompts[-1] + answers.answers[-1], WEIGHTS, config)
    return ProbeReport(
        model=name,
        layers=depth,
        parameters=parameters,
        answers=len(answers.answers),
        tokens=answers.tokens,
        chat=answers.chat,
        temperature=TEMPERATURE,
        epsilon=config.epsilon,
        timed_layers=steps[0].timed,
        checkpoints=checkpoints,
        greedy_changed=early.greedy_changed,
        changed=early.changed,
        modes=tuple(forecast(one, early, answers.prompts, config.epsilon) for one in steps),
        minutes=Minutes(
            calibrate=calibration / 60,
            draft=draft_minutes(steps[-1]),
            export=(loading + max(one.export_seconds for one in steps)) / 60,
            check=SECONDS / 60,
        ),
        seconds=time.perf_counter() - began,
    )


def planned(depth: int, config: TideConfig) -> tuple[int, ...]:
    """Returns the checkpoints to look at: a calibration's; fewer in a deep model, one in a shallow one."""
    if depth <= config.checkpoint_interval:
        return (depth // 2,) if depth > 1 else ()
    interval = max(config.checkpoint_interval, ceil(depth / (MAX_CHECKPOINTS + 1)))
    return config.model_copy(update={"checkpoint_interval": interval}).resolve_checkpoints(depth)


def calibration_seconds(source: SourceModel, answers: Answers, config: TideConfig) -> float:
    """Returns the seconds of a calibration with its default text, by the costs of parts on the answers."""
    sequences = [
        TokenSequence(number, np.array(prompt + answer, np.int32))
        for number, (prompt, answer) in enumerate(zip(answers.prompts, answers.answers, strict=True))
    ]
    config = config.sized(source.model.num_parameters())
    length = min(config.calibration_length, context_length(source, None if source.context_length else 2048))
    total = config.calibration_samples * length
    held_out = int(total * config.validation_fraction), int(total * config.test_fraction)
    few = source.num_layers <= config.checkpoint_interval
    checkpoints = planned(source.num_layers, config) if few else config.resolve_checkpoints(source.num_layers)
    part = Split(sequences[::-1], sequences, sequences, "documents")
    work = Work.planned(source, (total - sum(held_out), *held_out), checkpoints, config)
    return sum(Costs.measure(source, part, config).of(work, len(checkpoints), source.num_layers).values())


def draft_minutes(steps: Steps) -> tuple[float, float]:
    """Returns the minutes of `draft` in which the bundle answers as much as did those the prior rests on."""
    per_minute = 60 * ANSWERS_PER_STEP / steps.plain * ANSWER_SHARE
    low, high = (tokens / per_minute for tokens in DRAFT_TOKENS)
    return low, high
