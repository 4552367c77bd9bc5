"""Loads HTTP servers with requests that arrive at random, in alternating rounds: tokens/s and latencies over streams.

    python tools/benchmarks/serve.py BUNDLE --dataset FILE.jsonl [--mode full,auto,exit:0.8] [--temperature 0.8]
    [--peer NAME=COMMAND] [--streams 1,4,8,16] [--check]

Starts `tide-export serve` on BUNDLE, and every peer: any server with OpenAI's /v1/completions, by the command that
starts it with {port} where its port goes, e.g. --peer "llama.cpp=llama-server -m f32.gguf --port {port} -t 2 -np 16 -c
16384". One that cannot be started is omitted, and the table has the reason. A round gives every case the same requests
(Poisson arrivals, prompts of 100 to 900 characters of FILE, answers of mixed lengths: greedy, or sampled with a seed
for each request), in a new random order of cases; at most N are sent at a time, the others wait at the client.
Prompts of all rounds differ, so that no server's cache helps. Times are seen by the client: to the first text from the
sending of the request, and between texts. The goal is 1.3 times the tokens/s of the best peer at 8 streams; only
ratios within one run mean anything.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from harness.child_process import PeerError

from tide_export.common.formatting import table

GOAL, GOAL_STREAMS = 1.3, 8
OURS = "tide-export"
START_SECONDS = 120


@dataclass(frozen=True)
class Ask:
    """A request: its prompt, how many tokens it asks for, how long after the one before it arrives, and its seed."""

    prompt: str
    max_tokens: int
    pause: float
    seed: int = 0


@dataclass
class Heard:
    """What came back: its text, its tokens, and when the first and each further piece came, in seconds.

    Attributes:
        first: from the sending of the request.
        gaps: between pieces, each of one token unless the server sends several as one.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)


class Server:
    """A server of one model in a separate process."""

    def __init__(self, command: str) -> None:
        """Starts it, and waits until it answers. `command` has {port} where its port goes.

        Raises:
            PeerError: it cannot be started; the message has its last line.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        words = shlex.split(command.replace("{port}", str(self.port)))
        try:
            self._process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise PeerError(f"{words[0]}: {error.strerror}") from error
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                answer = httpx.get(f"{self.address}/v1/models", timeout=5)
                if answer.status_code == 200:
                    self.model = answer.json()["data"][0]["id"]
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                reason = self._last_line()
                self.close()
                raise PeerError(f"does not answer: {reason}")
            time.sleep(0.2)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Its process."""
        return self._process

    @property
    def log(self) -> str:
        """What it printed so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    @property
    def megabytes(self) -> float:
        """Its memory now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))

    def load(self, asks: Sequence[Ask], streams: int, options: Mapping[str, Any]) -> tuple[float, list[Heard]]:
        """Sends the requests as they arrive, at most `streams` at a time; the seconds of all, and what came back.

        Raises:
            PeerError: a request failed.
        """
        return asyncio.run(self._load(asks, streams, options))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    async def _load(self, asks: Sequence[Ask], streams: int, options: Mapping[str, Any]) -> tuple[float, list[Heard]]:
        limits = httpx.Limits(max_keepalive_connections=0)  # a server may close an idle connection at any time
        async with httpx.AsyncClient(base_url=self.address, timeout=600, limits=limits) as client:
            free, started = asyncio.Semaphore(streams), time.perf_counter()

            async def one(ask: Ask) -> Heard:
                async with free:
                    return await self._ask(client, ask, options)

            tasks = []
            for ask in asks:
                await asyncio.sleep(ask.pause)
                tasks.append(asyncio.create_task(one(ask)))
            heard = list(await asyncio.gather(*tasks))
            return time.perf_counter() - started, heard

    async def _ask(self, client: httpx.AsyncClient, ask: Ask, options: Mapping[str, Any]) -> Heard:
        body = {"model": self.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0}
        body |= {"seed": ask.seed, "stream": True, "stream_options": {"include_usage": True}, **options}
        heard, pieces, last = Heard(), 0, time.perf_counter()
        sent = last
        try:
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                if stream.status_code != 200:
                    raise PeerError(f"answers {stream.status_code}: {(await stream.aread()).decode()[:200]}")
                async for line in stream.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event, now = json.loads(line.removeprefix("data: ")), time.perf_counter()
                    if "error" in event:
                        raise PeerError(f"answers {event['error']}")
                    heard.tokens = (event.get("usage") or {}).get("completion_tokens", heard.tokens)
                    text = "".join(choice.get("text", "") for choice in event.get("choices", []))
                    if text and not pieces:
                        heard.first = now - sent
                    elif text:
                        heard.gaps.append(now - last)
                    if text:
                        heard.text, pieces, last = heard.text + text, pieces + 1, now
        except httpx.HTTPError as error:
            raise PeerError(f"fails: {error!r}") from error
        heard.tokens = heard.tokens or pieces
        return heard

    def _last_line(self) -> str:
        lines = self.log.strip().splitlines()
        return lines[-1][:200] if lines else "it printed nothing"


def draw(texts: Sequence[str], count: int, rate: float, tokens: int, order: random.Random) -> list[Ask]:
    """Requests with parts of `texts` as prompts, none of them twice.

    Args:
        rate: of their arrivals a second (Poisson).
        tokens: of an answer on average; from half to one and a half times as many.
    """
    asks = []
    for _ in range(count):
        text, characters = order.choice(texts), order.choice((100, 300, 900))
        first = order.randrange(max(len(text) - characters, 1))
        answer = order.randint(tokens - tokens // 2, tokens + tokens // 2)
        asks.append(Ask(text[first : first + characters], answer, order.expovariate(rate), order.randrange(1 << 31)))
    return asks


@dataclass
class Case:
    """One way to ask one server, and what was measured: tokens/s of each round, and all that came back."""

    title: str
    server: Server
    options: Mapping[str, Any]
    speeds: dict[int, list[float]] = field(default_factory=dict)
    heard: dict[int, list[Heard]] = field(default_factory=dict)
    megabytes: list[float] = field(default_factory=list)

    def result(self, streams: int, base: "Case") -> dict[str, Any]:
        heard, speed = self.heard[streams], median(self.speeds[streams])
        first, gaps = [one.first for one in heard], [gap for one in heard for gap in one.gaps]
        same = sum(a.text == b.text for a, b in zip(heard, base.heard[streams], strict=True))
        return {
            "streams": streams,
            "case": self.title,
            "tokens_per_second": speed,
            "relative": speed / median(base.speeds[streams]),
            "first_ms": percentiles(first),
            "token_ms": percentiles(gaps),
            "same_text": same / len(heard),
        }


def percentiles(seconds: Sequence[float]) -> list[float | None]:
    """p50 and p95 in milliseconds; None where there is nothing, as between the tokens of answers of one."""
    return [1e3 * float(np.percentile(seconds, q)) if seconds else None for q in (50, 95)]


def start(arguments: argparse.Namespace, running: ExitStack) -> tuple[list[Case], dict[str, str]]:
    """The cases, and why peers are omitted."""
    slots = max(arguments.streams)
    ours = [sys.executable, "-m", "tide_export.cli.main", "serve", arguments.bundle, "--port", "{port}", "-q"]
    ours += ["--slots", str(slots), "--threads", str(arguments.threads), "--no-verify", "--provider", "cpu"]
    cases, omitted = list[Case](), dict[str, str]()
    for mode in arguments.mode:  # a server each: the second one asked would have the prompts of the first in its cache
        server = Server(shlex.join(ours))
        running.callback(server.close)
        cases.append(Case(f"{OURS}, {mode}", server, mode_options(mode) | {"temperature": arguments.temperature}))
    for option in arguments.peer:
        name, _, command = option.partition("=")
        try:
            peer = Server(command)
        except PeerError as error:
            omitted[name] = str(error)
            continue
        running.callback(peer.close)
        cases.append(Case(name, peer, {"temperature": arguments.temperature}))
    return cases, omitted


def mode_options(mode: str) -> dict[str, Any]:
    """Of a request: `exit`, or `exit:0.8` with a threshold of its own."""
    name, _, threshold = mode.partition(":")
    return {"mode": name} | ({"threshold": float(threshold)} if threshold else {})


def measure(arguments: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    order = random.Random(arguments.seed)
    with ExitStack() as running:
        cases, omitted = start(arguments, running)
        for case in cases:  # what is loaded or allocated at the first request
            case.server.load(draw(texts, 2, 10.0, 4, order), 2, case.options)
        for number in range(arguments.rounds):
            for streams in arguments.streams:
                count = arguments.requests * streams
                asks = draw(texts, count, arguments.rate * streams, arguments.tokens, order)
                for case in order.sample(cases, len(cases)):
                    try:
                        seconds, heard = case.server.load(asks, streams, case.options)
                    except PeerError as error:
                        raise SystemExit(f"{case.title} {error}") from error
                    tokens = sum(one.tokens for one in heard)
                    case.speeds.setdefault(streams, []).append(tokens / seconds)
                    case.heard.setdefault(streams, []).extend(heard)
                    case.megabytes.append(case.server.megabytes)
                    line = f"round {number + 1}, {streams} streams, {case.title}: {tokens} tokens in {seconds:.1f} s"
                    print(line, file=sys.stderr, flush=True)
    results = [case.result(streams, cases[0]) for streams in arguments.streams for case in cases]
    return {
        **{name: getattr(arguments, name) for name in ("bundle", "threads", "rounds", "temperature")},
        "results": results,
        "megabytes": {case.title: [case.megabytes[0], case.megabytes[-1]] for case in cases},
        "omitted": omitted,
        "goal": goal(results, [case.title for case in cases if not case.title.startswith(OURS)]),
    }


def goal(results: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> dict[str, Any]:
    """Our first case against the best peer; not met where there is none."""
    speeds = {one["case"]: one["tokens_per_second"] for one in results if one["streams"] == GOAL_STREAMS}
    best = max((peer for peer in peers if peer in speeds), key=lambda peer: speeds[peer], default=None)
    ratio = None if best is None else next(iter(speeds.values())) / speeds[best]
    return {"against": best, "ratio": ratio, "met": ratio is not None and ratio >= GOAL}


def render(result: Mapping[str, Any]) -> str:
    rows = [
        [
            str(one["streams"]),
            one["case"],
            f"{one['tokens_per_second']:.1f}",
            f"{one['relative']:.2f}",
            *("-" if value is None else f"{value:.0f}" for value in (*one["first_ms"], *one["token_ms"])),
            f"{100 * one['same_text']:.0f} %",
        ]
        for one in result["results"]
    ]
    heads = ["streams", "case", "tokens/s", "ratio", "first p50 ms", "p95", "token p50 ms", "p95", "same text"]
    memory = [f"{case}: {one:.0f} to {two:.0f} MB" for case, (one, two) in result["megabytes"].items()]
    found = result["goal"]
    verdict = "met" if found["met"] else "MISSED" if found["ratio"] else "NOT MEASURED"
    ratio = f": {found['ratio']:.2f} against {found['against']}" if found["ratio"] else ""
    return "\n".join(
        [
            f"{result['bundle']}, {result['threads']} threads, {result['rounds']} alternating rounds, "
            f"temperature {result['temperature']:g}",
            table(heads, rows),
            f"memory after the first and the last round: {'; '.join(memory)}",
            *(f"OMITTED {name}: {why}" for name, why in result["omitted"].items()),
            f"{verdict} at least {GOAL:g}x the tokens/s of the best peer at {GOAL_STREAMS} streams{ratio}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--dataset", type=Path, required=True, help=".jsonl; prompts are cut from its field text")
    modes = "of our server, each a case; exit:0.8 has that threshold"
    parser.add_argument("--mode", type=lambda text: text.split(","), default=["full"], help=modes)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another server")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--temperature", type=float, default=0.0, help="of all cases; 0: greedy")
    parser.add_argument("--requests", type=int, default=3, help="of a stream in a round")
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second and stream")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, on average")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of requests and order: another one for another run")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when the goal is missed or was not measured")
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in arguments.dataset.read_text(encoding="utf-8").splitlines()]
    result = measure(arguments, [text for text in texts if len(text) > 1000])
    print(render(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(arguments.check and not result["goal"]["met"])


if __name__ == "__main__":
    raise SystemExit(main())
