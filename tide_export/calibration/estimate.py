"""Estimates how long a calibration will take on this machine, and corrects that while it runs.

Times the model, its head, an update of a lens and an epoch of a router on a few tokens, and multiplies by the number of
tokens that each will process. Parts that are done correct what is left: a machine that became busy stays so.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tide_export.calibration.collect import capacities
from tide_export.calibration.config import TideConfig
from tide_export.calibration.fast_attention import fast_attention
from tide_export.calibration.fit_lenses import MEASUREMENTS, UPDATE_TOKENS, VALIDATION_TOKENS, start, update
from tide_export.calibration.fit_router import LabelledHidden, fit_router
from tide_export.calibration.labels import blocks, predict
from tide_export.calibration.lens_loss import PartialHead
from tide_export.calibration.parallel import MAX_THREADS, in_parallel
from tide_export.calibration.placement import CURVE_TOKENS
from tide_export.calibration.split import Split
from tide_export.common.changed_tokens import changed_tokens
from tide_export.common.progress import duration
from tide_export.model.source import SourceModel

PROBED_TOKENS = 256  # per sequence
LABELS = 0.6  # share of the head's time: `unchanged` rarely computes all of it
MEASURED = 1.5  # in head times: the head with divergence and added loss
CHANGED_ROWS = 32  # of which changed tokens are timed
HELD_OUT_HIDDEN = 64  # of those that a router is timed on
EPOCHS = 0.8  # share of `router_epochs` after which the loss mostly stops falling
Result = TypeVar("Result")
logger = logging.getLogger("tide_export")


def estimate(source: SourceModel, split: Split, checkpoints: Sequence[int], config: TideConfig) -> "Timetable":
    """Returns how long calibration with `config` and each of its parts will take."""
    work = Work.of(source, split, checkpoints, config)
    return Timetable(Costs.measure(source, split, config).of(work, len(checkpoints), source.num_layers))


class Timetable:
    """The estimated seconds of the parts of a calibration, in their order."""

    def __init__(self, seconds: Mapping[str, float], clock: Callable[[], float] = time.perf_counter) -> None:
        """Takes part -> seconds; a part of none is omitted."""
        self._seconds, self._clock, self._begun, self._started = dict(seconds), clock, 0, 0.0

    @property
    def sentence(self) -> str:
        """The estimate of the whole and of each part."""
        parts = ", ".join(f"{what} {duration(time)}" for what, time in self._seconds.items() if time)
        return f"calibration takes about {duration(sum(self._seconds.values()))} on this machine: {parts}"

    def next(self) -> None:
        """Begins the next part and logs its share, and what is left by the time that the parts so far took."""
        now = self._clock()
        self._started = self._started if self._begun else now
        part, seconds = list(self._seconds.items())[self._begun]
        values = list(self._seconds.values())
        done, left = sum(values[: self._begun]), sum(values[self._begun :])
        self._begun += 1
        if seconds:
            slower = (now - self._started) / done if done else 1.0
            share, rest = 100 * seconds / sum(values), duration(left * slower)
            logger.info("%s: %.0f %% of the calibration, about %s left in all", part, share, rest)


@dataclass(frozen=True)
class Work:
    """The number of tokens that each part will process.

    Attributes:
        read: tokens of the text, over which the model runs once.
        again: tokens over which the model runs again for the lenses.
        lens: tokens to which each lens is fitted, counting repetitions.
        train, held_out: tokens kept of the training split, and of each other split.
    """

    read: int
    again: int
    lens: int
    train: int
    held_out: int

    @classmethod
    def of(cls, source: SourceModel, split: Split, checkpoints: Sequence[int], config: TideConfig) -> "Work":
        """Counts the tokens of `split`."""
        parts = (split.train, split.validation, split.test)
        tokens = tuple(sum(len(sequence.ids) for sequence in part) for part in parts)
        return cls.planned(source, tokens, checkpoints, config)

    @classmethod
    def planned(
        cls, source: SourceModel, tokens: Sequence[int], checkpoints: Sequence[int], config: TideConfig
    ) -> "Work":
        """Counts the tokens of a split whose parts (training, validation, test) have `tokens` each."""
        train, validation, test = tokens
        most, held_out = capacities(source, config, len(checkpoints) + 1)
        lens = 0 if config.exit_strategy == "identity" else min(config.lens_tokens, config.lens_epochs * train)
        again = lens if train > most else 0
        return cls(train + validation + test, again, lens, min(train, most), min(validation, test, held_out))


@dataclass(frozen=True)
class Costs:
    """Seconds per token with all cores of this machine.

    Attributes:
        model, head: a forward pass of each.
        target: the target of a lens.
        lens: an update of one lens.
        router: the updates of one router in all epochs.
        changed: changed tokens of one exit.
    """

    model: float
    head: float
    target: float
    lens: float
    router: float
    changed: float

    @classmethod
    def measure(cls, source: SourceModel, split: Split, config: TideConfig) -> "Costs":
        """Times the model, its head and a lens on the first tokens of a few sequences."""
        threads = min(torch.get_num_threads(), MAX_THREADS)
        ids = [torch.from_numpy(sequence.ids[:PROBED_TOKENS]).long()[None] for sequence in split.train[:threads]]
        depth = source.num_layers

        def run(part: torch.Tensor) -> torch.Tensor:
            return source.raw_hidden(part.to(source.device), [depth])[depth][0].float()

        def choose(rows: slice) -> torch.Tensor:
            return predict(source, normalized[rows]).likeliest()

        with fast_attention(source, ids[0][0].tolist(), [depth]):
            model, hidden = _timed(lambda: torch.cat(list(in_parallel(source, run, ids))))
        normalized = source.normalize(hidden)
        head, _ = _timed(lambda: list(in_parallel(source, choose, blocks(source, len(hidden)))))
        logits = predict(source, normalized[:CHANGED_ROWS]).logits.cpu().numpy()
        changed, _ = _timed(lambda: changed_tokens(logits, logits[::-1], config.temperature))
        generator = torch.Generator().manual_seed(config.seed)
        partial_head, fit = PartialHead(source), start(source, hidden, config, depth)
        part = hidden[:UPDATE_TOKENS]
        target, made = _timed(lambda: partial_head.target(source.normalize(part), generator))
        lens, _ = _timed(
            lambda: update(fit, made.loss(source.normalize(fit.translate(part))), config.lens_learning_rate)
        )
        tokens = len(hidden)
        router = _router_epoch(source, normalized, config, threads) * config.router_epochs * EPOCHS
        each = model / tokens, head / tokens, target / len(part), lens / len(part), router / tokens
        return cls(*each, changed / len(logits) / threads)

    def of(self, work: Work, checkpoints: int, depth: int) -> dict[str, float]:
        """Returns the seconds of each part of `work`."""
        kept = work.train + work.held_out
        layers = self.model * 4 * CURVE_TOKENS + self.head * MEASURED * CURVE_TOKENS * depth
        looked_at = min(work.held_out, VALIDATION_TOKENS)
        return {
            f"reading {work.read + work.again:,} tokens": self.model * (work.read + work.again) + layers,
            f"fitting {checkpoints} lenses to {work.lens:,}": work.lens * (self.target + checkpoints * self.lens)
            + (self.head * MEASURED * looked_at * (MEASUREMENTS + 1) * (checkpoints + 1) if work.lens else 0.0),
            f"fitting {checkpoints} routers to {work.train:,}": self.head * kept * (1 + LABELS * checkpoints)
            + self.router * work.train * checkpoints,
            "measuring": (self.head * MEASURED * (checkpoints + 1) + self.changed * checkpoints) * work.held_out,
        }


def _router_epoch(source: SourceModel, hidden: torch.Tensor, config: TideConfig, threads: int) -> float:
    """Returns the seconds of a router's epoch on normalized `hidden` [n, D'], others fitted beside it."""
    once = config.model_copy(update={"router_epochs": 1})
    labels = torch.arange(len(hidden)) % 2 == 0
    size = min(config.router_shortlist, source.vocab_size)
    shortlist = torch.randn(max(2, size), hidden.shape[1]) if size else None
    train, held_out = (LabelledHidden(hidden[rows], labels[rows]) for rows in (slice(None), slice(HELD_OUT_HIDDEN)))

    def fit(number: int) -> None:
        fit_router(train, held_out, once, number, shortlist)

    seconds, _ = _timed(lambda: list(in_parallel(source, fit, range(threads))))
    return seconds / threads


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Calls `work` twice, as the first call allocates; returns the seconds and result of the second."""
    work()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
