"""Speed of the exported graph against itself and its peers, in one interleaved run: medians, ratios, a plot.

    python tools/benchmarks/decode.py MODEL [--checkpoints 4,8,12] [--threads 2] [--spin 0] [--graphs FOLDER] [--plot
    FILE.png]

Cases are interleaved in a new random order each round, one decode step each, so that a busy moment of the machine, and
the caches that the previous case filled, affect all of them alike. The place of a session's weights in memory
changes its time by a few percent, so sessions are loaded again, in another order, `--loads` times. Only ratios within
one run mean anything. Threads wait as they do in the product, GenAI's too; with `--spin 0` they sleep at
once, as the goals are set (PyTorch's wait some 20 microseconds either way).
MODEL is exported twice, with routers (seeded random ones: speed does not depend on what they have learned) and without
any branch. ONNX Runtime GenAI's graph joins where `onnxruntime-genai` is installed (extra `bench`), eager PyTorch
unless `--no-eager` (for models of which memory holds three copies and not four); with `--weights int4` both graphs are
quantized alike; with `--weights bf16` or `fp16` GenAI's is float32, and ours in float32 joins. Goals are those of the
project; a missed one, or one that could not be measured, makes the exit code 1 with
`--check`. Other peers: tools/benchmarks/peers.py; contexts and prompts: tools/benchmarks/context_length.py.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault(
    "GOMP_SPINCOUNT", str(SPIN_ROUNDS)
)  # some 20 us; by default threads spin into the next case's measurement

import onnxruntime
import torch
from harness import genai_case as genai_graph
from harness.engine_case import RESTART_AFTER, DecodeSteps, steps_after, tokens
from harness.graphs import BRANCHED, FLOAT32, GENAI, PLAIN, Graphs, add_recipe_options, genai_installed, recipe_of
from harness.interleave import Case, Goal, Seconds, interleave, plot, render_table, summary, write_json
from harness.spinning import SPIN_MICROSECONDS, spin

from tide_export.model.source import SourceModel
from tide_export.runtime.engine import load


def eager_case(source: SourceModel, context: Sequence[int]) -> Case:
    """One decode step of the Hugging Face model in eager PyTorch with its own growing cache."""
    cache: list = [None, 0]

    @torch.no_grad()
    def case() -> float:
        if cache[0] is None or cache[1] > RESTART_AFTER:
            output = source.model(input_ids=torch.tensor([list(context)]), use_cache=True)
            cache[:] = [output.past_key_values, 0]
        cache[1] += 1
        ids = torch.tensor([[context[-1]]])
        started = time.perf_counter()
        source.model(input_ids=ids, past_key_values=cache[0], use_cache=True)
        return time.perf_counter() - started

    return case


def load_cases(
    graphs: Graphs, context: list[int], arguments: argparse.Namespace, order: random.Random, deep_runs: Sequence[int]
) -> dict[str, Case]:
    """Fresh sessions of every exported graph, loaded in random order, and the cases that run on them."""
    threads = arguments.threads
    room = steps_after(len(context), graphs.manifest.model.context_length)

    def plain() -> dict[str, Case]:
        return {"no branches": DecodeSteps(load(graphs.folder / PLAIN, "cpu", threads, verify=False), context).full}

    def float32() -> dict[str, Case]:
        folder = graphs.folder / FLOAT32
        if not folder.exists():
            return {}
        return {"no branches, float32": DecodeSteps(load(folder, "cpu", threads, verify=False), context).full}

    def branched() -> dict[str, Case]:
        engine = load(graphs.folder / BRANCHED, "cpu", threads, verify=False)
        return {
            "branched, nothing exits": DecodeSteps(engine, context).full,
            "all exit at first": DecodeSteps(engine, context).first_exit,
            **{deep_run(tokens): DecodeSteps(engine, context).deep_over(tokens) for tokens in deep_runs},
        }

    def genai() -> dict[str, Case]:
        folder = graphs.folder / GENAI
        if not folder.exists():
            return {}
        return {
            "genai": genai_graph.decode_case(genai_graph.GenaiGraph(folder, threads, arguments.spin), context, room)
        }

    def eager() -> dict[str, Case]:
        return {"Hugging Face eager": eager_case(graphs.source, context)} if arguments.eager else {}

    loaders = [plain, float32, branched, genai, eager]
    cases: dict[str, Case] = {}
    for loader in order.sample(loaders, len(loaders)):
        cases |= loader()
    return cases


def deep_run(tokens: int) -> str:
    return f"deep run over {tokens}"


CASES = (
    "no branches",
    "no branches, float32",
    "branched, nothing exits",
    "all exit at first",
    "deep run over 8",
    "genai",
    "Hugging Face eager",
)

GOALS = [
    Goal("full depth no slower than 0.9x ONNX Runtime GenAI", "no branches", "genai", 1 / 0.9),
    Goal("a graph that may exit but does not costs at most 4 %", "branched, nothing exits", "no branches", 1.04),
    Goal("every token exits at the first checkpoint: 2.5x faster", "all exit at first", "no branches", 1 / 2.5),
    Goal("a deep run over 8 tokens costs at most 2x one over 1", "deep run over 8", "branched, nothing exits", 2.0),
]


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    torch.set_num_threads(arguments.threads)
    spin(arguments.spin)
    recipe = recipe_of(
        arguments,
        weights=arguments.weights,
        block_size=arguments.block_size,
        accuracy_level=arguments.accuracy_level,
    )
    graphs = Graphs(recipe, folder)
    genai = genai_installed() and arguments.weights != "int8"
    float32 = [FLOAT32] if recipe.half else []
    graphs.make([BRANCHED, PLAIN, *float32, *([GENAI] if genai else [])])
    if not arguments.eager:
        graphs.forget_source()
    manifest = graphs.manifest
    context = tokens(arguments.context, manifest.model.vocab_size)
    seconds: Seconds = {}
    order = random.Random(0)
    max_pending = [int(number) for number in arguments.max_pending.split(",") if number]
    deep_runs = [8, *(number + 1 for number in max_pending if number != 7)]
    for _ in range(arguments.loads):
        cases = load_cases(graphs, context, arguments, order, deep_runs)
        interleave(cases, arguments.rounds, order, seconds)
        del cases
    found = summary(seconds, [*CASES, *map(deep_run, deep_runs[1:])], "no branches", GOALS)
    return {
        "model": recipe.model,
        "weights": recipe.weights,
        "layers": manifest.model.num_layers,
        "checkpoints": list(manifest.checkpoints),
        "shortlist": "default" if recipe.shortlist is None else recipe.shortlist,
        "threads": arguments.threads,
        "spin_microseconds": arguments.spin,
        "context": arguments.context,
        "loads": arguments.loads,
        "rounds": arguments.rounds,
        "onnxruntime": onnxruntime.__version__,
        "worst_steps": worst_steps(found, max_pending),
        **found,
    }


def worst_steps(found: dict, max_pending: Sequence[int]) -> list[dict]:
    """Of the worst pattern for each `max_pending`, so many early exits and then a token at full depth: milliseconds of
    its last step and of a step on average, by the medians and by the fastest tenth."""
    rows = []
    for number in max_pending:
        for figure in ("median", "p10"):
            times = found[f"{figure}_ms"]
            worst = times[deep_run(number + 1)]
            mean = (number * times["all exit at first"] + worst) / (number + 1)
            rows.append({"max_pending": number, "figure": figure, "worst_ms": worst, "mean_ms": mean})
    return rows


def render(result: dict) -> str:
    return (
        f"{result['model']}: {result['weights']}, {result['layers']} layers, checkpoints {result['checkpoints']}, "
        f"{result['shortlist']} shortlist rows a router, {result['threads']} threads that "
        f"spin {result['spin_microseconds']} us, one decode step after {result['context']} tokens, "
        f"medians of {result['loads']} loads x {result['rounds']} interleaved rounds\n"
        + render_table(result, "no branches")
        + "".join(
            f"\nmax_pending {row['max_pending']}, {row['figure']}: worst step {row['worst_ms']:.2f} ms, "
            f"mean {row['mean_ms']:.2f} ms, {row['worst_ms'] / row['mean_ms']:.2f}x"
            for row in result["worst_steps"]
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_recipe_options(parser)
    parser.add_argument("--weights", choices=["fp32", "bf16", "fp16", "int8", "int4"], default="fp32")
    parser.add_argument("--block-size", type=int, help="of int8 and int4")
    parser.add_argument("--accuracy-level", type=int, help="of int8 and int4")
    parser.add_argument(
        "--spin", type=int, default=SPIN_MICROSECONDS, help="microseconds that threads wait before they sleep"
    )
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache before the step")
    parser.add_argument(
        "--max-pending",
        default="",
        help="the worst step and the mean step of the pattern with the longest catch-up, e.g. 1,4,16",
    )
    parser.add_argument("--no-eager", dest="eager", action="store_false", help="leave the PyTorch model out")
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=80, help="rounds of each case per load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a bar chart (PNG) here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed or was not measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, arguments.graphs or Path(scratch))
    print(render(result))
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.plot:
        title = f"{Path(result['model']).name}: label is the ratio to the graph without branches"
        plot(result, arguments.plot, f"ms per decode step, median ({result['threads']} threads)", title)
    return int(arguments.check and not all(goal["met"] for goal in result["goals"]))


if __name__ == "__main__":
    raise SystemExit(main())
