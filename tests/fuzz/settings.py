"""How many cases hypothesis tries."""

import os

from hypothesis import HealthCheck, Phase, settings


def mutated() -> bool:
    """Whether tools/checks/mutants.py runs the tests: any failure will do."""
    return "MUTANT_UNDER_TEST" in os.environ


def cases(default: int, **options) -> settings:
    """Settings of `default` cases, the same in every run, a quarter of them for mutants; with TIDE_FUZZ_CASES that
    many, drawn at random.

    Args:
        options: further settings of hypothesis.
    """
    wanted = os.environ.get("TIDE_FUZZ_CASES")
    return settings(
        max_examples=int(wanted or (default // 4 if mutated() else default)),
        derandomize=wanted is None,
        database=None,
        deadline=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate] if mutated() else list(Phase),
        suppress_health_check=list(HealthCheck),
        **options,
    )
