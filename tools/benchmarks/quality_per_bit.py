"""Compares formats of weights at their bits: perplexity and divergence from the float32 model, on text.

    python tools/benchmarks/quality_per_bit.py MODEL --dataset FILE.jsonl --case "int4=BUNDLE" --case "Q4_K_M=FILE.gguf"
    [--tokens 20000] [--as-run]

Each case is a bundle in int4 or int8, or a GGUF file of any type (`llama-quantize` makes them). Its weights are
dequantized exactly, into MODEL in float32, and PyTorch computes with them, so that only the weights differ; MODEL
should come in 16 bits, as weights that were rounded to 4 bits before favour the format they were rounded to.
`--as-run` adds a row for each bundle: the runtime itself, a token at a time, which rounds a matmul's inputs to 8 bits.

Columns: bits of all tensors of the file, for each weight of MODEL; bits of what a token reads (layers and head, scales
in 16 bits as they are in memory), for each weight of these; perplexity; the KL divergence of the next token's
distribution from MODEL's, in thousandths of a nat, its mean and 99th percentile; changed tokens, greedy. Nothing is
timed: `cpu_peers.py` with the same files gives the speeds.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.common.formatting import table
from tide_export.data.documents import Documents
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.model.source import SourceModel, load_model
from tide_export.quantize.matrices import own_head_name, parameter_names
from tide_export.runtime.engine import load
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.quantized import restore, stored_matrices

HEADS = ["case", "bits, file", "bits, read", "perplexity", "divergence / 1000", "99 %", "changed tokens"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    source, texts = load_model(str(options.model)), _texts(options)
    weights = sum(parameter.numel() for parameter in source.model.parameters())
    shape = (sum(map(len, texts)), source.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        reference = np.memmap(Path(folder) / "reference", np.float32, "w+", shape=shape)
        for place, found in zip(_places(texts), _by_pytorch(source, texts), strict=True):
            reference[place] = found
        rows = [_Row(options.model.name, 32.0, 32.0, reference, texts, iter(reference[p] for p in _places(texts)))]
        print(rows[0].line(), flush=True)
        for case in options.case:
            title, _, file = case.partition("=")
            path = Path(file)
            if path.is_dir():
                source = load_model(str(options.model))
                restore(source, open_bundle(path))
                size = (path / WEIGHTS_FILE).stat().st_size
                read = _read_bits(source, path)
            else:
                source = load_model(file)
                size, read = _gguf_bits(path)
            bits = 8 * size / weights
            rows.append(_Row(title, bits, read, reference, texts, _by_pytorch(source, texts)))
            print(rows[-1].line(), flush=True)
            if path.is_dir() and options.as_run:
                rows.append(_Row(f"{title}, as run", bits, read, reference, texts, _by_runtime(path, texts, options)))
                print(rows[-1].line(), flush=True)
    print(table(HEADS, [row.cells() for row in rows]))
    if options.json:
        options.json.write_text(json.dumps([row.__dict__ for row in rows], indent=1) + "\n")


class _Row:
    """What was measured of one case."""

    def __init__(
        self,
        title: str,
        file_bits: float,
        read_bits: float,
        reference: np.ndarray,
        texts: Sequence[Sequence[int]],
        found: Iterator[np.ndarray],
    ) -> None:
        """`reference` and `found`: logarithms of probabilities [tokens, V], `found` those of one text at a time."""
        divergences, losses, changed = list[np.ndarray](), list[np.ndarray](), 0
        for text, place, logs in zip(texts, _places(texts), found, strict=True):
            wanted = np.asarray(reference[place])
            divergences.append((np.exp(wanted) * (wanted - logs)).sum(-1, dtype=np.float64))
            losses.append(-logs[np.arange(len(text) - 1), np.asarray(text[1:])])
            changed += int((wanted.argmax(-1) != logs.argmax(-1)).sum())
        every = np.concatenate(divergences)
        self.title, self.file_bits, self.read_bits = title, file_bits, read_bits
        self.perplexity = float(np.exp(np.concatenate(losses).mean(dtype=np.float64)))
        self.divergence, self.percentile_99 = float(every.mean()), float(np.quantile(every, 0.99))
        self.changed = changed / len(every)

    def cells(self) -> list[str]:
        bits = [f"{self.file_bits:.2f}", f"{self.read_bits:.2f}", f"{self.perplexity:.3f}"]
        divergences = [f"{1000 * self.divergence:.3f}", f"{1000 * self.percentile_99:.2f}"]
        return [self.title, *bits, *divergences, f"{100 * self.changed:.2f} %"]

    def line(self) -> str:
        return "  ".join(self.cells())


def _texts(options: argparse.Namespace) -> list[list[int]]:
    count = -(-options.tokens // options.length)
    tokenizer = load_tokenizer(str(options.model))
    found = read_sequences(Documents(options.dataset), tokenizer, options.length, limit=4 * count)
    whole = [sequence.ids.tolist() for sequence in found if len(sequence.ids) == options.length][:count]
    if len(whole) < count:
        raise SystemExit(
            f"--dataset {options.dataset}: holds {len(whole)} texts of {options.length} tokens, not {count}"
        )
    return whole


def _places(texts: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Yields the positions of each text among those of all."""
    return (slice(*ends) for ends in pairwise(np.cumsum([0, *map(len, texts)]).tolist()))


@torch.no_grad()
def _by_pytorch(source: SourceModel, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    for text in texts:
        yield source.run(torch.tensor([text]), []).logits[0].float().log_softmax(-1).numpy()


def _by_runtime(bundle: Path, texts: Sequence[Sequence[int]], options: argparse.Namespace) -> Iterator[np.ndarray]:
    engine = load(bundle, provider="cpu", threads=options.threads)
    for text in texts:
        sequence = engine.start([NEVER_EXIT] * len(engine.manifest.checkpoints))
        logits = np.stack([np.array(sequence.step([token]).logits).reshape(-1) for token in text])
        yield torch.from_numpy(logits).float().log_softmax(-1).numpy()


def _read_bits(source: SourceModel, path: Path) -> float:
    """Returns the bits that a token reads of a bundle, for each weight of its layers and head."""
    head, names = own_head_name(source), parameter_names(source.model)
    embedding = names.get(id(getattr(source.model.get_input_embeddings(), "weight", None)))
    matrices: dict[str, Any] = {"\n".join(owners): matrix for owners, matrix in stored_matrices(open_bundle(path))}
    if head != embedding and any(head in owners.split("\n") for owners in matrices):
        matrices.pop(str(embedding), None)
    stored = sum(matrix.packed.nbytes + 2 * matrix.scales.size for matrix in matrices.values())
    return 8 * stored / sum(matrix.rows * matrix.inputs for matrix in matrices.values())


def _gguf_bits(path: Path) -> tuple[int, float]:
    """Returns the bytes of the tensors of a GGUF file, and the bits that a token reads, for each of these weights."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    read = [t for name, t in tensors.items() if len(t.shape) == 2 and name != "token_embd.weight"]
    if "output.weight" not in tensors:
        read.append(tensors["token_embd.weight"])
    bits = 8 * sum(int(t.n_bytes) for t in read) / sum(int(t.n_elements) for t in read)
    return sum(int(tensor.n_bytes) for tensor in tensors.values()), bits


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--case", action="append", default=[], metavar="TITLE=FILE", help="a bundle, or a GGUF file")
    parser.add_argument("--dataset", required=True, metavar="SPEC", help="text that nothing was trained on")
    parser.add_argument("--tokens", type=int, default=20_000, metavar="N", help="(20000)")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="of a text (512)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(1)")
    parser.add_argument("--as-run", action="store_true", help="bundles by the runtime, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
