"""Divides the time between answers and training, in rounds; learning rate; expected speed; when more gains little.

Two passes over the answers are aimed at: an acceptance grows with the text that is not repeated. Answers come early and
training late: when a share `x` of the time is over, `x (2 - x)` of all answers shall be there.

A round ends with a measurement. The expected speed grows about linearly with the logarithm of the tokens learned from,
so a line through the last measurements says what the time that is left would gain. Where that is less than `MIN_GAIN`,
or the time is over, the last round begins, in which the learning rate falls to its end.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 8
MAX_ROUND_SECONDS = 1200.0
PASSES = 2
FIRST_ANSWER_SHARE = 0.55  # of the time, before speeds are measured
MAX_ANSWER_SHARE = 0.8  # of a round
TRAINED_STEPS = 3  # draft steps of most of the training
WARM_UP = 20  # steps
DECAY = 0.75  # of the training, at its end, has a falling rate
FINAL_RATE = 0.03
LAST_SHARE = 0.25  # of the training so far: the length of the last round of one that ends early
MIN_GAIN = 0.005  # of speed: training ends early when the time that is left would gain less
FITTED = 4  # measurements that the line goes through, at most; 3 are needed
MAX_DRAFTS = 16
DRAFT_COST = 0.07  # of a draft, in steps, where none was measured
VERIFIED = (1, 2, 4, 8, 16)  # drafts of a bundle's `verify_costs`


def now() -> float:
    """Returns seconds of a clock that only runs forward."""
    return time.monotonic()


@dataclass(frozen=True)
class Spent:
    """What was done so far, of the main process.

    Attributes:
        answering, training, measuring: seconds.
        answer_tokens: new tokens of all processes' answers.
        trained_rows: of all draft steps.
    """

    answering: float
    training: float
    measuring: float
    answer_tokens: int
    trained_rows: int

    @property
    def seconds(self) -> float:
        return self.answering + self.training + self.measuring


@dataclass(frozen=True)
class Round:
    """What a round shall do.

    Attributes:
        answer_until, train_until: seconds of answering and training in all at its end.
        train_total: expected seconds of training in all at the end of the last round.
        last: whether it is that one.
    """

    answer_until: float
    train_until: float
    train_total: float
    last: bool


def next_round(spent: Spent, total: float, enough: bool) -> Round:
    """Plans the next round of a training that has `total` seconds.

    Args:
        enough: more text gains too little: this round is the last.
    """
    left = max(0.0, total - spent.seconds)
    length = min(total / ROUNDS, MAX_ROUND_SECONDS)
    usable = total * (1 - spent.measuring / spent.seconds) if spent.seconds else total
    answering = answer_share(spent) * usable
    if enough or left <= 1.5 * length:
        training = min(left, LAST_SHARE * spent.training) if enough else left
        until = spent.training + training
        return Round(spent.answering, until, until, True)
    share = min(1.0, (spent.seconds + length) / total)
    wanted = answering * share * (2 - share) - spent.answering
    answers = min(max(wanted, 0.0), MAX_ANSWER_SHARE * length)
    return Round(
        spent.answering + answers,
        spent.training + length - answers,
        max(usable - answering, spent.training + length - answers),
        False,
    )


def answer_share(spent: Spent) -> float:
    """Returns the share of the time in which answers are made so that `PASSES` over them fill the rest."""
    if not spent.answering or not spent.training or not spent.answer_tokens or not spent.trained_rows:
        return FIRST_ANSWER_SHARE
    answer = spent.answering / spent.answer_tokens
    train = PASSES * TRAINED_STEPS * spent.training / spent.trained_rows
    return min(MAX_ANSWER_SHARE, max(1 - MAX_ANSWER_SHARE, answer / (answer + train)))


def rate(step: int, progress: float) -> float:
    """Returns the factor of the learning rates: a warm-up, constant, then a linear decay."""
    falling = min(1.0, max(FINAL_RATE, (1 - progress) / DECAY))
    return min(1.0, (step + 1) / WARM_UP) * falling


def expected_speed(acceptance: Sequence[float], verify_costs: Sequence[float], draft_cost: float = DRAFT_COST) -> float:
    """Returns the best expected speed, over full depth, of runs that all verify the same number of drafts, 1 or more.

    A runtime that drafts on only where it is confident is faster, and one that drafts where it pays never below 1.

    Args:
        acceptance: of draft 1, 2, ..., each where the ones before were accepted; later ones are as the last.
        verify_costs: of verifying `VERIFIED` drafts, in steps, on top of one.
    """
    speeds, tokens, chance = list[float](), 1.0, 1.0
    for drafts in range(1, MAX_DRAFTS + 1):
        chance *= acceptance[min(drafts, len(acceptance)) - 1]
        tokens += chance
        speeds.append(tokens / (1 + float(np.interp(drafts, VERIFIED, verify_costs)) + draft_cost * drafts))
    return max(speeds)


def gain_left(measured: Sequence[tuple[int, float]], spent_share: float) -> float:
    """Returns the relative gain of speed that the time left would bring, by a line through the last measurements.

    Args:
        measured: tokens learned from and expected speed, after each round.
        spent_share: of the training.
    """
    if len(measured) < 3:
        return math.inf
    tokens, speeds = zip(*measured[-FITTED:], strict=True)
    slope = float(np.polyfit(np.log2(tokens), speeds, 1)[0])
    return slope * -math.log2(max(min(spent_share, 1.0), 1e-9)) / speeds[-1]
