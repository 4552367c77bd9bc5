"""Measures what collecting hidden states costs: time against one plain forward pass, memory against the text.

    python tools/benchmarks/calibration_cost.py MODEL --dataset SPEC [--memory-tokens 10000,100000,1000000]

Time: `collect`, in memory and into a folder, and Hugging Face's own forward pass (logits and all) over the same tokens
in the same batches, interleaved in one process; the ratio is that of the medians. Fitting is not included. Memory:
reading and collecting with a fixed number of kept tokens from texts of several lengths, each in a new process; the
largest resident set as Linux counts it (VmHWM).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from tide_export.calibration.collect import CPU_TOKENS, collect
from tide_export.calibration.config import TideConfig
from tide_export.calibration.sampling_plan import Plan
from tide_export.data.sequences import TokenSequence, load_tokenizer, read_sequences
from tide_export.model.source import SourceModel, load_model

LENGTH, KEPT = 512, 8192  # tokens of a sequence, and kept of all
MEMORY = """
import sys
sys.path.insert(0, {tools!r})
from calibration_cost import KEPT, layers_of, peak_bytes, read
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.model.source import load_model
source = load_model({model!r})
sequences = read({model!r}, {text!r}, {tokens})
before = peak_bytes()
sample = collect(source, sequences, layers_of(source), TideConfig(), KEPT, "collecting")
print("MEASURED", sample.seen, sample.kept, before, peak_bytes())
"""


def layers_of(source: SourceModel) -> list[int]:
    """Returns the checkpoints of the default settings, and the depth."""
    return [*TideConfig().resolve_checkpoints(source.num_layers), source.num_layers]


def peak_bytes() -> int:
    """Returns this process's largest resident set; getrusage would also count what its parent had at the start."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024


def read(model: str, spec: str, tokens: int) -> list[TokenSequence]:
    """Returns sequences of `spec` that have `tokens` tokens together."""
    found: list[TokenSequence] = []
    left = tokens
    for sequence in read_sequences(spec, load_tokenizer(model), LENGTH, 2 * tokens // LENGTH + 2):
        found.append(TokenSequence(sequence.document, sequence.ids[:left]))
        left -= len(found[-1].ids)
        if left <= 0:
            return found
    raise SystemExit(f"{spec} gives {tokens - left} tokens only, not {tokens}")


@torch.no_grad()
def plain_pass(source: SourceModel, plan: Plan) -> None:
    """Runs the model over the same batches: logits of every token, nothing kept."""
    for number in range(len(plan.batches)):
        batch = plan.batch(number)
        source.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits.sum().item()


def measure_time(model: str, spec: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each case by round."""
    source, config = load_model(model), TideConfig()
    sequences, layers = read(model, spec, tokens), layers_of(source)
    plan = Plan.make(sequences, tokens, config.seed, config.calibration_batch, CPU_TOKENS)

    def into_folder() -> None:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            collect(source, sequences, layers, config, KEPT, "collecting", Path(folder))

    cases: dict[str, Callable[[], object]] = {
        "plain pass": lambda: plain_pass(source, plan),
        "collect": lambda: collect(source, sequences, layers, config, KEPT, "collecting"),
        "collect into a folder": into_folder,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):  # the first warms up
        for name, case in cases.items():
            started = time.perf_counter()
            case()
            seconds[name] += [time.perf_counter() - started] if number else []
    return seconds


def measure_memory(model: str, spec: str, tokens: int) -> list[int]:
    """Returns tokens read and kept, and the bytes before collecting and at most, of a fresh process."""
    body = MEMORY.format(tools=str(Path(__file__).parent), model=model, text=spec, tokens=tokens)
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED")), None)
    if line is None:
        raise SystemExit(done.stderr.strip())
    return [int(word) for word in line.split()[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dataset", required=True, metavar="SPEC")
    parser.add_argument("--time-tokens", type=int, default=16384, metavar="N", help="(16384)")
    parser.add_argument("--memory-tokens", default="10000,100000,1000000", metavar="N,N", help="(10000,100000,1000000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    seconds = measure_time(arguments.model, arguments.dataset, arguments.time_tokens, arguments.rounds)
    print(f"{arguments.time_tokens} tokens, {torch.get_num_threads()} threads")
    for name, values in seconds.items():
        ratio = median(values) / median(seconds["plain pass"])
        print(f"{name:22s} {median(values):7.2f} s   {ratio:.2f}x a plain pass   ({min(values):.2f} at best)")
    rows = []
    for tokens in map(int, filter(None, arguments.memory_tokens.split(","))):
        rows.append(measure_memory(arguments.model, arguments.dataset, tokens))
        read_, kept, before, peak = rows[-1]
        print(f"{read_:>9,} tokens read, {kept:,} kept: peak {peak / 2**20:.0f} MiB, {before / 2**20:.0f} before")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds, "memory": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
