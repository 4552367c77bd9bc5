"""How likely a draft is accepted, estimated from what verification showed before in the same sequence.

`LosslessDecoder` drafts as far as the expected gain exceeds the cost. The estimates start at shares measured on sampled
text and depend on the sequence alone, never on a clock: a generation that is repeated drafts the same again.
"""

EXITS = 0  # the source of early exits; those of prompt-lookup drafts follow
AGREEMENTS = 2  # times in a row that the same token followed an n-gram, counted up to this
# By length of the n-gram and agreements: share of prompt-lookup drafts accepted, of code and answers drawn at
# temperature .6 and .8 (docs/measurements/lossless.md).
NGRAM_SHARES = ((0.17, 0.42, 0.76), (0.42, 0.62, 0.88), (0.54, 0.75, 0.9), (0.7, 0.85, 0.94))
EXIT_SHARE = 0.6
WEIGHT = 12.0  # drafts that the starting share counts for
EXIT_WEIGHT = 4.0
DECAY = 0.97  # by which earlier drafts count less than the latest
MIN_EXIT_SHARE = 0.45  # below it early exits cost more than they gain


def ngram_source(length: int, agreements: int) -> int:
    """The source of a draft after a match of `length` tokens which the same token followed `agreements` times more."""
    return 1 + (length - 1) * (AGREEMENTS + 1) + min(agreements, AGREEMENTS)


class Acceptance:
    """Estimates of one sequence, by source."""

    def __init__(self) -> None:
        """Nothing was verified yet."""
        shares = [share for length in NGRAM_SHARES for share in length]
        self._accepted = [EXIT_SHARE * EXIT_WEIGHT, *(share * WEIGHT for share in shares)]
        self._drafted = [EXIT_WEIGHT, *(WEIGHT for _ in shares)]

    def of(self, source: int) -> float:
        """Estimated probability that the next draft of a source is accepted, where those before it are."""
        return self._accepted[source] / self._drafted[source]

    @property
    def exits_pay(self) -> bool:
        """Whether early exits are worth drafting; once they are not, they stay off in this sequence."""
        return self.of(EXITS) >= MIN_EXIT_SHARE

    def record(self, sources: list[int], accepted: int) -> None:
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
