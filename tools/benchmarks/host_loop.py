"""Times what a token costs beside the model's runs: in the library alone, and through Python.

    python tools/benchmarks/host_loop.py BUNDLE [--new-tokens 48] [--rounds 40] [--megabytes 0,16,128] [--json FILE]
                                         [--check]

BUNDLE holds segment networks (`export --target tensorrt --no-engines` makes some anywhere). In their place the library
gets networks in C that compute nothing: their runs read so many megabytes of memory a token, which push what the host
needs out of the caches as a model's weights do, and time themselves. What else a generation takes, over its tokens, is
the host's: of `tide_generate`, which is the library alone, of `Engine.generate`, and of a loop over `Engine.stream`;
what these take longer is Python's. All of a generation counts, from its options to its statistics. Cases take turns in
random order, and the fastest tenth of the rounds is shown: others have what else ran on this machine in them. With
`--check` the exit code is 1 where Python takes more than 10 microseconds a token.
"""

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import c_char_p, c_double, c_int, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.interleave import write_json

from tide_export.bundle.opened import open_bundle
from tide_export.formatting import table
from tide_export.runtime.engine import Engine
from tide_export.runtime.native import call, created, library

INCLUDE = Path(__file__).resolve().parents[2] / "cpp" / "include"
NETWORKS = r"""
#include <time.h>
#include <tide/tide.h>
double seconds;             /* that runs took */
const char volatile* memory;
size_t size;
static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + 1e-9 * at.tv_nsec;
}
static tide_status open_set(void* context, void* stream, int64_t* number) { return *number = 0, TIDE_OK; }
static void forget(void* context, int64_t number, int64_t recording) {}
static void close_set(void* context, int64_t number) {}
static tide_status run(void* context, int64_t number, const char* network, const char* const* tensors,
                       void* const* addresses, size_t count, int64_t tokens, int64_t batch_size, int64_t recording,
                       int captured) {
  double const started = now();
  for (size_t at = 0; at < size; at += 64) (void)memory[at];
  seconds += now() - started;
  return TIDE_OK;
}
tide_networks const networks = {NULL, "nothing", -1, open_set, run, forget, close_set, 0};
"""
LIBRARY, GENERATE, STREAM = "the library", "Engine.generate", "Engine.stream"
MODES: dict[str, dict[str, Any]] = {"full": {"mode": "full"}, "exit": {"mode": "exit", "threshold": 0.5}}
GOAL = 10.0  # microseconds a token that Python takes
PROMPT = np.arange(1, 17)


def compiled() -> ctypes.CDLL:
    """The networks that compute nothing."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "networks.so")
        line = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-I", str(INCLUDE), "-x", "c", "-"]
        try:
            subprocess.run([*line, "-o", str(target)], input=NETWORKS, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"host_loop: no C compiler that works, which the networks need: {error}")
        return ctypes.CDLL(str(target))


class Host:
    """A bundle on such networks."""

    def __init__(self, path: Path, new_tokens: int) -> None:
        self._networks, self._new_tokens = compiled(), new_tokens
        networks = ctypes.byref(c_void_p.in_dll(self._networks, "networks"))
        self._handle = created("load_networks", os.fsencode(path), b'{"verify": false}', networks)
        self._engine = Engine(open_bundle(path), self._handle)
        self._seconds = c_double.in_dll(self._networks, "seconds")
        library().tide_generate.argtypes = [c_void_p, c_void_p, c_size_t, c_char_p, c_void_p, c_void_p]
        library().tide_generate.restype = c_int

    def reads(self, megabytes: int) -> None:
        """Lets the networks' runs read so much for a token: each segment's, the head's, and that of its best token."""
        runs = len(self._engine.manifest.segment_sizes) + 2
        self._memory = np.ones((megabytes << 20) // runs, np.int8)
        c_void_p.in_dll(self._networks, "memory").value = self._memory.ctypes.data
        c_size_t.in_dll(self._networks, "size").value = self._memory.nbytes

    def microseconds(self, way: str, mode: str) -> float:
        """Of a token, without the runs of networks."""
        options = {"max_new_tokens": self._new_tokens, "stop_token_ids": [], **MODES[mode]}
        ways: dict[str, Callable[[], int]] = {
            LIBRARY: partial(self._in_library, options),
            GENERATE: lambda: len(self._engine.generate(PROMPT, **options).tokens),
            STREAM: lambda: sum(1 for _ in self._engine.stream(PROMPT, **options)),
        }
        before, started = self._seconds.value, time.perf_counter()
        count = ways[way]()
        spent = time.perf_counter() - started - (self._seconds.value - before)
        assert count == self._new_tokens
        return 1e6 * spent / count

    def _in_library(self, options: dict[str, Any]) -> int:
        generation, count = c_void_p(), c_size_t()
        given = self._handle, PROMPT.ctypes.data, len(PROMPT), json.dumps(options).encode(), None
        call("generate", *given, ctypes.byref(generation))
        library().tide_generation_tokens(generation, ctypes.byref(count))
        library().tide_generation_stats(generation)
        library().tide_generation_free(generation)
        return count.value


def measure(host: Host, megabytes: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each mode and number of megabytes."""
    rows, order = [], random.Random(0)
    for size in megabytes:
        host.reads(size)
        cases = [(mode, way) for mode in MODES for way in (LIBRARY, GENERATE, STREAM)]
        taken: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        for number in range(rounds + 1):
            for mode, way in order.sample(cases, len(cases)):
                found = host.microseconds(way, mode)
                taken[mode, way] += [found] if number else []  # the first round warms up
        for mode in MODES:
            by = {way: float(np.percentile(taken[mode, way], 10)) for way in (LIBRARY, GENERATE, STREAM)}
            of_python = max(by[GENERATE], by[STREAM]) - by[LIBRARY]
            rows.append({"mode": mode, "megabytes": size, "microseconds": by, "python": of_python})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N", help="of a generation (48)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="(40)")
    parser.add_argument("--megabytes", default="0,16,128", metavar="N,N", help="read for each token (0,16,128)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.megabytes.split(",")]
    rows = measure(Host(options.bundle, options.new_tokens), sizes, options.rounds)
    heads = ["mode", "MB read a token", LIBRARY, GENERATE, STREAM, "Python's part"]
    print(f"microseconds a token beside the networks' runs, the fastest tenth of {options.rounds} rounds")
    shown = [
        [
            row["mode"],
            str(row["megabytes"]),
            *(f"{value:.1f}" for value in (*row["microseconds"].values(), row["python"])),
        ]
        for row in rows
    ]
    print(table(heads, shown))
    if options.json:
        write_json({"rounds": options.rounds, "new_tokens": options.new_tokens, "rows": rows}, options.json)
    return int(options.check and any(row["python"] > GOAL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
