"""Memory that ends: every allocation of an operation fails in turn (memory.cpp). Nothing has changed then, and the same
operation succeeds with the same results."""

import re

import pytest
import tiers
from builds import Embedding, run
from tiny_engines import TinyLlama

Operations = list[tuple[str, str, dict[str, int]]]
# Operations by the bundle and the provider, with the fewest allocations that each makes.
OPERATIONS: Operations = [
    ("exact", "cpu", {"sequence-grow": 70, "sequence-one": 70, "sequence-rewind": 1, "load": 5}),
    ("exact", "cpu", {"batch-grow": 200, "batch-alone": 100, "batch-join": 5, "submit": 20}),
    ("exact", "cpu", {"stream-all": 500, "schedule-0": 150, "schedule-cache": 150}),
    ("propagating", "cpu", {"sequence-grow": 70, "sequence-one": 70, "batch-grow": 150, "batch-alone": 100}),
    ("exact", "cpu-networks", {"sequence-grow": 70, "sequence-one": 70, "batch-alone": 80, "batch-join": 3}),
]
# The same in more modes, in a second request's steps, or of what takes long on others.
MORE: Operations = [
    ("exact", "cpu", {"list": 25, "stream-full": 400, "stream-lossless": 500, "schedule-9": 150, "schedule-60": 150}),
    ("propagating", "cpu", {"stream-exit": 400, "schedule-0": 150}),
    ("exact", "cpu-networks", {"batch-grow": 300, "stream-exit": 700, "schedule-0": 300}),
]


def cases(operations: Operations) -> list[tuple[str, str, str, int]]:
    return [(bundle, provider, *one) for bundle, provider, of_it in operations for one in of_it.items()]


@pytest.mark.parametrize(
    ("bundle", "provider", "operation", "fewest"),
    tiers.exhaustive_beyond(len(cases(OPERATIONS)), cases(OPERATIONS + MORE)),
)
def test_an_allocation_that_fails(
    embedding: Embedding, tiny_llama: TinyLlama, bundle: str, provider: str, operation: str, fewest: int
) -> None:
    *differences, counts = run(
        [str(embedding.memory), str(getattr(tiny_llama, bundle)), provider, operation]
    ).splitlines()
    assert differences == []
    failures, errors = (int(number) for number in re.fullmatch(r"(\d+) failures, (\d+) errors", counts).groups())
    assert failures >= fewest
    if operation in ("schedule-0", "schedule-cache"):  # a step that fails is repeated for each request alone
        assert 0 < errors < failures / 5
    else:  # of a list, a step that fails in an operator is repeated too
        assert errors > failures / 3
