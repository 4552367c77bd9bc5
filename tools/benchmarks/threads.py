"""Compares three ways in which ONNX Runtime's threads wait for work: tokens per second, alone and beside others.

    python tools/benchmarks/threads.py BUNDLE [--threads 2] [--rounds 5] [--seconds 2] [--json FILE] [--plot FILE.png]

A worker thread of ONNX Runtime with nothing to do sleeps at once, spins for some microseconds first (as the runtime
sets it: `kSpinMicroseconds`), or spins for milliseconds (ONNX Runtime's own default).
Sleeping costs a wake-up for every operator, spinning takes cores from whoever else needs them; so each way is measured
where nothing else runs, with several sequences on one engine, beside a program that keeps one core busy, and beside a
second engine. Every figure is from a separate process, decoding at full depth; the ways are interleaved in a
new random order each round. With `--check` the exit code is 1 unless the package's way is a tenth faster than
sleeping where nothing else runs, and nowhere more than a tenth slower.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from harness.interleave import write_json
from harness.spinning import SPIN_MICROSECONDS

from tide_export.formatting import table

ASLEEP, ALONE = "sleep at once", "alone"
MIN_GAIN, MIN_ELSEWHERE = 1.1, 0.9  # times as fast as sleeping
# What `session.intra_op.spin_duration_us` is set to; -1 is ONNX Runtime's own default.
WAYS = {ASLEEP: 0, f"spin {SPIN_MICROSECONDS} us": SPIN_MICROSECONDS, "ONNX Runtime's default": -1}
OURS = f"spin {SPIN_MICROSECONDS} us"

CHILD = """
import os, sys, threading, time
tools, bundle, microseconds, threads, sequences, seconds = *sys.argv[1:3], *map(int, sys.argv[3:6]), float(sys.argv[6])
sys.path.insert(0, tools)
from harness.spinning import spin
from tide_export.runtime.engine import load
spin(microseconds)
engine = load(bundle, "cpu", threads, verify=False)
prompt = [(i * 7919) % engine.manifest.model.vocab_size for i in range(1, 65)]
done = [0] * sequences
def decode(place):
    while True:
        for token in engine.stream(prompt, max_new_tokens=64, mode="full", stop_token_ids=[]):
            done[place] += 1
for place in range(sequences):
    threading.Thread(target=decode, args=(place,), daemon=True).start()
while min(done) < 5:
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.readline()
before, started = sum(done), time.perf_counter()
time.sleep(seconds)
rate = (sum(done) - before) / (time.perf_counter() - started)
print(rate, flush=True)
sys.stdin.readline()  # keeps decoding beside those that still measure
os._exit(0)
"""


class Decoder:
    """A process that decodes until it is closed."""

    def __init__(self, arguments: argparse.Namespace, spin: int, sequences: int):
        given = arguments.bundle, spin, arguments.threads, sequences, arguments.seconds
        line = [sys.executable, "-c", CHILD, Path(__file__).parent, *given]
        self._process = subprocess.Popen(
            list(map(str, line)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def read(self) -> str:
        """The next line of its output.

        Raises:
            SystemExit: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("a decoding process ended early: does `tide-export generate` run on this bundle?")
        return line

    def resume(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def busy_core() -> Iterator[None]:
    """Runs a program that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rates(arguments: argparse.Namespace, spin: int, processes: int = 1, sequences: int = 1) -> float:
    """Sum of the tokens per second of all sequences, while all of them run."""
    with ExitStack() as stack:
        decoders = []
        for _ in range(processes):
            decoders.append(Decoder(arguments, spin, sequences))
            stack.callback(decoders[-1].close)
        for step in (Decoder.read, Decoder.resume):
            for decoder in decoders:
                step(decoder)
        return sum(float(decoder.read()) for decoder in decoders)


def beside_a_busy_core(arguments: argparse.Namespace, spin: int) -> float:
    with busy_core():
        return rates(arguments, spin)


SCENES = {
    ALONE: lambda arguments, spin: rates(arguments, spin),
    "2 sequences, one engine": lambda arguments, spin: rates(arguments, spin, sequences=2),
    "8 sequences, one engine": lambda arguments, spin: rates(arguments, spin, sequences=8),
    "beside a busy core": beside_a_busy_core,
    "2 engines, 2 processes": lambda arguments, spin: rates(arguments, spin, processes=2),
}


def measure(arguments: argparse.Namespace) -> dict:
    found: dict[str, dict[str, list[float]]] = {scene: {way: [] for way in WAYS} for scene in SCENES}
    order = random.Random(0)
    for _ in range(arguments.rounds):
        for scene, run in SCENES.items():
            for way in order.sample(list(WAYS), len(WAYS)):
                found[scene][way].append(run(arguments, WAYS[way]))
    return {
        "bundle": arguments.bundle,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "tokens_per_second": {scene: {way: median(all_) for way, all_ in by.items()} for scene, by in found.items()},
    }


def held(result: dict) -> bool:
    """Whether the package's way gains where nothing else runs, and loses little anywhere."""
    return all(
        by[OURS] >= (MIN_GAIN if scene == ALONE else MIN_ELSEWHERE) * by[ASLEEP]
        for scene, by in result["tokens_per_second"].items()
    )


def plot(result: dict, path: Path) -> None:
    """Groups of bars: a scene each, a way each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for offset, way in enumerate(WAYS):
        values = [by[way] for by in result["tokens_per_second"].values()]
        bars = axes.bar([index + 0.27 * (offset - 1) for index in range(len(values))], values, 0.26, label=way)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(SCENES)), [scene.replace(", ", ",\n") for scene in SCENES])
    axes.set_ylabel("tokens per second, all sequences")
    axes.set_title(f"how {result['threads']} threads wait for work")
    axes.margins(y=0.2)
    axes.legend(loc="upper left", ncols=3)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="that one figure is measured over")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    rows = [[scene, *(f"{by[way]:.1f}" for way in WAYS)] for scene, by in result["tokens_per_second"].items()]
    print(f"{arguments.bundle}, {arguments.threads} threads, tokens/s, medians of {arguments.rounds} rounds")
    print(table(["", *WAYS], rows))
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.plot:
        plot(result, arguments.plot)
    return int(arguments.check and not held(result))


if __name__ == "__main__":
    sys.exit(main())
