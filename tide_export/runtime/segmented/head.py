"""Runs the head over rows of the exit states, and brings to the host what tokens are chosen from, no more.

All logits stay on the device. Of positions that need few of them, the networks BEST and CANDIDATES find these there: of
the most likely token 8 bytes cross, of the `MAX_CANDIDATES` most likely 12 bytes each, and of all V 4 bytes each.

Engines may order equal logits as they like. So candidates are used where the least that was found is smaller than the
last that counts: then all that equal the latter were found. Else all logits of that position are fetched.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tide_export import names
from tide_export.bundle.engine_fields import NetworksInfo
from tide_export.runtime.segmented.device import ALIGNMENT, Block, Buffer, Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec
from tide_export.runtime.segmented.run_plan import padded
from tide_export.runtime.sequence import Candidates

Row = tuple[int, int]  # a slot and a row of its exit states
# Parts of the small outputs, those of BEST first.
FOUND = (names.BEST_TOKENS, names.BEST_LOGITS, names.CANDIDATE_LOGITS, names.CANDIDATE_TOKENS)


class Head:
    """The networks after the segments, in the buffers of one device."""

    def __init__(
        self,
        specs: Mapping[str, NetworkSpec],
        networks: Mapping[str, Network],
        device: Device,
        info: NetworksInfo,
        exits: Buffer,
        slots: int,
    ) -> None:
        """`exits`: the exit states of all `slots`. Raises GenerationError: the device has not enough memory."""
        self._networks, self._device, self._info, self._slots = networks, device, info, slots
        self._exits, self._rows = exits, Block(device, [8 * info.max_logits])
        logits = specs[names.HEAD].outputs[names.LOGITS]
        self._vocabulary = logits.dims(1)[-1]
        self._logits = device.allocate(max(logits.size(info.max_logits), ALIGNMENT))
        self._host = device.staging(self._logits.size).view(np.float32)
        self._specs = {**specs[names.BEST].outputs, **specs[names.CANDIDATES].outputs}
        self._found = Block(device, [self._specs[name].size(info.max_logits) for name in FOUND])
        self._most = self._specs[names.CANDIDATE_TOKENS].dims(1)[-1]

    def count(self, candidates: int) -> int:
        """What is fetched for a position that needs so many candidates: these, or 0 for all logits."""
        return candidates if candidates <= 1 or candidates < self._most else 0

    def run(
        self, whole: Sequence[Row], few: Sequence[Row], counts: Sequence[int]
    ) -> tuple[np.ndarray, list[Candidates]]:
        """The logits of the rows `whole`, float32 [m, V], and the candidates of the rows `few`.

        Args:
            counts: candidates that each of `few` needs, as `count` returns them.

        Returns:
            A view of a buffer, where there are no more rows than a run takes; else a copy.
        """
        limit, rows = self._info.max_logits, [*whole, *few]
        if len(rows) <= limit:
            return self._run(rows, len(whole), counts)
        logits, found = list[np.ndarray](), list[Candidates]()
        for start in range(0, len(rows), limit):
            of_these = min(max(len(whole) - start, 0), limit)
            first = start + of_these - len(whole)
            some, more = self._run(rows[start : start + limit], of_these, counts[first : first + limit - of_these])
            logits.append(some.copy())
            found += more
        return np.concatenate(logits), found

    def _run(self, rows: Sequence[Row], whole: int, counts: Sequence[int]) -> tuple[np.ndarray, list[Candidates]]:
        limit, indices = self._info.max_logits, self._rows.host(0, np.int64)
        tokens = padded(len(rows), 0, limit, limit)
        indices[:tokens] = 0
        indices[: len(rows)] = [slot * self._info.state_rows + row for slot, row in rows]
        finders = [names.BEST] * (1 in counts) + [names.CANDIDATES] * any(count > 1 for count in counts)
        fetched = padded(whole, 0, tokens, tokens) if whole else 0
        host = self._host[: fetched * self._vocabulary]
        addresses = {names.EXIT_STATES: self._exits.address, names.ROWS: self._rows.address(0)}
        addresses[names.LOGITS] = self._logits.address
        addresses |= {name: self._found.address(part) for part, name in enumerate(FOUND)}
        last = FOUND.index(names.CANDIDATE_TOKENS if names.CANDIDATES in finders else names.BEST_LOGITS)

        def work() -> None:
            self._rows.upload(0, 8 * tokens)
            self._networks[names.HEAD].run(addresses, tokens, self._slots)
            for name in finders:
                self._networks[name].run(addresses, tokens, self._slots)
            if fetched:
                self._device.download(host, self._logits.address)
            if finders:
                self._found.download(last, self._specs[FOUND[last]].size(tokens))

        self._device.launch((names.HEAD, tokens, fetched, *finders), work)
        self._device.synchronize()
        logits = host.reshape(fetched, self._vocabulary)[:whole]
        return logits, [self._candidates(whole + n, count) for n, count in enumerate(counts)]

    def _candidates(self, row: int, count: int) -> Candidates:
        if count == 1:
            token, logit = self._found.host(0, np.int32)[row], self._found.host(1, np.float32)[row]
            return Candidates(np.array([token], np.int64), np.array([logit]))
        every = slice(row * self._most, (row + 1) * self._most)
        logits, tokens = self._found.host(2, np.float32)[every], self._found.host(3, np.int64)[every]
        if logits[count - 1] > logits[-1]:
            order = np.argsort(tokens[logits >= logits[count - 1]])  # they are in front
            return Candidates(tokens[order], logits[order])
        host = self._host[row * self._vocabulary : (row + 1) * self._vocabulary]
        self._device.download(host, self._logits.address + row * host.nbytes)
        self._device.synchronize()
        return Candidates(np.arange(self._vocabulary), host.copy())
