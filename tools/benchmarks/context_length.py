"""A decode step after N tokens and the time to the first token of a prompt, ours and ONNX Runtime GenAI's.

    python tools/benchmarks/context_length.py MODEL --decode 128,2048,4096 --stretch 8192 [--graphs FOLDER] [--plot
    FILE.png]
    python tools/benchmarks/context_length.py MODEL --prefill 128,1000 [--graphs FOLDER]

Decode steps: our graph without branches, with branches of which none is taken, with every token leaving at the first
checkpoint, and GenAI's graph. Each is related to GenAI's at the same length, and each length to the first one.
Prompts: a new sequence up to its first logits, memory for K/V included; ours at full depth without and with branches;
where all exit at the first checkpoint and the bundle's `max_pending` limits the pending tokens (`exits, max_pending`),
or nothing does (`exits, all wait`: a prompt that is answered by its first layers, with the rest pending);
GenAI's graph with a head that reads the last token alone, as ours does. `--stretch` gives the model a context it was
not trained for: its tokens there are meaningless, their time is not. All cases are interleaved in one run; all
sessions are loaded again, in another order, `--loads` times. Without ONNX Runtime GenAI its goals are not measured,
which `--check` counts as missed.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

import numpy as np
import onnxruntime
from harness import genai_case as genai
from harness.engine_case import UNLIMITED, DecodeSteps, logits_after, prefill_case, steps_after, tokens
from harness.graphs import (
    BRANCHED,
    GENAI,
    GENAI_LAST,
    PLAIN,
    Graphs,
    add_recipe_options,
    genai_installed,
    recipe_of,
)
from harness.interleave import Case, Goal, Seconds, goal_lines, interleave, summary, write_json
from harness.peer_case import check_logits

from tide_export.formatting import table
from tide_export.runtime.engine import load

FULL, MAY_EXIT, ALL_EXIT, LIMITED, WAITING, PEER = (
    "full depth",
    "may exit but does not",
    "all exit at first",
    "exits, max_pending",
    "exits, all wait",
    "ORT-GenAI's graph",
)
GENAI_ROOM = 128  # tokens that its buffers hold beyond the prompt
DECODE, PREFILL = (FULL, MAY_EXIT, ALL_EXIT, PEER), (FULL, MAY_EXIT, LIMITED, WAITING, PEER)


def named(case: str, stage: str, length: int) -> str:
    return f"{case}, {stage} {length}"


def load_cases(
    graphs: Graphs, decode: list[int], prefill: list[int], threads: int, order: random.Random
) -> dict[str, Case]:
    """Fresh sessions, loaded in random order, and the cases that run on them."""
    model = graphs.manifest.model
    prompts = {length: tokens(length, model.vocab_size) for length in {*decode, *prefill}}
    cases: dict[str, Case] = {}

    def plain() -> None:
        engine = load(graphs.folder / PLAIN, "cpu", threads, verify=False)
        for n in decode:
            cases[named(FULL, "decode", n)] = DecodeSteps(engine, prompts[n]).full
        for n in prefill:
            cases[named(FULL, "prefill", n)] = prefill_case(engine, prompts[n])

    def branched() -> None:
        engine = load(graphs.folder / BRANCHED, "cpu", threads, verify=False)
        for n in decode:
            cases[named(MAY_EXIT, "decode", n)] = DecodeSteps(engine, prompts[n]).full
            cases[named(ALL_EXIT, "decode", n)] = DecodeSteps(engine, prompts[n]).first_exit
        for n in prefill:
            cases[named(MAY_EXIT, "prefill", n)] = prefill_case(engine, prompts[n])
            cases[named(LIMITED, "prefill", n)] = prefill_case(engine, prompts[n], exits=True)
            cases[named(WAITING, "prefill", n)] = prefill_case(engine, prompts[n], exits=True, max_pending=UNLIMITED)

    def genai_decode() -> None:
        graph = genai.GenaiGraph(graphs.folder / GENAI, threads)
        for n in decode:
            room = steps_after(n, model.context_length)
            cases[named(PEER, "decode", n)] = genai.decode_case(graph, prompts[n], room)

    def genai_prefill() -> None:
        graph = genai.GenaiGraph(graphs.folder / GENAI_LAST, threads)
        for n in prefill:
            cases[named(PEER, "prefill", n)] = genai.prefill_case(graph, prompts[n], GENAI_ROOM)

    loaders = [plain, branched]
    if genai_installed():
        loaders += [genai_decode] * bool(decode) + [genai_prefill] * bool(prefill)
    for loader in order.sample(loaders, len(loaders)):
        loader()
    return cases


def check_genai(graphs: Graphs, length: int, threads: int) -> float:
    """How far GenAI's logits after `length` tokens are from ours, in shares of the largest one."""
    ids = tokens(length, graphs.manifest.model.vocab_size)
    sequence = genai.GenaiSequence(genai.GenaiGraph(graphs.folder / GENAI, threads), length)
    sequence.read(ids[:-1])
    sequence.run(ids[-1:])
    return check_logits(sequence.logits(), logits_after(load(graphs.folder / PLAIN, "cpu", threads, verify=False), ids))


def goals_of(decode: list[int], prefill: list[int]) -> list[Goal]:
    goals = []
    for n in decode:
        what = f"decode step after {n} tokens at least 1.05x as fast as ORT-GenAI's graph"
        goals.append(Goal(what, named(FULL, "decode", n), named(PEER, "decode", n), 1 / 1.05))
    for n in prefill:
        what = f"first token of {n} no later than ORT-GenAI's graph"
        goals.append(Goal(what, named(FULL, "prefill", n), named(PEER, "prefill", n), 1.0))
    return goals


def growth(medians: dict[str, float], decode: list[int]) -> list[dict]:
    """The goal that a step after more tokens costs no more, related to one after the fewest, than GenAI's does."""
    found = []
    for n in decode[1:]:
        ratio, limit = (
            medians[named(case, "decode", n)] / medians[named(case, "decode", decode[0])]
            if named(case, "decode", n) in medians
            else None
            for case in (FULL, PEER)
        )
        met = ratio is not None and limit is not None and ratio <= limit
        what = f"decode step after {n} tokens over one after {decode[0]}, against ORT-GenAI's ratio"
        found.append({"goal": what, "ratio": ratio if limit else None, "limit": limit, "met": met})
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    decode, prefill = lengths(arguments.decode), lengths(arguments.prefill)
    if not decode and not prefill:
        raise SystemExit("give lengths to measure: --decode 128,2048 or --prefill 128,1000")
    recipe = recipe_of(arguments)
    graphs = Graphs(recipe, folder)
    peer = [GENAI, *([GENAI_LAST] if prefill else [])] if genai_installed() else []
    graphs.make([PLAIN, BRANCHED, *peer])
    graphs.forget_source()
    model = graphs.manifest.model
    for n in [*decode, *prefill]:
        steps_after(n, model.context_length)
    apart = check_genai(graphs, max(decode + prefill), arguments.threads) if peer else None
    seconds: Seconds = {}
    order = random.Random(0)
    for _ in range(arguments.loads):
        cases = load_cases(graphs, decode, prefill, arguments.threads, order)
        interleave(cases, arguments.rounds, order, seconds)
        del cases
    names = [named(case, "decode", n) for n in decode for case in DECODE]
    names += [named(case, "prefill", n) for n in prefill for case in PREFILL]
    found = summary(seconds, names, names[0], goals_of(decode, prefill))
    del found["relative"]
    found["goals"] += growth(found["median_ms"], decode)
    return {
        "model": recipe.model,
        "layers": model.num_layers,
        "checkpoints": list(graphs.manifest.checkpoints),
        "max_pending": graphs.manifest.max_pending,
        "context_length": model.context_length,
        "threads": arguments.threads,
        "decode": decode,
        "prefill": prefill,
        "loads": arguments.loads,
        "rounds": arguments.rounds,
        "onnxruntime": onnxruntime.__version__,
        "genai_logits_apart": apart,
        **found,
    }


def lengths(option: str) -> list[int]:
    return [int(length) for length in option.split(",")] if option else []


def rows(result: dict, stage: str) -> list[list[str]]:
    """Of each length and case: median, fastest tenth, ratio to GenAI's, ratio to the same case at the first length."""
    found = []
    medians = result["median_ms"]
    for n in result[stage]:
        for case in DECODE if stage == "decode" else PREFILL:
            name, first = named(case, stage, n), named(case, stage, result[stage][0])
            if name not in medians:
                continue
            peer = medians.get(named(PEER, stage, n))
            against = f"{medians[name] / peer:.3f}" if peer else "-"
            p10 = result["p10_ms"][name]
            grown = f"{medians[name] / medians[first]:.2f}"
            found.append([str(n), case, f"{medians[name]:.2f}", f"{p10:.2f}", against, grown])
    return found


def render(result: dict) -> str:
    lines = [
        f"{result['model']}: fp32, {result['layers']} layers, checkpoints {result['checkpoints']}, context "
        f"{result['context_length']}, {result['threads']} threads, medians of {result['loads']} loads x "
        f"{result['rounds']} interleaved rounds, max_pending {result['max_pending']}"
    ]
    for stage, title in (("decode", "decode step after"), ("prefill", "first token of")):
        if result[stage]:
            headers = [title, "case", "median ms", "p10 ms", f"x {PEER}", f"x of {result[stage][0]}"]
            lines.append(table(headers, rows(result, stage), left=2))
    lines += goal_lines(result["goals"])
    if result["genai_logits_apart"] is None:
        lines.append("OMITTED ORT-GenAI's graph: onnxruntime-genai is not installed: pip install 'tide_export[bench]'")
    else:
        lines.append(f"ORT-GenAI's logits within {result['genai_logits_apart']:.0e} of ours")
    return "\n".join(lines)


def plot(result: dict, path: Path) -> None:
    """Milliseconds over the length, a line for each case, decode and prefill beside each other."""
    from matplotlib.figure import Figure

    stages = [stage for stage in ("decode", "prefill") if result[stage]]
    figure = Figure(figsize=(6 * len(stages), 4), layout="constrained")
    for axes, stage in zip(np.atleast_1d(figure.subplots(1, len(stages))), stages, strict=True):
        for number, case in enumerate(dict.fromkeys(DECODE + PREFILL)):
            points = [(n, result["median_ms"].get(named(case, stage, n))) for n in result[stage]]
            if measured := [point for point in points if point[1]]:
                axes.plot(*zip(*measured, strict=True), marker="o", label=case, color=f"C{number}")
        axes.set_xlabel("tokens in the cache" if stage == "decode" else "tokens of the prompt")
        axes.set_ylabel("ms per decode step" if stage == "decode" else "ms to the first token")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(f"{Path(result['model']).name}, medians, {result['threads']} threads")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_recipe_options(parser)
    parser.add_argument("--decode", default="", metavar="N,...", help="tokens in the cache before a decode step")
    parser.add_argument("--prefill", default="", metavar="N,...", help="tokens of a prompt")
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each case per load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a plot (PNG) here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed or was not measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, arguments.graphs or Path(scratch))
    print(render(result))
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.plot:
        plot(result, arguments.plot)
    return int(arguments.check and not all(goal["met"] for goal in result["goals"]))


if __name__ == "__main__":
    raise SystemExit(main())
