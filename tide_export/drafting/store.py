"""Stores answers and the model's hidden states on disk; a killed run loses at most one batch.

Each process appends to a file of hidden states, bfloat16 [positions, D], and then a line to its JSON index. Opening the
files removes what follows the hidden states of the last complete line.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_export.adaptation.snapshot import require_same
from tide_export.common.files import failure, lock, replace_files
from tide_export.common.formatting import size
from tide_export.drafting.prompts import Request
from tide_export.errors import DraftError

SETTINGS_FILE = "settings.json"
HIDDEN_BYTES = 2
SPARE_BYTES = 200_000_000  # for the trainer's snapshot and the drafter


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt with its answer.

    Attributes:
        number: number of the request.
        ids: token ids of prompt and answer, int32 [n].
        prompt: number of prompt tokens.
        held_out: whether it is measured on and not trained on.
        process: rank of the process whose file has the hidden states.
        offset: index of the first hidden state in that file; each token but the last has one.
    """

    number: int
    ids: np.ndarray
    prompt: int
    held_out: bool
    process: int
    offset: int

    @property
    def rows(self) -> int:
        return len(self.ids) - 1

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt


class AnswerStore:
    """The answers in a folder: a process appends its answers and reads those of all processes.

    Attributes:
        answers: all answers read so far, by number.
        answered: number of answers of this process.
        seconds: time in which this process generated them.
    """

    def __init__(self, folder: Path, width: int, rank: int = 0, count: int = 1) -> None:
        """Opens or creates the files of process `rank` of `count`.

        Args:
            width: size of a hidden state, D.

        Raises:
            DraftError: the files cannot be opened, are damaged, or are in use by another run.
        """
        self.folder, self.width, self.rank, self.count = folder, width, rank, count
        self.answers: list[Answer] = []
        self.seconds = 0.0
        self.answered = 0
        self._read: dict[int, int] = {}  # bytes of each index that were read
        self._maps: dict[int, np.ndarray] = {}
        try:
            self._hidden = self._file("states", rank).open("ab")
            lock(self._hidden.fileno(), f"the cache {folder}", DraftError)
            end = self._repair()
            self._index = self._file("answers", rank).open("ab")
        except OSError as error:
            raise DraftError(f"cannot use the cache {folder}: {failure(error, folder)}") from error
        self._end = end
        self.reload()

    def append(self, answered: Sequence[tuple[Request, Sequence[int], np.ndarray]], seconds: float) -> None:
        """Appends answers.

        Args:
            answered: the request, new tokens and hidden states, float32 [tokens - 1, D], of each answer.
            seconds: time in which they were generated.

        Raises:
            DraftError: they cannot be written; the cache is unchanged.
        """
        entries, hidden = list[dict[str, Any]](), list[bytes]()
        for request, tokens, values in answered:
            entries.append(
                {
                    "number": request.number,
                    "held_out": request.held_out,
                    "prompt": len(request.ids),
                    "ids": [*request.ids, *map(int, tokens)],
                }
            )
            half = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            hidden.append(half.view(torch.int16).numpy().tobytes())
        end = self._end + sum(len(entry["ids"]) - 1 for entry in entries)
        line = json.dumps({"end": end, "seconds": seconds, "answers": entries}, separators=(",", ":")) + "\n"
        before = self._index.tell()
        try:
            _append(self._hidden, b"".join(hidden))
            _append(self._index, line.encode())
        except OSError as error:
            self._undo(before)
            raise DraftError(
                f"cannot keep the answers in {self.folder}: {failure(error, self.folder)}; make room and start the "
                "same command again, and it goes on from here"
            ) from error
        self._end = end

    def reload(self) -> None:
        """Reads the answers that all processes have appended.

        Raises:
            DraftError: an index cannot be read or is damaged.
        """
        for process in range(self.count):
            file = self._file("answers", process)
            if not file.exists():
                continue
            with file.open("rb") as stream:
                stream.seek(self._read.get(process, 0))
                content = stream.read()
            for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
                self._add(process, line)
                self._read[process] = self._read.get(process, 0) + len(line)
            self._maps.pop(process, None)
        self.answers.sort(key=lambda answer: answer.number)

    def hidden(self, answer: Answer) -> torch.Tensor:
        """Returns the model's hidden states of an answer, bfloat16 [tokens - 1, D]."""
        if answer.process not in self._maps:
            file = self._file("states", answer.process)
            self._maps[answer.process] = np.memmap(file, np.int16, "r").reshape(-1, self.width)
        values = self._maps[answer.process][answer.offset : answer.offset + answer.rows]
        return torch.from_numpy(np.array(values)).view(torch.bfloat16)

    def close(self) -> None:
        """Closes the files."""
        self._maps.clear()
        self._hidden.close()
        self._index.close()

    def _file(self, kind: str, process: int) -> Path:
        return self.folder / f"{kind}-{process}.{'jsonl' if kind == 'answers' else 'bf16'}"

    def _repair(self) -> int:
        """Removes the remains of an interrupted `append`; returns the number of hidden states in the index."""
        index, hidden = self._file("answers", self.rank), self._file("states", self.rank)
        content = index.read_bytes() if index.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(index, len(whole))
        lines = whole.splitlines()
        end = int(self._parsed(lines[-1])["end"]) if lines else 0
        length, wanted = hidden.stat().st_size if hidden.exists() else 0, end * self.width * HIDDEN_BYTES
        if length < wanted:
            raise self._damaged()
        if length > wanted:
            os.truncate(hidden, wanted)
        return end

    def _add(self, process: int, line: bytes) -> None:
        entry = self._parsed(line)
        try:
            answers, offset = entry["answers"], int(entry["end"])
            for one in reversed(answers):
                ids = np.array(one["ids"], np.int32)
                offset -= len(ids) - 1
                self.answers.append(Answer(one["number"], ids, one["prompt"], one["held_out"], process, offset))
            if process == self.rank:
                self.seconds += float(entry["seconds"])
                self.answered += len(answers)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            int(entry["end"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged() from error
        return entry

    def _damaged(self) -> DraftError:
        return DraftError(f"the cache {self.folder} is damaged: delete it to begin anew")

    def _undo(self, index: int) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self._file("answers", self.rank), index)
            os.truncate(self._file("states", self.rank), self._end * self.width * HIDDEN_BYTES)


def _append(stream: Any, content: bytes) -> None:
    stream.write(content)
    stream.flush()
    os.fsync(stream.fileno())


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Creates a cache for a training with `settings`, or compares the settings of an existing one.

    Raises:
        DraftError: the folder cannot be written, or holds another training.
    """
    file = folder / SETTINGS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            if any(folder.iterdir()):
                raise DraftError(
                    f"the cache {folder} holds files that are no training of a drafter: name another folder"
                )
            replace_files({file: json.dumps(settings, indent=1).encode()})
        written = json.loads(file.read_bytes())
        if not isinstance(written, dict):
            raise ValueError
    except OSError as error:
        raise DraftError(f"cannot use the cache {folder}: {failure(error, folder)}") from error
    except ValueError as error:
        raise DraftError(f"the cache {folder} is damaged ({SETTINGS_FILE}): delete it to begin anew") from error
    require_same(f"the cache {folder}", written, settings, DraftError)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Checks that the disk of `folder` has room for `needed` bytes and the trainer's snapshot.

    Raises:
        DraftError: it has not; the sentence says that `what` needs the space.
    """
    existing = next(entry for entry in (folder, *folder.parents) if entry.exists())
    needed, free = needed + SPARE_BYTES, shutil.disk_usage(existing).free
    if free < needed:
        raise DraftError(
            f"{what} need about {size(needed)} in {folder}, and {size(free)} are free: name a folder on another disk "
            "with --cache, or give fewer --minutes"
        )
