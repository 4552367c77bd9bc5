"""The buffers of a batch on a device, and the runs of the networks over its slots.

`batch` decides which sequences run a segment. The K/V buffers of all slots are contiguous, so a run over adjacent slots
is a matter of addresses. Before every segment but the first is a pending buffer with room in every slot. A run takes a
dense block [slots, tokens, D]: the output of the run before it, where the same slots go on and nothing was pending, and
otherwise a block gathered by copies on the device. New states stay where the network wrote them until it is known who
goes on; those of the others are then copied to the pending buffer.

The small inputs and outputs of a run (ids, lengths, thresholds, verdicts) cross in one copy each way. Exit states stay
where they were written until the end of the step, and are gathered for the head then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import NetworksInfo
from tide_export.runtime.segmented.buffers import Block, NetworkBuffers, aligned, grown
from tide_export.runtime.segmented.device import Buffer, Device
from tide_export.runtime.segmented.network_spec import KvBuffer, Network, NetworkSpec, kv_buffers, shared_kv
from tide_export.runtime.segmented.run_plan import Run, padded, runs_over

SCORES, FLAGS = 0, 1  # parts of a verdict
# Parts of a run's small inputs. Every slot has thresholds of its own, so the host compares, and the input stays 0.
LENGTHS, LAST, THRESHOLD, IDS = range(4)

Copy = tuple[int, int, int]  # target, source, bytes


@dataclass
class _RunBuffers:
    """The small inputs and outputs of one run."""

    inputs: Block
    verdict: Block
    exits: Buffer  # exit states of the slots' last tokens
    queued: bool = False  # `inputs` may not have been read yet


class _SlotOutput:
    """The output of the last segment's run for one slot: number `index` of the run's slots."""

    def __init__(self, buffers: _RunBuffers, index: int) -> None:
        self.buffers, self.index = buffers, index
        self.states = list[tuple[int, int]]()  # new hidden states: address and tokens, in order


class BatchBuffers(NetworkBuffers):
    """The buffers of up to `slots` sequences. Serves one thread at a time."""

    def __init__(
        self,
        specs: Mapping[str, NetworkSpec],
        networks: Mapping[str, Network],
        device: Device,
        info: NetworksInfo,
        slots: int,
        pending_capacity: int,
    ) -> None:
        """Allocates K/V buffers for `info.capacity` tokens of each sequence, and `pending_capacity` hidden states of
        each before every segment. Raises GenerationError: the device has not enough memory."""
        super().__init__(specs, networks, device, info)
        self.slots = slots
        entries = [specs[names.segment(k)].inputs[names.HIDDEN_STATES] for k in range(1, self._segments)]
        # Bytes of a token in each segment's input; of the first it is an id.
        self._state_size = [8, *(entry.size() for entry in entries)]
        self._exit_size = specs[names.HEAD].inputs[names.EXIT_STATES].size()
        self._final_size = specs[names.segment(self._segments - 1)].outputs[names.FINAL_STATES].size()
        self._past = [self._allocate_past(specs[names.segment(k)]) for k in range(self._segments)]
        written = {kv.name: (kv, buffer) for past in self._past for kv, buffer in past}
        # Of each segment, the K/V buffers of earlier ones that it reads.
        self._shared = [[written[n] for n in shared_kv(specs[names.segment(k)])] for k in range(self._segments)]
        self._written = [0] * slots  # tokens of each slot's K/V buffers that may not be zero
        self._pending = [self._allocate(slots * pending_capacity * size) for size in self._state_size[1:]]
        self._pending_capacity = pending_capacity
        self._entry = self._allocate(info.max_tokens * max(self._state_size))
        self._out = [self._allocate(0), self._allocate(0)]  # alternating: one segment reads the output of the last
        self._run_buffers = dict[tuple[int, int], _RunBuffers]()  # by segment and number of the run
        self._last_runs = dict[tuple[int, int, int], int]()  # output addresses of the segment that ran last
        self._outputs = dict[int, _SlotOutput]()  # of the segment that ran last, by slot
        self._exits = dict[int, list[int]]()  # addresses of each slot's exit states in this step
        self._head_entry = self._allocate(info.max_logits * self._exit_size)

    def _allocate_past(self, spec: NetworkSpec) -> list[tuple[KvBuffer, Buffer]]:
        """Memory of every K/V buffer of a segment, of all slots."""
        return [(kv, self._allocate(self.slots * kv.bytes)) for kv in kv_buffers(spec)]

    def clear(self, slots: Sequence[int]) -> None:
        """Zeroes the K/V of sequences that were in some slots, for the next ones (see `SequenceBuffers.clear`)."""
        for slot in slots:
            for kv, buffer in (entry for past in self._past for entry in past):
                start, stride = buffer.address + slot * kv.bytes, kv.capacity * kv.size
                self._device.clear(start, self._written[slot] * kv.size, kv.heads, stride)
            self._written[slot] = 0

    def run(
        self,
        k: int,
        counts: Mapping[int, int],
        lengths: Sequence[int],
        pending: Mapping[int, int],
        ids: Mapping[int, np.ndarray],
    ) -> None:
        """Runs segment k over all tokens pending before it in some slots, in as many runs as it takes.

        Args:
            counts: tokens by slot: those in the pending buffer, and the output of segment k - 1.
            lengths: tokens in the segment's K/V cache, of every slot.
            pending: how many of `counts` are in the pending buffer.
            ids: the new tokens, int64, for segment 0.

        Raises:
            GenerationError: the device has not enough memory, or failed.
        """
        if k == 0:
            self._exits.clear()
        plan = runs_over(counts, lengths, self._info)
        size = self._state_size[k + 1] if k + 1 < self._segments else self._final_size
        result = self._reserve_out(k, sum(aligned(run.slots * run.tokens * size) for run in plan))
        outputs, last_runs, index = dict[int, _SlotOutput](), dict[tuple[int, int, int], int](), -1
        for run in plan:
            index += run.first == 0  # the parts of a prompt share their buffers
            buffers = self._buffers_of(k, index)
            chunks = {slot: min(counts[slot] - run.first, run.tokens) for slot in run.active}
            for slot in range(run.start, run.stop):
                self._written[slot] = max(self._written[slot], lengths[slot] + run.first + run.tokens)
            buffers.inputs.host(LENGTHS, np.int64)[: run.slots] = lengths[run.start : run.stop]
            buffers.inputs.host(LENGTHS, np.int64)[0] += run.first
            last = buffers.inputs.host(LAST, np.int64)
            last[:] = 0
            last[np.array(run.active) - run.start] = np.array(list(chunks.values())) - 1
            source = self._gather(k, run, chunks, pending) if k else self._stage_ids(buffers, run, chunks, ids)
            self._launch(k, run, buffers, source, result)
            for slot in run.active:
                output = outputs.setdefault(slot, _SlotOutput(buffers, slot - run.start))
                output.states.append((result + (slot - run.start) * run.tokens * size, chunks[slot]))
            if run.first == 0:
                last_runs[run.start, run.slots, run.tokens] = result
            result += aligned(run.slots * run.tokens * size)
        self._outputs, self._last_runs = outputs, last_runs

    def scores(self) -> dict[int, float]:
        """The router's score of the last token of each slot of the last run; waits for it. Not of the last segment."""
        self._synchronize()
        return {
            slot: float(output.buffers.verdict.host(SCORES, np.float32)[output.index])
            for slot, output in self._outputs.items()
        }

    def exit(self, counts: Mapping[int, int]) -> None:
        """The last tokens in some slots of the last run exit here, so many of each: one, except after the last segment.
        No more exit than the run took."""
        for slot, count in counts.items():
            output, size = self._outputs[slot], self._exit_size
            if count == 1:
                self._exits[slot] = [output.buffers.exits.address + output.index * size]
            else:
                states = [address + number * size for address, held in output.states for number in range(held)]
                self._exits[slot] = states[-count:]

    def append_pending(self, k: int, pending: Mapping[int, int]) -> None:
        """Appends the last run's output in some slots to the pending buffer of segment k."""
        size = self._state_size[k]
        new = {slot: sum(count for _, count in self._outputs[slot].states) for slot in pending}
        self._reserve_pending(max((pending[slot] + new[slot] for slot in pending), default=0))
        copies = []
        for slot, count in pending.items():
            target = self._pending_address(k, slot) + count * size
            for address, held in self._outputs[slot].states:
                copies.append((target, address, held * size))
                target += held * size
        self._copy(copies)

    def logits(self) -> dict[int, np.ndarray]:
        """The head on the exit states of this step, by slot: float32 [m, V]."""
        states = [state for exits in self._exits.values() for state in exits]
        parts, limit, size = [], self._info.max_logits, self._exit_size
        for first in range(0, len(states), limit):
            chunk, entry = states[first : first + limit], self._head_entry.address
            self._copy((entry + number * size, state, size) for number, state in enumerate(chunk))
            parts.append(self._head(entry, padded(len(chunk), 0, limit, limit))[: len(chunk)].copy())
        ends = accumulate(len(exits) for exits in self._exits.values())
        logits = np.split(np.concatenate(parts), list(ends)[:-1])
        return dict(zip(self._exits, logits, strict=True))

    def _buffers_of(self, k: int, index: int) -> _RunBuffers:
        """The buffers of a run of segment k, ready to be written to."""
        buffers = self._run_buffers.get((k, index))
        if buffers is None:
            counts, ids = [8 * self.slots, 8 * self.slots, 4], 8 * max(self._info.max_tokens, self.slots)
            inputs = Block(self._device, counts if k else [*counts, ids])
            verdict = Block(self._device, [4 * self.slots, self.slots])
            buffers = _RunBuffers(inputs, verdict, self._allocate(self.slots * self._exit_size))
            self._run_buffers[k, index] = buffers
        if buffers.queued:
            self._synchronize()
        return buffers

    def _synchronize(self) -> None:
        self._device.synchronize()
        for buffers in self._run_buffers.values():
            buffers.queued = False

    def _stage_ids(
        self, buffers: _RunBuffers, run: Run, chunks: Mapping[int, int], ids: Mapping[int, np.ndarray]
    ) -> int:
        block = buffers.inputs.host(IDS, np.int64)[: run.slots * run.tokens].reshape(-1, run.tokens)
        block[:] = 0
        for slot, chunk in chunks.items():
            block[slot - run.start, :chunk] = ids[slot][run.first : run.first + chunk]
        return buffers.inputs.address(IDS)

    def _gather(self, k: int, run: Run, chunks: Mapping[int, int], pending: Mapping[int, int]) -> int:
        """The address of a run's hidden states [slots, tokens, D]. Padding after them is zero, or the earlier segments'
        output for padding: never another sequence's states, which may be NaN (see `SequenceBuffers.clear`)."""
        whole = self._last_runs.get((run.start, run.slots, run.tokens))
        if whole is not None and run.first == 0 and not any(pending[slot] for slot in chunks):
            return whole
        copies, size = list[Copy](), self._state_size[k]
        for slot, chunk in chunks.items():
            target = self._entry.address + (slot - run.start) * run.tokens * size
            skip, room = run.first, chunk
            for address, held in [(self._pending_address(k, slot), pending[slot]), *self._outputs[slot].states]:
                take = max(0, min(held - skip, room))
                copies.append((target, address + skip * size, take * size))
                target, room, skip = target + take * size, room - take, max(0, skip - held)
        if sum(chunks.values()) < run.slots * run.tokens:
            self._device.clear(self._entry.address, run.slots * run.tokens * size)
        self._copy(copies)
        return self._entry.address

    def _launch(self, k: int, run: Run, buffers: _RunBuffers, source: int, result: int) -> None:
        slots, last = run.slots, k + 1 == self._segments
        addresses = {
            names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: source,
            names.FINAL_STATES if last else names.NEW_HIDDEN_STATES: result,
            names.PAST_LENGTHS: buffers.inputs.address(LENGTHS),
            names.LAST_TOKENS: buffers.inputs.address(LAST),
            names.EXIT_STATES: buffers.exits.address,
        }
        if not last:
            addresses[names.EXIT_THRESHOLD] = buffers.inputs.address(THRESHOLD)
            addresses[names.ROUTER_SCORE] = buffers.verdict.address(SCORES)
            addresses[names.EXIT_FLAG] = buffers.verdict.address(FLAGS)
        for kv, buffer in self._past[k]:
            addresses[kv.name] = buffer.address + run.start * kv.bytes
            addresses[kv.name.replace("past_key_values.", "present.")] = addresses[kv.name]
        for kv, buffer in self._shared[k]:
            addresses[kv.name] = buffer.address + run.start * kv.bytes

        def work() -> None:
            buffers.inputs.upload(*((IDS, 8 * slots * run.tokens) if k == 0 else (THRESHOLD, 4)))
            self._networks[names.segment(k)].run(addresses, run.tokens, slots)
            if not last:
                buffers.verdict.download(SCORES, SCORES, 4 * slots)

        self._device.launch((k, run.start, slots, run.tokens, source, result, buffers.exits.address), work)
        buffers.queued = True

    def _pending_address(self, k: int, slot: int) -> int:
        """Where a slot's part of the pending buffer of segment k begins."""
        return self._pending[k - 1].address + slot * self._pending_capacity * self._state_size[k]

    def _copy(self, copies: Iterable[Copy]) -> None:
        """Copies within the device; pieces that are adjacent on both sides are joined."""
        joined = list[Copy]()
        for target, source, size in copies:
            if joined and (target, source) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
                joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
            elif size:
                joined.append((target, source, size))
        for target, source, size in joined:
            self._device.copy(target, source, size)

    def _reserve_out(self, k: int, size: int) -> int:
        """The address of segment k's output, with room for `size` bytes; its contents are no longer needed."""
        if self._out[k % 2].size < size:
            self._synchronize()  # the old buffer is freed
            self._out[k % 2] = self._allocate(grown(self._out[k % 2].size, size))
        return self._out[k % 2].address

    def _reserve_pending(self, tokens: int) -> None:
        """Grows the pending buffers to `tokens` hidden states in every slot, with their contents."""
        old, capacity = self._pending_capacity, grown(self._pending_capacity, tokens)
        if capacity == old:
            return
        sizes = self._state_size[1:]
        grown_buffers = [self._allocate(self.slots * capacity * size) for size in sizes]  # all, or nothing changes
        for source, target, size in zip(self._pending, grown_buffers, sizes, strict=True):
            for slot in range(self.slots):
                start = source.address + slot * old * size
                self._device.copy(target.address + slot * capacity * size, start, old * size)
        self._synchronize()  # the old buffers are freed
        self._pending, self._pending_capacity = grown_buffers, capacity
