"""How many cases hypothesis tries."""

import os

from hypothesis import HealthCheck, Phase, settings


def cases(default: int, **options) -> settings:
    """Settings of `default` cases, the same in every run; with TIDE_FUZZ_CASES that many, drawn at random.

    Args:
        options: further settings of hypothesis.
    """
    wanted = os.environ.get("TIDE_FUZZ_CASES")
    mutated = "MUTANT_UNDER_TEST" in os.environ  # by mutmut: any failure will do
    return settings(
        max_examples=int(wanted or default),
        derandomize=wanted is None,
        database=None,
        deadline=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate] if mutated else list(Phase),
        suppress_health_check=list(HealthCheck),
        **options,
    )
