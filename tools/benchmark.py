"""Speed of the exported graph against itself and its peers, in one interleaved run: medians, ratios, a plot.

    python tools/benchmark.py MODEL [--checkpoints 4,8,12] [--threads 2] [--json FILE] [--plot FILE.png]

Cases take turns in a new random order each round, one decode step each, so that a busy moment of the machine, and the
caches the case before left behind, hit all of them alike. Where a session's weights happen to lie in memory moves it by
some percent, so all sessions are loaded again, in another order, `--loads` times. Only ratios within one run mean
anything. MODEL is exported twice, with routers (seeded random ones: speed does not depend on what they have learned)
and without any branch. ONNX Runtime GenAI's graph joins where `onnxruntime-genai` is installed (extra `bench`), eager
PyTorch always does; with `--weights int4` both graphs are quantized alike. Goals are those of the project; a missed one
makes the exit code 1 with `--check`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's threads would spin into the turn of the next case

import numpy as np
import onnxruntime
import torch

from tide_export.bundle import write_manifest, writing_bundle
from tide_export.config import TideConfig
from tide_export.graph import compose, cut
from tide_export.lower import lower_for_onnxruntime
from tide_export.manifest import Quantization
from tide_export.model import SourceModel, load_model
from tide_export.package import context_length, make_manifest, save_graph
from tide_export.quantize import quantization_settings, quantize_model
from tide_export.routers import Router, RouterSet
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.state import State
from tide_export.thresholds import OFF
from tide_export.trace import trace

RESTART_AFTER = 48  # steps before a case starts again at the context asked for


Turn = Callable[[], float]  # does whatever must come first untimed and returns the seconds of one step


class Stepper:
    """Steps one sequence of an engine, starting again when it has grown by `RESTART_AFTER` tokens."""

    def __init__(self, engine: Engine, context: Sequence[int]):
        self.engine, self.context = engine, list(context)
        self.off = [OFF] * len(engine.manifest.checkpoints)
        self.all_exit = [-1.0] * len(engine.manifest.checkpoints)
        self.state = self._start()

    def _start(self) -> State:
        state = self.engine.start(self.off, max_pending=1 << 20, room=4 * RESTART_AFTER)
        state.step(self.context)
        return state

    def step(self, thresholds: Sequence[float]) -> float:
        self.state.set_thresholds(thresholds)
        started = time.perf_counter()
        self.state.step([self.context[-1]])
        return time.perf_counter() - started

    def full(self) -> float:
        self._restart()
        return self.step(self.off)

    def first_exit(self) -> float:
        self._restart()
        return self.step(self.all_exit)

    def deep_over(self, tokens: int) -> Turn:
        def turn() -> float:
            self._restart()
            for _ in range(tokens - 1):
                self.step(self.all_exit)
            return self.step(self.off)

        return turn

    def _restart(self) -> None:
        if self.state.length > len(self.context) + RESTART_AFTER:
            self.state = self._start()


def export_genai(model: Path, folder: Path, settings: Quantization | None) -> None:
    """The graph that ONNX Runtime GenAI's builder makes of `model`, its products quantized by the same `settings`."""
    precision, extra = "fp32", []
    if settings is not None:
        if settings.bits != 4:
            raise SystemExit("onnxruntime-genai's builder quantizes to int4 alone: measure int8 without it")
        precision = "int4"
        extra = [
            "--extra_options",
            f"int4_block_size={settings.block_size}",
            f"int4_accuracy_level={settings.accuracy_level}",
            f"int4_is_symmetric={'true' if settings.symmetric else 'false'}",
        ]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(folder)]
    done = subprocess.run(
        [*command, "-p", precision, "-e", "cpu", "-c", str(folder / "cache"), *extra], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"onnxruntime-genai could not build {model}: {done.stderr.strip().splitlines()[-1]}")


def genai_turn(folder: Path, context: int, threads: int) -> Turn:
    """One decode step of that graph, its K/V shared in place."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    config = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    binding, kept = session.io_binding(), []
    capacity = context + 4 * RESTART_AFTER
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            shape = (1, config["num_key_value_heads"], capacity, config["head_size"])
            array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            shared = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(value.name, shared)
            binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), shared)
            kept += [array, shared]
    binding.bind_cpu_input("input_ids", np.array([[5]], np.int64))
    logits = np.zeros((1, 1, config.get("vocab_size", 0) or session.get_outputs()[0].shape[-1]), np.float32)
    binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
    length = [context]

    def turn() -> float:
        length[0] = length[0] + 1 if length[0] < context + RESTART_AFTER else context + 1
        binding.bind_cpu_input("attention_mask", np.ones((1, length[0]), np.int64))
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        return time.perf_counter() - started

    turn.kept = (kept, logits)  # type: ignore[attr-defined] # the binding holds bare pointers
    return turn


def eager_turn(source: SourceModel, context: Sequence[int]) -> Turn:
    """One decode step of the HuggingFace model in eager PyTorch with its own growing cache."""
    cache: list = [None, 0]

    @torch.no_grad()
    def turn() -> float:
        if cache[0] is None or cache[1] > RESTART_AFTER:
            output = source.model(input_ids=torch.tensor([list(context)]), use_cache=True)
            cache[:] = [output.past_key_values, 0]
        cache[1] += 1
        ids = torch.tensor([[context[-1]]])
        started = time.perf_counter()
        source.model(input_ids=ids, past_key_values=cache[0], use_cache=True)
        return time.perf_counter() - started

    return turn


def random_routers(source: SourceModel, checkpoints: Sequence[int], bottleneck: int, shortlist: int) -> RouterSet:
    torch.manual_seed(0)
    rows = source.head_rows() if shortlist else None
    read = rows[:shortlist] if rows is not None else None
    return RouterSet({c: Router(source.normed_size, bottleneck, read).requires_grad_(False) for c in checkpoints})


def export_graph(source: SourceModel, routers: RouterSet, folder: Path) -> None:
    """Exports without calibration or tokenizer; no routers means no branch."""
    length = context_length(source, None)
    pieces = cut(trace(source, routers.checkpoints), length)
    graph = lower_for_onnxruntime(compose(pieces, routers.arrays()), source.quantized)
    with writing_bundle(folder) as temporary:
        save_graph(graph, temporary)
        write_manifest(temporary, make_manifest(source, routers, TideConfig(), graph, length))


def load_cases(
    folder: Path, source: SourceModel, context: list[int], threads: int, order: random.Random
) -> dict[str, Turn]:
    """Fresh sessions of every exported graph, loaded in random order, and the cases that run on them."""

    def plain() -> dict[str, Turn]:
        return {"no branches": Stepper(load(folder / "plain", "cpu", threads), context).full}

    def branched() -> dict[str, Turn]:
        engine = load(folder / "branched", "cpu", threads)
        return {
            "branched, nothing exits": Stepper(engine, context).full,
            "all exit at first": Stepper(engine, context).first_exit,
            "deep run over 8": Stepper(engine, context).deep_over(8),
        }

    def genai() -> dict[str, Turn]:
        graph = folder / "genai"
        return {"genai": genai_turn(graph, len(context), threads)} if graph.exists() else {}

    def eager() -> dict[str, Turn]:
        return {"HuggingFace eager": eager_turn(source, context)}

    loaders = [plain, branched, genai, eager]
    cases: dict[str, Turn] = {}
    for loader in order.sample(loaders, len(loaders)):
        cases |= loader()
    return cases


CASES = ("no branches", "branched, nothing exits", "all exit at first", "deep run over 8", "genai", "HuggingFace eager")

# (what, case, against, at most this ratio of their medians)
GOALS = [
    ("full depth no slower than 0.9x ONNX Runtime GenAI", "no branches", "genai", 1 / 0.9),
    ("a graph that may exit but does not costs at most 4 %", "branched, nothing exits", "no branches", 1.04),
    ("every token exits at the first checkpoint: 2.5x faster", "all exit at first", "no branches", 1 / 2.5),
    ("a deep run over 8 tokens costs at most 2x one over 1", "deep run over 8", "branched, nothing exits", 2.0),
]


def measure(arguments: argparse.Namespace) -> dict:
    torch.set_num_threads(arguments.threads)
    source = load_model(str(arguments.model))
    settings = quantization_settings(
        arguments.weights, block_size=arguments.block_size, accuracy_level=arguments.accuracy_level
    )
    if settings is not None:
        source = quantize_model(source, settings)
    checkpoints = tuple(int(c) for c in arguments.checkpoints.split(",")) if arguments.checkpoints else None
    config = TideConfig(checkpoints=checkpoints)
    shortlist = config.router_shortlist if arguments.shortlist is None else arguments.shortlist
    context = (np.arange(1, arguments.context + 1) * 7919 % source.vocab_size).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        points = config.resolve_checkpoints(source.num_layers)
        routers = random_routers(source, points, config.router_bottleneck_dim, shortlist)
        export_graph(source, routers, folder / "branched")
        export_graph(source, RouterSet({}), folder / "plain")
        if find_spec("onnxruntime_genai") is not None and arguments.weights != "int8":
            export_genai(arguments.model, folder / "genai", settings)
        for _ in range(arguments.loads):
            cases = load_cases(folder, source, context, arguments.threads, order)
            for round_number in range(arguments.rounds + 3):
                for name in order.sample(list(cases), len(cases)):
                    elapsed = cases[name]()
                    if round_number >= 3:  # the first rounds pay for memory and caches
                        seconds[name].append(elapsed)
            del cases
    measured = {name: values for name, values in seconds.items() if values}
    medians = {name: 1e3 * median(values) for name, values in measured.items()}
    goals = [
        {
            "goal": what,
            "ratio": medians[case] / medians[against],
            "limit": limit,
            "met": medians[case] / medians[against] <= limit,
        }
        for what, case, against, limit in GOALS
        if case in medians and against in medians
    ]
    return {
        "model": str(arguments.model),
        "weights": arguments.weights,
        "layers": source.num_layers,
        "checkpoints": list(routers.checkpoints),
        "shortlist": shortlist,
        "threads": arguments.threads,
        "context": arguments.context,
        "loads": arguments.loads,
        "rounds": arguments.rounds,
        "onnxruntime": onnxruntime.__version__,
        "median_ms": medians,
        "p10_ms": {name: 1e3 * float(np.percentile(values, 10)) for name, values in measured.items()},
        "relative": {name: value / medians["no branches"] for name, value in medians.items()},
        "goals": goals,
    }


def render(result: dict) -> str:
    lines = [
        f"{result['model']}: {result['weights']}, {result['layers']} layers, checkpoints {result['checkpoints']}, "
        f"routers with {result['shortlist'] or 'no'} shortlist rows, "
        f"{result['threads']} threads, one decode step after {result['context']} tokens, "
        f"medians of {result['loads']} loads x {result['rounds']} interleaved turns",
        f"{'case':28s} {'median ms':>10s} {'p10 ms':>8s} {'x no branches':>14s}",
    ]
    for name, value in result["median_ms"].items():
        lines.append(f"{name:28s} {value:10.3f} {result['p10_ms'][name]:8.3f} {result['relative'][name]:14.3f}")
    for goal in result["goals"]:
        verdict = "met" if goal["met"] else "MISSED"
        lines.append(f"{verdict:7s} {goal['goal']}: {goal['ratio']:.3f} (limit {goal['limit']:.3f})")
    return "\n".join(lines)


def plot(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    names = list(result["median_ms"])
    figure = Figure(figsize=(8, 0.6 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, [result["median_ms"][name] for name in names], color="tab:blue")
    axes.bar_label(bars, [f"{result['relative'][name]:.2f}x" for name in names], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms per decode step, median ({result['threads']} threads)")
    axes.set_title(f"{Path(result['model']).name}: label is the ratio to the graph without branches")
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", choices=["fp32", "int8", "int4"], default="fp32")
    parser.add_argument("--block-size", type=int, help="of int8 and int4")
    parser.add_argument("--accuracy-level", type=int, help="of int8 and int4")
    parser.add_argument("--checkpoints", help="layers run, comma separated; every 4 layers by default")
    parser.add_argument("--shortlist", type=int, help="head rows a router reads; as many as by default")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache before the step")
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=80, help="turns of each case per load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a bar chart (PNG) here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(render(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)
    return int(arguments.check and not all(goal["met"] for goal in result["goals"]))


if __name__ == "__main__":
    raise SystemExit(main())
