"""Times a token by the layers it runs, on a GPU, with the segment networks in PyTorch under the runtime's CUDA graphs.

    python tools/benchmarks/gpu_exits.py BUNDLE [--sequences 1,8] [--new-tokens 128] [--rounds 5] [--json FILE]

Every token exits at one checkpoint whatever its score, so that a row shows what its layers cost, those computed later
for its exact K/V included; `never` checks every checkpoint and exits at none: beside `full` it is the price of asking.
Once the GPU decides after each segment, and once the host does (`TIDE_HOST_DECIDES`); cases take turns in each. A
bundle whose weights file was left behind gets random weights: its tokens say nothing, its times do. PyTorch's kernels
are not TensorRT's: compare rows with each other. Exit code 1 where nothing was recorded as a CUDA graph.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "checks")]  # on a bare machine the package is not installed

HOST_DECIDES = "TIDE_HOST_DECIDES"
DECIDERS = {"GPU": "", "host": "1"}
PROMPT_TOKENS = 16
ASKED = 0.9999999  # above every score of these routers; at 1 no score would be computed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a token by case, with who decides as the environment says."""
    from gpu_torch import GpuNetworks

    from tide_export.bundle.opened import open_bundle
    from tide_export.runtime.callers_networks import load_networks
    from tide_export.runtime.engine import Engine

    cuda = options.device == "cuda"
    draw_embedding(options.bundle, options.device)
    bundle = open_bundle(options.bundle, verify=False)
    networks = GpuNetworks(bundle, *(() if cuda else ("cpu", on_host())))
    engine = Engine(bundle, load_networks(bundle, {"verify": False}, "cpu", networks, 0 if cuda else None))
    checkpoints, vocabulary = bundle.manifest.checkpoints, bundle.manifest.model.vocab_size
    cases: dict[str, dict[str, Any]] = {"full": {"mode": "full"}}
    cases["never"] = {"mode": "exit", "threshold": ASKED, "min_layers": 0}
    for layers in checkpoints:
        thresholds = [0.0 if layers == one else 1.0 for one in checkpoints]
        cases[f"{layers} layers"] = {"mode": "exit", "threshold": thresholds, "min_layers": 0}
    sizes, order = [int(size) for size in options.sequences.split(",")], random.Random(0)
    times: dict[str, list[float]] = {}
    for size in sizes:
        prompts = [[(i * 7919 + n) % vocabulary for i in range(PROMPT_TOKENS)] for n in range(size)]
        for number in range(options.rounds + 2):  # a shape is run once, then recorded, then replayed
            for name in order.sample(sorted(cases), len(cases)):
                given: Any = prompts if size > 1 else prompts[0]
                started = time.perf_counter()
                engine.generate(given, max_new_tokens=options.new_tokens, stop_token_ids=[], **cases[name])
                seconds = time.perf_counter() - started
                if number >= 2:
                    times.setdefault(f"{name}, {size}", []).append(seconds * 1e6 / options.new_tokens)
    return {"times": times, "recorded": networks.recorded.total(), "order": [f"{n}, {s}" for s in sizes for n in cases]}


def draw_embedding(bundle: Path, device: str) -> None:
    """Writes the file of the embedding where it was left behind: that one the runtime reads, not PyTorch."""
    import torch

    from tide_export.bundle.file_names import EMBEDDING_FILE, MANIFEST_FILE
    from tide_export.bundle.manifest import Manifest
    from tide_export.bundle.network_spec import HIDDEN_TYPES

    info = Manifest.from_json((bundle / MANIFEST_FILE).read_text()).networks
    if info is None or info.embedding is None or (bundle / EMBEDDING_FILE).exists():
        return
    kind = getattr(torch, HIDDEN_TYPES[info.weights])
    noise = 0.02 * torch.randn(info.embedding.rows, info.embedding.width, device=device)
    (bundle / EMBEDDING_FILE).write_bytes(noise.to(kind).cpu().view(torch.uint8).numpy().tobytes())


def on_host() -> Any:
    from tide_export.verify.pytorch.networks import _on_host

    return _on_host


def in_a_process(arguments: list[str], decider: str) -> dict[str, Any]:
    """The measurement with one decider, which the library asks for once a process."""
    command = [sys.executable, __file__, *arguments, "--measure"]
    environment = os.environ | {HOST_DECIDES: DECIDERS[decider]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip() or f"gpu_exits: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sequences", default="1,8", help="in a list; 1: alone (1,8)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try this program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.measure:
        print(json.dumps(measure(options)))
        return 0
    found: dict[str, dict[str, Any]] = {}
    for decider in (*DECIDERS, *reversed(DECIDERS)):  # each before the other once, as a GPU's clock may drift
        one = in_a_process(given, decider)
        before = found.setdefault(decider, one)
        if before is not one:
            for case, times in one["times"].items():
                before["times"][case] += times
    rows = []
    for case in found["GPU"]["order"]:
        name, size = case.rsplit(", ", 1)
        row: dict[str, Any] = {"case": name, "sequences": int(size)}
        for decider, one in found.items():
            here, full = median(one["times"][case]), median(one["times"][f"full, {size}"])
            row |= {f"{decider} decides, us": here, f"{decider}: full / this": full / here}
        rows.append(row)
        print(" | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    recorded = {decider: one["recorded"] for decider, one in found.items()}
    print(f"runs recorded as CUDA graphs: {recorded}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(options.device == "cuda" and not all(recorded.values()))


if __name__ == "__main__":
    sys.exit(main())
