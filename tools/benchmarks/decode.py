"""Times one decode step of a bundle with checkpoints against one without: medians and ratios.

    python tools/benchmarks/decode.py MODEL [--checkpoints 4,8,12] [--weights int4] [--threads 2] [--graphs FOLDER]

Exports MODEL twice, with routers (seeded random ones: speed does not depend on what they have learned) and as one
segment; with `--weights bf16` or `fp16` that segment in float32 is the third. Each round times one step of
every case once, in a new random order, so that a busy moment of the machine and the caches that the previous case
filled affect all of them alike. The addresses of a session's weights change its time by a few percent, so sessions are
loaded again, in another order, `--loads` times. Only ratios within one run mean anything. Exit code 1 with `--check`
where a goal is missed. Other runtimes: tools/benchmarks/cpu_peers.py.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime

from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.calibration.config import TideConfig
from tide_export.common.formatting import table
from tide_export.compose.cut import cut
from tide_export.compose.step_graph import compose
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.onnxruntime.packed import save_batch_networks
from tide_export.model.source import SourceModel, load_model
from tide_export.names.operators import OP_HALF_MATMUL
from tide_export.pipeline.contents import make_manifest, save_graph
from tide_export.pipeline.preflight import context_length
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.half import round_to_half
from tide_export.quantize.settings import quantization_settings
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT
from tide_export.trace.tracer import trace

UNTIMED = 3  # rounds after loading that pay for memory and caches
RESTART_AFTER = 48  # steps before a case returns to its context
CHUNK = 512  # tokens of the context read in one step: attention over thousands takes gigabytes
UNLIMITED = 1 << 20  # pending tokens
PLAIN, SEGMENTED, FLOAT32 = "no checkpoints", "nothing exits", "no checkpoints, float32"
FOLDERS = {PLAIN: "plain", SEGMENTED: "segmented", FLOAT32: "float32"}
ALL_EXIT = "all exit at first"
GOALS = (  # case, its goal against another case, at most so many times its median
    (SEGMENTED, PLAIN, 1.04),
    (ALL_EXIT, PLAIN, 1 / 2.5),
    ("deep run over 8", SEGMENTED, 2.0),
)


def export_graph(source: SourceModel, routers: RouterSet, folder: Path, half: str | None) -> None:
    """Exports without calibration or tokenizer; no routers means one segment."""
    length = context_length(source, None)
    pieces = cut(trace(source, routers.checkpoints), length)
    lower = partial(lower_for_onnxruntime, quantized=source.quantized, half=half)
    graph = lower(compose(pieces, routers.arrays()))
    manifest = make_manifest(source, routers, TideConfig(), pieces, graph, length, half)
    with writing_bundle(folder) as temporary:
        save_graph(graph, temporary, manifest)
        save_batch_networks(temporary, pieces, routers.arrays(), None, None, lower)
        write_manifest(temporary, manifest)


def make_graphs(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Exports the graphs that are not in `folder` yet; returns the names of all.

    Raises:
        SystemExit: `folder` holds graphs of other options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    half = arguments.weights if arguments.weights in OP_HALF_MATMUL else None
    names = [PLAIN, SEGMENTED, *([FLOAT32] if half else [])]
    note = folder / "options.json"
    options = json.dumps([str(arguments.model.resolve()), arguments.weights, arguments.checkpoints])
    if note.exists():
        if note.read_text() != options:
            raise SystemExit(f"{folder} holds graphs of other options: name another folder, or delete it")
        return names
    source = load_model(str(arguments.model))
    settings = quantization_settings(arguments.weights)
    if settings is not None:
        quantize_model(source, settings)
    if half:
        round_to_half(source, half)
    points = tuple(map(int, arguments.checkpoints.split(","))) if arguments.checkpoints else None
    config = TideConfig(checkpoints=points)
    checkpoints = config.resolve_checkpoints(source.num_layers)
    sizes = config.router_bottleneck_dim, config.router_shortlist
    for name in names:
        routers = RouterSet({})
        if name == SEGMENTED:
            routers = random_routers(source, checkpoints, tokens(64, source), *sizes)
        export_graph(source, routers, folder / FOLDERS[name], None if name == FLOAT32 else half)
    note.write_text(options)
    return names


def tokens(count: int, model: SourceModel | Engine) -> list[int]:
    """Returns `count` token ids; their values do not matter to the speed."""
    vocabulary = model.manifest.model.vocab_size if isinstance(model, Engine) else model.vocab_size
    return (np.arange(1, count + 1) * 7919 % vocabulary).tolist()


class DecodeSteps:
    """Steps one sequence of an engine; rewinds it to its context when it has grown by more than `room` tokens."""

    def __init__(self, engine: Engine, context: Sequence[int]) -> None:
        self.context, limit = list(context), engine.manifest.model.context_length
        self.off = [NEVER_EXIT] * len(engine.manifest.checkpoints)
        self.all_exit = [ALWAYS_EXIT] * len(engine.manifest.checkpoints)
        self.room = RESTART_AFTER if limit is None else min(RESTART_AFTER, (limit - len(context) - 8) // 2)
        if self.room < 1:
            raise SystemExit(f"a context of {len(context)} leaves no room to step in a model of {limit}")
        self.state = engine.start(self.off, UNLIMITED)
        for start in range(0, len(self.context), CHUNK):
            self.state.step(self.context[start : start + CHUNK])

    def step(self, thresholds: Sequence[float]) -> float:
        """Returns the seconds of one step."""
        self.state.set_thresholds(thresholds)
        started = time.perf_counter()
        self.state.step([self.context[-1]])
        return time.perf_counter() - started

    def deep_run(self, count: int) -> Callable[[], float]:
        """Returns a case: a step at full depth that catches up `count` - 1 pending tokens."""

        def case() -> float:
            self._restart()
            for _ in range(count - 1):
                self.step(self.all_exit)
            return self.step(self.off)

        return case

    def first_exit(self) -> float:
        self._restart()
        return self.step(self.all_exit)

    def _restart(self) -> None:
        if self.state.length > len(self.context) + self.room:
            self.state.rewind(len(self.context))


def load_cases(folder: Path, arguments: argparse.Namespace, names: list[str], deep: list[int]) -> dict[str, Callable]:
    """Opens every graph, in the order of `names`, and returns the cases that run on them."""
    cases = {}
    for name in names:
        engine = load(folder / FOLDERS[name], "cpu", arguments.threads, verify=False)
        context = tokens(arguments.context, engine)
        cases[name] = DecodeSteps(engine, context).deep_run(1)
        if name == SEGMENTED:
            cases[ALL_EXIT] = DecodeSteps(engine, context).first_exit
            cases |= {f"deep run over {count}": DecodeSteps(engine, context).deep_run(count) for count in deep}
    return cases


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    names, order = make_graphs(arguments, folder), random.Random(0)
    max_pending = [int(number) for number in arguments.max_pending.split(",") if number]
    deep = sorted({8, *(number + 1 for number in max_pending)})
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.loads):
        cases = load_cases(folder, arguments, order.sample(names, len(names)), deep)
        for number in range(arguments.rounds + UNTIMED):
            for name in order.sample(sorted(cases), len(cases)):
                elapsed = 1e3 * cases[name]()
                seconds.setdefault(name, []).extend([elapsed] * (number >= UNTIMED))
        del cases
    medians = {name: median(taken) for name, taken in seconds.items()}
    fastest = {name: float(np.percentile(taken, 10)) for name, taken in seconds.items()}
    goals = [(case, base, medians[case] / medians[base], limit) for case, base, limit in GOALS]
    return {"median_ms": medians, "p10_ms": fastest, "goals": goals, "worst_steps": worst(fastest, max_pending)}


def worst(fastest: dict[str, float], max_pending: Sequence[int]) -> list[tuple[int, float, float]]:
    """Returns the worst pattern for each `max_pending`, so many early exits and then a step at full depth: milliseconds
    of its last step and of a step on average, by the fastest tenths."""
    rows = []
    for number in max_pending:
        last = fastest[f"deep run over {number + 1}"]
        rows.append((number, last, (number * fastest[ALL_EXIT] + last) / (number + 1)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--checkpoints", help="layers run, comma separated; every 4 layers by default")
    parser.add_argument("--graphs", type=Path, help="keep the exported graphs in this folder, and use those in it")
    parser.add_argument("--weights", choices=["fp32", "bf16", "fp16", "int8", "int4"], default="fp32")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache before the step (128)")
    parser.add_argument("--max-pending", default="", help="longest and average step with these limits, e.g. 1,4,16")
    parser.add_argument("--loads", type=int, default=6, help="(6)")
    parser.add_argument("--rounds", type=int, default=80, help="rounds of each case per load (80)")
    parser.add_argument("--threads", type=int, default=2, help="(2)")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, arguments.graphs or Path(scratch))
    medians, fastest = result["median_ms"], result["p10_ms"]
    print(
        f"{arguments.model}: {arguments.weights}, {arguments.threads} threads, onnxruntime {onnxruntime.__version__}, "
        f"after {arguments.context} tokens, {arguments.loads} loads x {arguments.rounds} interleaved rounds"
    )
    rows = [[name, f"{t:.3f}", f"{fastest[name]:.3f}", f"{t / medians[PLAIN]:.3f}"] for name, t in medians.items()]
    print(table(["case", "median ms", "p10 ms", f"x {PLAIN}"], sorted(rows)))
    for case, base, ratio, limit in result["goals"]:
        print(f"{'met' if ratio <= limit else 'MISSED'}: {case}, {ratio:.3f}x {base}, at most {limit:.3f}x")
    for number, last, mean in result["worst_steps"]:
        print(f"max_pending {number}: longest step {last:.2f} ms, average {mean:.2f} ms, {last / mean:.2f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(arguments.check and any(ratio > limit for *_, ratio, limit in result["goals"]))


if __name__ == "__main__":
    raise SystemExit(main())
