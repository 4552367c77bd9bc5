"""The oracle's result for the last token of any sequence, for tests that step engines at random."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT
from tide_export.verify.oracle import OracleOutput, oracle

TEXT = [(i * 37) % 500 + 3 for i in range(40)]
AHEAD = 32  # tokens that the oracle reads at a time


class Truth(NamedTuple):
    """The oracle's result for the last token of a sequence; `full_logits` [S, V] are of all."""

    exit_layer: int
    logits: np.ndarray
    scores: np.ndarray
    full_logits: np.ndarray


class Judge:
    """The oracle on one model.

    Attributes:
        depths: layers up to the end of each segment.
        thresholds: of each checkpoint, values that all, none or some of TEXT's scores exceed.
    """

    def __init__(self, source: SourceModel, routers: RouterSet) -> None:
        self.depths = (*routers.checkpoints, source.num_layers)
        self._source, self._routers = source, routers
        scores = oracle(source, routers, TEXT, [NEVER_EXIT] * len(routers.checkpoints)).scores.numpy()
        some = np.quantile(scores, [0.5, 0.2, 0.8], axis=0).T.tolist()
        self.thresholds = [[NEVER_EXIT, ALWAYS_EXIT, *values, 0.0, 1.0] for values in some]
        self._oracle = lru_cache(512)(self._run)

    def truth(self, ids: list[int], thresholds: tuple[float, ...], following: Iterator[int]) -> Truth:
        """The result after `ids`.

        Args:
            following: tokens that probably follow. The oracle reads some of them too, so that it runs less often.
        """
        more = -len(ids) % AHEAD
        text, last = (*ids, *islice(following, more)), len(ids) - 1
        output = self._oracle(text, thresholds)
        full = output.full_logits[: last + 1].numpy()
        return Truth(int(output.exit_layers[last]), output.logits[last].numpy(), output.scores[last].numpy(), full)

    def _run(self, ids: tuple[int, ...], thresholds: tuple[float, ...]) -> OracleOutput:
        return oracle(self._source, self._routers, ids, thresholds)
