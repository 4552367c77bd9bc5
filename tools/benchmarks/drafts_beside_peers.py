"""Speed of decoding with drafts, ours beside other runtimes', per kind of prompt, in one interleaved run.

    python tools/benchmarks/drafts_beside_peers.py BUNDLE --prompts tools/benchmarks/prompts/chat.txt --prompts ...
    --case "tide-export, full=tide:BUNDLE:full" --case "tide-export, lossless=tide:BUNDLE:lossless"
    --case "ik_llama.cpp Q4_0, plain=server:IK/llama-server -m q4_0.gguf"
    --case "ik_llama.cpp Q4_0, ngram-mod=server:IK/llama-server -m q4_0.gguf --spec-type ngram-mod:n_max=8,n_min=2"
    --case "ORT-GenAI int4, n-grams=genai:FOLDER:ngrams" [--python genai=PEERS/bin/python] [--against TITLE]

Each case is a runtime with or without its drafts (harness/answer_process.py says which there are) in a process of its
own. The title's part before the comma names its group, whose first case decodes plainly. Each prompt of a kind (a file
of prompts) is answered by every case, in a new random order and with the same seed; an answer ends where the model ends
it. BUNDLE's tokenizer and chat template make the tokens for all. For each temperature the processes start anew, and
answer one prompt that is not counted. Speeds are tokens over wall clock, both after the first token of each answer; in
brackets: times the group's plain decoding, times the case of `--against`. `unequal` counts answers that differ from the
group's plain ones of the same seed. A case that fails is omitted, and the table has the reason.
"""

import argparse
import json
import math
import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_peers import read_cases
from harness.chat import chat_prompts
from harness.child_process import ChildProcess, PeerError

from tide_export.bundle.opened import open_bundle
from tide_export.report.theme import LIGHT

CHILD = Path(__file__).parent / "harness" / "answer_process.py"
Cell = tuple[str, float]  # kind of prompts, temperature


@dataclass(eq=False)
class Entrant:
    """One runtime with or without its drafts, and its answers."""

    title: str
    runtime: str
    file: str
    version: str = ""
    answers: dict[Cell, dict[int, dict[str, Any]]] = field(default_factory=dict)  # by number of the prompt
    omitted: dict[float, str] = field(default_factory=dict)  # by temperature

    @property
    def group(self) -> str:
        return self.title.partition(",")[0]

    def speed(self, cell: Cell) -> float:
        """Tokens a second; not a number where it gave no answers."""
        answers = self.answers.get(cell, {}).values()
        seconds = sum(answer["seconds"] for answer in answers)
        return sum(answer["tokens"] for answer in answers) / seconds if seconds else math.nan


class Run:
    """The entrants, and the prompts that they answer."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.order = arguments, random.Random(0)
        self.pythons = dict(option.split("=", 1) for option in arguments.python)
        self.entrants = [Entrant(case.title, case.runtime, case.file) for case in read_cases(arguments.case)]
        bundle = open_bundle(arguments.bundle)
        self.kinds = {path.stem: chat_prompts(bundle, path)[: arguments.count] for path in arguments.prompts}
        self.cells = [(kind, temperature) for temperature in arguments.temperatures for kind in self.kinds]
        titles = [entrant.title for entrant in self.entrants]
        self.against = self.entrants[titles.index(arguments.against)] if arguments.against else self.entrants[0]

    def measure(self) -> None:
        for temperature in self.arguments.temperatures:
            with ExitStack() as running:
                children = self._start(temperature, running)
                for kind, prompts in self.kinds.items():
                    for number, prompt in enumerate(prompts):
                        for entrant in self.order.sample(list(children), len(children)):
                            self._ask(entrant, children[entrant], (kind, temperature), number, prompt)
                    print(f"{kind}, temperature {temperature:g}: done", file=sys.stderr, flush=True)

    def _start(self, temperature: float, running: ExitStack) -> dict[Entrant, ChildProcess]:
        children = {}
        longest = max(len(prompt) for prompts in self.kinds.values() for prompt in prompts)
        for entrant in self.entrants:
            job = {"runtime": entrant.runtime, "file": entrant.file, "threads": self.arguments.threads}
            job |= {"length": longest + self.arguments.new_tokens + 64, "batch": 1}
            python = self.pythons.get(entrant.runtime, sys.executable)
            try:
                child = ChildProcess([python, "-P", str(CHILD), json.dumps(job)], self.arguments.threads)
                running.callback(child.close)
                self._question(child, next(iter(self.kinds.values()))[-1], temperature, 0, 8)
            except PeerError as error:
                self._omit(entrant, temperature, error)
                continue
            entrant.version = child.ready["version"]
            children[entrant] = child
        return children

    def _ask(self, entrant: Entrant, child: ChildProcess, cell: Cell, number: int, prompt: list[int]) -> None:
        if cell[1] not in entrant.omitted:
            try:
                answer = self._question(child, prompt, cell[1], number, self.arguments.new_tokens)
                entrant.answers.setdefault(cell, {})[number] = answer
            except PeerError as error:
                self._omit(entrant, cell[1], error)

    def _question(
        self, child: ChildProcess, prompt: list[int], temperature: float, seed: int, tokens: int
    ) -> dict[str, Any]:
        question = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "seed": seed}
        return child.ask({"do": "answer", "question": question | {"top_k": self.arguments.top_k}})

    def _omit(self, entrant: Entrant, temperature: float, why: PeerError) -> None:
        entrant.omitted[temperature] = str(why)
        print(f"OMITTED {entrant.title}, temperature {temperature:g}: {why}", file=sys.stderr, flush=True)

    def plain(self, entrant: Entrant) -> Entrant:
        """The first case of the entrant's group."""
        return next(other for other in self.entrants if other.group == entrant.group)

    def unequal(self, entrant: Entrant, temperature: float) -> str:
        pairs = [
            (answer["text"], plain[number]["text"])
            for kind in self.kinds
            for plain in [self.plain(entrant).answers.get((kind, temperature), {})]
            for number, answer in entrant.answers.get((kind, temperature), {}).items()
            if number in plain
        ]
        return f"{sum(one != other for one, other in pairs)} of {len(pairs)}"


def render(run: Run) -> str:
    arguments, lines = run.arguments, []
    for temperature in arguments.temperatures:
        rows = []
        for entrant in run.entrants:
            if temperature in entrant.omitted:
                continue
            cells = []
            for kind in run.kinds:
                speed, base, ours = (
                    one.speed((kind, temperature)) for one in (entrant, run.plain(entrant), run.against)
                )
                cells.append(f"{speed:.1f} ({speed / base:.2f}x, {speed / ours:.2f}x)")
            rows.append([entrant.title, *cells, run.unequal(entrant, temperature)])
        lines += [
            f"temperature {temperature:g}{f', top-k {arguments.top_k}' if temperature else ''}: tokens/s (times its "
            f"own plain decoding, times {run.against.title})",
            markdown(["case", *run.kinds, "unequal"], rows),
            "",
        ]
    lines += [f"{entrant.title}: {entrant.version}" for entrant in run.entrants]
    lines += [
        f"OMITTED {entrant.title}, temperature {temperature:g}: {why}"
        for entrant in run.entrants
        for temperature, why in entrant.omitted.items()
    ]
    counts = ", ".join(f"{len(prompts)} {kind}" for kind, prompts in run.kinds.items())
    return "\n".join([f"{counts}; {arguments.new_tokens} tokens at most, {arguments.threads} threads", "", *lines])


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def draw(run: Run, path: Path) -> None:
    """Bars of tokens a second by kind, one axes for each temperature; groups in one colour, plain decoding pale."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(entrant.group for entrant in run.entrants))
    colours = {group: colormaps["viridis"](0.05 + 0.8 * i / max(1, len(groups) - 1)) for i, group in enumerate(groups)}
    temperatures = run.arguments.temperatures
    figure = Figure(figsize=(10, 3.4 * len(temperatures)), dpi=130, layout="constrained")
    width = 0.85 / len(run.entrants)
    for axes, temperature in zip(figure.subplots(len(temperatures), squeeze=False)[:, 0], temperatures, strict=True):
        for i, entrant in enumerate(run.entrants):
            speeds = [entrant.speed((kind, temperature)) for kind in run.kinds]
            places = [number - 0.425 + (i + 0.5) * width for number in range(len(speeds))]
            group = [one for one in run.entrants if one.group == entrant.group]
            alpha = 0.4 + 0.6 * group.index(entrant) / max(1, len(group) - 1)
            axes.bar(places, speeds, width, color=colours[entrant.group], alpha=alpha, label=entrant.title)
        axes.set_xticks(range(len(run.kinds)), list(run.kinds))
        axes.set_ylabel("tokens/s")
        axes.set_title(f"temperature {temperature:g}", loc="left", color=LIGHT.ink)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=LIGHT.faint)
        axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    FigureCanvasAgg(figure).print_png(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="its tokenizer and chat template make the tokens")
    parser.add_argument("--case", action="append", required=True, metavar="TITLE=RUNTIME:FILE")
    parser.add_argument("--against", metavar="TITLE", help="the case that others are compared with (the first)")
    parser.add_argument("--python", action="append", default=[], metavar="RUNTIME=PYTHON", help="which Python runs it")
    parser.add_argument("--prompts", type=Path, action="append", required=True, metavar="FILE", help="one kind")
    parser.add_argument("--count", type=int, default=40, metavar="N", help="prompts of each kind at most (40)")
    parser.add_argument("--new-tokens", type=int, default=96, metavar="N", help="of an answer at most (96)")
    parser.add_argument("--temperatures", type=lambda text: [float(word) for word in text.split(",")], default=[0.8, 0])
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="above temperature 0 (40)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    parser.add_argument("--json", type=Path, help="write every answer's time and text here")
    arguments = parser.parse_args()
    if arguments.against not in (None, *(case.title for case in read_cases(arguments.case))):
        parser.error(f"--against {arguments.against}: no case has this title")
    run = Run(arguments)
    run.measure()
    print(render(run))
    if arguments.picture:
        draw(run, arguments.picture)
    if arguments.json:
        found = {
            one.title: [[kind, temperature, answers] for (kind, temperature), answers in one.answers.items()]
            for one in run.entrants
        }
        arguments.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
