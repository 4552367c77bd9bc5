"""Draws and makes the visits of `soak.py`: what a client asks of a server, and at which point it vanishes."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.attackable import BAD_TOKEN, LOOP
from harness.raw_http import Connection, ask, message

TEXT = Path(__file__).read_text()  # prompts are its parts, which partly begin alike
HOURS = {"type": "integer", "multipleOf": 9999991}  # of compiling
DEEPER = "start: s\ns: " + " | ".join(f'"{"a" * n}" s "{end}"' for n, end in enumerate("abcdddde", 1))
ROWS = 'start: s\ns: "x" s s s s s s | "x" s s s s s| "x" s s s s | "x"'
TOO_LONG, FULL = "the request took longer than", "requests are waiting already"
BUSY = (TOO_LONG, FULL, "choices, and this server takes")
LARGE = 1 << 20  # bytes: the server refuses without reading so many, and a client that writes may see a reset alone
Said = Any  # the answer without what differs each time, as its id


@dataclass
class Ask:
    """A request, and what it was answered when it was alone; None: it was not asked alone."""

    path: str
    body: dict[str, Any]
    alone: Said = None


@dataclass(frozen=True)
class Kind:
    """A kind of requests: how often it is asked, how many different ones there are, and how one is drawn."""

    share: float
    count: int
    draw: Callable[[random.Random], tuple[str, dict[str, Any]]]
    compared: bool = True


def prompt(chance: random.Random) -> str:
    first = chance.choice([0, 0, 0, chance.randrange(len(TEXT) // 2)])
    return TEXT[first : first + chance.choice([20, 100, 400, 800])]


def plain(chance: random.Random) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "max_tokens": chance.choice([4, 16, 40]),
        "mode": chance.choice(["full", "auto", "exit", "lossless"]),
        "temperature": chance.choice([0, 0.8]),
        "seed": chance.randrange(1000),
        "n": chance.choice([1, 1, 1, 2]),
    }
    options |= chance.choice([{}, {}, {"logprobs": 3}, {"stop": ["\n"]}, {"repetition_penalty": 1.2}])
    return "/v1/completions", options | {"prompt": prompt(chance)}


def constrained(chance: random.Random) -> tuple[str, dict[str, Any]]:
    object_of = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["b"],
    }
    grammars: list[dict[str, Any]] = [{"guided_json": object_of}, {"guided_regex": "[a-f]{3,9}"}]
    grammars += [{"guided_choice": ["one", "two", "three"]}, {"response_format": {"type": "json_object"}}]
    options = {"max_tokens": 24, "temperature": 0, "mode": chance.choice(["full", "auto"]), "prompt": prompt(chance)}
    return "/v1/completions", options | chance.choice(grammars)


def chat(chance: random.Random) -> tuple[str, dict[str, Any]]:
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}"}} for number in range(chance.choice([0, 0, 20]))
    ]
    body = {"messages": [{"role": "user", "content": prompt(chance)}], "temperature": 0, "max_tokens": 24}
    return "/v1/chat/completions", body | ({"tools": tools} if tools else {})


def vectors(chance: random.Random) -> tuple[str, dict[str, Any]]:
    if chance.random() < 0.5:
        return "/tokenize", {"prompt": prompt(chance)}
    return "/v1/embeddings", {"input": [prompt(chance) for _ in range(chance.choice([1, 6]))]}


def refused(chance: random.Random) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(300)]
    asked = {"prompt": prompt(chance), "max_tokens": 8, "temperature": 0}
    ambiguous = 'start: s\ns: a s b | s s | "a"\na: "a" | \nb: "a" | "b" |'
    odd: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", asked | {"guided_grammar": "start: ["}),
        ("/v1/completions", asked | {"guided_grammar": ambiguous, "max_tokens": 200}),
        ("/v1/completions", asked | {"guided_regex": "(", "n": 3}),
        ("/v1/completions", asked | {"guided_json": {"type": "no such type"}, "stream": True}),
        ("/v1/completions", asked | {"stop": ["x"] * 10_000}),
        ("/v1/completions", asked | {"prompt": "x " * 600_000}),
        ("/v1/completions", asked | {"prompt": [5] * 5000}),
        ("/v1/completions", asked | {"model": "another"}),
        ("/v1/completions", asked | {"n": 99}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": tools}),
        ("/v1/embeddings", {"input": ["x", ""]}),
        ("/nowhere", {}),
    ]
    return chance.choice(odd)


def failing(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A step of it fails: in a network, so for everyone in that step, or as its grammar becomes too complex."""
    asked = {"prompt": prompt(chance), "max_tokens": 900, "temperature": 0}
    if chance.random() < 0.3:
        return "/v1/completions", asked | {"prompt": [*range(5, chance.choice([9, 70])), BAD_TOKEN]}
    if chance.random() < 0.5:
        return "/v1/completions", asked | {"logit_bias": {str(BAD_TOKEN): 100}, "mode": "full"}
    grammar = chance.choice([DEEPER, ROWS])
    return "/v1/completions", asked | {"guided_grammar": grammar}


def endless(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """It compiles or renders until the time limit."""
    if chance.random() < 0.5:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": LOOP}]}
    return "/v1/completions", {"guided_json": HOURS, "prompt": "x", "max_tokens": 8}


def late(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """It asks for more than a request has time for."""
    return "/v1/completions", {"n": 16, "max_tokens": 900, "ignore_eos": True, "prompt": prompt(chance), "mode": "full"}


KINDS = {
    "plain": Kind(60, 48, plain),
    "constrained": Kind(10, 12, constrained),
    "chat": Kind(8, 8, chat),
    "vectors": Kind(6, 8, vectors),
    "refused": Kind(10, 36, refused),
    "failing": Kind(4, 10, failing),
    "endless": Kind(0.7, 3, endless),
    "late": Kind(1.5, 4, late, compared=False),
}
WAYS = {
    "whole": 35.0,
    "stream": 30.0,
    "gone in its stream": 14.0,
    "gone while waiting": 12.0,
    "gone in its body": 5.0,
    "body that stops": 2.0,
    "headers that stop": 2.0,
}


def drawn(chance: random.Random, model: str) -> dict[str, list[Ask]]:
    """The requests by kind, in an order of their own."""
    asks = dict[str, list[Ask]]()
    for name, kind in KINDS.items():
        made = [kind.draw(chance) for _ in range(kind.count)]
        asks[name] = [Ask(path, {"model": model, **body}) for path, body in made]
    return asks


async def ask_alone(port: int, asks: Mapping[str, Sequence[Ask]]) -> None:
    """Asks each request that is compared, one after the other."""
    for name in sorted(asks, key="endless".__ne__):  # first: each ends a process, which the others start again
        for one in asks[name] if KINDS[name].compared else ():
            _, content = await ask(port, one.path, one.body)
            found = said([json.loads(content)]) if content else None
            one.alone = None if busy(found) else found


async def visit(port: int, one: Ask, way: str, chance: random.Random) -> str:
    """Makes a visit; returns what came of it.

    "same" as alone; "busy" or "refused"; "gone": the client is; "none": no answer came; "different", and what was said.
    """
    streams = one.path.endswith("completions") and way in ("stream", "gone in its stream")
    content = message(one.path, one.body | ({"stream": True} if streams else {}))
    async with Connection.open(port) as connection:
        if way in ("body that stops", "headers that stop", "gone in its body"):
            start = content.index(b"\r\n\r\n") + 4
            end = start + len(content[start:]) // 2 if "body" in way else start // 2
            await connection.send(content[:end])
            if way == "gone in its body":
                await asyncio.sleep(chance.uniform(0, 0.2))
                connection.vanish()
                return "gone"
            return "refused" if await connection.status() >= 400 else "none"
        await connection.send(content)
        if way == "gone while waiting":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.status(), chance.choice([0.01, 0.1, 0.5]))
            connection.vanish()
            return "gone"
        status = await connection.status()
        if not (streams and status == 200):
            answer = await connection.rest()
            if not answer:
                return "refused" if len(content) > LARGE else "none"
            return compared(one, said([json.loads(answer)]))
        pieces, leaves = [], chance.randint(1, 12)
        while line := await connection.line():
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line.removeprefix(b"data: ")))
            if way == "gone in its stream" and len(pieces) == leaves:
                connection.vanish()
                return "gone"
        return compared(one, said(pieces))


def compared(one: Ask, found: Said) -> str:
    if busy(found):
        return "busy"
    return "same" if found == one.alone or one.alone is None else f"different: {json.dumps(found)[:300]}"


def busy(found: Said) -> bool:
    return isinstance(found, str) and any(reason in found for reason in BUSY)


def said(pieces: Iterable[dict[str, Any]]) -> Said:
    """What an answer says, whole or in pieces: of each choice text, log-probabilities and reason; or an error."""
    texts, logprobs, reasons = dict[int, str](), dict[int, list[Any]](), dict[int, Any]()
    for piece in pieces:
        if "error" in piece:
            return str(piece["error"]["message"])
        if "choices" not in piece:
            return [one["embedding"] for one in piece.get("data", [])] or piece
        for choice in piece["choices"]:
            number, told = choice["index"], choice.get("message") or choice.get("delta") or choice
            calls = [one["function"] for one in told.get("tool_calls") or ()]
            text = (
                told.get("text") or told.get("content") or "",
                *(f"{one.get('name', '')}{one['arguments']}" for one in calls),
            )
            texts[number] = texts.get(number, "") + "".join(text)
            logprobs.setdefault(number, []).extend((choice["logprobs"] or {}).get("token_logprobs") or ())
            reasons[number] = choice["finish_reason"]
    return [[texts[number], logprobs[number], reasons[number]] for number in sorted(texts)]
