"""Asks a server for an hour, with clients that vanish, grammars that are refused and steps that fail: nothing may stay.

    python tools/benchmarks/soak.py BUNDLE [--minutes 60] [--seed 0] [--cores 0.5]
    python tools/benchmarks/soak.py BUNDLE --seed 0 --only ROUND

Starts `tide-export serve` on a copy of BUNDLE that has a chat template and a token that makes steps fail, and asks
every request alone. Then, in rounds, a drawn crowd comes: plain, constrained and chat requests, embeddings, requests
that are refused, whose step fails (in a network, or as a grammar becomes too complex), that compile or render without
end, or take too long; some read the answer whole or as a stream, others vanish in it, in the queue or in their own
body, or stop sending. Who is answered must get what it got alone, to the bit; after each round no request may run or
wait. Between rounds it pauses, so that server and clients use --cores. /health is asked all the time. Every minute is a
line. At the end, exit code 1 and a sentence each unless: no slot is taken, children, files and threads of the server
are as before, its memory is level, its log has no exception, and SIGTERM ends it.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from harness.attackable import attackable
from harness.raw_http import ask
from serve import Server
from soak_visits import KINDS, WAYS, Ask, ask_alone, drawn, visit

OPTIONS = "--slots 4 --waiting 20 --request-seconds 2 --body-seconds 2 --threads 1 --provider cpu -q"
OPTIONS += f" --prefix-cache-bytes {16 << 20} --drain-seconds 5"
WARM_UP, MORE, MORE_BYTES = 0.1, 1.02, 8 << 20  # share of the time; memory may be this much more, or so many bytes
QUIET_SECONDS, HEALTH_SECONDS, SAMPLE_SECONDS = 30.0, 0.25, 5.0
SLOWEST_HEALTH = 5.0  # seconds, on a machine that is busy with other things: health.py measures on a quiet one
CROWD = (4, 24)
POOLS = 32  # threads at most that are started when they are needed, and stay


@dataclass(frozen=True)
class Sample:
    """What the server holds now."""

    bytes: int
    threads: int
    files: int
    children: int


@dataclass
class Seen:
    """What was seen so far."""

    samples: list[Sample] = field(default_factory=list)
    health: list[float] = field(default_factory=list)  # of the present minute
    slowest: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    wrong: list[str] = field(default_factory=list)


def sample(pid: int) -> Sample:
    process = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    files = len(list((process / "fd").iterdir()))
    return Sample(int(fields["VmRSS"].split()[0]) << 10, int(fields["Threads"]), files, len(children(pid)))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def seconds_of(pid: int) -> float:
    """Time on a core that a process has had, with its children and those that have ended."""
    used = 0.0
    for one in (pid, *children(pid)):
        with contextlib.suppress(FileNotFoundError):
            used += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return used / os.sysconf("SC_CLK_TCK")


async def taken(port: int) -> tuple[int, int]:
    """Requests with a slot, and in the queue."""
    _, content = await ask(port, "/metrics")
    values = dict(re.findall(r"^(tide_requests_running|tide_requests_waiting) (.*)$", content.decode(), re.MULTILINE))
    return int(float(values["tide_requests_running"])), int(float(values["tide_requests_waiting"]))


async def watch(server: Server, seen: Seen) -> None:
    """Asks /health, and takes samples."""
    next_sample = 0.0
    while True:
        started = time.monotonic()
        status, _ = await ask(server.port, "/health")
        seconds = time.monotonic() - started
        seen.health.append(seconds)
        seen.slowest = max(seen.slowest, seconds)
        if status != 200:
            seen.wrong.append(f"/health answers {status}")
        if started > next_sample:
            seen.samples.append(sample(server.process.pid))
            next_sample = started + SAMPLE_SECONDS
        await asyncio.sleep(HEALTH_SECONDS)


async def crowd(server: Server, asks: dict[str, list[Ask]], seen: Seen, name: str) -> None:
    """A round: visits at the same time, and then nobody; `name` is its seed."""
    chance = random.Random(name)

    async def one() -> None:
        kind = chance.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
        way = chance.choices(list(WAYS), list(WAYS.values()))[0]
        asked, own = chance.choice(asks[kind]), random.Random(chance.random())
        await asyncio.sleep(own.uniform(0, 0.5))
        try:
            end = await visit(server.port, asked, way, own)
        except (OSError, ValueError, LookupError) as error:
            end = f"different: {error!r}"
        seen.kinds[kind] += 1
        seen.ways[way] += 1
        seen.ends[end.partition(":")[0]] += 1
        if end.startswith(("different", "none")):
            seen.wrong.append(f"round {name.split()[1]}: {kind}, {way}: {end}; {asked}"[:1000])

    await asyncio.gather(*(one() for _ in range(chance.randint(*CROWD))))
    until = time.monotonic() + QUIET_SECONDS
    while any(left := await taken(server.port)):
        if time.monotonic() > until:
            seen.wrong.append(f"round {name.split()[1]}: {left[0]} slots taken and {left[1]} waiting, and no client")
            return
        await asyncio.sleep(0.05)


async def soak(server: Server, options: argparse.Namespace, seen: Seen) -> tuple[Sample, Sample]:
    """Runs the rounds; returns what the server held before them and after them."""
    asks = drawn(random.Random(options.seed), server.model)
    await ask_alone(server.port, asks)
    first, started = sample(server.process.pid), time.monotonic()
    watching = asyncio.create_task(watch(server, seen))
    minute, used = 0, seconds_of(server.process.pid) + time.process_time()
    number = options.only or 0
    while not seen.wrong and time.monotonic() - started < 60 * options.minutes:
        await crowd(server, asks, seen, f"{options.seed} {number}")
        number, seen.rounds = number + 1, seen.rounds + 1
        if options.only is not None:
            break
        while seconds_of(server.process.pid) + time.process_time() - used > options.cores * (
            time.monotonic() - started
        ):
            await asyncio.sleep(0.05)
        if time.monotonic() - started > 60 * (minute + 1):
            minute = int((time.monotonic() - started) // 60)
            print(f"{minute} min: {line(seen, await taken(server.port))}", flush=True)
            seen.health.clear()
    await asyncio.sleep(3)  # so that the server sees the end of the last connection
    if watching.done():
        watching.result()  # raises
    watching.cancel()
    return first, sample(server.process.pid)


def line(seen: Seen, left: tuple[int, int]) -> str:
    now = seen.samples[-1]
    kinds = ", ".join(f"{count} {kind}" for kind, count in seen.kinds.items())
    held = f"{now.bytes / 1e6:.1f} MB, {now.threads} threads, {now.files} files, {now.children} children"
    slots = f"{left[0]} running, {left[1]} waiting"
    return f"{seen.rounds} rounds; {kinds}; {held}; {slots}; /health up to {1e3 * max(seen.health, default=0):.0f} ms"


def verdict(seen: Seen, first: Sample, last: Sample) -> Iterator[str]:
    """What is wrong, a sentence each."""
    yield from seen.wrong
    for name, more in (("children", 0), ("files", 0), ("threads", POOLS)):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + more:
            yield f"the server has {after} {name}, and had {before} at first"
    if seen.slowest > SLOWEST_HEALTH:
        yield f"/health took {seen.slowest:.1f} s"
    before, after = level(seen.samples)
    if after > max(before * MORE, before + MORE_BYTES):
        yield f"memory is not level: {before / 1e6:.1f} MB in the first quarter, {after / 1e6:.1f} MB in the last"


def level(samples: Sequence[Sample]) -> tuple[float, float]:
    """Memory in the first and in the last quarter, after the warm-up: medians."""
    warm = [one.bytes for one in samples[int(WARM_UP * len(samples)) :]]
    quarter = max(len(warm) // 4, 1)
    return median(warm[:quarter]), median(warm[-quarter:])


def ended(server: Server) -> Iterator[str]:
    """Ends the server as a person does; what is wrong then."""
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(timeout=30)
        if code:
            yield f"the server ended with code {code}"
    except subprocess.TimeoutExpired:
        yield "SIGTERM does not end the server"
    if "Traceback" in server.log:
        yield f"the server's log has an exception: {server.log[server.log.index('Traceback') :][:2000]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and rounds (%(default)s)")
    parser.add_argument("--cores", type=float, default=0.5, metavar="N", help="to use, on average (%(default)s)")
    parser.add_argument("--only", type=int, metavar="ROUND", help="run this round alone")
    options = parser.parse_args(argv)
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        bundle = attackable(options.bundle, Path(folder))
        command = [sys.executable, "-m", "tide_export.cli.main", "serve", str(bundle), "--port", "{port}"]
        with contextlib.closing(Server(f"{shlex.join(command)} {OPTIONS}")) as server:
            first, last = asyncio.run(soak(server, options, seen))
            wrong = [*verdict(seen, first, last), *ended(server)]
    before, after = level(seen.samples)
    print(f"visits: {dict(seen.ways)}; ends: {dict(seen.ends)}")
    print(
        f"at first {first}; at last {last}; memory {before / 1e6:.1f} and {after / 1e6:.1f} MB; "
        f"/health up to {1e3 * seen.slowest:.0f} ms"
    )
    print("\n".join(wrong) or f"{sum(seen.kinds.values())} visits, nothing stays")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
