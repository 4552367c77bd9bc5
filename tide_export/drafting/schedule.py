"""Divides the time of a drafter's training between answering and training, in rounds.

The training makes two passes over the answers: acceptance grows with text that is not repeated. Answers come early and
training late: after a share `x` of the time, `x (2 - x)` of all answers are there.

A round ends with a measurement. The expected speed grows about linearly with the logarithm of the trained tokens, so a
line through the last measurements predicts the gain of the remaining time. When that is less than `MIN_GAIN`, or the
time is over, the last round begins, in which the learning rate decays to its final value.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 8
MAX_ROUND_SECONDS = 1200.0
PASSES = 2
FIRST_ANSWER_SHARE = 0.55  # share of the time, before speeds are measured
MAX_ANSWER_SHARE = 0.8  # share of a round
TRAINED_STEPS = 3  # draft steps in most of the training
WARM_UP = 20  # steps
DECAY = 0.75  # share of the training, at its end, over which the rate decays
FINAL_RATE = 0.03
LAST_SHARE = 0.25  # length of the last round of a training that ends early, as a share of the training so far
MIN_GAIN = 0.005  # training ends early when the remaining time would gain a smaller share of speed
FITTED = 4  # maximum measurements that the line is fitted to; 3 are needed
MAX_DRAFTS = 16
DRAFT_COST = 0.07  # cost of a draft in steps, unless measured
VERIFIED = (1, 2, 4, 8, 16)  # numbers of drafts of a bundle's `verify_costs`


def now() -> float:
    """Returns the seconds of a monotonic clock."""
    return time.monotonic()


@dataclass(frozen=True)
class Spent:
    """The time that the main process spent so far, and its work.

    Attributes:
        answering, training, measuring: seconds.
        answer_tokens: new tokens in the answers of all processes.
        trained_rows: rows trained on, summed over all draft steps.
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
    """The plan of a round.

    Attributes:
        answer_until, train_until: total seconds of answering and of training at its end.
        train_total: expected total seconds of training after the last round.
        last: whether this round is the last.
    """

    answer_until: float
    train_until: float
    train_total: float
    last: bool


def next_round(spent: Spent, total: float, enough: bool) -> Round:
    """Plans the next round of a training that has `total` seconds.

    Args:
        enough: whether more text gains too little, so that this round is the last.
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
    """Returns the share of the time for answers such that `PASSES` passes over them fill the rest."""
    if not spent.answering or not spent.training or not spent.answer_tokens or not spent.trained_rows:
        return FIRST_ANSWER_SHARE
    answer = spent.answering / spent.answer_tokens
    train = PASSES * TRAINED_STEPS * spent.training / spent.trained_rows
    return min(MAX_ANSWER_SHARE, max(1 - MAX_ANSWER_SHARE, answer / (answer + train)))


def rate(step: int, progress: float) -> float:
    """Returns the factor of the learning rates: linear warm-up, constant, linear decay.

    Args:
        progress: share of the training that is done.
    """
    falling = min(1.0, max(FINAL_RATE, (1 - progress) / DECAY))
    return min(1.0, (step + 1) / WARM_UP) * falling


def expected_speed(acceptance: Sequence[float], verify_costs: Sequence[float]) -> float:
    """Returns the expected speed over full depth at the best fixed number of drafts, at least 1.

    A runtime that stops drafting when it is not confident is faster, and never slower than 1.

    Args:
        acceptance: share accepted of draft 1, 2, ... whose predecessors were accepted; later drafts have the last.
        verify_costs: additional cost of verifying `VERIFIED` drafts, in steps.
    """
    speeds, tokens, chance = list[float](), 1.0, 1.0
    for drafts in range(1, MAX_DRAFTS + 1):
        chance *= acceptance[min(drafts, len(acceptance)) - 1]
        tokens += chance
        speeds.append(tokens / (1 + float(np.interp(drafts, VERIFIED, verify_costs)) + DRAFT_COST * drafts))
    return max(speeds)


def gain_left(measured: Sequence[tuple[int, float]], spent_share: float) -> float:
    """Returns the relative gain of speed that the remaining time is predicted to bring.

    Args:
        measured: trained tokens and expected speed after each round.
        spent_share: share of the training that is done.
    """
    if len(measured) < 3:
        return math.inf
    tokens, speeds = zip(*measured[-FITTED:], strict=True)
    slope = float(np.polyfit(np.log2(tokens), speeds, 1)[0])
    return slope * -math.log2(max(min(spent_share, 1.0), 1e-9)) / speeds[-1]
