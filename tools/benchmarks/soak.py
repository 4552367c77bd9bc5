"""Asks a server for minutes, with clients that are killed, and says how much memory it had over time.

    python tools/benchmarks/soak.py BUNDLE --dataset FILE.jsonl [--minutes 10] [--requests 10000] [--streams 32]
    [--prefix-cache-bytes 67108864] [--kill-seconds 15] [--json FILE] [--check]

Starts `tide-export serve` on BUNDLE and four client processes that share the streams, each with other options (modes,
greedy and sampled), and prompts of 100 to 900 characters of FILE. One of them, in turn, is killed (SIGKILL) every
--kill-seconds in the middle of its requests, and another takes its place. It ends when both --minutes and --requests
have passed. Memory is flat when at the end it is at most 10 % above that after the first quarter. `--check`: exit code
1 unless it is, the prefix cache kept its bound, no slot stayed taken, and an answer is what it was before.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
from harness.interleave import write_json
from harness.peer_case import PeerError
from harness.server_case import Ask, Server, draw

from tide_export.formatting import table

GROWTH = 1.1
ASKS = 2000  # of one client; those left when it is killed are never sent
IDLE_SECONDS = 30
CLIENTS: tuple[dict[str, Any], ...] = (
    {"mode": "full"},
    {"mode": "exit", "threshold": 0.5},
    {"mode": "auto", "temperature": 0.8},
    {"mode": "full", "temperature": 0.8, "top_p": 0.9},
)


def ask_until_killed(server: Server, asks: Sequence[Ask], streams: int, options: Mapping[str, Any]) -> None:
    with contextlib.suppress(PeerError):  # 429 while the slots of a killed client are still taken
        server.load(asks, streams, options)


def clients(server: Server, texts: Sequence[str], streams: int, tokens: int) -> Iterator[BaseProcess]:
    """Client processes, started one after the other."""
    order, fork = random.Random(0), multiprocessing.get_context("fork")
    for number in count():
        asks = draw(texts, ASKS, 1000.0, tokens, order)
        arguments = (server, asks, streams // len(CLIENTS), CLIENTS[number % len(CLIENTS)])
        process = fork.Process(target=ask_until_killed, args=arguments, daemon=True)
        process.start()
        yield process


def gauges(server: Server) -> dict[str, float]:
    """The server's metrics by name; those with labels are added up."""
    found: dict[str, float] = {}
    text = httpx.get(f"{server.address}/metrics", timeout=60).text  # on a busy machine
    for name, value in re.findall(r"^(tide_\w+)(?:{.*})? (\S+)$", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def sample(server: Server, started: float) -> dict[str, float]:
    found = gauges(server)
    return {
        "seconds": time.monotonic() - started,
        "megabytes": server.megabytes,
        "requests": found.get("tide_generations_total", 0.0),
        "tokens": found.get("tide_tokens_total", 0.0),
        "cache_bytes": found.get("tide_prefix_cache_bytes", 0.0),
        "running": found["tide_requests_running"] + found["tide_requests_waiting"],
    }


def soak(arguments: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    words = [sys.executable, "-m", "tide_export.cli.main", "serve", arguments.bundle, "--port", "{port}", "-q"]
    words += ["--slots", str(arguments.slots), "--waiting", str(2 * arguments.streams), "--provider", "cpu"]
    words += ["--threads", str(arguments.threads), "--prefix-cache-bytes", str(arguments.prefix_cache_bytes)]
    with contextlib.closing(Server(shlex.join(words))) as server:
        first = [Ask(texts[0][:300], 32, 0.0)]
        before = server.load(first, 1, {"mode": "full"})[1][0].text
        starting = clients(server, texts, arguments.streams, arguments.tokens)
        running, kills = [next(starting) for _ in CLIENTS], 0
        started, samples = time.monotonic(), list[dict[str, float]]()
        try:
            while (
                not samples
                or samples[-1]["seconds"] < 60 * arguments.minutes
                or (samples[-1]["requests"] < arguments.requests)
            ):
                time.sleep(arguments.kill_seconds)
                victim = running.pop(0)
                if victim.is_alive():
                    os.kill(victim.pid or 0, 9)
                    kills += 1
                victim.join()
                samples.append(sample(server, started))
                running.append(next(starting))
                print(json.dumps({name: round(value) for name, value in samples[-1].items()}), file=sys.stderr)
        finally:
            for process in running:
                process.kill()
                process.join()
        until = time.monotonic() + IDLE_SECONDS
        while (last := sample(server, started))["running"] and time.monotonic() < until:
            time.sleep(0.2)
        same = server.load(first, 1, {"mode": "full"})[1][0].text == before
    quarter = samples[len(samples) // 4]
    return {
        "bundle": arguments.bundle,
        "streams": arguments.streams,
        "prefix_cache_bytes": arguments.prefix_cache_bytes,
        "kills": kills,
        "samples": samples,
        "growth": samples[-1]["megabytes"] / quarter["megabytes"],
        "cache_held": max(one["cache_bytes"] for one in samples) <= arguments.prefix_cache_bytes,
        "still_running": last["running"],
        "same_answer": same,
    }


def kept(result: Mapping[str, Any]) -> bool:
    flat = result["growth"] <= GROWTH
    return flat and result["cache_held"] and not result["still_running"] and result["same_answer"]


def render(result: Mapping[str, Any]) -> str:
    samples = result["samples"]
    chosen = sorted({round(part * (len(samples) - 1) / 10) for part in range(11)})
    names = ("seconds", "megabytes", "requests", "tokens", "cache_bytes")
    rows = [[f"{samples[number][name]:.0f}" for name in names] for number in chosen]
    flat = "flat" if result["growth"] <= GROWTH else "NOT FLAT"
    return "\n".join(
        [
            f"{result['bundle']}, {result['streams']} streams, {result['kills']} clients killed",
            table([name.replace("_", " ") for name in names], rows),
            f"memory {flat}: {result['growth']:.2f} of that after the first quarter",
            f"prefix cache {'within' if result['cache_held'] else 'BEYOND'} {result['prefix_cache_bytes']} bytes",
            f"requests left without a client: {result['still_running']:.0f}",
            f"the first request's answer {'is as before' if result['same_answer'] else 'DIFFERS'}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--dataset", type=Path, required=True, help=".jsonl; prompts are cut from its field text")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--streams", type=int, default=32, help=f"{len(CLIENTS)} or more: of all clients")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, on average")
    parser.add_argument("--prefix-cache-bytes", type=int, default=64 << 20)
    parser.add_argument("--kill-seconds", type=float, default=15.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--check", action="store_true", help="exit code 1 unless all that was kept")
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in arguments.dataset.read_text(encoding="utf-8").splitlines()]
    result = soak(arguments, [text for text in texts if len(text) > 1000])
    print(render(result))
    if arguments.json:
        write_json(result, arguments.json)
    return int(arguments.check and not kept(result))


if __name__ == "__main__":
    raise SystemExit(main())
