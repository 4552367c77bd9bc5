"""How many cases hypothesis tries."""

import os

from hypothesis import HealthCheck, settings


def cases(default: int, **options) -> settings:
    """Settings of `default` cases, the same in every run; with TIDE_FUZZ_CASES that many, drawn at random.

    Args:
        options: further settings of hypothesis.
    """
    wanted = os.environ.get("TIDE_FUZZ_CASES")
    return settings(
        max_examples=int(wanted or default),
        derandomize=wanted is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **options,
    )
