"""Compares whole runtimes on the CPU, end to end, in one interleaved run: speed, memory, load time, perplexity.

    python tools/benchmarks/cpu_peers.py MODEL --case "bf16=tide:BUNDLE" --case "llama.cpp Q4_0=llama.cpp:FILE.gguf"
    [--python llama.cpp=PYTHON] --dataset FILE.jsonl [--contexts 128,1024,4096] [--batches 1,8]

Each case is a runtime (tide, llama.cpp, genai, openvino, eager) with its model, in a process of its own, by
the interpreter that `--python` names for the runtime. `tide:BUNDLE:lossless` is another mode,
`llama.cpp:FILE:no-flash` without flash attention. `server:COMMAND` is llama-server of llama.cpp or ik_llama.cpp,
which times itself, with its options: `"ik=server:bin/llama-server -m f.gguf"`, with `--spec-type ngram-mod` it
drafts. A round gives every case, in a new random order, the same prompts of FILE, cut to the context's length, and
asks for `--tokens` more of each, greedily. Before that, every case loads its file anew. What is compared: prompt
tokens and decoded tokens a second, seconds to load, memory after the first context, and the perplexity of text, read
a token at a time. MODEL's tokenizer makes the tokens for all. A case that cannot be started is omitted, and the table
has the reason. Only ratios within one run mean anything.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness.child_process import ChildProcess, PeerError

from tide_export.common.formatting import table
from tide_export.data.documents import Documents
from tide_export.data.sequences import load_tokenizer, read_sequences

CHILD = Path(__file__).parent / "harness" / "runtime_process.py"
Setting = tuple[int, int]  # context, batch
RUNTIMES = ("tide", "llama.cpp", "server", "genai", "openvino", "eager")
LENGTH = 256  # tokens of a text whose perplexity is measured


@dataclass
class Case:
    """One runtime with one file, and what was measured of it."""

    title: str
    runtime: str
    file: str
    loads: list[float] = field(default_factory=list)
    memory: float = math.nan  # megabytes, after the first request
    first: dict[Setting, list[float]] = field(default_factory=dict)
    rest: dict[Setting, list[float]] = field(default_factory=dict)
    nll: list[float] = field(default_factory=list)
    version: str = ""
    omitted: dict[Setting | None, str] = field(default_factory=dict)  # None: the case as a whole

    def result(self, settings: Sequence[Setting], tokens: int) -> dict[str, Any]:
        speeds = {}
        for context, batch in settings:
            if (context, batch) in self.first:
                prompt = context * batch / median(self.first[context, batch])
                decode = (tokens - 1) * batch / median(self.rest[context, batch])
                speeds[f"{context}x{batch}"] = {"prompt": prompt, "decode": decode}
        return {
            "case": self.title,
            "version": self.version,
            "load_seconds": median(self.loads) if self.loads else None,
            "megabytes": self.memory,
            "perplexity": math.exp(sum(self.nll) / len(self.nll)) if self.nll else None,
            "tokens_per_second": speeds,
        }


def read_cases(options: Sequence[str]) -> list[Case]:
    """`TITLE=RUNTIME:FILE` of every `--case`.

    Raises:
        SystemExit: one of another form.
    """
    cases = []
    for option in options:
        title, _, rest = option.partition("=")
        runtime, _, file = rest.partition(":")
        if runtime not in RUNTIMES or not file or not title:
            raise SystemExit(f"--case {option}: TITLE=RUNTIME:FILE, RUNTIME one of {', '.join(RUNTIMES)}")
        cases.append(Case(title, runtime, file))
    return cases


class Run:
    """The cases, the tokens they read, and the interpreters that run them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.cases = read_cases(arguments.case)
        self.pythons = dict(option.split("=", 1) for option in arguments.python)
        self.arguments, self.order = arguments, random.Random(0)
        self.settings = [(context, batch) for batch in arguments.batches for context in arguments.contexts]
        longest = max(arguments.contexts)
        sequences = read_sequences(
            Documents(arguments.dataset),
            load_tokenizer(str(arguments.model)),
            longest,
            limit=4 * max(arguments.batches),
        )
        ids = [token for sequence in sequences for token in sequence.ids.tolist()]
        if len(ids) < longest + max(arguments.batches):
            raise SystemExit(
                f"--dataset {arguments.dataset}: holds {len(ids)} tokens, fewer than a context of {longest}"
            )
        self.ids = ids

    def measure(self) -> None:
        for _ in range(self.arguments.loads):
            with ExitStack() as running:
                children = self._load(running)
                for number in range(self.arguments.rounds + 1):  # the first is not counted
                    for setting in self.settings:
                        prompts = self._prompts(*setting)
                        for case, child in self.order.sample(children, len(children)):
                            self._generate(case, child, prompts, setting, number > 0)
                self._perplexity(children)

    def _load(self, running: ExitStack) -> list[tuple[Case, ChildProcess]]:
        children = []
        for case in self.order.sample(self.cases, len(self.cases)):
            if None not in case.omitted:
                try:
                    child = self._start(case)
                    running.callback(child.close)
                    case.version = child.ready["version"]
                    case.loads.append(child.ready["load"])
                    children.append((case, child))
                except PeerError as error:
                    self._omit(case, None, str(error))
        return children

    def _start(self, case: Case) -> ChildProcess:
        length = max(self.arguments.contexts) + self.arguments.tokens + 8
        job = {"runtime": case.runtime, "file": case.file, "threads": self.arguments.threads}
        job |= {"length": length, "batch": max(self.arguments.batches)}
        python = self.pythons.get(case.runtime, sys.executable)
        return ChildProcess([python, "-P", str(CHILD), json.dumps(job)], self.arguments.threads)

    def _generate(
        self, case: Case, child: ChildProcess, prompts: list[list[int]], setting: Setting, counted: bool
    ) -> None:
        if setting in case.omitted:
            return
        try:
            took = child.ask({"do": "generate", "prompts": prompts, "tokens": self.arguments.tokens})
            if math.isnan(case.memory):
                case.memory = child.ask({"do": "memory"})["memory"]
        except PeerError as error:
            self._omit(case, setting, str(error))
            return
        if counted:
            case.first.setdefault(setting, []).append(took["first"])
            case.rest.setdefault(setting, []).append(took["rest"])

    def _perplexity(self, children: Sequence[tuple[Case, ChildProcess]]) -> None:
        for case, child in children:
            if case.first and not case.nll:
                for start in range(0, self.arguments.perplexity, LENGTH):
                    case.nll += child.ask({"do": "nll", "ids": self.ids[start : start + LENGTH + 1]})["nll"]

    def _prompts(self, context: int, batch: int) -> list[list[int]]:
        last = len(self.ids) - context
        starts = [self.order.randrange(last + 1) for _ in range(batch)]
        return [self.ids[start : start + context] for start in starts]

    def _omit(self, case: Case, setting: Setting | None, why: str) -> None:
        case.omitted[setting] = why
        print(f"OMITTED {case.title}{name_of(setting)}: {why}", file=sys.stderr, flush=True)


def name_of(setting: Setting | None) -> str:
    return "" if setting is None else f", {setting[0]}x{setting[1]}"


def render(result: dict[str, Any]) -> str:
    settings = result["settings"]
    base = result["cases"][0]
    rows = []
    for case in result["cases"]:
        row = [case["case"]]
        for setting in settings:
            ours, theirs = (one["tokens_per_second"].get(setting) for one in (base, case))
            if ours is None or theirs is None:
                row += ["", ""]
                continue
            for what in ("prompt", "decode"):
                row.append(f"{theirs[what]:.1f} ({theirs[what] / ours[what]:.2f})")
        row.append("" if case["load_seconds"] is None else f"{case['load_seconds']:.2f}")
        row.append(f"{case['megabytes']:.0f}")
        row.append("" if case["perplexity"] is None else f"{case['perplexity']:.3f}")
        rows.append(row)
    speeds = [f"{setting} {what}" for setting in settings for what in ("prompt", "decode")]
    lines = [
        f"{result['model']}: {result['threads']} threads, tokens/s (in brackets: times the first case's), context x "
        f"batch, {result['tokens']} tokens decoded, {result['loads']} loads x {result['rounds']} interleaved rounds",
        table(["case", *speeds, "load s", "MB", "perplexity"], rows),
    ]
    lines += [f"{case['case']}: {case['version']}" for case in result["cases"]]
    return "\n".join([*lines, *(f"OMITTED {title}: {why}" for title, why in result["omitted"].items())])


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="its tokenizer makes the tokens")
    parser.add_argument(
        "--case", action="append", required=True, metavar="TITLE=RUNTIME:FILE", help="the first is the base"
    )
    parser.add_argument("--python", action="append", default=[], metavar="RUNTIME=PYTHON", help="which Python runs it")
    parser.add_argument("--dataset", required=True, help="text for prompts and perplexity")
    parser.add_argument("--contexts", type=numbers, default=[128, 1024, 4096], help="tokens of a prompt")
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="prompts at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="decoded after each prompt")
    parser.add_argument("--perplexity", type=int, default=1024, metavar="N", help="tokens of text; 0: none")
    parser.add_argument("--loads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of each case, context and batch per load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    run = Run(arguments)
    run.measure()
    measured = [case for case in run.cases if case.first]
    if not measured:
        raise SystemExit("no case could be measured")
    result = {
        "model": arguments.model.name,
        **{name: getattr(arguments, name) for name in ("threads", "tokens", "loads", "rounds")},
        "settings": [f"{context}x{batch}" for context, batch in run.settings],
        "cases": [case.result(run.settings, arguments.tokens) for case in measured],
        "omitted": {
            f"{case.title}{name_of(setting)}": why for case in run.cases for setting, why in case.omitted.items()
        },
    }
    print(render(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
