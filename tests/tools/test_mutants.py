import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = '''"""Adds 1 + 1 and 2."""
__all__ = ["total", "x" * 2]
LIMIT: Literal[7] = 3
if TYPE_CHECKING:
    TYPED = 4


@cache(maxsize=5)
def total(values: tuple[6] = (), quick=False) -> 8:
    """Not 9."""
    result = 0  # and 10 < 11
    for value in values:
        if value is not None and len(values) <= 12:
            result += min(value, LIMIT)
    logger.warning("%d", 13)
    self.seen = f"{14 + 15} values"
    values.clear()
    return (
        result
        - 1
    )
'''
CHANGED_PYTHON = [
    "LIMIT: Literal[7] = 4",
    "def total(values: tuple[6] = (), quick=True) -> 8:",
    "    result = 1  # and 10 < 11",
    "        if value is None and len(values) <= 12:",
    "        if value is not None or len(values) <= 12:",
    "        if value is not None and len(values) < 12:",
    "        if value is not None and len(values) <= 13:",
    "        if not (value is not None and len(values) <= 12):",
    "            result += max(value, LIMIT)",
    "            pass",
    "    pass",
    "    pass",
    "    return None\n\n\n",
    "        + 1",
    "        - 2",
]
CPP = """// 1 < 2
#include "a3.h"
static_assert(4 < 5);
template <typename T, int kSize = 6>
bool f(std::vector<T> const& x, T&& y) {
  int const size = std::min(x[0], 7);  // 8
  if (size < 10 && !(y == 1e-9)) throw Error("at most " + name(11));
  x_[1] = size
      - 2;
  char const* text = R"(12 + 13)", letter = '\\'';
  count(text, letter);
  return y.get();
}
"""
CHANGED_CPP = [
    "template <typename T, int kSize = 7>",
    "  int const size = std::max(x[0], 7);  // 8",
    "  int const size = std::min(x[1], 7);  // 8",
    "  int const size = std::min(x[0], 8);  // 8",
    '  if (size <= 10 && !(y == 1e-9)) throw Error("at most " + name(11));',
    '  if (size < 11 && !(y == 1e-9)) throw Error("at most " + name(11));',
    '  if (size < 10 || !(y == 1e-9)) throw Error("at most " + name(11));',
    '  if (size < 10 && !(y != 1e-9)) throw Error("at most " + name(11));',
    '  if (!(size < 10 && !(y == 1e-9))) throw Error("at most " + name(11));',
    "  x_[2] = size",
    "  ;\n",
    "      + 2;",
    "      - 3;",
    "  ;",
    "  return {};",
]


@pytest.mark.parametrize(("name", "text", "changed"), [("x.py", PYTHON, CHANGED_PYTHON), ("x.cpp", CPP, CHANGED_CPP)])
def test_a_mutant_changes_one_place_of_the_code(name: str, text: str, changed: list[str], tmp_path: Path) -> None:
    from mutants import draw

    folder = tmp_path / "cpp" / "src"
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    drawn = [list(draw(tmp_path, ["cpp/src"], seed)) for seed in range(100)]
    assert sorted({each.after for mutants in drawn for each in mutants}) == sorted(set(changed))
    for each in drawn[0]:
        assert text.split("\n")[each.line - 1 :][: each.before.count("\n") + 1] == each.before.split("\n")
        assert each.after.count("\n") == each.before.count("\n"), "the lines after it must keep their numbers"
    assert drawn[0] == list(draw(tmp_path, ["cpp/src"], 0)), "the same seed must draw the same"


CHECK = """import ctypes, sys, tide_export.lower.halves as halves
with open("calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
if sys.argv[1:]:
    raise SystemExit(5)
if halves.half(6) != 3 or ctypes.CDLL("tide_export/runtime/libtide.so").tide_sum(2, 3) != 5:
    raise SystemExit("FAILED tests/test_halves.py::test_half - wrong")
"""
HALVES = """def half(n):
    result = n // 2
    return result if n >= 0 else 0
"""
SUM = """namespace { int const kUnused = 1; }
extern "C" __attribute__((visibility("default"))) int tide_sum(int a, int b) {
  return a + b;
}
"""
VERDICTS = [  # of each of these changes
    ("tide_export/lower/halves.py", "    result = n // 2", "    result = n // 3", "caught"),
    (
        "tide_export/lower/halves.py",
        "    return result if n >= 0 else 0",
        "    return result if n > 0 else 0",
        "survived",
    ),
    ("cpp/src/sum.cpp", "namespace { int const kUnused = 1; }", "namespace { int const kUnused = 2; }", "same object"),
    ("cpp/src/sum.cpp", "  return a + b;", "  return a - b;", "caught"),
    ("cpp/src/sum.cpp", "  return a + b;", "  return a + ;", "does not compile"),
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout, which the tool takes for its own."""
    import mutants

    folder = tmp_path / "checkout"
    files = {"check.py": CHECK, "tide_export/lower/halves.py": HALVES, "cpp/src/sum.cpp": SUM, "cpp/ops/none.cpp": ""}
    for name in ("packaging/tide_build.py", "cpp/src/capi/exports.map", "tide_export/common/version.py"):
        files[name] = (ROOT / name).read_text()
    files |= {f"{name}/__init__.py": "" for name in ("tide_export", *(mutants.FOLDERS.keys() - {"cpp/src", "cpp/ops"}))}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    monkeypatch.setattr(mutants, "ROOT", folder)
    return folder


def test_each_mutant_runs_alone_and_an_interrupted_run_goes_on(checkout: Path, tmp_path: Path, capsys) -> None:
    from mutants import Tree, main, read

    again, results, tree = tmp_path / "again", tmp_path / "results", tmp_path / "tree"
    lines = []
    for number, (file, before, after, _) in enumerate(VERDICTS):
        text = (checkout / file).read_text()
        begin = text.index(before)
        place = {"file": file, "begin": begin, "line": text[:begin].count("\n") + 1, "before": before, "after": after}
        lines.append(json.dumps(place | {"number": number, "verdict": "survived"}) + "\n")
    again.write_text("".join(lines))
    command = ["--run", f"{sys.executable} check.py {{tests}}", "--tree", str(tree), "--results", str(results)]

    assert main([*command, "--again", str(again), "--count", "2"]) == 1
    calls = (tree / "calls").read_text().splitlines()
    assert calls == ["", "tests/lower", "", "tests/lower", ""], (
        "the command without a mutant, then the likely tests first"
    )
    assert main([*command, "--again", str(again)]) == 1
    records = read(results)
    assert [record["verdict"] for record in records] == [verdict for *_, verdict in VERDICTS]
    assert records[0]["by"] == records[3]["by"] == "tests/test_halves.py::test_half"
    *_, totals, survivor = capsys.readouterr().out.splitlines()
    assert totals.split() == ["all", "2", "0", "1", "1", "1"]
    assert "halves.py:3  return result if n >= 0 else 0  ->  return result if n > 0 else 0" in survivor
    changed = subprocess.run(["git", "status", "--short", "-uno"], cwd=tree, capture_output=True, check=True).stdout
    assert not changed, "each mutant must be taken out"

    with pytest.raises(SystemExit, match="is of other mutants"):
        main(command)
    results.unlink()
    with pytest.raises(SystemExit, match="fails without a mutant"):
        main(["--run", "exit 3", *command[2:]])
    assert Tree(tree, "sleep 600", 0.1).run("")["verdict"] == "hung"
