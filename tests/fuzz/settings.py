"""How many cases hypothesis tries."""

import os

import tiers
from hypothesis import HealthCheck, settings


def cases(usual: int, exhaustive: int | None = None, **options) -> settings:
    """Settings of a number of cases, the same in every run; with TIDE_FUZZ_CASES that many, drawn at random.

    Args:
        usual: in `make test`.
        exhaustive: in `make test-all`; None: `usual`.
        options: further settings of hypothesis.
    """
    wanted = os.environ.get("TIDE_FUZZ_CASES")
    return settings(
        max_examples=int(wanted or tiers.sized(usual, exhaustive or usual)),
        derandomize=wanted is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **options,
    )
