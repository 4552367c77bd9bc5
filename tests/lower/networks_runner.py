"""Runs the segment networks of a model with one checkpoint in ONNX Runtime, over batches of sequences."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
from ort_sessions import session_options

from tide_export.bundle.file_names import EMBEDDING_FILE, network_file
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD, segment_name

UPDATED = {names.NEXT_PENDING_STATES: names.NEW_PENDING, names.EXIT_STATES: names.NEW_EXIT_STATES}


class Runner:
    """Rows of a batch over the two segments, each row with a K/V cache of another length."""

    def __init__(self, folder: Path, rows: int, dtype: type = np.float32) -> None:
        parts = [segment_name(0), segment_name(1), HEAD]
        files = [str(folder / network_file(part)) for part in parts]
        options = session_options(1)
        if dtype == np.float32:  # ONNX Runtime 1.31 fuses FP8 in float32 into an operator that does not take it
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        self.sessions = [ort.InferenceSession(file, options) for file in files]
        self.buffers: dict[str, np.ndarray] = {}
        for session in self.sessions:
            for entry in session.get_inputs():
                if entry.name == names.EMBEDDING:
                    self.buffers[entry.name] = np.fromfile(folder / EMBEDDING_FILE, dtype).reshape(entry.shape)
                if entry.name in UPDATED or entry.name.startswith("past_key"):
                    self.buffers[entry.name] = np.full([rows, *entry.shape[1:]], 7, dtype)
                    self.buffers[entry.name][:] = 7 if entry.name == names.EXIT_STATES else 0

    def segment(self, k: int, feeds: dict[str, np.ndarray], lengths: list[int]) -> dict[str, np.ndarray]:
        session = self.sessions[k]
        feeds = {names.PAST_LENGTHS: np.array(lengths), **feeds}
        if any(entry.name == names.KEY_INDICES for entry in session.get_inputs()):
            feeds[names.KEY_INDICES] = np.arange(max(lengths) + len(feeds[names.TOKEN_INDICES]))
        feeds |= self._buffers(session)
        outputs = dict(zip([entry.name for entry in session.get_outputs()], session.run(None, feeds), strict=True))
        for name in self.buffers:
            present = UPDATED.get(name, name.replace("past_key_values.", "present."))
            self.buffers[name] = outputs.get(present, self.buffers[name])
        return outputs

    def full(
        self, ids: np.ndarray, lengths: list[int], last: list[int], limit: float = 0.5
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits at full depth, scores and exit flags of each row's last token."""
        rows, tokens = ids.shape
        feeds = {names.TOKEN_INDICES: np.arange(tokens), names.LAST_TOKENS: np.array(last)}
        feeds |= {names.PENDING_LENGTHS: np.zeros(rows, np.int64), names.THRESHOLDS: np.full(rows, limit, np.float32)}
        first = self.segment(0, {names.INPUT_IDS: ids, **feeds}, lengths)
        pending = {names.PENDING_STATES: self.buffers[names.NEXT_PENDING_STATES]}
        self.segment(1, {names.TOKEN_INDICES: np.arange(tokens), **pending}, lengths)
        return self.logits([names.FINAL_ROW + each for each in last]), first[names.ROUTER_SCORE], first[names.EXIT_FLAG]

    def logits(self, rows: list[int]) -> np.ndarray:
        """The head on a row of each slot's exit states."""
        size = self.buffers[names.EXIT_STATES].shape[2]
        feeds = {names.ROWS: np.array([n * size + r for n, r in enumerate(rows)]), **self._buffers(self.sessions[2])}
        return self.sessions[2].run(None, feeds)[0]

    def _buffers(self, session: ort.InferenceSession) -> dict[str, np.ndarray]:
        return {entry.name: self.buffers[entry.name] for entry in session.get_inputs() if entry.name in self.buffers}
