"""One sequence's memory on a device, and how its networks are run over it.

`state` says which segment runs over which waiting tokens; this module knows where they are. Before every segment but
the first lie the hidden states that wait for it, one row a token, in a buffer that grows; a segment reads its rows
there and writes the new ones where the next segment will read them. Nothing but token ids, lengths, the routers'
verdicts and the logits crosses to the host.

Runs are padded to a power of two, so that a device that records its work (a CUDA graph per network and number of
tokens) has few to record; padding goes behind the last token, in the buffers and in the K/V cache alike, where it is
overwritten before anything reads it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import NetworksInfo
from tide_export.runtime.segmented.device import ALIGNMENT, Buffer, Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec, kv_aliases, kv_buffers
from tide_export.runtime.segmented.run_plan import padded

# A segment's small inputs, and its verdict, each at an aligned place of one block that crosses in one copy.
LENGTH, LAST, THRESHOLD = (place * ALIGNMENT for place in range(3))
SCORE, FLAG = (place * ALIGNMENT for place in range(2))


def grown(rows: int, needed: int) -> int:
    """Rows of a buffer that has `rows` and must hold `needed`: at least doubled, so that few copies are made."""
    return rows if needed <= rows else max(needed, 2 * rows)


class Lane:
    """The buffers of one sequence and a way to run networks over them. Serves one thread at a time.

    Attributes:
        max_tokens: a run takes at most so many.
    """

    def __init__(
        self,
        specs: Mapping[str, NetworkSpec],
        networks: Mapping[str, Network],
        device: Device,
        info: NetworksInfo,
        waiting_rows: int,
    ) -> None:
        """Allocates K/V buffers for `info.capacity` tokens, and `waiting_rows` hidden states before every segment.

        Raises:
            GenerationError: the device has not enough memory.
        """
        max_tokens = info.max_tokens
        self.max_tokens, self._most_logits, self._capacity = max_tokens, info.max_logits, info.capacity
        self._specs, self._networks, self._device = specs, networks, device
        self._segments = len(specs) - 1
        self._fixed: list[dict[str, int]] = []  # per segment, the addresses that never change
        self._owned: list[Buffer] = []
        self._waiting: list[Buffer] = []
        # Bytes of a row of what a segment takes, and last of what the head takes.
        entries = [(names.segment(k), names.HIDDEN_STATES) for k in range(1, self._segments)]
        self._row = [
            0,
            *(specs[name].inputs[entry].size(1) for name, entry in [*entries, (names.HEAD, names.EXIT_STATES)]),
        ]
        self._scratch = self._allocate(max_tokens * max(self._row))
        self._chunk = self._allocate(max(max_tokens, info.max_logits) * max(self._row))
        self._ids = self._allocate(max_tokens * 8)
        self._ids_host = device.staging(max_tokens * 8).view(np.int64)
        self._control: list[Buffer] = []
        self._control_host: list[np.ndarray] = []
        self._verdict: list[Buffer] = []
        self._verdict_host: list[np.ndarray] = []
        for k in range(self._segments):
            self._add_segment(k, waiting_rows)
        self._waiting.append(device.allocate(max(waiting_rows * self._row[-1], ALIGNMENT)))
        logits = specs[names.HEAD].outputs[names.LOGITS]
        self._vocabulary = logits.dims(1)[-1]
        self._logits = self._allocate(logits.size(info.max_logits))
        self._logits_host = device.staging(self._logits.size).view(np.float32)
        self._kept = 0  # the last segment's last so many tokens are in its rows ...
        self._kept_from = 0  # ... from this one on
        self._written = [0] * self._segments  # tokens of each segment's K/V buffers that may not be zero
        self._queued: set[int] = set()  # segments whose control block the queue may not have read yet

    def _add_segment(self, k: int, waiting_rows: int) -> None:
        spec, device = self._specs[names.segment(k)], self._device
        control, verdict = self._allocate(3 * ALIGNMENT), self._allocate(2 * ALIGNMENT)
        self._control.append(control)
        self._verdict.append(verdict)
        self._control_host.append(device.staging(control.size))
        self._verdict_host.append(device.staging(verdict.size))
        self._waiting.append(device.allocate(max(waiting_rows * self._row[k], ALIGNMENT)))
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
        """Makes the lane as it was when it was made, for another sequence.

        What lies behind the last token counts for nothing in attention, but as a factor of zero, and zero times NaN is
        NaN: a sequence that the model made overflow must leave nothing behind.
        """
        for k, written in enumerate(self._written):
            for kv in kv_buffers(self._specs[names.segment(k)]):
                self._device.clear(self._fixed[k][kv.name], written * kv.size, kv.heads, kv.capacity * kv.size)
            self._written[k] = 0
        for buffer in self._waiting:  # of which padding is read
            self._device.clear(buffer.address, buffer.size)

    def set_threshold(self, k: int, threshold: float) -> None:
        """Segment k's router exits above this from its next run on."""
        self._settle(k)
        self._control_host[k][THRESHOLD : THRESHOLD + 4].view(np.float32)[0] = threshold

    def run(
        self, k: int, ids: Sequence[int] | np.ndarray, count: int, length: int, target: int = 0, keep: int = 1
    ) -> None:
        """Segment k over all that waits before it, in as many runs as it takes.

        Args:
            ids: the `count` new tokens, for segment 0.
            count: tokens that wait.
            length: tokens in the segment's K/V cache.
            target: the row before segment k + 1 where the first new hidden state goes.
            keep: how many of the last tokens `rows` shall be asked about, of the last segment.

        Raises:
            GenerationError: the device has not enough memory, or failed.
        """
        if k + 1 == self._segments:  # its rows are those from the run on that the first kept token is in
            start = (count - keep) // self.max_tokens * self.max_tokens
            self._kept, self._kept_from, target = keep, count - keep - start, -start
        for first in range(0, count, self.max_tokens):
            chunk = min(count - first, self.max_tokens)
            tokens = padded(chunk, length + first, self.max_tokens, self._capacity)
            self._written[k] = max(self._written[k], length + first + tokens)
            self._settle(k)
            control = self._control_host[k]
            control[LENGTH : LENGTH + 8].view(np.int64)[0] = length + first
            control[LAST : LAST + 8].view(np.int64)[0] = chunk - 1
            if k == 0:
                self._ids_host[:chunk] = ids[first : first + chunk]
                self._ids_host[chunk:tokens] = 0
                source = self._ids.address
            else:
                source = self._rows_at(k, first, tokens)
            self._run_chunk(k, source, chunk, tokens, max(0, target + first))

    def _rows_at(self, k: int, first: int, tokens: int) -> int:
        """Where what waits before segment k lies from row `first` on, aligned and with room for `tokens`."""
        self._reserve(k, first + tokens)
        start = self._waiting[k].address + first * self._row[k]
        if first == 0:
            return start
        self._device.copy(self._chunk.address, start, tokens * self._row[k])
        return self._chunk.address

    def _run_chunk(self, k: int, source: int, chunk: int, tokens: int, target: int) -> None:
        spec, device, row = self._specs[names.segment(k)], self._device, self._row[k + 1]
        goes_on = k + 1 < self._segments
        self._reserve(k + 1, target + tokens)
        destination = self._waiting[k + 1].address + target * row
        # Straight to its place where that is always the same; else by way of the scratch rows.
        result = destination if target == 0 else self._scratch.address
        addresses = {
            **self._fixed[k],
            names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: source,
            names.NEW_HIDDEN_STATES if goes_on else names.FINAL_STATES: result,
        }

        def work() -> None:
            if k == 0:
                device.upload(self._ids.address, self._ids_host[:tokens])
            device.upload(self._control[k].address, self._control_host[k])
            self._networks[spec.name].run(addresses, tokens)
            if goes_on:
                device.download(self._verdict_host[k], self._verdict[k].address)

        device.launch((k, tokens, source, result), work)
        self._queued.add(k)
        if target != 0:
            device.copy(destination, self._scratch.address, chunk * row)

    def verdict(self, k: int) -> tuple[float, bool]:
        """Score and exit flag of the last token of segment k's last run; waits for it."""
        self._settle(k)
        host = self._verdict_host[k]
        return float(host[SCORE : SCORE + 4].view(np.float32)[0]), bool(host[FLAG])

    def logits(self, k: int) -> np.ndarray:
        """The head on the state the last token left segment k with: float32 [V], the lane's own memory."""
        return self._head(self._fixed[k][names.EXIT_STATES], 1)[0]

    def rows(self) -> np.ndarray:
        """The head on the tokens the last segment's last run was told to keep: float32 [m, V]."""
        found = []
        for first in range(0, self._kept, self._most_logits):
            count = min(self._kept - first, self._most_logits)
            tokens = padded(count, 0, self._most_logits, self._most_logits)
            found.append(
                self._head(self._rows_at(self._segments, self._kept_from + first, tokens), tokens)[:count].copy()
            )
        return np.concatenate(found)

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

    def _settle(self, k: int) -> None:
        """Waits for segment k's last run, if it may still be on its way."""
        if k in self._queued:
            self._device.synchronize()
            self._queued.clear()

    def _reserve(self, k: int, rows: int) -> None:
        """Room for `rows` hidden states before segment k; those that wait there move along."""
        row = self._row[k]
        held = self._waiting[k].size // row
        wanted = grown(held, rows)
        if wanted == held:
            return
        buffer = self._device.allocate(wanted * row)
        self._device.copy(buffer.address, self._waiting[k].address, held * row)
        self._device.synchronize()  # the old rows are freed now
        self._queued.clear()
        self._waiting[k] = buffer
