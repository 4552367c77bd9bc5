"""Runs the frozen model over sequences and keeps the raw states of a sample of their tokens: third step of `calibrate`.

The plan says which tokens, the store holds them, several processes may share the work. Labels, norms and heads are left
to the caller, who computes them from the states. What is held is tokens kept x layers x width floats, whatever the
number of tokens read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tide_export.calibration.distributed import Processes
from tide_export.calibration.fast_attention import fast_attention
from tide_export.calibration.parallel import in_parallel
from tide_export.calibration.sampling_plan import Batch, Plan
from tide_export.calibration.state_store import FolderStore, Store
from tide_export.config import TideConfig
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel
from tide_export.progress import stage

CPU_TOKENS = 1024  # a CPU gains nothing from a larger pass, but its attention matrices become allocations of their own


@dataclass(frozen=True, eq=False)
class Sample:
    """n tokens kept from a split, each set of n equally likely, in the order of the text.

    Attributes:
        raw: per layer count the residual stream after that many layers, float32 [n, D] on the CPU.
        next_ids: the id that follows each token in its sequence, -1 at the sequence's end; int64 [n].
        documents: the document of each token, int64 [n].
        places: (number of the sequence in the split, position in it), int64 [n, 2], in ascending order.
        seen: tokens the n were drawn from.
    """

    raw: dict[int, torch.Tensor]
    next_ids: torch.Tensor
    documents: torch.Tensor
    places: torch.Tensor
    seen: int

    @property
    def kept(self) -> int:
        return len(self.places)


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
    """The states of at most `capacity` tokens of `sequences` (one part of a split) after each of `layers` layers.

    With a `folder` (made if it is not there; one for each call) they are kept in it: a run that was killed goes on
    where it was when started again, and a complete one is only read. Processes started by a launcher share the work,
    and all get the whole sample. The sample does not depend on their number, nor on interruptions, as long as the
    arithmetic is the same: torch adds up in another order on another device, version or number of threads.

    Raises:
        CalibrationError: no token, a token id the model does not have, NaN or infinity in a kept state; a folder that
            cannot be used; another process ended.
    """
    on_cpu = source.device.type == "cpu"
    plan = Plan.make(sequences, capacity, config.seed, config.calibration_batch, CPU_TOKENS if on_cpu else None)
    _check_ids(source, sequences)
    processes = Processes.current()
    first = sequences[int(plan.places[0, 0])].ids
    with (
        fast_attention(source, first.tolist(), layers) as attention,
        _open_store(source, plan, layers, attention, folder, processes) as store,
    ):
        own = store.pending()[processes.rank :: processes.count]

        def run(number: int) -> tuple[int, Batch, dict[int, torch.Tensor]]:
            batch = plan.batch(number)
            return number, batch, _run(source, batch, layers)

        with _progress(title, float(plan.tokens[own].sum()), processes) as advance:
            for number, batch, states in in_parallel(source, run, own):
                _check_finite(source, states)
                store.put(number, batch.slots, states)
                advance(float(plan.tokens[number]))
        raw = store.finish()
    next_ids, documents, places = (torch.from_numpy(part) for part in (plan.next_ids, plan.documents, plan.places))
    return Sample(raw, next_ids, documents, places, plan.seen)


def _open_store(
    source: SourceModel,
    plan: Plan,
    layers: Sequence[int],
    attention: str,
    folder: Path | None,
    processes: Processes,
) -> Store:
    """In memory for one process without a folder, else in one."""
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
    """The states [k, D] of the batch's kept tokens, float32 on the CPU; the others never leave the model's device."""

    def kept(state: torch.Tensor) -> torch.Tensor:
        return state[batch.rows.to(state.device), batch.positions.to(state.device)].float().cpu()

    return source.raw_states(batch.ids.to(source.device), layers, batch.mask.to(source.device), kept)


@contextmanager
def _progress(title: str, total: float, processes: Processes) -> Iterator[Callable[[float], Any]]:
    """The main process shows its own part of the work, which stands for all."""
    if processes.main:
        with stage(title, total=total) as advance:
            yield advance
    else:
        yield lambda amount: None


def _check_ids(source: SourceModel, sequences: Sequence[TokenSequence]) -> None:
    embedding = source.model.get_input_embeddings()
    assert isinstance(embedding.weight, torch.Tensor)
    known = embedding.weight.shape[0]
    largest = max(int(sequence.ids.max(initial=0)) for sequence in sequences)
    if largest >= known:
        raise CalibrationError(
            f"the tokenizer gives token id {largest} but {source.name} knows {known} tokens: it is another model's"
        )


def _check_finite(source: SourceModel, states: dict[int, torch.Tensor]) -> None:
    for layers, state in sorted(states.items()):
        if not bool(torch.isfinite(state).all()):
            raise CalibrationError(
                f"model {source.name!r} gives NaN or infinity in its hidden state after layer {layers}: "
                "no router can be fitted to it"
            )
