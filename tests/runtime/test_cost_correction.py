"""What steps cost is corrected by the times of later steps, slowly, and whatever the clock says."""

import random
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("cpp/src/decoding/cost_correction.cpp", "cpp/src/decoding/draft_costs.cpp")
BEFORE = [0.1, 0.2, 0.3, 0.6, 1.2, 0.4, 0.8, 0.1]  # of 1, 2, 4, 8, 16 tokens more, two exits, the drafter
TOKENS = (1, 2, 3, 5, 9, 17)

Reading = tuple[str | int | float, ...]


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Iterable[Reading]], list[float]]:
    """The costs after some readings."""
    program = tmp_path_factory.mktemp("correction") / "program"
    sources = [Path(__file__).with_name("cost_correction.cpp"), *(ROOT / source for source in SOURCES)]
    flags = ["-std=c++17", "-Wall", "-Werror", f"-I{ROOT}/cpp/src", f"-I{ROOT}/cpp/include"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(program)], check=True)

    def run(readings: Iterable[Reading]) -> list[float]:
        text = "".join(" ".join(map(str, reading)) + "\n" for reading in readings)
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
        return [float(value) for value in done.stdout.split()]

    return run


def true_steps(costs: list[float], count: int, seconds: float = 0.02) -> list[Reading]:
    """Steps that take what these costs say, with the scatter of a busy machine."""
    draw = random.Random(0)
    readings: list[Reading] = []
    for _ in range(count):
        number = draw.randrange(9)
        scatter = seconds * draw.lognormvariate(0, 0.05) * (3 if draw.random() < 0.02 else 1)
        if number < 6:
            readings.append(("ran", TOKENS[number], scatter * (1 + (costs[number - 1] if number else 0))))
        elif number < 8:
            readings.append(("exited", number - 6, scatter * costs[number - 1]))
        else:
            readings.append(("drafted", scatter * costs[7]))
    return readings


def test_wrong_costs_come_right(corrected) -> None:
    right = [0.2, 0.3, 0.5, 0.9, 1.5, 0.3, 0.6, 0.05]
    assert corrected(true_steps(right, 20_000)) == pytest.approx(right, abs=0.05)


def test_right_costs_stay_on_a_machine_that_becomes_slower(corrected) -> None:
    readings = [*true_steps(BEFORE, 3000), *true_steps(BEFORE, 3000, seconds=0.2), *true_steps(BEFORE, 3000)]
    assert corrected(readings) == pytest.approx(BEFORE, abs=0.06)


def test_steps_over_one_token_alone_say_nothing(corrected) -> None:
    assert corrected([("ran", 1, 0.02 * (1 + number % 7)) for number in range(500)]) == BEFORE


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "0", "-0.0", "-5", "-1e308"])
def test_what_is_no_time_is_not_read(corrected, seconds: str) -> None:
    steady = [("ran", tokens, 0.02 * (1 + cost)) for tokens, cost in zip(TOKENS, [0.0, *BEFORE[:5]], strict=True)] * 20
    wrong: list[Reading] = [("ran", tokens, seconds) for tokens in TOKENS]
    wrong += [("exited", 0, seconds), ("exited", 1, seconds), ("drafted", seconds)]
    assert corrected([*wrong, *steady, *wrong * 50]) == pytest.approx(corrected(steady), abs=1e-9)


@pytest.mark.parametrize("seconds", ["1e-300", "1e300", "1e5", "1e-9"])
def test_a_clock_that_jumps_once_moves_nothing_far(corrected, seconds: str) -> None:
    steady = [("ran", tokens, 0.02 * (1 + cost)) for tokens, cost in zip(TOKENS, [0.0, *BEFORE[:5]], strict=True)] * 20
    jump: list[Reading] = [("ran", 3, seconds), ("exited", 0, seconds), ("drafted", seconds)]
    assert corrected([*steady, *jump]) == pytest.approx(BEFORE, abs=0.01)
    assert corrected([*jump, *steady * 5]) == pytest.approx(BEFORE, abs=0.1), "also as the first reading"


def test_a_clock_that_always_jumps_gives_costs_in_order(corrected) -> None:
    draw = random.Random(1)
    times = ["nan", "-1", "0", "1e-300", "1e300", "0.02", "1e5"]
    readings: list[Reading] = [("ran", draw.choice((*TOKENS, 64, 65, 10**9)), draw.choice(times)) for _ in range(5000)]
    readings += [("exited", draw.choice((0, 1, 2, 99)), draw.choice(times)) for _ in range(500)]
    found = corrected(readings)
    assert found[:5] == sorted(found[:5])
    assert all(0 <= cost < 1e6 for cost in found)
