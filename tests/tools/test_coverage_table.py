"""The table of what the tests ran: figures of coverage.py as they are, those of C++ by gcov."""

import json
import subprocess
from pathlib import Path

SUM = """template <int N>
int larger(int a, int b) {
  if (a > b && a > N) return a + N;  // or b if it is not
  return b + N;
}
int never() { return 1; }
int main(int count, char**) { return larger<3>(count, 9) + larger<5>(10, count) - 27; }
"""
PAGE = "# Verified\n\n<!-- coverage -->\nearlier\n<!-- /coverage -->\n\nMore.\n"
TABLE = """| Folder             | Lines | covered | Branches | covered |
| ------------------ | ----: | ------: | -------: | ------: |
| all cpp            |     5 |  80.0 % |        4 |  75.0 % |
| all tide_export    | 1,250 |  80.0 % |       24 |  50.0 % |
| cpp/src/decoding   |     5 |  80.0 % |        4 |  75.0 % |
| tide_export        |    10 | 100.0 % |        0 |   0.0 % |
| tide_export/bundle | 1,240 |  79.8 % |       24 |  50.0 % |
"""


def test_a_row_per_folder_and_language(tmp_path: Path, capsys) -> None:
    from coverage_table import main

    source, build, page = tmp_path / "cpp" / "src" / "decoding" / "sum.cpp", tmp_path / "build", tmp_path / "page.md"
    source.parent.mkdir(parents=True)
    build.mkdir()
    source.write_text(SUM)
    page.write_text(PAGE)
    measured = {"tide_export/errors.py": (10, 10, 0, 0)}
    measured |= {"tide_export/bundle/x.py": (1000, 950, 20, 10), "tide_export/bundle/y/z.py": (240, 40, 4, 2)}
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    files = {file: {"summary": dict(zip(names, counts, strict=True))} for file, counts in measured.items()}
    (tmp_path / "coverage.json").write_text(json.dumps({"files": files}))
    assert main([str(tmp_path)]) == 2
    assert "nothing that GCC compiled" in capsys.readouterr().err
    subprocess.run(["g++", "--coverage", "-O0", "-c", source, "-o", build / "sum.o"], check=True)
    subprocess.run(["g++", "--coverage", build / "sum.o", "-o", build / "sum"], check=True)
    subprocess.run([build / "sum"], check=True)
    assert main([str(tmp_path), "--write", str(page)]) == 0
    assert capsys.readouterr().out == TABLE
    assert TABLE in page.read_text()
    assert page.read_text().startswith("# Verified\n\n<!-- coverage -->\nWhat the tests")
    assert page.read_text().endswith("\n<!-- /coverage -->\n\nMore.\n")
    assert "earlier" not in page.read_text()
