"""One segment's session with the bindings of one batch: runs any of the rows, each over its own new tokens.

K/V buffers are bound as input and output at once, row by row: keys and values are written in place, and a row that is
not run costs an idle branch. A place in the batch without a sequence is bound to buffers of one token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export import names
from tide_export.errors import GenerationError
from tide_export.runtime.onnxruntime.session import first_line
from tide_export.runtime.packed.row import Row


class SegmentRun:
    """Attributes:
    states: float32 [1, m, D'], of the positions of the last run that were asked for: what the head takes should they
        leave.
    scores: float32 [m], the router's of them; empty behind the last segment.
    hidden: float32 [1, N, D], the new hidden states; empty behind the last segment.

    The arrays change with the next run.
    """

    def __init__(
        self, ort: Any, session: Any, k: int, layers: range, rows: int, nobody: Row, widths: tuple[int, int], last: bool
    ) -> None:
        """`nobody` stands in for sequences that are not there; `widths` are D and D'."""
        self._ort, self._session, self._k, self._layers, self._last = ort, session, k, layers, last
        self._hidden_size, self._exit_size = widths
        self._binding = session.io_binding()
        self._bound: dict[str, np.ndarray] = {}  # the binding holds bare pointers
        self._row_tokens = self._input(names.SLOT_TOKENS, np.zeros(rows, np.int64))
        self._row_lengths = self._input(names.SLOT_LENGTHS, np.ones(rows, np.int32))
        self._shape = (-1, -1)
        self.states = self.scores = self.hidden = np.zeros(0, np.float32)
        for place in range(rows):
            self.bind_row(place, nobody)

    def bind_row(self, place: int, row: Row) -> None:
        """The sequence at this place is `row`, or its buffers are new."""
        binding = self._binding
        for layer in self._layers:
            for kind in ("key", "value"):
                value = row.values[layer, kind]
                binding.bind_ortvalue_input(names.slot(names.past(layer, kind), place), value)
                binding.bind_ortvalue_output(names.slot(names.present(layer, kind), place), value)

    def run(
        self,
        places: Sequence[int],
        counts: Sequence[int],
        totals: Sequence[int],
        asked: Sequence[int],
        entry: np.ndarray,
    ) -> None:
        """Runs the sequences at `places`, ascending.

        Args:
            counts: tokens of each.
            totals: tokens each will then have in the K/V cache.
            asked: of each, how many of the last positions are asked for.
            entry: of all of them, one behind the other: token ids int64 [1, N] or hidden states float32 [1, N, D].

        Raises:
            GenerationError: ONNX Runtime failed.
        """
        tokens, positions = entry.shape[1], sum(asked)
        if (tokens, positions) != self._shape:
            self._allocate(tokens, positions)
        self._input(names.INPUT_IDS if self._k == 0 else names.HIDDEN_STATES, entry)
        ends = np.cumsum(counts)
        self._bound[names.LAST_TOKENS][:] = _stretches(ends, asked)
        # Each token's place in its own sequence: it counts up to the row's last one.
        self._bound[names.POSITION_IDS][0] = np.arange(tokens) + np.repeat(np.asarray(totals) - ends, counts)
        self._row_tokens[:] = 0
        self._row_lengths[:] = 1
        self._row_tokens[places] = counts
        self._row_lengths[places] = totals
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            raise GenerationError(f"ONNX Runtime failed in {names.segment(self._k)}: {first_line(error)}") from error

    def _allocate(self, tokens: int, asked: int) -> None:
        self._input(names.LAST_TOKENS, np.zeros(asked, np.int64))
        self._input(names.POSITION_IDS, np.zeros((1, tokens), np.int64))
        self.states = self._output(names.EXIT_STATES, (1, asked, self._exit_size))
        if not self._last:
            self.hidden = self._output(names.NEW_HIDDEN_STATES, (1, tokens, self._hidden_size))
            self.scores = self._output(names.ROUTER_SCORE, (asked, 1, 1)).reshape(asked)
        self._shape = (tokens, asked)

    # As in `runtime.branched.sequence`: an OrtValue made from a C-contiguous numpy array is the array's own memory.

    def _input(self, name: str, array: np.ndarray) -> np.ndarray:
        if self._bound.get(name) is not array:
            self._binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array))
            self._bound[name] = array
        return array

    def _output(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = np.zeros(shape, np.float32)
        self._binding.bind_ortvalue_output(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        self._bound[name] = array
        return array


def _stretches(ends: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The numbers of which `sizes` [n] lie right before each of `ends` [n], int64 [sum of sizes]."""
    behind = np.cumsum(sizes)
    return np.arange(behind[-1]) + np.repeat(ends - behind, sizes)
