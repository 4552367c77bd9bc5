"""Times matmuls in 4 and 8 bits, whose rows are the same in any company, against MatMulNBits.

    python tools/benchmarks/equal_bits.py BUNDLE [--streams 1,8,16] [--rounds 7] [--new-tokens 32]

Three bundles run in one interleaved order, at full depth:

- "as exported": the runtime's matmuls, whose rows have the same bits however many are computed at once, and each
  segment's layers as one operator;
- "a node each": the same matmuls, each an operator of ONNX Runtime's graph;
- "any rows": the same with ONNX Runtime's MatMulNBits in their place, which computes one row, and several, as is
  fastest for each.

Of each the median over the rounds is shown, the ratio of the second to the third, which is that of the matmuls, and how
many tokens of B sequences together differ from those of each alone.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.common.formatting import table
from tide_export.names.operators import INTEGER_MATMULS, OP_GATED_MATMUL, OP_INTEGER_LAYERS, OP_LAYERS
from tide_export.runtime.engine import Engine, load

LAYERS = {OP_LAYERS, OP_INTEGER_LAYERS}
MATMULS = {*INTEGER_MATMULS, *(OP_GATED_MATMUL[name] for name in INTEGER_MATMULS)}
VARIANTS: dict[str, set[str]] = {"as exported": set(), "a node each": LAYERS, "any rows": LAYERS | MATMULS}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    sizes = [int(size) for size in options.streams.split(",")]
    with tempfile.TemporaryDirectory(dir=options.bundle.parent) as folder:
        engines = {}
        for number, (name, inlined) in enumerate(VARIANTS.items()):
            variant = options.bundle if not inlined else _variant(options.bundle, Path(folder) / str(number), inlined)
            engines[name] = load(variant, provider="cpu", threads=options.threads)
        measured, differing = _measure(engines, sizes, options.rounds, options.prompt_tokens, options.new_tokens)
    rows = []
    for size in sizes:
        speeds = {name: size * (options.new_tokens - 1) / median(measured[name, size]) for name in engines}
        ratio = speeds["a node each"] / speeds["any rows"]
        rows.append([size, *(f"{speeds[name]:.0f}" for name in engines), f"{ratio:.2f}"])
        rows[-1] += [", ".join(str(differing[name, size]) for name in engines)]
    heads = ["streams", *(f"{name}, tokens/s" for name in engines), "a node each x any rows", "tokens that differ"]
    print(table(heads, rows))


def _variant(bundle: Path, folder: Path, inlined: set[str]) -> Path:
    """Copies a bundle, with the functions of these operators in their place."""
    shutil.copytree(bundle, folder, copy_function=os.link)
    (folder / MANIFEST_FILE).unlink()
    found = 0
    for path in [folder / "model.onnx", *sorted((folder / "batch").glob("*.onnx"))]:
        model = ir.load(path)
        found += sum(function.name in inlined for function in model.functions.values())
        common_passes.InlinePass(criteria=lambda function: function.name in inlined)(model)
        path.unlink()  # it is a link to the bundle's own
        path.write_bytes(ir.to_proto(model).SerializeToString())
    if not found:
        raise SystemExit(f"error: {bundle} has no matmuls in 4 or 8 bits: export it with --weights int4 or int8")
    write_manifest(folder, open_bundle(bundle).manifest)
    return folder


def _measure(
    engines: dict[str, Engine], sizes: Sequence[int], rounds: int, prompt: int, new_tokens: int
) -> tuple[dict[tuple[str, int], list[float]], dict[tuple[str, int], int]]:
    """Seconds after the first token of each variant and size, by round, and the tokens that differ from those alone."""
    chance = np.random.default_rng(0)
    vocabulary = next(iter(engines.values())).manifest.model.vocab_size
    prompts = [[int(id) for id in chance.integers(vocabulary, size=prompt)] for _ in range(max(sizes))]
    request: dict[str, Any] = {"mode": "full", "max_new_tokens": new_tokens, "stop_token_ids": []}
    alone = {name: [engine.generate(ids, **request).tokens for ids in prompts] for name, engine in engines.items()}
    cases = [(name, size) for name in engines for size in sizes]
    seconds = {case: list[float]() for case in cases}
    differing = dict.fromkeys(cases, 0)
    order = random.Random(0)
    for number in range(rounds + 1):  # of which the first opens the networks
        order.shuffle(cases)
        for name, size in cases:
            started = time.perf_counter()
            if size == 1:
                done = [engines[name].generate(prompts[0], **request)]
            else:
                done = engines[name].generate(prompts[:size], **request)
            spent = time.perf_counter() - started - max(one.stats.prefill_seconds for one in done)
            if number == 0:
                pairs = [
                    pair
                    for one, ids in zip(done, alone[name], strict=False)
                    for pair in zip(one.tokens, ids, strict=True)
                ]
                differing[name, size] = sum(a != b for a, b in pairs)
            else:
                seconds[name, size].append(spent)
    return seconds, differing


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--streams", default="1,8,16", metavar="B,B", help="(1,8,16)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="(7)")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="(64)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="(32)")
    parser.add_argument("--threads", type=int, metavar="N")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
