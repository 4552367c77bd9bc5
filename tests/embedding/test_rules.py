"""Rules that only the C++ sources show (rules.cpp): the generator, numbers of 16 bits, an audit's bounds, pages."""

import signal
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builds import Embedding, environment, run
from tiny_engines import TinyLlama


@pytest.mark.parametrize(
    ("counter_and_key", "words"),
    [
        ("0 0 0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (" ".join(["ffffffff"] * 6), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_generator_is_philox(embedding: Embedding, counter_and_key: str, words: str) -> None:
    """The vectors of Random123, its authors' library, for Philox4x32-10."""
    assert run([str(embedding.rules), "philox", *counter_and_key.split()]).split() == words.split()


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_states_are_rounded_as_numpy_rounds_them(embedding: Embedding, dtype: np.dtype) -> None:
    """Every number of 16 bits, those between two of them, and what is too large."""
    exact = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    finite = exact[np.isfinite(exact)]
    between = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    random = np.random.default_rng(3).integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([exact, between.astype(np.float32), random, np.nextafter(between.astype(np.float32), 9)])
    lines = run([str(embedding.rules), "numbers", dtype.name], "\n".join(f"{n:x}" for n in numbers.view(np.uint32)))
    halves, back = np.array([[int(word, 16) for word in line.split()] for line in lines.splitlines()], np.uint32).T
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(dtype)
    known = ~np.isnan(numbers)
    np.testing.assert_array_equal(halves[known], expected.view(np.uint16)[known])
    np.testing.assert_array_equal(np.isnan(back.view(np.float32)), ~known)
    np.testing.assert_array_equal(back.view(np.float32)[known], expected.astype(np.float32)[known])


def bounds(embedding: Embedding, losses: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper bound after each loss."""
    lines = run([str(embedding.rules), "bounds", str(delta)], " ".join(map(str, losses.astype(float)))).splitlines()
    return tuple(np.array([line.split() for line in lines], float).T)


@pytest.mark.parametrize("rates", [(0.02, 0.02), (0.3, 0.3), (0.0, 0.2), (0.3, 0.0)])
def test_bounds_hold_at_all_times(embedding: Embedding, rates: tuple[float, float]) -> None:
    """The mean of the expected losses drifts from one rate to the other."""
    drawn, runs, steps, delta = np.random.default_rng(4), 120, 300, 0.1
    means = np.linspace(*rates, steps)
    running = means.cumsum() / np.arange(1, steps + 1)
    found = [bounds(embedding, losses, delta) for losses in drawn.random((runs, steps)) < means]
    assert sum((lower > running).any() for lower, _ in found) <= delta * runs
    assert sum((upper < running).any() for _, upper in found) <= delta * runs


def test_bounds_close_in(embedding: Embedding) -> None:
    nothing, some = np.zeros(4000), np.arange(4000) % 50 == 0
    lower, upper = bounds(embedding, nothing, 0.05)
    assert lower[-1] == 0 < upper[-1] < 0.0011
    lower, upper = bounds(embedding, some, 0.05)
    assert 0.01 < lower[-1] < 0.02 < upper[-1] < 0.032
    assert (lower[0], upper[0]) == (0, 1)


def test_a_debug_build_stops_before_a_page_is_written_for_two_sequences(
    embedding: Embedding, tiny_llama: TinyLlama
) -> None:
    command = [str(embedding.rules), "pages", str(tiny_llama.exact)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == -signal.SIGABRT
    assert "writes_no_page_twice" in done.stderr


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "300", "memory.max": "900"}, 300),
        ("0::/a/b", {"a/b/memory.max": "200", "a/memory.max": "300"}, 200),
        ("0::/of/the/host", {"memory.max": "400"}, 400),  # of a container without a namespace of its own
        ("4:cpu,memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "500", "a/memory.max": "3"}, 500),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 1000),
        ("0::/../x", {"unified/memory.max": "600"}, 600),
        ("", {"memory.max": "3"}, 1000),
        ("nonsense\n0::/a", {"a/memory.max": "nonsense"}, 1000),
    ],
)
def test_the_least_limit_of_control_groups_counts(
    embedding: Embedding, tmp_path: Path, groups: str, files: dict[str, str], limit: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert run([str(embedding.rules), "memory", groups, str(tmp_path), "1000"]) == f"{limit}\n"
