"""Chooses the rows of a table that are tested in all forms: few of them, which have every feature of the table."""

from collections.abc import Collection, Mapping


def covering(rows: Mapping[str, Collection[str]]) -> list[str]:
    """Returns names of rows that together have every feature that a row has (a covering array of strength 1).

    Chvatal's greedy choice: each time the row with the most features that no chosen row has, of equal ones the one
    with the most features (so that more of them meet in one model), of these the first.
    """
    missing = {feature for features in rows.values() for feature in features}
    chosen = []
    while missing:
        best = max(rows, key=lambda name: (len(missing.intersection(rows[name])), len(rows[name])))
        chosen.append(best)
        missing.difference_update(rows[best])
    return chosen
