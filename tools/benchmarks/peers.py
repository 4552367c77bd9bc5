"""Times one decode step at full depth against other ways to run the model, in one interleaved run: a table, a plot.

    python tools/benchmarks/peers.py MODEL [--peer optimum=PYTHON --peer tide=PYTHON] [--graphs FOLDER] [--plot
    FILE.png]

The peers: Hugging Face in eager PyTorch, TIDE 0.2.1, Optimum-ONNX, transformers.exporters with its fusions for ONNX
Runtime, and ONNX Runtime GenAI's graph. Each of the first four runs as its users run it, in a separate process, which
`--peer NAME=PYTHON` starts with the interpreter of an environment that has its packages (NAME: eager, tide, optimum,
exporters; this interpreter where none is given), and runs one step per request over a pipe. Before a peer is
timed, its logits are compared with ours: same likeliest token, same values. One that cannot be started or differs is
omitted, and the table has the reason; its goal is then not measured, which `--check` counts as a miss. All
sessions and processes start again, in another order, `--loads` times. Exporting takes minutes: `--graphs` keeps what
was exported, theirs and ours.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tide_export.cli.torch_environment import SPIN_ROUNDS

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

import numpy as np
import onnxruntime
from harness import genai_case as genai
from harness.engine_case import DecodeSteps, logits_after, steps_after, tokens
from harness.graphs import BRANCHED, GENAI, PLAIN, Graphs, add_recipe_options, genai_installed, recipe_of
from harness.interleave import Case, Goal, Seconds, interleave, plot, render_table, summary, write_json
from harness.peer_case import PEERS, PeerError, PeerProcess, PeerSpec, check_logits

from tide_export.progress import stage
from tide_export.runtime.engine import Engine, load

LastStep = tuple[list[int], np.ndarray]  # tokens, and the logits [V] that follow the last

OURS, MAY_EXIT, GENAI_TITLE = "tide-export, full depth", "tide-export, may exit but does not", "ORT-GenAI's graph"
TITLES = {spec.name: spec.title for spec in PEERS}
CASES = (OURS, MAY_EXIT, GENAI_TITLE, TITLES["exporters"], TITLES["optimum"], TITLES["eager"], TITLES["tide"])
GOALS = [
    Goal(f"at least {times:g}x as fast as {title}", OURS, title, 1 / times)
    for title, times in [
        (GENAI_TITLE, 1.05),
        (TITLES["exporters"], 1.0),
        (TITLES["optimum"], 2.0),
        (TITLES["eager"], 3.0),
        (TITLES["tide"], 3.0),
    ]
]


class Run:
    """The cases of one load, and those omitted from here on."""

    def __init__(self, graphs: Graphs, pythons: dict[str, str], context: list[int], threads: int) -> None:
        self.graphs, self.pythons, self.context, self.threads = graphs, pythons, context, threads
        self.omitted: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.apart: dict[str, float] = {}

    def load(self, order: random.Random, open_peers: ExitStack) -> dict[str, Case]:
        """Fresh sessions and processes, started in random order; then all that are not ours are checked."""
        engine: Engine | None = None
        cases: dict[str, Case] = {}
        last_step: dict[str, Callable[[], LastStep]] = {}
        for title in order.sample(CASES, len(CASES)):
            if title == OURS:
                engine = load(self.graphs.folder / PLAIN, "cpu", self.threads, verify=False)
                cases[title] = DecodeSteps(engine, self.context).full
            elif title == MAY_EXIT:
                branched = load(self.graphs.folder / BRANCHED, "cpu", self.threads, verify=False)
                cases[title] = DecodeSteps(branched, self.context).full
            elif title not in self.omitted:
                try:
                    cases[title], last_step[title] = (
                        self._genai() if title == GENAI_TITLE else self._peer(title, open_peers)
                    )
                except PeerError as error:
                    self._omit(title, str(error))
        assert engine is not None
        for title, last in last_step.items():
            try:
                ids, logits = last()
                self.apart[title] = check_logits(logits, logits_after(engine, ids))
            except PeerError as error:
                del cases[title]
                self._omit(title, str(error))
        return cases

    def _omit(self, title: str, why: str) -> None:
        self.omitted[title] = why
        print(f"OMITTED {title}: {why}", file=sys.stderr, flush=True)

    def _peer(self, title: str, open_peers: ExitStack) -> tuple[Case, Callable[[], LastStep]]:
        spec = next(spec for spec in PEERS if spec.title == title)
        peer = self._start(spec)
        open_peers.callback(peer.close)
        self.versions[title] = peer.version
        peer.step()
        return peer.step, peer.logits

    def _start(self, spec: PeerSpec) -> PeerProcess:
        python, folder = self.pythons.get(spec.name, sys.executable), self.graphs.folder / f"peer-{spec.name}"
        try:
            with stage(f"Starting {spec.title}"):
                return PeerProcess(spec, python, self.graphs.model, self.context, self.threads, folder)
        except PeerError as error:
            if "No module named" not in str(error) and "PackageNotFoundError" not in str(error):
                raise
            raise PeerError(
                f"{error} in {python}: install {spec.packages} into an environment and give "
                f"--peer {spec.name}=ENVIRONMENT/bin/python"
            ) from error

    def _genai(self) -> tuple[Case, Callable[[], LastStep]]:
        folder = self.graphs.folder / GENAI
        if not folder.exists():
            raise PeerError("onnxruntime-genai is not installed: pip install 'tide_export[bench]'")
        self.versions[GENAI_TITLE] = f"onnxruntime {onnxruntime.__version__}"
        graph = genai.GenaiGraph(folder, self.threads)
        room = steps_after(len(self.context), self.graphs.manifest.model.context_length)

        def last_step() -> LastStep:
            sequence = genai.GenaiSequence(graph, len(self.context) + 1)
            sequence.read(self.context)
            sequence.run(self.context[-1:])
            return [*self.context, self.context[-1]], sequence.logits()

        return genai.decode_case(graph, self.context, room), last_step


def measure(arguments: argparse.Namespace, folder: Path, pythons: dict[str, str]) -> dict:
    recipe = recipe_of(arguments)
    graphs = Graphs(recipe, folder)
    graphs.make([PLAIN, BRANCHED, *([GENAI] if genai_installed() else [])])
    graphs.forget_source()
    model = graphs.manifest.model
    run = Run(graphs, pythons, tokens(arguments.context, model.vocab_size), arguments.threads)
    seconds: Seconds = {}
    order = random.Random(0)
    for _ in range(arguments.loads):
        with ExitStack() as open_peers:
            cases = run.load(order, open_peers)
            try:
                interleave(cases, arguments.rounds, order, seconds)
            except PeerError as error:
                raise SystemExit(f"a peer failed while it was timed: {error}") from error
            del cases
    for title in run.omitted:
        seconds.pop(title, None)
    return {
        "model": recipe.model,
        "layers": model.num_layers,
        "threads": arguments.threads,
        "context": arguments.context,
        "loads": arguments.loads,
        "rounds": arguments.rounds,
        "versions": run.versions,
        "logits_apart": run.apart,
        "left_out": run.omitted,
        **summary(seconds, CASES, OURS, GOALS),
    }


def render(result: dict) -> str:
    lines = [
        f"{result['model']}: fp32, {result['layers']} layers, {result['threads']} threads, one decode step after "
        f"{result['context']} tokens, medians of {result['loads']} loads x {result['rounds']} interleaved rounds",
        render_table(result, OURS),
    ]
    for title, apart in result["logits_apart"].items():
        lines.append(f"{title}: {result['versions'][title]}; logits within {apart:.0e} of ours")
    lines += [f"OMITTED {title}: {why}" for title, why in result["left_out"].items()]
    return "\n".join(lines)


def interpreters(options: list[str]) -> dict[str, str]:
    """`NAME=PYTHON` of every `--peer`.

    Raises:
        SystemExit: a name that no peer has.
    """
    pythons = {}
    for option in options:
        name, _, python = option.partition("=")
        if name not in TITLES or not python:
            raise SystemExit(f"--peer {option}: NAME=PYTHON, NAME one of {', '.join(TITLES)}")
        pythons[name] = python
    return pythons


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_recipe_options(parser)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="which Python runs a peer")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache before the step")
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each case per load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a bar chart (PNG) here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed or was not measured")
    arguments = parser.parse_args()
    pythons = interpreters(arguments.peer)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, arguments.graphs or Path(scratch), pythons)
    print(render(result))
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.plot:
        title = f"{Path(result['model']).name}: label is the ratio to our own full depth"
        plot(result, arguments.plot, f"ms per decode step, median ({result['threads']} threads)", title)
    return int(arguments.check and not all(goal["met"] for goal in result["goals"]))


if __name__ == "__main__":
    raise SystemExit(main())
