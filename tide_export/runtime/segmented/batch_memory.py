"""The memory of a batch on a device, and how the networks are run over its places: `lane` for several sequences.

`batch` says which sequences run a segment; this module knows where everything is. K/V buffers of all places lie side by
side, so a run over neighbouring places is a matter of addresses. Before every segment but the first there is room for
the hidden states that wait, place by place. A run takes a dense block [rows, tokens, D]: that is what the run before it
gave, where the same places go on and nothing waited, and is put together by copies on the device otherwise. New states
stay where the network wrote them until it is known who goes on; those who do not have them copied to where they wait.

What a run reads and says (ids, lengths, thresholds, verdicts) crosses in one copy each way, in a slot of its own. What
tokens leave with stays where it was written until the end of the step, and is put before the head then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import NetworksInfo
from tide_export.runtime.segmented.device import ALIGNMENT, Buffer, Device
from tide_export.runtime.segmented.network_spec import KvBuffer, Network, NetworkSpec, kv_buffers
from tide_export.runtime.segmented.run_plan import Run, padded, runs_over
from tide_export.runtime.segmented.sequence_memory import grown

SCORES, FLAGS = 0, 1  # parts of a verdict
LENGTHS, LAST, THRESHOLD, IDS = range(4)  # parts of what a run is told

Copy = tuple[int, int, int]  # target, source, bytes


def aligned(size: int) -> int:
    """`size` rounded up to what an address must be a multiple of."""
    return size + -size % ALIGNMENT


class _Block:
    """Parts at aligned places of one buffer, and the same on the host, so that all cross in one copy."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._starts = [sum(map(aligned, sizes[:part])) for part in range(len(sizes) + 1)]
        self._buffer = device.allocate(self._starts[-1])
        self._device, self._host = device, device.staging(self._starts[-1])

    def address(self, part: int) -> int:
        return self._buffer.address + self._starts[part]

    def host(self, part: int, dtype: type) -> np.ndarray:
        return self._host[self._starts[part] : self._starts[part + 1]].view(dtype)

    def upload(self, part: int, size: int) -> None:
        """All up to the first `size` bytes of a part."""
        self._device.upload(self._buffer.address, self._host[: self._starts[part] + size])

    def download(self, part: int, size: int) -> None:
        start = self._starts[part]
        self._device.download(self._host[start : start + size], self._buffer.address + start)


@dataclass
class _Slot:
    """What one run reads and says beside hidden states and K/V."""

    told: _Block
    verdict: _Block
    exits: Buffer  # states the rows' last tokens would leave with, one behind the other
    queued: bool = False  # the queue may not have read `told` yet


class _Place:
    """Where a place's part of the last segment's run is."""

    def __init__(self, slot: _Slot, row: int) -> None:
        self.slot, self.row = slot, row
        self.states = list[tuple[int, int]]()  # its new hidden states: address and tokens, in order


class BatchLane:
    """The buffers of up to `rows` sequences and a way to run networks over them. Serves one thread at a time."""

    def __init__(
        self,
        specs: Mapping[str, NetworkSpec],
        networks: Mapping[str, Network],
        device: Device,
        info: NetworksInfo,
        rows: int,
        waiting_tokens: int,
    ) -> None:
        """Allocates K/V buffers for `info.capacity` tokens of each sequence, and `waiting_tokens` hidden states of each
        before every segment.

        Raises:
            GenerationError: the device has not enough memory.
        """
        self.rows, self._info, self._networks, self._device = rows, info, networks, device
        self._specs, self._count = specs, len(specs) - 1
        entries = [specs[names.segment(k)].inputs[names.HIDDEN_STATES] for k in range(1, self._count)]
        head = specs[names.HEAD]
        # Bytes of a token of what each segment takes; of the first it is an id.
        self._row = [8, *(entry.size() for entry in entries)]
        self._exit_row = head.inputs[names.EXIT_STATES].size()
        self._final_row = specs[names.segment(self._count - 1)].outputs[names.FINAL_STATES].size()
        self._past = [self._allocate_past(specs[names.segment(k)]) for k in range(self._count)]
        self._written = [0] * rows  # tokens of each place's K/V buffers that may not be zero
        self._waiting = [self._allocate(rows * waiting_tokens * row) for row in self._row[1:]]  # before segments 1, ...
        self._waiting_tokens = waiting_tokens
        self._entry = self._allocate(info.max_tokens * max(self._row))
        self._out = [self._allocate(0), self._allocate(0)]  # in turns: one segment reads what the last one wrote
        self._slots = dict[tuple[int, int], _Slot]()  # of a segment's runs, first, second, ...
        self._last_runs = dict[tuple[int, int, int], int]()  # of the segment that ran last: where each wrote
        self._places = dict[int, _Place]()
        self._left = dict[int, list[int]]()  # where the states are that each place left with in this step
        self._head_entry = self._allocate(info.max_logits * self._exit_row)
        self._vocabulary = head.outputs[names.LOGITS].dims(1)[-1]
        self._logits = self._allocate(head.outputs[names.LOGITS].size(info.max_logits))
        self._logits_host = device.staging(self._logits.size).view(np.float32)

    def _allocate(self, size: int) -> Buffer:
        return self._device.allocate(max(size, ALIGNMENT))

    def _allocate_past(self, spec: NetworkSpec) -> list[tuple[KvBuffer, Buffer]]:
        """Memory of every K/V buffer of a segment, of all places."""
        return [(kv, self._allocate(self.rows * kv.bytes)) for kv in kv_buffers(spec)]

    def clear(self, places: Sequence[int]) -> None:
        """Leaves nothing of the sequences that were at some places for the next ones (see `Lane.clear`)."""
        for place in places:
            for kv, buffer in (entry for past in self._past for entry in past):
                start, stride = buffer.address + place * kv.bytes, kv.capacity * kv.size
                self._device.clear(start, self._written[place] * kv.size, kv.heads, stride)
            self._written[place] = 0

    def _slot(self, k: int, index: int) -> _Slot:
        """The slot of a run of segment k, ready to be written to."""
        slot = self._slots.get((k, index))
        if slot is None:
            counts, ids = [8 * self.rows, 8 * self.rows, 4], 8 * max(self._info.max_tokens, self.rows)
            told = _Block(self._device, counts if k else [*counts, ids])
            verdict, exits = (
                _Block(self._device, [4 * self.rows, self.rows]),
                self._allocate(self.rows * self._exit_row),
            )
            slot = self._slots[k, index] = _Slot(told, verdict, exits)
        if slot.queued:
            self._synchronize()
        return slot

    def _synchronize(self) -> None:
        self._device.synchronize()
        for slot in self._slots.values():
            slot.queued = False

    def run(
        self,
        k: int,
        counts: Mapping[int, int],
        lengths: Sequence[int],
        waited: Mapping[int, int],
        ids: Mapping[int, np.ndarray],
        threshold: float,
    ) -> None:
        """Segment k over all that waits before it at some places, in as many runs as it takes.

        Args:
            counts: tokens by place: what waited, and for k > 0 what the run of segment k - 1 gave.
            lengths: tokens in the segment's K/V cache, of every place.
            waited: how many of `counts` waited.
            ids: the new tokens, int64, for segment 0.
            threshold: that the segment's router exits above.

        Raises:
            GenerationError: the device has not enough memory, or failed.
        """
        if k == 0:
            self._left.clear()
        plan = runs_over(counts, lengths, self._info)
        row = self._row[k + 1] if k + 1 < self._count else self._final_row
        result = self._reserve_out(k, sum(aligned(run.rows * run.tokens * row) for run in plan))
        found, ran, index = dict[int, _Place](), dict[tuple[int, int, int], int](), -1
        for run in plan:
            index += run.first == 0  # the parts of a prompt share a slot
            slot = self._slot(k, index)
            chunks = {place: min(counts[place] - run.first, run.tokens) for place in run.places}
            for place in range(run.start, run.stop):
                self._written[place] = max(self._written[place], lengths[place] + run.first + run.tokens)
            slot.told.host(LENGTHS, np.int64)[: run.rows] = lengths[run.start : run.stop]
            slot.told.host(LENGTHS, np.int64)[0] += run.first
            last = slot.told.host(LAST, np.int64)
            last[:] = 0
            last[np.array(run.places) - run.start] = np.array(list(chunks.values())) - 1
            slot.told.host(THRESHOLD, np.float32)[0] = threshold
            source = self._enter_ids(slot, run, chunks, ids) if k == 0 else self._enter(k, run, chunks, waited)
            self._launch(k, run, slot, source, result)
            for place in run.places:
                at = found.setdefault(place, _Place(slot, place - run.start))
                at.states.append((result + (place - run.start) * run.tokens * row, chunks[place]))
            if run.first == 0:
                ran[run.start, run.rows, run.tokens] = result
            result += aligned(run.rows * run.tokens * row)
        self._places, self._last_runs = found, ran

    def _enter_ids(self, slot: _Slot, run: Run, chunks: Mapping[int, int], ids: Mapping[int, np.ndarray]) -> int:
        block = slot.told.host(IDS, np.int64)[: run.rows * run.tokens].reshape(-1, run.tokens)
        block[:] = 0
        for place, chunk in chunks.items():
            block[place - run.start, :chunk] = ids[place][run.first : run.first + chunk]
        return slot.told.address(IDS)

    def _enter(self, k: int, run: Run, chunks: Mapping[int, int], waited: Mapping[int, int]) -> int:
        """Where the hidden states of a run lie, [rows, tokens, D]; behind what there is to run, zeros or what such
        padding became in the segments before: never another sequence's, which may be NaN (see `Lane.clear`)."""
        whole = self._last_runs.get((run.start, run.rows, run.tokens))
        if whole is not None and run.first == 0 and not any(waited[place] for place in chunks):
            return whole
        copies, row = list[Copy](), self._row[k]
        for place, chunk in chunks.items():
            target = self._entry.address + (place - run.start) * run.tokens * row
            skip, room = run.first, chunk
            for address, held in [(self._door(k, place), waited[place]), *self._places[place].states]:
                take = max(0, min(held - skip, room))
                copies.append((target, address + skip * row, take * row))
                target, room, skip = target + take * row, room - take, max(0, skip - held)
        if sum(chunks.values()) < run.rows * run.tokens:
            self._device.clear(self._entry.address, run.rows * run.tokens * row)
        self._copy(copies)
        return self._entry.address

    def _launch(self, k: int, run: Run, slot: _Slot, source: int, result: int) -> None:
        rows, last = run.rows, k + 1 == self._count
        addresses = {
            names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: source,
            names.FINAL_STATES if last else names.NEW_HIDDEN_STATES: result,
            names.PAST_LENGTHS: slot.told.address(LENGTHS),
            names.LAST_TOKENS: slot.told.address(LAST),
            names.EXIT_STATES: slot.exits.address,
        }
        if not last:
            addresses[names.EXIT_THRESHOLD] = slot.told.address(THRESHOLD)
            addresses[names.ROUTER_SCORE] = slot.verdict.address(SCORES)
            addresses[names.EXIT_FLAG] = slot.verdict.address(FLAGS)
        for kv, buffer in self._past[k]:
            addresses[kv.name] = buffer.address + run.start * kv.bytes
            addresses[kv.name.replace("past_key_values.", "present.")] = addresses[kv.name]

        def work() -> None:
            slot.told.upload(*((IDS, 8 * rows * run.tokens) if k == 0 else (THRESHOLD, 4)))
            self._networks[names.segment(k)].run(addresses, run.tokens, rows)
            if not last:
                slot.verdict.download(FLAGS, rows)

        self._device.launch((k, run.start, rows, run.tokens, source, result, slot.exits.address), work)
        slot.queued = True

    def verdicts(self) -> dict[int, bool]:
        """Whether the last token of each place that the last segment ran over leaves; waits for it. Not of the last."""
        self._synchronize()
        return {place: bool(at.slot.verdict.host(FLAGS, np.bool_)[at.row]) for place, at in self._places.items()}

    def leave(self, counts: Mapping[int, int]) -> None:
        """The last tokens at some places of the last run leave here, so many of each; of other segments than the last
        it is one. No more leave than the run took."""
        for place, count in counts.items():
            at, row = self._places[place], self._exit_row
            if count == 1:
                self._left[place] = [at.slot.exits.address + at.row * row]
            else:
                states = [address + number * row for address, held in at.states for number in range(held)]
                self._left[place] = states[-count:]

    def wait(self, k: int, waited: Mapping[int, int]) -> None:
        """What the last run gave at some places waits before segment k, behind the tokens that do so already."""
        row = self._row[k]
        news = {place: sum(count for _, count in self._places[place].states) for place in waited}
        self._reserve_waiting(max((waited[place] + news[place] for place in waited), default=0))
        copies = []
        for place, count in waited.items():
            target = self._door(k, place) + count * row
            for address, held in self._places[place].states:
                copies.append((target, address, held * row))
                target += held * row
        self._copy(copies)

    def logits(self) -> dict[int, np.ndarray]:
        """The head on what the tokens of this step left with, by place: float32 [m, V]."""
        states = [state for left in self._left.values() for state in left]
        found, most, row = [], self._info.max_logits, self._exit_row
        for first in range(0, len(states), most):
            chunk, entry = states[first : first + most], self._head_entry.address
            self._copy((entry + number * row, state, row) for number, state in enumerate(chunk))
            found.append(self._head(entry, padded(len(chunk), 0, most, most))[: len(chunk)].copy())
        ends = accumulate(len(left) for left in self._left.values())
        rows = np.split(np.concatenate(found), list(ends)[:-1])
        return dict(zip(self._left, rows, strict=True))

    def _head(self, states: int, tokens: int) -> np.ndarray:
        host = self._logits_host[: tokens * self._vocabulary]
        addresses = {names.EXIT_STATES: states, names.LOGITS: self._logits.address}

        def work() -> None:
            self._networks[names.HEAD].run(addresses, tokens)
            self._device.download(host, self._logits.address)

        self._device.launch((names.HEAD, states, tokens), work)
        self._synchronize()
        return host.reshape(tokens, self._vocabulary)

    def _door(self, k: int, place: int) -> int:
        """Where what waits before segment k at a place begins."""
        return self._waiting[k - 1].address + place * self._waiting_tokens * self._row[k]

    def _copy(self, copies: Iterable[Copy]) -> None:
        """Copies within the device; pieces that lie behind one another on both sides go together."""
        joined = list[Copy]()
        for target, source, size in copies:
            if joined and (target, source) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
                joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
            elif size:
                joined.append((target, source, size))
        for target, source, size in joined:
            self._device.copy(target, source, size)

    def _reserve_out(self, k: int, size: int) -> int:
        """Where segment k's results begin, with room for `size` bytes; nothing that is there is needed any more."""
        if self._out[k % 2].size < size:
            self._synchronize()  # the old memory is freed
            self._out[k % 2] = self._allocate(grown(self._out[k % 2].size, size))
        return self._out[k % 2].address

    def _reserve_waiting(self, tokens: int) -> None:
        """Room for `tokens` hidden states before every segment at every place; those that wait there move along."""
        held, wanted = self._waiting_tokens, grown(self._waiting_tokens, tokens)
        if wanted == held:
            return
        buffers = [self._allocate(self.rows * wanted * row) for row in self._row[1:]]  # all, or it stays as it was
        for old, buffer, row in zip(self._waiting, buffers, self._row[1:], strict=True):
            for place in range(self.rows):
                self._device.copy(buffer.address + place * wanted * row, old.address + place * held * row, held * row)
        self._synchronize()  # the old memory is freed
        self._waiting, self._waiting_tokens = buffers, wanted
