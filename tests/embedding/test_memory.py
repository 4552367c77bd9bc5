"""Memory that ends: every allocation of an operation fails in turn (memory.cpp). Nothing has changed then, and the same
operation succeeds with the same results."""

import re

import pytest
import tiers
from builds import Embedding, run
from tiny_engines import TinyLlama

Operations = list[tuple[str, dict[str, int]]]
# Operations by the provider, with the fewest allocations that each makes.
OPERATIONS: Operations = [
    ("cpu", {"sequence-grow": 70, "sequence-one": 70, "sequence-rewind": 1, "load": 5}),
    ("cpu", {"batch-grow": 200, "batch-alone": 100, "batch-join": 5, "submit": 20}),
    ("cpu", {"stream-all": 500, "schedule-0": 150, "schedule-cache": 150}),
    ("cpu-networks", {"sequence-grow": 70, "sequence-one": 70, "batch-alone": 80, "batch-join": 3}),
]
# The same in more modes, in a second request's steps, or of what takes long on others.
MORE: Operations = [
    ("cpu", {"list": 25, "stream-full": 400, "stream-lossless": 500, "schedule-9": 150, "schedule-60": 150}),
    ("cpu-networks", {"batch-grow": 300, "stream-exit": 700, "schedule-0": 300}),
]


def cases(operations: Operations) -> list[tuple[str, str, int]]:
    return [(provider, *one) for provider, of_it in operations for one in of_it.items()]


@pytest.mark.parametrize(
    ("provider", "operation", "fewest"),
    tiers.exhaustive_beyond(len(cases(OPERATIONS)), cases(OPERATIONS + MORE)),
)
def test_an_allocation_that_fails(
    embedding: Embedding, tiny_llama: TinyLlama, provider: str, operation: str, fewest: int
) -> None:
    *differences, counts = run([str(embedding.memory), str(tiny_llama.exact), provider, operation]).splitlines()
    assert differences == []
    failures, errors = (int(number) for number in re.fullmatch(r"(\d+) failures, (\d+) errors", counts).groups())
    assert failures >= fewest
    if operation in ("schedule-0", "schedule-cache"):  # a step that fails is repeated for each request alone
        assert 0 < errors < failures / 5
    else:  # of a list, a step that fails in an operator is repeated too
        assert errors > failures / 3
