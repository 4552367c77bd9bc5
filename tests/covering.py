"""Chooses the rows of a table that are tested: few of them, which have every feature (a covering array)."""

from collections.abc import Collection, Hashable, Mapping
from itertools import combinations


def covering(rows: Mapping[str, Collection[Hashable]], given: Collection[str] = ()) -> list[str]:
    """Returns names of rows that have, together with the rows `given`, every feature that a row has.

    Chvatal's greedy choice: each time the row with the most features that no chosen row has, of equal ones the one
    with the most features (so that more of them meet in one model), of these the first.
    """
    missing = {feature for features in rows.values() for feature in features}
    missing -= {feature for name in given for feature in rows[name]}
    chosen = []
    while missing:
        best = max(rows, key=lambda name: (len(missing.intersection(rows[name])), len(rows[name])))
        chosen.append(best)
        missing.difference_update(rows[best])
    return chosen


def pairs(features: Collection[str]) -> list[tuple[str, str]]:
    """Returns the pairs of features that a row has."""
    return list(combinations(sorted(set(features)), 2))
