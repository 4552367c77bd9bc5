"""One test body for everything that answers requests: what it gives equals `Engine.generate`.

An implementation is a `Front`: a function that answers a list of requests, as many at a time as it likes, and of some
only the beginning, because their client leaves.

A request in a batch runs on other networks than alone, whose float32 logits are rounded otherwise. So an answer that
differs is compared once more, with what `Engine.generate` gives where the logits at the position of the first
difference are moved by no more than rounding may: equal to that, it is within tolerance, and counted.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import httpx
import numpy as np

from tide_export.runtime.engine import Engine
from tide_export.runtime.hooks import LogitsProcessor
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.tokenizer import BundleTokenizer, TextStream

CLIENTS = 6
# CI runs a few short requests; TIDE_CONFORMANCE=400 as many, of 500 tokens each, of which most are made.
FULL_SIZE = int(os.environ.get("TIDE_CONFORMANCE", "0"))
REQUESTS, NEW_TOKENS = (FULL_SIZE, (300, 500, 800)) if FULL_SIZE else (24, (1, 8, 24))
WHOLE = 6 if FULL_SIZE else 2  # requests without stop strings for two with them
# A request and its client may wait so long: at full size on a busy machine longer than a server's default.
REQUEST_SECONDS = 7200.0 if FULL_SIZE else 60.0
THRESHOLD = 0.3
# Of any length: without a stop string the text goes on until it has its number of tokens.
REGEX = r"(    [a-z_]+ = ([0-9]+|[a-z_]+\([a-z, ]*\))\n)+"
LARK = 'start: line+\nline: "    " ("return" | "yield" | "raise") " " /[a-z_.]+/ "(" /[^()\\n]*/ ")\\n"'
SERVER_NAMES = {"max_new_tokens": "max_tokens", "regex": "guided_regex", "grammar": "guided_grammar"}


@dataclass(frozen=True)
class Item:
    """A request.

    Attributes:
        options: of `GenerationConfig`.
        leaves_after: tokens or pieces of text after which the client goes; None: it stays.
    """

    ids: list[int]
    options: dict[str, Any]
    stops: list[str] = field(default_factory=list)
    leaves_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        count: of tokens; None where the implementation does not say it.
        tokens: None where the implementation gives only text.
        exits: after so many layers; empty where the implementation does not say it.
    """

    text: str
    finish_reason: str | None
    count: int | None
    tokens: list[int] | None = None
    exits: frozenset[int] = frozenset()


Front = Callable[[Sequence[Item]], list[Answer]]
Generate = Callable[..., Any]  # as `Engine.generate`


def items_of(engine: Engine, text: Sequence[int], count: int = REQUESTS) -> list[Item]:
    """Requests of every mode with parts of `text` as prompts; the same in every run."""
    order, modes = random.Random(7), [{"mode": "full"}, {"mode": "exit", "threshold": THRESHOLD}]
    modes.append({"mode": "lossless", "threshold": THRESHOLD})
    sampling: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 40, "top_p": 0.9}]
    sampling.append({"temperature": 1.0, "min_p": 0.05})
    changes: list[dict[str, Any]] = [{}, {}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}]
    changes += [{"repetition_penalty": 1.2}, {"logit_bias": {262: 4.0, 9: -100.0}}]
    forms: list[dict[str, Any]] = [{}, {}, {}, {"regex": REGEX}, {"grammar": LARK}]
    items = []
    for number in range(count):
        length = order.choice((1, 4, 30, 120))
        first = order.randrange(len(text) - length)
        options = modes[number % len(modes)] | order.choice(sampling) | order.choice(changes) | order.choice(forms)
        options["max_new_tokens"] = order.choice(NEW_TOKENS)
        if "temperature" in options:
            options["seed"] = number
        stops = order.choice(([],) * WHOLE + (["\n\n", "self."], ["e"]))
        leaves_after = order.choice((None,) * (WHOLE + 1) + (2,))
        items.append(Item(list(text[first : first + length]), options, stops, leaves_after))
    return items


def expected(engine: Engine, items: Sequence[Item], generate: Generate | None = None) -> list[Answer]:
    """What the engine gives for each alone, up to its first stop string.

    Args:
        generate: of another runtime.
    """
    tokenizer, answers = BundleTokenizer(engine.bundle), []
    for item in items:
        done = (generate or engine.generate)(item.ids, **item.options)
        reason = "stop" if done.finish_reason == "stop" else "length"
        depths = frozenset(done.stats.exit_layer)
        answers.append(_up_to_stop(tokenizer, item, Answer("", reason, len(done.tokens), done.tokens, depths)))
    return answers


def check(
    front: Front, items: Sequence[Item], answers: Sequence[Answer], engine: Engine, generate: Generate | None = None
) -> None:
    """Compares what `front` gives with `answers`, which `expected` gave of the other arguments."""
    found, wrong, rounded = front(items), list[Any](), list[Any]()
    for number, (item, one, right) in enumerate(zip(items, found, answers, strict=True)):
        if difference := _difference(item, one, right):
            undecided = _within_tolerance(engine, item, one, right, generate)
            (rounded if undecided else wrong).append((number, item.options, item.stops, difference))
    print(f"{len(items)} requests, {sum(one.count or 0 for one in found)} tokens, within tolerance: {rounded}")
    assert not wrong, f"{len(wrong)} of {len(items)} requests differ: {wrong}"
    assert len(rounded) <= 1 + len(items) // 50, "more than rounding explains"


def _within_tolerance(engine: Engine, item: Item, found: Answer, right: Answer, generate: Generate | None) -> bool:
    """Whether `generate` gives what was found if it draws, at the first difference, another token that changes of the
    logits draw there which are no larger than what leaves a choice undecided."""
    from tide_export.verify.parity import UNDECIDED_GAP

    at = _first_difference(engine, item, found, right)
    ranks, order = list[int](), list[int]()
    for amount in (UNDECIDED_GAP, -UNDECIDED_GAP):
        processor = moving(item, at, (right.tokens or [])[at], amount, order)
        done = (generate or engine.generate)(item.ids, **item.options | {"logits_processor": processor})
        ranks.append(order.index(done.tokens[at]))
    # A smaller change draws what is between the two. Few are: more are tried only where the test of this allows much.
    drawn = [order[ranks[0]], order[ranks[1]], *order[min(ranks) : max(ranks)][:64]]
    if found.tokens is not None:
        drawn = [token for token in drawn if token == found.tokens[at]][:1]
    for token in drawn:
        other = replace(item, options=item.options | {"logits_processor": forcing(item, at, token)})
        if not _difference(item, found, expected(engine, [other], generate)[0]):
            return True
    return False


def _first_difference(engine: Engine, item: Item, found: Answer, right: Answer) -> int:
    """The number of the first token that differs, by the text where the tokens that were found are not known."""
    tokens = right.tokens or []
    if found.tokens is not None:
        return _first(found.tokens, tokens) or 0
    same = _first(found.text, right.text) or 0
    texts = _texts(BundleTokenizer(engine.bundle), item, tokens)[: len(tokens)]
    return next((n for n, text in enumerate(texts) if same < len(text)), 0)


def _first(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Where two sequences first differ; None: one is the beginning of the other."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def moving(item: Item, at: int, token: int, amount: float, order: list[int]) -> LogitsProcessor:
    """Changes the logits of token `at` of the answer so that the border between `token` and its neighbour moves by what
    `amount` on the logits can do: to the next one, or with a negative `amount` to the one before.

    Args:
        order: becomes the vocabulary in the order in which tokens are drawn there.
    """

    def process(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(ids) == len(item.ids) + at:
            by_id = "temperature" in item.options and item.options.get("top_p", 1) == 1
            ranked = np.arange(len(logits)) if by_id else np.argsort(-logits, kind="stable")
            order[:] = ranked.tolist()
            logits[ranked[: order.index(token) + (amount > 0)]] -= amount
        return logits

    return process


def forcing(item: Item, at: int, token: int) -> LogitsProcessor:
    """Makes `token` the only one that can be token `at` of the answer."""

    def process(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(ids) == len(item.ids) + at:
            logits[np.arange(len(logits)) != token] = -np.inf
        return logits

    return process


def _difference(item: Item, found: Answer, right: Answer) -> str:
    """What is different, in words; empty where nothing is."""
    tokens, expected = found.tokens or [], right.tokens or []
    if item.leaves_after is not None and found.finish_reason is None:
        same = right.text.startswith(found.text) and tokens == expected[: len(tokens)]
    else:
        same = (found.text, found.finish_reason) == (right.text, right.finish_reason)
        same &= found.count in (None, right.count) and found.tokens in (None, right.tokens)
    if same:
        return ""
    ends = f"{found.count} {found.finish_reason}, {right.count} {right.finish_reason}"
    return f"from token {_first(tokens, expected)}, character {_first(found.text, right.text)} on; ends {ends}"


def concurrently(ask: Callable[[Item], Answer]) -> Front:
    """`CLIENTS` clients that ask one request after the other."""

    def front(items: Sequence[Item]) -> list[Answer]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(ask, items))

    return front


def by_scheduler(engine: Engine) -> Front:
    """The scheduler in a thread."""

    def front(items: Sequence[Item]) -> list[Answer]:
        with engine.scheduler(SchedulerLimits(slots=CLIENTS - 2, prompt_tokens=64)) as scheduler:

            def ask(item: Item) -> Answer:
                handle = scheduler.submit(item.ids, stop=item.stops, detokenize=True, **item.options)
                for number, _ in enumerate(handle, 1):
                    if number == item.leaves_after:
                        handle.cancel()
                done = handle.result()
                if done.finish_reason == "cancelled":
                    return Answer("", None, len(done.tokens), done.tokens)
                reason = "stop" if done.finish_reason == "stop" else "length"
                return Answer(done.text or "", reason, len(done.tokens), done.tokens)

            return concurrently(ask)(items)

    return front


def by_http(client: httpx.Client, model: str) -> Front:
    """/v1/completions, streamed and whole in turn."""

    def ask(item: Item) -> Answer:
        body = _fields(item) | {"stop": item.stops, "model": model, "prompt": item.ids}
        if len(item.ids) % 2 and item.leaves_after is None:
            done = client.post("/v1/completions", json=body)
            assert done.status_code == 200, done.text
            choice = done.json()["choices"][0]
            return Answer(choice["text"], choice["finish_reason"], done.json()["usage"]["completion_tokens"])
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, reason, count, pieces = "", None, None, 0
        with client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            for event in _events(stream):
                assert "error" not in event, event
                for choice in event["choices"]:
                    text, reason, pieces = text + choice["text"], choice["finish_reason"], pieces + 1
                if event.get("usage"):
                    count = event["usage"]["completion_tokens"]
                if pieces == item.leaves_after:
                    break
        return Answer(text, reason, count)

    return concurrently(ask)


def by_triton(client: httpx.Client, model: str) -> Front:
    """A model of tritonserver, streamed and whole in turn."""

    def ask(item: Item) -> Answer:
        streamed = bool(len(item.ids) % 2 == 0 or item.leaves_after)
        body = _fields(item) | {"input_ids": item.ids, "stream": streamed}
        body |= {name: json.dumps(body[name]) for name in ("logit_bias",) if name in body}
        if item.stops:
            body["stop"] = json.dumps(item.stops)
        text, tokens, reason = b"", list[int](), None
        with client.stream("POST", f"/v2/models/{model}/generate_stream", json=body) as stream:
            for pieces, event in enumerate(_events(stream), 1):
                assert "error" not in event, event
                text, tokens = text + bytes(values(event, "text_output")), tokens + values(event, "token_ids")
                reason = bytes(values(event, "finish_reason")).decode() or None
                if pieces == item.leaves_after:
                    break
        return Answer(text.decode(), reason, len(tokens), tokens)

    return concurrently(ask)


def _fields(item: Item) -> dict[str, Any]:
    """The item's options by the server's names."""
    return {"temperature": 0.0} | {SERVER_NAMES.get(name, name): value for name, value in item.options.items()}


def values(event: dict[str, Any], output: str) -> list[int]:
    """An output of a model in Triton's JSON, where a single value is no list and none may be missing."""
    value = event.get(output, [])
    return value if isinstance(value, list) else [value]


def _events(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _up_to_stop(tokenizer: BundleTokenizer, item: Item, whole: Answer) -> Answer:
    """`whole` with its text, up to the first stop string and the token that completes it."""
    assert whole.tokens is not None
    texts = _texts(tokenizer, item, whole.tokens)
    text = texts[-1]
    ends = [text.index(stop) + len(stop) for stop in item.stops if stop in text]
    if not ends:
        return replace(whole, text=text)
    begins = min(text.index(stop) for stop in item.stops if text.find(stop) + len(stop) == min(ends) and stop in text)
    count = next(n for n, part in enumerate(texts, 1) if any(stop in part for stop in item.stops))
    tokens = whole.tokens[:count]
    return replace(whole, text=text[:begins], finish_reason="stop", count=len(tokens), tokens=tokens)


def _texts(tokenizer: BundleTokenizer, item: Item, tokens: Sequence[int]) -> list[str]:
    """The text of an answer after each of its tokens, and at its end."""
    stream = TextStream(tokenizer, item.ids)
    return list(accumulate([*(stream.push(token) for token in tokens), stream.finish()]))
