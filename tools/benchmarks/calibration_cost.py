"""What collecting hidden states and fitting lenses costs: time against one plain forward pass, memory against the text.

    python tools/benchmarks/calibration_cost.py MODEL --dataset SPEC [--text SPEC] [--json FILE] [--plot FILE.png]

Time: `collect` and Hugging Face's own forward pass (logits and all) over the same tokens in the same batches,
interleaved in one process; the ratio is that of the medians. Fitting is not included. Memory: reading and collecting
(`--lenses`: and fitting lenses to all of the text) with a fixed number of kept tokens from 10 thousand, 100 thousand
and 1 million tokens, each in a new process; the largest resident set as Linux counts it (VmHWM). `--text` is for the
latter, where the dataset is too short.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tide_export.calibration.collect import CPU_TOKENS, collect
from tide_export.calibration.sampling_plan import Plan
from tide_export.config import TideConfig
from tide_export.data.sequences import TokenSequence, load_tokenizer, read_sequences
from tide_export.model.source import SourceModel, load_model

MEMORY = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tools!r})
from calibration_cost import layers_of, peak_bytes, read
from tide_export.calibration.collect import collect
from tide_export.calibration.fit_lenses import fit_lenses
from tide_export.config import TideConfig
from tide_export.model.source import load_model
source = load_model({model!r})
sequences = read({model!r}, {text!r}, {tokens}, {length})
before = peak_bytes()
started = time.perf_counter()
sample = collect(source, sequences, layers_of(source), TideConfig(), {capacity}, "collecting", {folder})
seconds = time.perf_counter() - started
config = TideConfig(exit_strategy="lens", lens_tokens={tokens}, lens_epochs=1)
if {lenses}:
    fit_lenses(source, sequences, sample, sample, config, layers_of(source)[:-1])
fitting = time.perf_counter() - started - seconds
print("MEASURED", sample.seen, sample.kept, before, peak_bytes(), seconds, fitting)
"""


def layers_of(source: SourceModel) -> list[int]:
    """The checkpoints of the default settings, and the depth."""
    return [*TideConfig().resolve_checkpoints(source.num_layers), source.num_layers]


def peak_bytes() -> int:
    """This process's largest resident set so far; getrusage would also count what its parent had when it started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024


def read(model: str, spec: str, tokens: int, length: int) -> list[TokenSequence]:
    """Sequences of `spec` with `tokens` tokens together."""
    found: list[TokenSequence] = []
    left = tokens
    for sequence in read_sequences(spec, load_tokenizer(model), length, 2 * tokens // length + 2):
        found.append(TokenSequence(sequence.document, sequence.ids[:left]))
        left -= len(found[-1].ids)
        if left <= 0:
            return found
    raise SystemExit(f"{spec} gives {tokens - left} tokens only, not {tokens}")


@torch.no_grad()
def plain_pass(source: SourceModel, plan: Plan) -> None:
    """What the model's user would run over the same batches: logits of every token, nothing kept."""
    for number in range(len(plan.batches)):
        batch = plan.batch(number)
        mask = batch.mask.to(source.device)
        source.model(input_ids=batch.ids.to(source.device), attention_mask=mask, use_cache=False).logits.sum().item()


def measure_time(model: str, spec: str, tokens: int, length: int, capacity: int, rounds: int, device: str) -> dict:
    """Seconds of `collect` in memory, `collect` into a folder, and the plain pass, interleaved."""
    source = load_model(model, device)
    sequences = read(model, spec, tokens, length)
    config = TideConfig()
    on_cpu = source.device.type == "cpu"
    plan = Plan.make(sequences, tokens, config.seed, config.calibration_batch, CPU_TOKENS if on_cpu else None)

    def into_folder() -> None:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            collect(source, sequences, layers_of(source), config, capacity, "collecting", Path(folder))

    cases: dict[str, Callable[[], object]] = {
        "plain": lambda: plain_pass(source, plan),
        "collect": lambda: collect(source, sequences, layers_of(source), config, capacity, "collecting"),
        "collect_into_folder": into_folder,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):  # the first warms up
        for name, case in cases.items():
            started = time.perf_counter()
            case()
            if number:
                seconds[name].append(time.perf_counter() - started)
    plain = statistics.median(seconds["plain"])
    ratios = {f"{name}_ratio": statistics.median(values) / plain for name, values in seconds.items() if name != "plain"}
    return {
        "tokens": plan.seen,
        "kept": min(capacity, plan.seen),
        "device": str(source.device),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        **ratios,
    }


def measure_memory(
    model: str, spec: str, tokens: int, length: int, capacity: int, in_folder: bool, lenses: bool
) -> dict:
    """Peak resident set of reading, collecting and, with `lenses`, fitting them in a fresh process."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        body = MEMORY.format(
            tools=str(Path(__file__).parent),
            model=model,
            text=spec,
            tokens=tokens,
            length=length,
            capacity=capacity,
            lenses=lenses,
            folder=f"Path({folder!r}) / 'cache'" if in_folder else None,
        )
        done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED")), None)
    if line is None:
        raise SystemExit(done.stderr.strip())
    seen, kept, before, peak, seconds, fitting = line.split()[1:]
    return {
        "tokens_read": int(seen),
        "tokens_kept": int(kept),
        "before_bytes": int(before),
        "peak_bytes": int(peak),
        "seconds": float(seconds),
        "fitting_seconds": float(fitting),
    }


def plot(rows: list[dict], capacity: int, path: Path) -> None:
    """Peak memory over tokens read."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    tokens = [row["tokens_read"] for row in rows]
    for key, label in (("peak_bytes", "peak"), ("before_bytes", "model and text loaded")):
        axes.plot(tokens, [row[key] / 2**20 for row in rows], marker="o", label=label)
    axes.set(xscale="log", xlabel="tokens read", ylabel="resident set, MiB", title=f"{capacity:,} tokens kept")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dataset", required=True, help="text for the timing (SPEC)")
    parser.add_argument("--text", help="text of a million tokens for the memory (SPEC); default: --dataset")
    parser.add_argument("--time-tokens", type=int, default=16384)
    parser.add_argument("--memory-tokens", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of the timing")
    parser.add_argument("--in-folder", action="store_true", help="memory: keep the states in a folder")
    parser.add_argument("--lenses", action="store_true", help="memory: fit lenses to the text, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()

    timed = measure_time(
        arguments.model,
        arguments.dataset,
        arguments.time_tokens,
        arguments.length,
        arguments.capacity,
        arguments.rounds,
        arguments.device,
    )
    print(f"{timed['tokens']} tokens, {timed['kept']} kept, {timed['device']}, {timed['threads']} threads")
    for name, values in timed["seconds"].items():
        ratio = timed.get(f"{name}_ratio", 1.0)
        print(
            f"{name:20s} {statistics.median(values):7.2f} s   {ratio:.2f}x a plain pass   ({min(values):.2f} at best)"
        )
    rows = []
    for tokens in arguments.memory_tokens:
        row = measure_memory(
            arguments.model,
            arguments.text or arguments.dataset,
            tokens,
            arguments.length,
            arguments.capacity,
            arguments.in_folder,
            arguments.lenses,
        )
        rows.append(row)
        print(
            f"{row['tokens_read']:>9,} tokens read, {row['tokens_kept']:,} kept: peak {row['peak_bytes'] / 2**20:.0f} "
            f"MiB ({row['before_bytes'] / 2**20:.0f} before collecting), {row['seconds']:.1f} s, "
            f"{row['fitting_seconds']:.1f} s fitting lenses"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"model": arguments.model, "time": timed, "memory": rows}, indent=2) + "\n"
        )
    if arguments.plot:
        plot(rows, arguments.capacity, arguments.plot)


if __name__ == "__main__":
    main()
