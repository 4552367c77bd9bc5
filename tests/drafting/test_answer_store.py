"""Answers on the disk: after a kill, on a full disk, of several processes, of another training."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tide_export.drafting import store as store_module
from tide_export.drafting.prompts import Request
from tide_export.drafting.store import AnswerStore, check_settings
from tide_export.errors import DraftError

WIDTH = 6


def answer(number: int, new: int = 4) -> tuple[Request, list[int], np.ndarray]:
    random = np.random.default_rng(number)
    ids = (5, 6, 7)[: 1 + number % 3]
    states = random.standard_normal((len(ids) + new - 1, WIDTH)).astype(np.float32)
    return Request(number, ids, number, number % 2 == 0), [number + n for n in range(new)], states


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    added = [answer(number) for number in range(5)]
    store = AnswerStore(tmp_path, WIDTH)
    store.append(added[:2], 1.5)
    store.append(added[2:], 2.0)
    store.close()
    store = AnswerStore(tmp_path, WIDTH)
    assert (store.seconds, store.answered) == (3.5, 5)
    for (request, tokens, states), found in zip(added, store.answers, strict=True):
        assert found.ids.tolist() == [*request.ids, *tokens]
        assert (found.number, found.prompt, found.held_out) == (request.number, len(request.ids), request.held_out)
        assert (found.rows, found.new_tokens) == (len(states), len(tokens))
        assert torch.equal(store.hidden(found), torch.from_numpy(states).to(torch.bfloat16))


def test_a_cache_in_use_is_refused(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, WIDTH)
    with pytest.raises(DraftError, match=f"the cache {tmp_path} is in use by another run: wait for its end, or give"):
        AnswerStore(tmp_path, WIDTH)
    store.append([answer(0)], 1.0)
    store.close()
    assert len(AnswerStore(tmp_path, WIDTH).answers) == 1


@pytest.mark.parametrize("left", ["states", "half a line", "states and half a line"])
def test_a_kill_loses_one_batch(tmp_path: Path, left: str) -> None:
    store = AnswerStore(tmp_path, WIDTH)
    store.append([answer(0), answer(1)], 1.0)
    store.close()
    if "states" in left:
        with (tmp_path / "states-0.bf16").open("ab") as stream:
            stream.write(b"\x01" * 77)
    if "line" in left:
        with (tmp_path / "answers-0.jsonl").open("ab") as stream:
            stream.write(b'{"end": 99, "answ')
    store = AnswerStore(tmp_path, WIDTH)
    assert [found.number for found in store.answers] == [0, 1]
    store.append([answer(2)], 1.0)
    store.reload()
    assert [found.number for found in store.answers] == [0, 1, 2]
    expected = torch.from_numpy(answer(2)[2]).to(torch.bfloat16)
    assert torch.equal(store.hidden(store.answers[2]), expected)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnswerStore(tmp_path, WIDTH)
    store.append([answer(0)], 1.0)

    def full(stream, content):
        stream.write(content[:5])
        stream.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_append", full)
        with pytest.raises(
            DraftError, match=r"cannot keep the answers in .*: no space left on the disk; make room and"
        ):
            store.append([answer(1)], 1.0)
    store.close()
    assert (tmp_path / "states-0.bf16").stat().st_size == answer(0)[2].size * 2
    store = AnswerStore(tmp_path, WIDTH)
    assert [found.number for found in store.answers] == [0]
    store.append([answer(1)], 1.0)
    store.reload()
    assert torch.equal(store.hidden(store.answers[1]), torch.from_numpy(answer(1)[2]).to(torch.bfloat16))


def test_processes_read_what_the_others_added(tmp_path: Path) -> None:
    first, second = (AnswerStore(tmp_path, WIDTH, rank, 2) for rank in range(2))
    first.append([answer(0), answer(2)], 1.0)
    second.append([answer(1), answer(3)], 2.0)
    for store, seconds in ((first, 1.0), (second, 2.0)):
        store.reload()
        assert [found.number for found in store.answers] == [0, 1, 2, 3]
        assert (store.answered, store.seconds) == (2, seconds)
        assert torch.equal(store.hidden(store.answers[3]), torch.from_numpy(answer(3)[2]).to(torch.bfloat16))


@pytest.mark.parametrize(
    "content", [b"nonsense\n", b'{"end": 5}\n', b"[1]\n", b'{"end": 500, "seconds": 1, "answers": []}\n']
)
def test_a_damaged_cache_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "answers-0.jsonl").write_bytes(content)
    (tmp_path / "states-0.bf16").write_bytes(b"\0" * 60)
    with pytest.raises(DraftError, match=r"the cache .* is damaged: delete it to begin anew"):
        AnswerStore(tmp_path, WIDTH)


class TestSettings:
    def test_the_same_are_taken(self, tmp_path: Path) -> None:
        check_settings(tmp_path / "cache", {"seed": 0, "prompts": None})
        check_settings(tmp_path / "cache", {"seed": 0, "prompts": None})

    def test_others_are_refused(self, tmp_path: Path) -> None:
        check_settings(tmp_path / "cache", {"seed": 0})
        with pytest.raises(
            DraftError, match=r"is of a training with seed 0, not 7: give the same settings to continue"
        ):
            check_settings(tmp_path / "cache", {"seed": 7})

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").write_text("Dear Emma")
        with pytest.raises(DraftError, match=r"holds files that are no training of a drafter: name another folder"):
            check_settings(tmp_path, {"seed": 0})
        assert [entry.name for entry in tmp_path.iterdir()] == ["letter.txt"]

    def test_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "settings.json").write_text("[")
        with pytest.raises(DraftError, match=r"is damaged \(settings.json\): delete it to begin anew"):
            check_settings(tmp_path, {"seed": 0})

    def test_no_folder_can_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DraftError, match=r"cannot use the cache .*file/cache: Not a directory"):
            check_settings(tmp_path / "file" / "cache", {"seed": 0})

    def test_readable(self, tmp_path: Path) -> None:
        check_settings(tmp_path, {"seed": 3})
        assert json.loads((tmp_path / "settings.json").read_text()) == {"seed": 3}
