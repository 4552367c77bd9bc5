"""What drafts of one sequence gain and cost, by what verification showed before in it, in steps of full depth.

`LosslessDecoder` drafts by prompt lookup as far as the expected gain exceeds the cost: `Acceptance` estimates the gain,
starting at shares measured on sampled text. Each kind of draft may lose no more than its `Balance` has, so that a
sequence in which drafts are rejected takes hardly longer than full depth does. Both depend on the sequence alone, never
on a clock: a generation that is repeated drafts the same again.
"""

from collections.abc import Sequence

AGREEMENTS = 2  # times in a row that the same token followed an n-gram, counted up to this
# By length of the n-gram and agreements: share of prompt-lookup drafts accepted, of code and answers drawn at
# temperature .6 and .8 (docs/measurements/lossless.md).
NGRAM_SHARES = ((0.17, 0.42, 0.76), (0.42, 0.62, 0.88), (0.54, 0.75, 0.9))
WEIGHT = 12.0  # drafts that the starting share counts for
DECAY = 0.97  # by which earlier drafts count less than the latest

START_BALANCE = 0.5
MAX_BALANCE = 4.0
ALLOWANCE = 0.01  # added with every token, so that drafts which were given up are tried again


class Balance:
    """What drafts of one kind may still lose in a sequence, in steps of full depth.

    Attributes:
        steps: what they gained more than they cost, with what they may lose at the start and by and by; bounded, so
            that drafts which gained much are given up as soon as they gain no more.
    """

    def __init__(self) -> None:
        """Nothing was drafted yet."""
        self.steps = START_BALANCE

    def settle(self, accepted: int, cost: float, tokens: int) -> None:
        """Adds a verification: of `accepted` drafts, each of which saved a step, at a cost; the sequence grew by
        `tokens`."""
        self.steps = min(self.steps + accepted - cost + ALLOWANCE * tokens, MAX_BALANCE)


def ngram_source(length: int, agreements: int) -> int:
    """The source of a draft after a match of `length` tokens which the same token followed `agreements` times more."""
    return (length - 1) * (AGREEMENTS + 1) + min(agreements, AGREEMENTS)


class Acceptance:
    """Estimated shares of prompt-lookup drafts that are accepted, by source."""

    def __init__(self) -> None:
        """Nothing was verified yet."""
        self._accepted = [share * WEIGHT for shares in NGRAM_SHARES for share in shares]
        self._drafted = [WEIGHT] * len(self._accepted)

    def of(self, source: int) -> float:
        """Estimated probability that the next draft of a source is accepted, where those before it are."""
        return self._accepted[source] / self._drafted[source]

    def record(self, sources: Sequence[int], accepted: int) -> None:
        """Adds a verification: of drafts of these sources the first `accepted`. Those after the first rejected show
        nothing."""
        for number, source in enumerate(sources[: accepted + 1]):
            self._accepted[source] = self._accepted[source] * DECAY + (number < accepted)
            self._drafted[source] = self._drafted[source] * DECAY + 1.0

    def save(self) -> tuple[list[float], list[float]]:
        """What `restore` returns to."""
        return self._accepted.copy(), self._drafted.copy()

    def restore(self, saved: tuple[list[float], list[float]]) -> None:
        self._accepted, self._drafted = (counts.copy() for counts in saved)
