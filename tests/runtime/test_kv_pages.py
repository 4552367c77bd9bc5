"""The pool of K/V pages: taken, shared, copied and given back; bounded, with a sentence where it ends."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_engines import TinyLlama

from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import SchedulerLimits

PAGE_TOKENS = 16

# In a process that may map little memory, the pool is small.
SMALL_POOL = """
import resource, sys
from pathlib import Path
from tide_export.errors import GenerationError
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits

load(sys.argv[1], threads=1)  # opens the libraries
limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (96 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
engine = load(sys.argv[1], threads=1)
"""

SEQUENCES = """
off = [2.0] * len(engine.manifest.checkpoints)


def fill(said):
    # Starts sequences of 100 tokens until there is no page, and returns them.
    states = []
    while True:
        state = engine.start(off, 0)
        try:
            for _ in range(10):  # what a step over all of them computes would take as much memory as their pages
                state.step([1] * 10)
        except GenerationError as error:
            if said:
                print(error)
            assert state.length % 10 == 0
            assert state.lengths == [state.length] * len(state.lengths)
            return states
        states.append(state)


states = fill(True)
print(len(states))
kept = states[::2]
for state in kept:
    state.rewind(1)
del states[1::2]  # their pages come back, and six of each that was rewound
for state in kept:
    for _ in range(11):
        state.step([1] * 9)
print(len(kept) + len(fill(False)))
"""

REQUESTS = """
def asked(number):
    return {"ids": [number % 89 + 3, number // 89 + 3] + [5] * (number % 98), "max_new_tokens": 4,
            "stop_token_ids": [], "mode": "full"}

def submit(scheduler, number):
    options = asked(number)
    return scheduler.submit(options.pop("ids"), **options)

try:
    engine.scheduler(SchedulerLimits(prefix_cache_bytes=2**60))
except GenerationError as error:
    print(error)
    page = 16 * engine.manifest.kv_token_bytes
    pages = int(str(error).split()[-1]) // page
scheduler = engine.scheduler(SchedulerLimits(slots=1024, prefix_cache_bytes=pages // 4 * page))
handles = [submit(scheduler, number) for number in range(2500)]
most = 0
while scheduler.step():
    most = max(most, scheduler.running)
for handle in handles:
    assert len(handle.result().tokens) == 4
for number in range(0, 2500, 50):
    assert handles[number].result().tokens == engine.generate(**asked(number)).tokens
print(most)
scheduler = engine.scheduler(SchedulerLimits(slots=1024, prefix_cache_bytes=(pages - 2048 - 4) * page))
handles = [submit(scheduler, number) for number in range(20)]  # of 24 tokens at most
for handle in handles:
    assert len(handle.result().tokens) == 4
try:
    submit(scheduler, 97)
except GenerationError as error:
    print(error)
"""


def run_with_a_small_pool(bundle: Path, script: str) -> list[str]:
    command = [sys.executable, "-c", SMALL_POOL + script, str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


def test_a_pool_that_is_full_is_said_and_goes_on_when_pages_come_back(tiny_llama: TinyLlama) -> None:
    sentence, *facts = run_with_a_small_pool(tiny_llama.exact, SEQUENCES)
    said = re.fullmatch(r"not enough memory for the K/V cache: it holds (\d+) tokens of all sequences", sentence)
    assert said is not None, sentence
    held, held_again = (int(fact) for fact in facts)
    pages = int(said[1]) // PAGE_TOKENS
    assert held == pages // 7, "a sequence of 100 tokens has seven pages"
    assert held_again == held, "the pages of sequences that are gone, and of tokens that were rewound"


def test_thousands_of_requests_wait_for_pages(tiny_llama: TinyLlama) -> None:
    """None fails in the middle, though all slots at once would need more pages than there are."""
    too_much, most, refused = run_with_a_small_pool(tiny_llama.exact, REQUESTS)
    assert re.fullmatch(r"prefix_cache_bytes is \d+, and the memory for K/V holds \d+.*", too_much), too_much
    assert 64 < int(most) < 1000
    assert refused == "prompt and max_new_tokens have 103 tokens, and the scheduler has K/V memory for 64"


def test_sequences_that_share_pages_do_not_change_each_other(engine: Engine) -> None:
    """Two requests go on differently in the middle of a page that the cache holds as well."""
    prompt = [token % 97 + 3 for token in range(48)]  # the last page is cached up to its last token
    limits = SchedulerLimits(slots=4, prefix_cache_bytes=100 * PAGE_TOKENS * engine.manifest.kv_token_bytes)
    scheduler = engine.scheduler(limits)
    scheduler.submit(prompt, mode="full", max_new_tokens=2, stop_token_ids=[]).result()
    options = [{"mode": "full", "max_new_tokens": 40, "temperature": 1.0, "seed": seed} for seed in range(4)]
    handles = [scheduler.submit(prompt, stop_token_ids=[], **given) for given in options]
    for handle, given in zip(handles, options, strict=True):
        assert handle.result().tokens == engine.generate(prompt, stop_token_ids=[], **given).tokens
        assert handle.cached_tokens == 47
    assert len({tuple(handle.result().tokens) for handle in handles}) == 4


def test_a_sequence_may_be_rewound_into_pages_that_it_shares(engine: Engine) -> None:
    """What it writes again is its own: the cache's page stays, and other requests read that."""
    off, ids = [2.0] * len(engine.manifest.checkpoints), [token % 97 + 3 for token in range(64)]
    state = engine.start(off, 0)
    expected = state.step(ids).logits.copy()
    for length in (0, 1, 15, 16, 17, 33, 63):
        state.rewind(length)
        state.step([5] * (64 - length))
        state.rewind(length)
        np.testing.assert_array_equal(state.step(ids[length:], full=True).logits, expected)
