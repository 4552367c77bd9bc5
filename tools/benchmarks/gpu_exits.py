"""Times a token by the layers it runs on a GPU, by provider `cuda`: ONNX Runtime, recorded as CUDA graphs.

    python tools/benchmarks/gpu_exits.py BUNDLE [--full-only] [--sequences 1,8] [--new-tokens 128] [--rounds 4]
                                         [--json FILE]

BUNDLE was exported with `--target cuda`. Every token exits at one checkpoint whatever its score, so that a row shows
what its layers cost, those computed later for its exact K/V included; `never` checks every checkpoint and exits at
none: beside `full` it is the price of asking. Cases take turns. Of `full` alone the last column is the share of the
GPU's bandwidth: bytes of weights that a token reads, over its time, over the bytes a second that a large copy moves.
A bundle whose weights file was left behind (`gpu_carry.py --shape`) gets random weights, written into its folder: its
tokens say nothing, its times do. Exit code 1 where a token ran other layers than its case says.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import onnx

from tide_export.bundle.file_names import EMBEDDING_FILE, MANIFEST_FILE, SEGMENTS_FOLDER, SEGMENTS_WEIGHTS_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.network_spec import HIDDEN_TYPES
from tide_export.bundle.network_weights import network_weights
from tide_export.bundle.roofline import network_bytes
from tide_export.runtime.engine import load

PROMPT_TOKENS = 16
ASKED = 0.9999999  # above every score of these routers; at 1 no score would be computed
PIECE = 2**26  # bytes of random weights at a time
PACKED, OTHER = "packed", "other"
KINDS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}
KINDS |= dict.fromkeys(("UINT8", "INT8", "UINT4", "INT4"), PACKED)


@dataclass(frozen=True)
class Drawn:
    """A weight to draw: its type (PyTorch's float, PACKED, OTHER), its bytes, and whether it is a vector or scales."""

    kind: str
    size: int
    is_vector: bool = False
    is_scale: bool = False


def weights_of(segments: Path) -> dict[int, Drawn]:
    """What the networks of a folder keep in their file of weights, by offset."""
    found = {}
    for file in sorted(segments.glob("*.onnx")):
        graph = onnx.load(str(file), load_external_data=False).graph
        types = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
        kinds = {name: KINDS.get(kind, OTHER) for name, kind in types.items()}
        beside = [node.input for node in graph.node if any(kinds.get(name) == PACKED for name in node.input)]
        scales = {name for names in beside for name in names}
        for tensor in graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place.get("location") == SEGMENTS_WEIGHTS_FILE:
                one = Drawn(kinds[tensor.name], int(place["length"]), len(tensor.dims) == 1, tensor.name in scales)
                found[int(place.get("offset", 0))] = one
    return found


def draw(file: Path, size: int, weights: Mapping[int, Drawn], device: str) -> None:
    """Writes a file of random weights where there is none, piece by piece."""
    if file.exists():
        return
    temporary = file.with_suffix(".part")
    with temporary.open("wb") as output:
        for offset, one in sorted(weights.items()):
            output.seek(offset)
            for at in range(0, one.size, PIECE):
                output.write(numbers(one, min(PIECE, one.size - at), device).cpu().numpy())
        output.truncate(size)
    temporary.rename(file)


def numbers(one: Drawn, size: int, device: str) -> Any:
    """Random numbers of a weight as bytes: packed ones any, floats small, norms about 1; other integers are 0."""
    import torch

    if one.kind == PACKED:
        return torch.randint(256, (size,), dtype=torch.uint8, device=device)
    if one.kind == OTHER:
        return torch.zeros(size, dtype=torch.uint8)
    kind = getattr(torch, one.kind)
    noise = torch.randn(size // kind.itemsize, device=device)
    drawn = 0.001 + 0.001 * noise.abs() if one.is_scale else 0.02 * noise + one.is_vector
    return drawn.to(kind).view(torch.uint8)


def prepare(folder: Path, device: str) -> float:
    """Draws the weights that were left behind; returns the bytes a microsecond that a copy moves."""
    from kernels import bandwidth  # which imports PyTorch

    manifest, segments = Manifest.from_json((folder / MANIFEST_FILE).read_text()), folder / SEGMENTS_FOLDER
    sizes = {name: info.size for name, info in manifest.files.items()}
    size = sizes[f"{SEGMENTS_FOLDER}/{SEGMENTS_WEIGHTS_FILE}"]
    draw(segments / SEGMENTS_WEIGHTS_FILE, size, weights_of(segments), device)
    if manifest.networks is not None and EMBEDDING_FILE in sizes:
        embedding = Drawn(HIDDEN_TYPES[manifest.networks.weights], sizes[EMBEDDING_FILE])
        draw(folder / EMBEDDING_FILE, embedding.size, {0: embedding}, device)
    return bandwidth(device)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each case, and what did not run the layers it should."""
    if not Manifest.from_json((options.bundle / MANIFEST_FILE).read_text()).has_cuda_networks:
        sys.exit(f"gpu_exits: bundle '{options.bundle}' holds no networks for CUDA: export it with --target cuda")
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # PyTorch holds nothing of the GPU when we time
        rate = apart.submit(prepare, options.bundle, options.device).result()
    engine = load(options.bundle, provider="cuda", verify=False)
    manifest = engine.manifest
    checkpoints, deepest, vocabulary = manifest.checkpoints, manifest.model.num_layers, manifest.model.vocab_size
    read = network_bytes(manifest, network_weights(engine.bundle), [False] * len(checkpoints), 1)
    full_depth = sum(network.weights_read for network in read)
    cases: dict[str, dict[str, Any]] = {"full": {"mode": "full"}}
    if not options.full_only:
        cases["never"] = {"mode": "exit", "threshold": ASKED, "min_layers": 0}
        for layers in checkpoints:
            thresholds = [0.0 if layers == one else 1.0 for one in checkpoints]
            cases[f"{layers} layers"] = {"mode": "exit", "threshold": thresholds, "min_layers": 0}
    order, rows, wrong = random.Random(0), [], list[str]()
    for size in [int(size) for size in options.sequences.split(",")]:
        prompts = [[(i * 7919 + n) % vocabulary for i in range(PROMPT_TOKENS)] for n in range(size)]
        times: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(options.rounds + 2):  # a shape is run once, then recorded, then replayed
            for name in order.sample(sorted(cases), len(cases)):
                given: Any = prompts if size > 1 else prompts[0]
                started = time.perf_counter()
                done = engine.generate(given, max_new_tokens=options.new_tokens, stop_token_ids=[], **cases[name])
                seconds = time.perf_counter() - started
                if number >= 2:
                    times[name].append(seconds * 1e6 / options.new_tokens)
                ran = {layers for one in (done if size > 1 else [done]) for layers in one.stats.exit_layer}
                expected = deepest if name in ("full", "never") else int(name.split()[0])
                if number == 0 and ran != {expected}:
                    wrong.append(f"{name}, {size} sequences: tokens ran {sorted(ran)} layers, not {expected}")
        for name, found in times.items():
            here, full = median(found), median(times["full"])
            share = full_depth / here / rate if (name, size) == ("full", 1) else "-"
            row = {"case": name, "sequences": size, "us a token": here, "full / this": full / here}
            rows.append({**row, "share of copy bandwidth": share})
    return rows, wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--full-only", action="store_true", help="full depth alone")
    parser.add_argument("--sequences", default="1,8", help="in a list; 1: alone (1,8)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: draws and copies there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows, wrong = measure(options)
    for row in rows:
        print(" | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    for sentence in wrong:
        print(f"DIFFERS: {sentence}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
