"""Watches over what early exits change in live traffic.

Of the tokens of mode `exit`, each is chosen with the same probability, before it is known. One that exited is made
again at full depth, from the same tokens and with the same random number (`decoding.audited`); one that did not is the
full model's. So the losses, 1 where the tokens differ, are a fair sample of the traffic's, and `ConfidenceSequence`
bounds the share of its tokens that are not those of the full model after the same text.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tide_export.bundle.manifest import PROPAGATE
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.scheduling.confidence import ConfidenceSequence
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.values import real_number

AUDIT_RATE = 0.01  # costs 2 % of the time at most (docs/measurements/audit.md)
DELTA = 0.05  # how likely a bound may ever be wrong
RAISES = 3  # of thresholds; the next step turns exits off

logger = logging.getLogger("tide_export.scheduling")


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """How a scheduler audits mode `exit`.

    Attributes:
        rate: share of the tokens that are chosen.
        epsilon: largest share of tokens that exits may change. When the lower bound is above it, the thresholds of
            requests that get a slot from then on are raised, half of the way to 1 each time; after RAISES times exits
            are turned off. None: they stay.

    Raises:
        GenerationError: one is not a number, or outside its range.
    """

    rate: float = AUDIT_RATE
    epsilon: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < real_number(f"audit {name}", value) <= 1:
                raise GenerationError(f"audit {name} must be above 0 and at most 1, not {value}")


class Audit:
    """The audit of one scheduler.

    Attributes:
        audited: tokens that were chosen, of all requests.
        checked: those of them that had exited, and were made again at full depth.
        different: those of them that full depth makes another token of.
        raises: how often thresholds were raised.
    """

    def __init__(self, config: AuditConfig) -> None:
        self._config, self._random = config, random.Random()
        self.audited = self.checked = self.different = self.raises = 0
        self._delta = DELTA if config.epsilon is None else DELTA / (RAISES + 2)
        self._bounds = ConfidenceSequence(self._delta)

    @property
    def upper_bound(self) -> float:
        """The share of tokens that exits change is no larger, since thresholds were raised last."""
        return self._bounds.upper

    @property
    def lower_bound(self) -> float:
        return self._bounds.lower

    def raised(self, thresholds: Sequence[float]) -> list[float]:
        """The thresholds of a request that begins now."""
        if self.raises > RAISES:
            return [NEVER_EXIT] * len(thresholds)
        return [value if value >= 1 else 1 - (1 - value) / 2**self.raises for value in thresholds]

    def chooses(self) -> bool:
        """Whether to audit the next token."""
        return self._random.random() < self._config.rate

    def record(self, exited: bool, different: bool, raises: int) -> None:
        """Counts a token that was chosen, of a request whose thresholds had been raised so often."""
        self.audited += 1
        self.checked += exited
        self.different += different
        if raises != self.raises:
            return
        self._bounds.add(float(different))
        epsilon = self._config.epsilon
        if epsilon is not None and raises <= RAISES and self._bounds.lower > epsilon:
            self._raise(epsilon)

    def _raise(self, epsilon: float) -> None:
        self.raises += 1
        what = "are raised" if self.raises <= RAISES else "let nothing exit any more"
        logger.warning(
            "audit: exits change at least %.2g %% of the tokens, and audit_epsilon is %.2g %%: the thresholds of "
            "requests that begin from now on %s",
            100 * self._bounds.lower,
            100 * epsilon,
            what,
        )
        self._bounds = ConfidenceSequence(self._delta)


def open_audit(bundle: Bundle, config: AuditConfig) -> Audit:
    """An audit for requests of a bundle. Raises GenerationError: there is nothing to audit, or it cannot be undone."""
    if not bundle.manifest.checkpoints:
        raise GenerationError(f"an audit is for checkpoints, and bundle {bundle.path} has none: no token leaves early")
    if bundle.manifest.kv_cache_strategy == PROPAGATE:
        raise GenerationError(
            f"an audit needs an exact K/V cache, and bundle {bundle.path} propagates: export it with "
            "kv_cache_strategy exact"
        )
    return Audit(config)
