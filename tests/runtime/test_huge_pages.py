"""Which memory is moved to huge pages, and that what is moved stays what it was."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from tide_export.runtime.onnxruntime import huge_pages
from tide_export.runtime.onnxruntime.huge_pages import HUGE, anonymous_ranges, new_ranges, on_huge_pages

MAPS = """\
00400000-00600000 r-xp 00000000 fe:00 77                                 /usr/bin/python 3
00800000-00a00000 rw-p 00000000 fe:00 77                                 /usr/bin/python 3
01000000-01800000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000600000 rw-p 00000000 00:00 0
7f0000600000-7f0000800000 ---p 00000000 00:00 0
7f0000800000-7f0000a00000 rw-s 00000000 00:01 9                          /dev/zero (deleted)
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_the_programs_own_writable_memory_is_looked_at() -> None:
    assert anonymous_ranges(MAPS) == [(0x1000000, 0x1800000), (0x7F0000000000, 0x7F0000600000)]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([], [(0, 4 * HUGE)], [(0, 4 * HUGE)]),
        ([], [(1, 4 * HUGE - 1)], [(HUGE, 3 * HUGE)]),  # whole huge pages alone
        ([], [(1, 2 * HUGE - 1)], []),
        ([(0, HUGE)], [(0, 4 * HUGE)], [(HUGE, 4 * HUGE)]),  # grown upwards, downwards, around, both ways
        ([(3 * HUGE, 4 * HUGE)], [(0, 4 * HUGE)], [(0, 3 * HUGE)]),
        ([(HUGE, 2 * HUGE)], [(0, 4 * HUGE)], [(0, HUGE), (2 * HUGE, 4 * HUGE)]),
        ([(0, HUGE), (2 * HUGE, 3 * HUGE)], [(0, 5 * HUGE)], [(HUGE, 2 * HUGE), (3 * HUGE, 5 * HUGE)]),
        ([(0, 9 * HUGE)], [(HUGE, 4 * HUGE)], []),  # shrunk
        ([(8 * HUGE, 9 * HUGE)], [(0, 2 * HUGE), (8 * HUGE, 9 * HUGE)], [(0, 2 * HUGE)]),
    ],
)
def test_only_what_is_new_is_moved(before, after, found) -> None:
    assert new_ranges(before, after) == found


def huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_memory_moved_keeps_its_contents_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_HUGE_PAGES", "1")
    ranges = []
    collapse = huge_pages.collapse
    monkeypatch.setattr(huge_pages, "collapse", lambda each: ranges.append(each) or collapse(each))
    had = huge_kib()
    with on_huge_pages():
        memory = mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.int64)
        array[:] = np.arange(len(array))
        address = array.ctypes.data
    inside = [(a, b) for a, b in ranges if a < address + 8 * HUGE and b > address]
    assert sum(min(b, address + 8 * HUGE) - max(a, address) for a, b in inside) >= 7 * HUGE
    assert array.ctypes.data == address
    np.testing.assert_array_equal(array, np.arange(len(array)))
    if collapse(inside[0]):  # this kernel can, and has huge pages left
        assert huge_kib() > had
    del array
    memory.close()


def test_only_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "collapse", lambda each: pytest.fail("asked for"))
    for value in ("0", ""):
        monkeypatch.setenv("TIDE_HUGE_PAGES", value)
        with on_huge_pages():
            memory = mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.close()


def test_asked_for_where_there_are_none_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "maps")
    monkeypatch.setenv("TIDE_HUGE_PAGES", "1")
    with on_huge_pages():
        pass
    assert "TIDE_HUGE_PAGES=1 is ignored" in caplog.text


def test_errors_of_loading_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_HUGE_PAGES", "1")
    with pytest.raises(ZeroDivisionError), on_huge_pages():
        raise ZeroDivisionError


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_an_engine_says_the_same_on_huge_pages(demo_bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_export.runtime.engine import load

    prompt = list(range(1, 30))
    expected = load(demo_bundle, "cpu", 1).generate(prompt, max_new_tokens=12, mode="full").tokens
    asked = []  # so small a model may fit into memory that was mapped before: then there is nothing to move
    looked = huge_pages.anonymous_ranges
    monkeypatch.setattr(huge_pages, "anonymous_ranges", lambda maps: asked.append(looked(maps)) or asked[-1])
    monkeypatch.setenv("TIDE_HUGE_PAGES", "1")
    assert load(demo_bundle, "cpu", 1).generate(prompt, max_new_tokens=12, mode="full").tokens == expected
    assert len(asked) == 2
    assert all(asked)
