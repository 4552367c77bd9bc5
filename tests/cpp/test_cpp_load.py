"""Many threads on one engine of the C++ runtime, in all modes, with streams that are cancelled and callbacks that
throw: a serial run's tokens, and nothing is left behind."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cpp_engine import CppEngine, prompts_of
from test_cpp_callbacks import resources

SECONDS = os.environ.get("TIDE_LOAD_SECONDS", "5")
THREADS = 64


@pytest.mark.slow
def test_64_threads_give_the_tokens_of_a_serial_run_and_memory_stays_flat(
    demo_bundle: Path, open_cpp: Callable[..., CppEngine], demo_text_ids: list[int]
) -> None:
    engine = open_cpp(demo_bundle)
    prompts = [demo_text_ids[40 * number : 40 * number + 1 + 7 * number] for number in range(6)]
    engine.generate_batch(prompts, max_new_tokens=2)
    before = resources(engine)
    found = engine.call("threads", str(THREADS), SECONDS, os.environ.get("TIDE_SEED", "0"), *prompts_of(prompts))
    json.dump(found, sys.stdout, indent=2)
    assert found["violations"] == []
    ends = ("whole", "cancelled", "thrown", "list whole", "list cancelled", "list thrown")
    assert found["generations"].keys() == {f"mode {mode} {end}" for mode in range(4) for end in ends}
    assert resources(engine) == before
    assert found["end_mib"] < 1.25 * found["warm_mib"] + THREADS, "a MiB for each thread that may be in a list by then"
