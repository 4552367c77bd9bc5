"""The buffers of one sequence on a device, and the runs of its networks over them.

`sequence` decides which segment runs over which pending tokens. Before every segment but the first is a pending buffer,
which grows, with one hidden state per token; a segment reads its input there and writes its output to the pending
buffer of the next. Only token ids, lengths, the routers' verdicts and the logits cross to the host.

Runs are padded to a power of two, so that a device that records its work (a CUDA graph per network and number of
tokens) has few to record. Padding follows the last token, in the buffers and in the K/V cache alike, where it is
overwritten before anything reads it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import NetworksInfo
from tide_export.runtime.segmented.buffers import Block, NetworkBuffers, grown
from tide_export.runtime.segmented.device import Buffer, Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec, kv_aliases, kv_buffers, shared_kv
from tide_export.runtime.segmented.run_plan import padded

LENGTH, LAST, THRESHOLD = range(3)  # parts of a segment's small inputs
SCORE, FLAG = 0, 1  # parts of a verdict


class SequenceBuffers(NetworkBuffers):
    """The buffers of one sequence. Serves one thread at a time."""

    def __init__(
        self,
        specs: Mapping[str, NetworkSpec],
        networks: Mapping[str, Network],
        device: Device,
        info: NetworksInfo,
        pending_capacity: int,
    ) -> None:
        """Allocates K/V buffers for `info.capacity` tokens, and `pending_capacity` hidden states before every segment.
        Raises GenerationError: the device has not enough memory."""
        super().__init__(specs, networks, device, info)
        max_tokens = info.max_tokens
        self._fixed: list[dict[str, int]] = []  # per segment, the addresses that never change
        self._owned: list[Buffer] = []
        self._pending: list[Buffer] = []
        # Bytes of a hidden state before each segment, and last before the head.
        entries = [(names.segment(k), names.HIDDEN_STATES) for k in range(1, self._segments)]
        self._state_size = [
            0,
            *(specs[name].inputs[entry].size(1) for name, entry in [*entries, (names.HEAD, names.EXIT_STATES)]),
        ]
        self._scratch = self._allocate(max_tokens * max(self._state_size))
        self._chunk = self._allocate(max(max_tokens, info.max_logits) * max(self._state_size))
        self._ids = self._allocate(max_tokens * 8)
        self._ids_host = device.staging(max_tokens * 8).view(np.int64)
        self._inputs = [Block(device, (8, 8, 4)) for _ in range(self._segments)]
        self._verdicts = [Block(device, (4, 1)) for _ in range(self._segments)]
        for k in range(self._segments):
            self._add_segment(k, pending_capacity)
        self._pending.append(self._allocate(pending_capacity * self._state_size[-1]))
        self._positions: int  # last tokens of the last segment's last run whose logits can be computed ...
        self._first_position: int  # ... and the index of the first of them in the buffer before the head
        self._written = [0] * self._segments  # tokens of each segment's K/V buffers that may not be zero
        self._queued: set[int] = set()  # segments whose control block may not have been read yet

    def _add_segment(self, k: int, pending_capacity: int) -> None:
        spec, inputs, verdict = self._specs[names.segment(k)], self._inputs[k], self._verdicts[k]
        self._pending.append(self._allocate(pending_capacity * self._state_size[k]))
        fixed = {
            names.PAST_LENGTHS: inputs.address(LENGTH),
            names.LAST_TOKENS: inputs.address(LAST),
            names.EXIT_STATES: self._own(spec.outputs[names.EXIT_STATES].size()),
        }
        if names.EXIT_THRESHOLD in spec.inputs:
            fixed[names.EXIT_THRESHOLD] = inputs.address(THRESHOLD)
            fixed[names.ROUTER_SCORE] = verdict.address(SCORE)
            fixed[names.EXIT_FLAG] = verdict.address(FLAG)
        for output, name in kv_aliases(spec).items():
            fixed[name] = fixed[output] = self._own(spec.inputs[name].size())
        for name in shared_kv(spec):
            fixed[name] = next(earlier[name] for earlier in self._fixed if name in earlier)
        self._fixed.append(fixed)

    def _own(self, size: int) -> int:
        """The address of memory that lives as long as the buffers."""
        self._owned.append(self._allocate(size))
        return self._owned[-1].address

    def clear(self) -> None:
        """Zeroes what a sequence wrote, for the next one.

        What follows the last token is multiplied by zero in attention, and zero times NaN is NaN: what a sequence that
        overflowed has written must not be read.
        """
        for k, written in enumerate(self._written):
            for kv in kv_buffers(self._specs[names.segment(k)]):
                self._device.clear(self._fixed[k][kv.name], written * kv.size, kv.heads, kv.capacity * kv.size)
            self._written[k] = 0
        for buffer in self._pending:  # of which padding is read
            self._device.clear(buffer.address, buffer.size)

    def set_threshold(self, k: int, threshold: float) -> None:
        """Segment k's router exits above this from its next run on."""
        self._wait_for(k)
        self._inputs[k].host(THRESHOLD, np.float32)[0] = threshold

    def run(
        self, k: int, ids: Sequence[int] | np.ndarray, count: int, length: int, target: int = 0, keep: int = 1
    ) -> None:
        """Runs segment k over all tokens pending before it, in as many runs as it takes.

        Args:
            ids: the `count` new tokens, for segment 0.
            count: pending tokens, the new ones included.
            length: tokens in the segment's K/V cache.
            target: the index in the pending buffer of segment k + 1 of the first new hidden state.
            keep: of the last segment, for how many of the last tokens `position_logits` computes logits.

        Raises:
            GenerationError: the device has not enough memory, or failed.
        """
        if k + 1 == self._segments:  # its states are kept from the run on that has the first of these positions
            start = (count - keep) // self._info.max_tokens * self._info.max_tokens
            self._positions, self._first_position, target = keep, count - keep - start, -start
        for first in range(0, count, self._info.max_tokens):
            chunk = min(count - first, self._info.max_tokens)
            tokens = padded(chunk, length + first, self._info.max_tokens, self._info.capacity)
            self._written[k] = max(self._written[k], length + first + tokens)
            self._wait_for(k)
            self._inputs[k].host(LENGTH, np.int64)[0] = length + first
            self._inputs[k].host(LAST, np.int64)[0] = chunk - 1
            if k == 0:
                self._ids_host[:chunk] = ids[first : first + chunk]
                self._ids_host[chunk:tokens] = 0
                source = self._ids.address
            else:
                source = self._states_at(k, first, tokens)
            self._run_chunk(k, source, chunk, tokens, max(0, target + first))

    def _states_at(self, k: int, first: int, tokens: int) -> int:
        """The address of the hidden states before segment k from index `first` on, aligned, with room for `tokens`."""
        self._reserve(k, first + tokens)
        start = self._pending[k].address + first * self._state_size[k]
        if first == 0:
            return start
        self._device.copy(self._chunk.address, start, tokens * self._state_size[k])
        return self._chunk.address

    def _run_chunk(self, k: int, source: int, chunk: int, tokens: int, target: int) -> None:
        spec, device, size = self._specs[names.segment(k)], self._device, self._state_size[k + 1]
        deepest = k + 1 == self._segments
        self._reserve(k + 1, target + tokens)
        destination = self._pending[k + 1].address + target * size
        # A target that varies would need a recording each: those results go through the scratch buffer.
        result = destination if target == 0 else self._scratch.address
        addresses = {
            **self._fixed[k],
            names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: source,
            names.FINAL_STATES if deepest else names.NEW_HIDDEN_STATES: result,
        }

        def work() -> None:
            if k == 0:
                device.upload(self._ids.address, self._ids_host[:tokens])
            self._inputs[k].upload(THRESHOLD, 4)
            self._networks[spec.name].run(addresses, tokens)
            if not deepest:
                self._verdicts[k].download(SCORE, FLAG, 1)

        device.launch((k, tokens, source, result), work)
        self._queued.add(k)
        if target != 0:
            device.copy(destination, self._scratch.address, chunk * size)

    def verdict(self, k: int) -> tuple[float, bool]:
        """Score and exit flag of the last token of segment k's last run; waits for it."""
        self._wait_for(k)
        verdict = self._verdicts[k]
        return float(verdict.host(SCORE, np.float32)[0]), bool(verdict.host(FLAG, np.bool_)[0])

    def logits(self, k: int) -> np.ndarray:
        """The head on the exit state of the last token after segment k: float32 [V], a view of a buffer."""
        return self._head(self._fixed[k][names.EXIT_STATES], 1)[0]

    def position_logits(self) -> np.ndarray:
        """The head on the last `keep` tokens of the last segment's run: float32 [m, V]."""
        parts = []
        for first in range(0, self._positions, self._info.max_logits):
            count = min(self._positions - first, self._info.max_logits)
            tokens = padded(count, 0, self._info.max_logits, self._info.max_logits)
            states = self._states_at(self._segments, self._first_position + first, tokens)
            parts.append(self._head(states, tokens)[:count].copy())
        return np.concatenate(parts)

    def _wait_for(self, k: int) -> None:
        """Waits for segment k's last run, if it may not have finished."""
        if k in self._queued:
            self._synchronize()

    def _synchronize(self) -> None:
        self._device.synchronize()
        self._queued.clear()

    def _reserve(self, k: int, tokens: int) -> None:
        """Grows the pending buffer of segment k to `tokens` hidden states, with its contents."""
        size = self._state_size[k]
        old = self._pending[k].size // size
        capacity = grown(old, tokens)
        if capacity == old:
            return
        buffer = self._device.allocate(capacity * size)
        self._device.copy(buffer.address, self._pending[k].address, old * size)
        self._synchronize()  # the old buffer is freed now
        self._pending[k] = buffer
