"""Requests of every mode get the tokens of `Engine.generate` from the scheduler of C++ too, through tide.h.

Two things differ from tests/serving/conformance.py: a sampled request is compared with C++'s own generation, as the two
runtimes have other random numbers; and a grammar is a logits processor, which here is the Python runtime's.
"""

import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_interface import CEngine, Process, Processor, processor_of

sys.path.append(str(Path(__file__).parents[1] / "serving"))  # the requests

from conformance import CLIENTS, Answer, Front, Item, check, concurrently, expected, items_of

from tide_export.runtime.engine import Engine, load
from tide_export.runtime.grammar import KINDS, Grammar


@pytest.fixture(scope="module", params=["exact", "propagating", "segment networks"])
def ours(request: pytest.FixtureRequest, tokenizers_library: Path) -> Iterator[CEngine]:
    library, load = "c_library", "load"
    if request.param == "segment networks":
        library, load = "c_networks_library", "load_networks"
    bundle = request.getfixturevalue("propagating_bundle" if request.param == "propagating" else "demo_bundle")
    engine = CEngine(request.getfixturevalue(library), bundle, load, tokenizers=str(tokenizers_library))
    yield engine
    engine.close()


def test_the_scheduler(ours: CEngine, demo_text_ids: list[int]) -> None:
    engine = load(ours.bundle, provider="cpu", threads=1)
    items = items_of(engine, demo_text_ids)

    def generate(ids: list[int], **options: Any) -> Any:
        if "seed" not in options:
            return engine.generate(ids, **options)
        processor, plain = split(engine, ids, options)
        return ours.generate(ids, processor, **plain)

    check(by_c(ours, engine), items, expected(engine, items, generate), engine, generate)


def by_c(ours: CEngine, engine: Engine) -> Front:
    """The scheduler of C++ in a thread of its own."""

    def front(items: list[Item]) -> list[Answer]:
        cache = 2**24 if ours.load == "load" else 0  # K/V of segment networks cannot be copied
        scheduler = ours.scheduler(slots=CLIENTS - 2, prompt_tokens=64, prefix_cache_bytes=cache)
        scheduler.start()

        def ask(item: Item) -> Answer:
            processor, options = split(engine, item.ids, item.options)
            request = scheduler.submit(item.ids, processor, stop=item.stops, detokenize=True, **options)
            for number, _ in enumerate(request, 1):
                if number == item.leaves_after:
                    request.cancel()
            done = request.result()
            request.close()
            if done.finish_reason == "cancelled":
                return Answer("", None, len(done.tokens), done.tokens)
            reason = "stop" if done.finish_reason == "stop" else "length"
            return Answer(done.text or "", reason, len(done.tokens), done.tokens)

        answers = concurrently(ask)(items)
        scheduler.close()
        return answers

    return front


def split(engine: Engine, ids: list[int], options: dict[str, Any]) -> tuple[Processor | None, dict[str, Any]]:
    """The hook for a grammar and for a logits processor, if the options have one, and the others."""
    plain, hooks = dict(options), list[Process]()
    if changed := plain.pop("logits_processor", None):
        hooks.append(lambda ids, logits: np.copyto(logits, changed(ids, logits)) is None)
    for kind in options.keys() & set(KINDS):
        hooks.append(following(Grammar(engine.bundle, kind, plain.pop(kind)), len(ids)))
    return processor_of(lambda *both: all(hook(*both) for hook in hooks)) if hooks else None, plain


def following(grammar: Grammar, prompt: int) -> Process:
    """Allows what a grammar does after `prompt` tokens."""
    state, made = grammar.start(), list[int]()

    def process(ids: list[int], logits: np.ndarray) -> bool:
        pairs = zip(made, ids[prompt:], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        state.rewind(len(made) - same)
        del made[same:]
        for token in ids[prompt + same :]:
            if not state.allows(token):  # a draft that will be rejected: what follows it does not matter
                return True
            state.accept(token)
            made.append(token)
        logits[~state.mask()] = -np.inf
        return True

    return process
