"""Runs the model over sequences and keeps the raw hidden states of a sample of their tokens.

`sampling_plan` chooses the tokens, `hidden_store` holds their hidden states, and several processes may share the work.
Memory is kept tokens x layers x width floats, whatever the number of tokens read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tide_export.calibration.config import TideConfig
from tide_export.calibration.distributed import Processes
from tide_export.calibration.fast_attention import fast_attention
from tide_export.calibration.hidden_store import FolderStore, Store
from tide_export.calibration.parallel import in_parallel
from tide_export.calibration.sampling_plan import Batch, Plan
from tide_export.calibration.split import Split
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel

CPU_TOKENS = 1024  # per forward pass; larger ones are no faster on a CPU and allocate larger attention matrices
HELD_OUT_RATIO = 0.25  # tokens kept of the validation split and of the test split, relative to the training split


@dataclass(frozen=True, eq=False)
class Sample:
    """A uniform sample of n tokens of a split, without replacement, in the order of the text.

    Attributes:
        raw: number of layers -> the residual stream after them, float32 [n, D] on the CPU.
        next_ids: the id that follows each token in its sequence, -1 at the sequence's end; int64 [n].
        documents: the document of each token, int64 [n].
        locations: (index of the sequence in the split, position in it), int64 [n, 2], ascending.
        seen: number of tokens in the split.
    """

    raw: dict[int, torch.Tensor]
    next_ids: torch.Tensor
    documents: torch.Tensor
    locations: torch.Tensor
    seen: int

    @property
    def kept(self) -> int:
        """The number of tokens n."""
        return len(self.locations)


def collect_splits(
    source: SourceModel, split: Split, checkpoints: Sequence[int], config: TideConfig, cache: Path | None
) -> dict[str, Sample]:
    """Samples "train", "validation" and "test", with hidden states at the checkpoints and the end."""
    layers = [*checkpoints, source.num_layers]
    train, held_out = capacities(source, config, len(layers))
    parts = {"train": (split.train, train), "validation": (split.validation, held_out), "test": (split.test, held_out)}
    return {
        name: collect(
            source,
            sequences,
            layers,
            config,
            capacity,
            f"running the model on {name} text",
            None if cache is None else cache / name,
        )
        for name, (sequences, capacity) in parts.items()
    }


def capacities(source: SourceModel, config: TideConfig, layers: int) -> tuple[int, int]:
    """Returns the maximum tokens kept of the training split, and of each other split."""
    train = config.tokens_kept(source.hidden_size, layers)
    return train, max(1, round(train * HELD_OUT_RATIO))


@torch.no_grad()
def collect(
    source: SourceModel,
    sequences: Sequence[TokenSequence],
    layers: Sequence[int],
    config: TideConfig,
    capacity: int,
    title: str,
    folder: Path | None = None,
) -> Sample:
    """Keeps the hidden states of at most `capacity` tokens of `sequences` after each of `layers` layers.

    Processes started by a launcher share the work, and each returns the whole sample. The sample depends neither on
    their number nor on interruptions, except for rounding: on another device, version or number of threads torch sums
    in another order.

    Args:
        title: title of the progress bar.
        folder: folder of the hidden states, a separate one for each call, created if missing. A killed run resumes from
            it, and a complete one is only read. None: memory.

    Raises:
        CalibrationError: there is no token, a token id is outside the vocabulary, a kept hidden state is not finite,
            the folder cannot be used, or another process ended.
    """
    on_cpu = source.device.type == "cpu"
    plan = Plan.make(sequences, capacity, config.seed, config.calibration_batch, CPU_TOKENS if on_cpu else None)
    check_ids(source, sequences)
    processes = Processes.current()
    first = sequences[int(plan.locations[0, 0])].ids
    with (
        fast_attention(source, first.tolist(), layers) as attention,
        _open_store(source, plan, layers, attention, folder, processes) as store,
    ):
        numbers = store.pending()[processes.rank :: processes.count]

        def run(number: int) -> tuple[int, Batch, dict[int, torch.Tensor]]:
            batch = plan.batch(number)
            return number, batch, _run(source, batch, layers)

        with processes.stage(title, float(plan.tokens[numbers].sum())) as advance:
            for number, batch, hidden in in_parallel(source, run, numbers):
                _check_finite(source, hidden)
                store.put(number, batch.slots, hidden)
                advance(float(plan.tokens[number]))
        raw = store.finish()
    next_ids, documents, locations = map(torch.from_numpy, (plan.next_ids, plan.documents, plan.locations))
    return Sample(raw, next_ids, documents, locations, plan.seen)


def _open_store(
    source: SourceModel,
    plan: Plan,
    layers: Sequence[int],
    attention: str,
    folder: Path | None,
    processes: Processes,
) -> Store:
    """Opens a store: in memory for one process without a folder, else in a folder."""
    width, batches = source.hidden_size, len(plan.batches)
    if folder is None and processes.count == 1:
        return Store(layers, plan.kept, width, batches)
    record = {
        "format": 1,
        "weights_sha256": source.weights_sha256,
        "device": source.device.type,
        "attention": attention,
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "plan_sha256": plan.sha256,
        "layers": list(layers),
        "kept": plan.kept,
        "seen": plan.seen,
        "width": width,
        "batches": batches,
    }
    return FolderStore(folder, record, processes)


def _run(source: SourceModel, batch: Batch, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Returns number of layers -> hidden states [k, D] of the batch's k kept tokens, float32 on the CPU."""

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[batch.rows.to(hidden.device), batch.positions.to(hidden.device)].float().cpu()

    return source.raw_hidden(batch.ids.to(source.device), layers, batch.mask.to(source.device), keep)


def check_ids(source: SourceModel, sequences: Sequence[TokenSequence]) -> None:
    """Checks that all token ids are in the model's vocabulary.

    Raises:
        CalibrationError: one is not.
    """
    known = next(source.model.get_input_embeddings().parameters()).shape[0]
    largest = max(int(sequence.ids.max(initial=0)) for sequence in sequences)
    if largest >= known:
        raise CalibrationError(
            f"the tokenizer gives token id {largest} but {source.name} knows {known} tokens: it is another model's"
        )


def _check_finite(source: SourceModel, hidden: dict[int, torch.Tensor]) -> None:
    for layers, one in sorted(hidden.items()):
        if not bool(torch.isfinite(one).all()):
            raise CalibrationError(
                f"model {source.name!r} gives NaN or infinity in its hidden state after layer {layers}: "
                "no router can be fitted to it, as its weights are damaged or overflow in float32"
            )
