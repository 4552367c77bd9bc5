"""The buffers of up to `slots` sequences on a device, and the runs of the networks over them.

`steps` decides which slots run a segment. What sequences leave for later runs is in buffers with a block for each slot:
K/V, the hidden states pending before each segment but the first, and the exit states that the head reads. The networks
read and update them in place (see `compose.segments`), so a run over adjacent slots is a matter of addresses, which
depend on the segment, the slots and the number of tokens alone. Lengths, thresholds and token ids cross to the device
in one copy a run, scores and exits to the host in another; `head` brings logits there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tide_export import names
from tide_export.bundle.engine_fields import NetworksInfo
from tide_export.runtime.segmented.device import ALIGNMENT, Block, Buffer, Device
from tide_export.runtime.segmented.head import Head, Row
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec, aliases, kv_buffers
from tide_export.runtime.segmented.run_plan import Run, runs_over
from tide_export.runtime.sequence import Candidates
from tide_export.thresholds.resolve import NEVER_EXIT

# Parts of a run's small inputs, by the inputs' names ...
INPUTS = (names.PAST_LENGTHS, names.LAST_TOKENS, names.PENDING_LENGTHS, names.THRESHOLDS, names.INPUT_IDS)
LENGTHS, LAST, PENDING, THRESHOLDS, IDS = range(len(INPUTS))
VERDICT = (names.ROUTER_SCORE, names.EXIT_FLAG)  # ... and of its small outputs
SCORES, FLAGS = range(len(VERDICT))


@dataclass
class SlotRun:
    """What a run needs to know of one slot.

    Attributes:
        count: tokens that it runs over.
        threshold: a score above it exits.
        ids: the new tokens, for segment 0.
    """

    count: int
    threshold: float
    ids: np.ndarray


@dataclass
class _RunBuffers:
    """The small inputs and outputs of one run."""

    inputs: Block
    verdict: Block
    queued: bool = False  # `inputs` may not have been read yet


class SegmentBuffers:
    """The buffers of up to `slots` sequences. Serves one thread at a time.

    Attributes:
        head: of the networks after the segments.
        busy: while a step is made; after one that an exception ended, what is queued and recorded is not known.
    """

    def __init__(
        self,
        specs: Mapping[str, NetworkSpec],
        networks: Mapping[str, Network],
        device: Device,
        info: NetworksInfo,
        slots: int,
    ) -> None:
        """Allocates buffers for `info.capacity` tokens of each sequence. Raises GenerationError: the device has not
        enough memory."""
        self.busy, self.slots = False, slots
        self._specs, self._networks, self._device, self._info = specs, networks, device, info
        self._segments = len(specs) - len(names.AFTER_SEGMENTS)
        self._written = [0] * slots  # tokens of each slot's buffers that may not be zero
        self._exits = self._allocate(specs[names.HEAD].inputs[names.EXIT_STATES].size(1, slots))
        self.head = Head(specs, networks, device, info, self._exits, slots)
        self._indices = Block(device, [8 * info.max_tokens])
        self._indices.host(0, np.int64)[: info.max_tokens] = np.arange(info.max_tokens)
        self._buffers: list[dict[str, Buffer]] = []  # of each segment, by the names of its inputs
        for k in range(self._segments):
            self._buffers.append(self._buffers_of(k))
        self._indices.upload(0, 8 * info.max_tokens)  # all memory is there
        self._run_buffers = dict[tuple[int, int], _RunBuffers]()  # by segment and number of the run
        self._last_run = dict[int, tuple[_RunBuffers, int]]()  # of each slot in the run before, and its index there

    def _buffers_of(self, k: int) -> dict[str, Buffer]:
        """The memory that segment k reads and writes, of all slots."""
        spec, earlier = self._specs[names.segment(k)], self._buffers
        buffers = {names.EXIT_STATES: self._exits}
        if k:
            buffers[names.PENDING_STATES] = earlier[-1][names.NEXT_PENDING_STATES]
        for name in aliases(spec).values():
            if name not in buffers:
                buffers[name] = self._allocate(spec.inputs[name].size(1, self.slots))
        for name in spec.inputs:
            if name.startswith("past_key_values.") and name not in buffers:  # an earlier segment's, which it reads
                buffers[name] = next(of_segment[name] for of_segment in earlier if name in of_segment)
        return buffers

    def _allocate(self, size: int) -> Buffer:
        return self._device.allocate(max(size, ALIGNMENT))

    def clear(self, slots: Iterable[int]) -> None:
        """Zeroes what sequences wrote in some slots, for the next ones.

        What follows the last token is multiplied by zero in attention, and zero times NaN is NaN: what a sequence that
        overflowed has written must not be read.
        """
        for slot in slots:
            for k, buffers in enumerate(self._buffers):
                spec = self._specs[names.segment(k)]
                for kv in kv_buffers(spec):
                    start, stride = buffers[kv.name].address + slot * kv.bytes, kv.capacity * kv.size
                    self._device.clear(start, self._written[slot] * kv.size, kv.heads, stride)
                if names.NEXT_PENDING_STATES in buffers:  # of which padding is read
                    size = spec.inputs[names.NEXT_PENDING_STATES].size()
                    rows = min(self._written[slot], self._info.state_rows)
                    start = buffers[names.NEXT_PENDING_STATES].address + slot * size
                    self._device.clear(start, rows * (size // self._info.state_rows))
            self._written[slot] = 0

    def run(self, k: int, slots: Mapping[int, SlotRun], lengths: Sequence[int], following: Sequence[int]) -> None:
        """Runs segment k over all tokens pending before it in some slots, in as many runs as it takes.

        Args:
            lengths: tokens in the segment's K/V cache, of every slot.
            following: tokens in the next segment's, of every slot; of the last segment not read.

        Raises:
            GenerationError: the device has not enough memory, or failed.
        """
        self._last_run.clear()
        counts = {slot: each.count for slot, each in slots.items()}
        for index, run in enumerate(runs_over(counts, lengths, self._info)):
            buffers = self._run_buffers_of(k, index)
            inputs = buffers.inputs
            inputs.host(LENGTHS, np.int64)[: run.slots] = lengths[run.start : run.stop]
            for slot in range(run.start, run.stop):
                self._written[slot] = max(self._written[slot], lengths[slot] + run.tokens)
            last, pending = inputs.host(LAST, np.int64), inputs.host(PENDING, np.int64)
            thresholds = inputs.host(THRESHOLDS, np.float32)
            last[: run.slots], thresholds[: run.slots] = 0, NEVER_EXIT
            pending[: run.slots] = np.subtract(lengths, following)[run.start : run.stop]
            ids = inputs.host(IDS, np.int64)[: run.slots * run.tokens].reshape(-1, run.tokens) if k == 0 else None
            if ids is not None:
                ids[:] = 0
            for slot in run.active:
                each, number = slots[slot], slot - run.start
                last[number], thresholds[number] = each.count - 1, each.threshold
                if ids is not None:
                    ids[number, : each.count] = each.ids
                self._last_run[slot] = buffers, number
            self._launch(k, index, run, buffers)

    def _run_buffers_of(self, k: int, index: int) -> _RunBuffers:
        """The buffers of a run of segment k, ready to be written to."""
        buffers = self._run_buffers.get((k, index))
        if buffers is None:
            sizes = [8 * self.slots, 8 * self.slots, 8 * self.slots, 4 * self.slots]
            ids = 8 * max(self._info.max_tokens, self.slots) if k == 0 else 0
            buffers = _RunBuffers(
                Block(self._device, [*sizes, ids]), Block(self._device, [4 * self.slots, 4 * self.slots])
            )
            self._run_buffers[k, index] = buffers
        if buffers.queued:
            self._synchronize()
        return buffers

    def _launch(self, k: int, index: int, run: Run, buffers: _RunBuffers) -> None:
        spec, slots = self._specs[names.segment(k)], run.slots
        addresses = {names.TOKEN_INDICES: self._indices.address(0)}
        addresses |= {name: buffers.inputs.address(part) for part, name in enumerate(INPUTS)}
        addresses |= {name: buffers.verdict.address(part) for part, name in enumerate(VERDICT)}
        for name, buffer in self._buffers[k].items():
            addresses[name] = buffer.address + run.start * spec.inputs[name].size()
        addresses |= {output: addresses[name] for output, name in aliases(spec).items()}

        def work() -> None:
            buffers.inputs.upload(*((IDS, 8 * slots * run.tokens) if k == 0 else (THRESHOLDS, 4 * slots)))
            self._networks[spec.name].run(addresses, run.tokens, slots)
            if names.ROUTER_SCORE in spec.outputs:
                buffers.verdict.download(FLAGS, 4 * slots)

        self._device.launch((k, index, run.start, slots, run.tokens), work)
        buffers.queued = True

    def exits(self) -> list[int]:
        """The slots of the last run whose last token exits there; waits for it. Not of the last segment."""
        self._synchronize()
        return [slot for slot, (run, number) in self._last_run.items() if run.verdict.host(FLAGS, np.int32)[number]]

    def score(self, k: int) -> np.float32:
        """The router's score in segment k's last run over one slot, once something that ran after it is read."""
        return self._run_buffers[k, 0].verdict.host(SCORES, np.float32)[0]

    def logits(
        self, whole: Sequence[Row], few: Sequence[Row], counts: Sequence[int]
    ) -> tuple[np.ndarray, list[Candidates]]:
        """See `Head.run`."""
        found = self.head.run(whole, few, counts)
        self._nothing_queued()
        return found

    def _synchronize(self) -> None:
        self._device.synchronize()
        self._nothing_queued()

    def _nothing_queued(self) -> None:
        for buffers in self._run_buffers.values():
            buffers.queued = False
