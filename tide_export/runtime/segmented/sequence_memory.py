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
from tide_export.runtime.segmented.device import ALIGNMENT, Buffer, Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec, kv_aliases, kv_buffers
from tide_export.runtime.segmented.run_plan import padded

# A segment's small inputs, and its verdict, each at an aligned offset of one block that crosses in one copy.
LENGTH, LAST, THRESHOLD = (index * ALIGNMENT for index in range(3))
SCORE, FLAG = (index * ALIGNMENT for index in range(2))


def grown(capacity: int, needed: int) -> int:
    """The new capacity of a buffer that must hold `needed`: at least doubled where it grows, so that copies are few."""
    return capacity if needed <= capacity else max(needed, 2 * capacity)


class SequenceBuffers:
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

        Raises:
            GenerationError: the device has not enough memory.
        """
        max_tokens = info.max_tokens
        self._max_tokens, self._max_logits, self._capacity = max_tokens, info.max_logits, info.capacity
        self._specs, self._networks, self._device = specs, networks, device
        self._segments = len(specs) - 1
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
        self._control: list[Buffer] = []
        self._control_host: list[np.ndarray] = []
        self._verdict: list[Buffer] = []
        self._verdict_host: list[np.ndarray] = []
        for k in range(self._segments):
            self._add_segment(k, pending_capacity)
        self._pending.append(device.allocate(max(pending_capacity * self._state_size[-1], ALIGNMENT)))
        logits = specs[names.HEAD].outputs[names.LOGITS]
        self._vocabulary = logits.dims(1)[-1]
        self._logits = self._allocate(logits.size(info.max_logits))
        self._logits_host = device.staging(self._logits.size).view(np.float32)
        self._positions = 0  # last tokens of the last segment's last run whose logits can be computed ...
        self._first_position = 0  # ... and the index of the first of them in the buffer before the head
        self._written = [0] * self._segments  # tokens of each segment's K/V buffers that may not be zero
        self._queued: set[int] = set()  # segments whose control block may not have been read yet

    def _add_segment(self, k: int, pending_capacity: int) -> None:
        spec, device = self._specs[names.segment(k)], self._device
        control, verdict = self._allocate(3 * ALIGNMENT), self._allocate(2 * ALIGNMENT)
        self._control.append(control)
        self._verdict.append(verdict)
        self._control_host.append(device.staging(control.size))
        self._verdict_host.append(device.staging(verdict.size))
        self._pending.append(device.allocate(max(pending_capacity * self._state_size[k], ALIGNMENT)))
        fixed = {
            names.PAST_LENGTHS: control.address + LENGTH,
            names.LAST_TOKENS: control.address + LAST,
            names.EXIT_STATES: self._allocate(spec.outputs[names.EXIT_STATES].size()).address,
        }
        if names.EXIT_THRESHOLD in spec.inputs:
            fixed[names.EXIT_THRESHOLD] = control.address + THRESHOLD
            fixed[names.ROUTER_SCORE] = verdict.address + SCORE
            fixed[names.EXIT_FLAG] = verdict.address + FLAG
        for output, name in kv_aliases(spec).items():
            fixed[name] = fixed[output] = self._allocate(spec.inputs[name].size()).address
        self._fixed.append(fixed)

    def _allocate(self, size: int) -> Buffer:
        buffer = self._device.allocate(max(size, ALIGNMENT))
        self._owned.append(buffer)
        return buffer

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
        self._control_host[k][THRESHOLD : THRESHOLD + 4].view(np.float32)[0] = threshold

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
            start = (count - keep) // self._max_tokens * self._max_tokens
            self._positions, self._first_position, target = keep, count - keep - start, -start
        for first in range(0, count, self._max_tokens):
            chunk = min(count - first, self._max_tokens)
            tokens = padded(chunk, length + first, self._max_tokens, self._capacity)
            self._written[k] = max(self._written[k], length + first + tokens)
            self._wait_for(k)
            control = self._control_host[k]
            control[LENGTH : LENGTH + 8].view(np.int64)[0] = length + first
            control[LAST : LAST + 8].view(np.int64)[0] = chunk - 1
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
            device.upload(self._control[k].address, self._control_host[k])
            self._networks[spec.name].run(addresses, tokens)
            if not deepest:
                device.download(self._verdict_host[k], self._verdict[k].address)

        device.launch((k, tokens, source, result), work)
        self._queued.add(k)
        if target != 0:
            device.copy(destination, self._scratch.address, chunk * size)

    def verdict(self, k: int) -> tuple[float, bool]:
        """Score and exit flag of the last token of segment k's last run; waits for it."""
        self._wait_for(k)
        host = self._verdict_host[k]
        return float(host[SCORE : SCORE + 4].view(np.float32)[0]), bool(host[FLAG])

    def logits(self, k: int) -> np.ndarray:
        """The head on the exit state of the last token after segment k: float32 [V], a view of a buffer."""
        return self._head(self._fixed[k][names.EXIT_STATES], 1)[0]

    def position_logits(self) -> np.ndarray:
        """The head on the last `keep` tokens of the last segment's run: float32 [m, V]."""
        parts = []
        for first in range(0, self._positions, self._max_logits):
            count = min(self._positions - first, self._max_logits)
            tokens = padded(count, 0, self._max_logits, self._max_logits)
            states = self._states_at(self._segments, self._first_position + first, tokens)
            parts.append(self._head(states, tokens)[:count].copy())
        return np.concatenate(parts)

    def _head(self, states: int, tokens: int) -> np.ndarray:
        """Logits [tokens, V] of the states at an address."""
        device, head = self._device, self._networks[names.HEAD]
        host = self._logits_host[: tokens * self._vocabulary]
        addresses = {names.EXIT_STATES: states, names.LOGITS: self._logits.address}

        def work() -> None:
            head.run(addresses, tokens)
            device.download(host, self._logits.address)

        device.launch((names.HEAD, states, tokens), work)
        device.synchronize()
        self._queued.clear()
        return host.reshape(tokens, self._vocabulary)

    def _wait_for(self, k: int) -> None:
        """Waits for segment k's last run, if it may not have finished."""
        if k in self._queued:
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
        self._device.synchronize()  # the old buffer is freed now
        self._queued.clear()
        self._pending[k] = buffer
