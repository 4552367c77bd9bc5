"""Attacks a server as its tests do, one attack at a time: how long /health and a plain request take meanwhile.

    python tools/benchmarks/health.py BUNDLE [--seconds 3] [--only WORDS] [--json FILE] [--check]

For each attack a `tide-export serve` of its own is started on a copy of BUNDLE whose chat template can loop, with
default limits. Attackers in another process, which yields to the others (they would be other machines), send their
requests again and again. Meanwhile /health is asked every 20 ms, each time on a new connection, and one plain client
streams 100 tokens, again and again. The goal: no answer of /health takes longer than 100 ms. That is for a machine with
two cores that does nothing else; --check: exit code 1 where it is missed, or a plain request is not answered.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness.attackable import LOOP, attackable
from harness.raw_http import Connection, ask, head, message
from serve import Server

from tide_export.common.formatting import table

GOAL_MS, EVERY_SECONDS, BEFORE_SECONDS, PATIENCE_SECONDS = 100.0, 0.02, 0.5, 10.0
CONNECTIONS = 600  # more than a server takes by default
HOURS = {"type": "integer", "multipleOf": 9999991}  # of compiling
AMBIGUOUS = 'start: s\ns: a s b | s s | "a"\na: "a" | \nb: "a" | "b" |'
WIDE = 'start: s\ns: "x" s s s s | "y" s s s | "x" s "z" | "x"'  # its masks take longer and longer
PLAIN: dict[str, Any] = {"prompt": "def read(path):", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Attack:
    """A request that many clients send at once, again and again.

    Attributes:
        leaves: the client vanishes after the first bytes of the answer.
        stops: the client sends this share of the request, and then waits.
    """

    path: str
    body: dict[str, Any] | bytes
    clients: int = 4
    leaves: bool = False
    stops: float = 1.0


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number:x}"}}


USER = [{"role": "user", "content": "x"}]
ATTACKS = {
    "nothing": Attack("/health", b"", 0),
    "20,000 tool names": Attack(CHAT, {"messages": USER, "tools": [tool(number) for number in range(20_000)]}),
    "128 tools": Attack(CHAT, {"messages": USER, "tools": [tool(number) for number in range(128)]}),
    "n=16, logprobs=20": Attack(COMPLETIONS, PLAIN | {"n": 16, "logprobs": 20, "stream": True}),
    "echo, logprobs=20": Attack(COMPLETIONS, {"prompt": [7] * 900, "echo": True, "logprobs": 20, "max_tokens": 8}),
    "a schema of hours": Attack(COMPLETIONS, PLAIN | {"guided_json": HOURS}, 8),
    "an ambiguous grammar": Attack(COMPLETIONS, PLAIN | {"guided_grammar": AMBIGUOUS}),
    "a grammar with slow masks": Attack(COMPLETIONS, PLAIN | {"guided_grammar": WIDE, "max_tokens": 900}),
    "1 MiB of token ids": Attack(COMPLETIONS, PLAIN | {"prompt": [[7, 8]] * 100_000}),
    "1 MiB of text": Attack(COMPLETIONS, PLAIN | {"prompt": "word " * 200_000}),
    "1 MiB of one word": Attack("/tokenize", {"prompt": "a" * 1_000_000}),
    "1 MiB of brackets": Attack(COMPLETIONS, b'{"model":' + b"[" * 1_000_000),
    "30,000 messages": Attack(CHAT, {"messages": [{"role": "user", "content": ""}] * 30_000}),
    "10,000 stops": Attack(COMPLETIONS, PLAIN | {"stop": ["x"] * 10_000}),
    "400 embeddings": Attack("/v1/embeddings", {"input": [[9] * 400] * 400}),
    "a template that loops": Attack(CHAT, {"messages": [{"role": "user", "content": LOOP}]}, 8),
    "slow headers": Attack(COMPLETIONS, PLAIN, CONNECTIONS, stops=0.01),
    "slow bodies": Attack(COMPLETIONS, PLAIN, CONNECTIONS, stops=0.9),
    "clients that vanish": Attack(COMPLETIONS, PLAIN | {"stream": True}, 32, leaves=True),
}


@dataclass
class Measured:
    """Seconds, under one attack."""

    health: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # from the plain request to its first piece
    gaps: list[float] = field(default_factory=list)  # between its pieces
    failed: int = 0  # answers of /health that are not 200
    refused: int = 0  # plain requests: the queue was full
    visits: int = 0  # attacks that ended


def attack_until_killed(attack: Attack, model: str, port: int, visits: Any) -> None:
    os.nice(10)
    body = {"model": model, **attack.body} if isinstance(attack.body, dict) else attack.body
    content = message(attack.path, body)
    content = content[: int(attack.stops * len(content))]

    async def client(number: int) -> None:
        await asyncio.sleep(random.Random(number).uniform(0, BEFORE_SECONDS))
        while True:
            with contextlib.suppress(OSError):
                async with Connection.open(port) as connection:
                    await connection.send(content)
                    await connection.status()
                    if attack.leaves:
                        connection.vanish()
                    else:
                        await connection.rest()
            with visits.get_lock():
                visits.value += 1
            await asyncio.sleep(0.01)

    async def clients() -> None:
        await asyncio.gather(*(client(number) for number in range(attack.clients)))

    asyncio.run(clients())


async def ask_health(port: int, found: Measured) -> None:
    while True:
        started = time.perf_counter()
        async with Connection.open(port) as connection:
            await connection.send(head("/health"))
            status = await connection.status()
        found.health.append(time.perf_counter() - started)
        found.failed += status != 200
        await asyncio.sleep(EVERY_SECONDS)


async def ask_plainly(server: Server, found: Measured) -> None:
    for number in itertools.count():
        body = {"model": server.model, **PLAIN, "mode": "full", "stream": True, "cache_salt": str(number)}
        async with Connection.open(server.port) as connection:
            last = time.perf_counter()
            await connection.send(message(COMPLETIONS, body))
            answered = await connection.status() == 200
            pieces = 0
            while answered and (line := await connection.line()):
                if line.startswith(b"data: {"):
                    now, pieces = time.perf_counter(), pieces + 1
                    (found.gaps if pieces > 1 else found.first).append(now - last)
                    last = now
        found.refused += not answered
        await asyncio.sleep(0.01 if answered else 0.1)


async def measure(server: Server, attack: Attack, seconds: float) -> Measured:
    """Measures for so many seconds, from when the attack has begun."""
    found, fork = Measured(), multiprocessing.get_context("fork")
    await ask(server.port, COMPLETIONS, {"model": server.model, **PLAIN})
    visits = fork.Value("i", 0)
    attackers = fork.Process(target=attack_until_killed, args=(attack, server.model, server.port, visits), daemon=True)
    attackers.start()
    try:
        await asyncio.sleep(BEFORE_SECONDS)
        asking = [asyncio.create_task(one) for one in (ask_health(server.port, found), ask_plainly(server, found))]
        done, left = await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        until = time.monotonic() + PATIENCE_SECONDS
        while not (done or found.gaps or found.refused) and time.monotonic() < until:  # it waits in the queue
            done, left = await asyncio.wait(asking, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        for one in left:
            one.cancel()
        for one in done:
            one.result()  # raises
        await asyncio.gather(*left, return_exceptions=True)
    finally:
        attackers.kill()
        attackers.join()
    found.visits = visits.value
    return found


def row(name: str, found: Measured) -> list[str]:
    def at(seconds: Sequence[float], share: float) -> str:
        return f"{1e3 * float(np.percentile(seconds, share)):.1f}" if seconds else "-"

    health = [at(found.health, 50), at(found.health, 99), at(found.health, 100)]
    plain = [at(found.first, 100), at(found.gaps, 50), at(found.gaps, 99), at(found.gaps, 100)]
    return [name, *health, *plain, str(found.refused), str(found.visits)]


HEADS = ["attack", "/health p50 ms", "p99", "max", "first token max ms", "token p50 ms", "p99", "max", "429", "attacks"]


def missed(name: str, found: Measured) -> str | None:
    """What is wrong; None: nothing."""
    if found.failed:
        return f"{name}: /health did not answer 200 for {found.failed} of {len(found.health)} times"
    slowest = 1e3 * max(found.health, default=float("inf"))
    if slowest > GOAL_MS:
        return f"{name}: /health took {slowest:.0f} ms"
    return None if found.gaps or found.refused else f"{name}: no plain request was answered"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="attacks whose names hold these words")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when the goal is missed")
    options = parser.parse_args(argv)
    results = dict[str, Measured]()
    with tempfile.TemporaryDirectory() as folder:
        bundle = attackable(options.bundle, Path(folder))
        command = [sys.executable, "-m", "tide_export.cli.main", "serve", str(bundle), "--port", "{port}"]
        line = shlex.join(command) + " --threads 1 --provider cpu --no-verify -q"
        for name, attack in ATTACKS.items():
            if options.only in name:
                with contextlib.closing(Server(line)) as server:
                    results[name] = asyncio.run(measure(server, attack, options.seconds))
                print(", ".join(row(name, results[name])), file=sys.stderr, flush=True)
    print(table(HEADS, [row(name, found) for name, found in results.items()]))
    if options.json:
        options.json.write_text(json.dumps({name: vars(found) for name, found in results.items()}) + "\n")
    wrong = [reason for name, found in results.items() if (reason := missed(name, found))]
    print("\n".join(f"MISSED {reason}" for reason in wrong) or f"met: /health within {GOAL_MS:g} ms under each attack")
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
