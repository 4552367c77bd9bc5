"""Tests the tests: changes the sources in one place at a time, drawn at random, and lists what a command lets pass.

    python tools/checks/mutants.py [--count N] [--seed N] [--only FOLDER]
    python tools/checks/mutants.py --run 'COMMAND' --tree FOLDER --results FILE [--again FILE] [...]

The first prints the mutants that are drawn. A mutant changes an operator, an integer, a condition or a returned value,
leaves a statement out, or takes min for max, in a line of FOLDERS; each line that has such a place is drawn as often.
What does not compile, or into the same object file, is replaced by the next.

COMMAND runs by sh in the tree, a clone of this checkout (made where there is none) with its own library and this
checkout's .venv. It has to pass there without a mutant, and to fail or hang with one. `{tests}` in it stands for the
tests that most likely notice; where these pass, for nothing:

    TIDE_REQUIRE_NVCC=1 OMP_NUM_THREADS=1 .venv/bin/pytest -x -q -n 2 --dist worksteal {tests}

RESULTS has a line for each mutant that was run, where an interrupted run goes on. Exit code 1 where one survived.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from mutant_places import cpp_places, python_places

ROOT = Path(__file__).resolve().parents[2]
# The folders, and the tests that most likely notice a change of their files.
FOLDERS = {
    "tide_export/trace": "tests/trace",
    "tide_export/compose": "tests/compose",
    "tide_export/lower": "tests/lower",
    "tide_export/runtime": "tests/runtime",
    "cpp/src": "tests/runtime",
    "cpp/ops": "tests/lower tests/quantize",
}
PLACES = {".py": python_places, ".cpp": cpp_places, ".h": cpp_places, ".inc": cpp_places}
REPLACED = ("does not compile", "same object")
VERDICTS = ("caught", "hung", "survived", *REPLACED)
NO_TESTS, HUNG = 5, 124  # exit codes: of pytest where nothing is left to run, and as timeout(1)'s
UNSET = ("PYTHONDONTWRITEBYTECODE", "TIDE_")  # COMMAND sets what it needs; none may bring in what was made elsewhere
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    number: int
    file: str
    begin: int  # in bytes; `before` and `after` are whole lines
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.number:4}  {self.file}:{self.line}  {before}  ->  {after}"


def draw(tree: Path, folders: Sequence[str], seed: int) -> Iterator[Mutant]:
    """Yields a mutant of each line that has a place for one, the lines in a random order."""
    lines: dict[tuple[str, int, int], list[tuple[str, str]]] = {}
    for path in sorted(path for folder in folders for path in (tree / folder).rglob("*") if path.suffix in PLACES):
        text = path.read_bytes().decode("latin-1")  # a character per byte
        for begin, end, becomes in sorted(PLACES[path.suffix](text)):
            first, last = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
            change = text[first:last], text[first:begin] + becomes + text[end:last]
            key = str(path.relative_to(tree)), first, text.count("\n", 0, first) + 1
            lines.setdefault(key, []).append(change)
    chance = random.Random(seed)
    for number, key in enumerate(chance.sample(sorted(lines), len(lines)), 1):
        yield Mutant(number, *key, *chance.choice(lines[key]))


class Tree:
    """A clone of this checkout that mutants are put into, one at a time."""

    def __init__(self, folder: Path, command: str, limit: float) -> None:
        self.folder, self._command, self._limit = folder.resolve(), command, limit
        if not self.folder.exists():
            subprocess.run(["git", "clone", "-q", ROOT, self.folder], check=True)
            (self.folder / ".venv").symlink_to(ROOT / ".venv")
        # What a killed run may have left.
        subprocess.run(["git", "checkout", "-q", "--", *FOLDERS], cwd=self.folder, check=True)
        self._objects = self._build()

    def verdict(self, mutant: Mutant) -> dict[str, Any]:
        """Puts the mutant in, runs the command, takes it out."""
        path = self.folder / mutant.file
        was, begin, end = path.read_bytes(), mutant.begin, mutant.begin + len(mutant.before)
        if was[begin:end] != mutant.before.encode("latin-1"):
            raise SystemExit(f"error: {path} is not the file that the mutants were drawn from")
        try:
            _write(path, was[:begin] + mutant.after.encode("latin-1") + was[end:])
            if path.suffix != ".py":
                try:
                    objects = self._build()
                except SystemExit:
                    return {"verdict": "does not compile"}
                if objects == self._objects:
                    return {"verdict": "same object"}
            return self.run(FOLDERS[folder_of(mutant.file)])
        finally:
            _write(path, was)
            if path.suffix != ".py":
                self._build()

    def run(self, likely: str) -> dict[str, Any]:
        """Runs the command, at first with the likely tests, if it has a place for them."""
        started, result = time.monotonic(), {"verdict": "survived"}
        for tests in [likely, ""] if likely and "{tests}" in self._command else [""]:
            code, output = self._run(self._command.replace("{tests}", tests))
            if code and not (tests and code == NO_TESTS):
                failed = FAILED.search(output)
                result = {"verdict": "hung" if code == HUNG else "caught", "by": failed[1] if failed else output[-300:]}
                break
        return result | {"seconds": round(time.monotonic() - started)}

    def _run(self, command: str) -> tuple[int, str]:
        """Returns the exit code and the output; ends whatever it started."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(UNSET)}
        environment["PYTHONPATH"] = str(self.folder)
        log = self.folder / "build" / "mutants" / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, shell=True, cwd=self.folder, env=environment, stdout=output, stderr=output, process_group=0
            )
            try:
                code = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                code = HUNG
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return code, log.read_text(errors="replace")

    def _build(self) -> dict[str, bytes]:
        """Builds the library, of which it compiles what changed alone. Returns the object files' digests.

        Raises:
            SystemExit: a source does not compile.
        """
        folder, package = self.folder / "build" / "mutants", self.folder / "tide_export"
        version = runpy.run_path(str(package / "common" / "version.py"))["__version__"]
        build = runpy.run_path(str(self.folder / "packaging" / "tide_build.py"))["build"]
        run = build.__globals__["_run"]

        def run_if_changed(command: list[str]) -> None:
            if "-c" not in command:
                run(command)
            elif (kept := _kept(command)).exists():
                shutil.copyfile(kept, command[-1])
            else:
                run([*command, "-MMD"])
                shutil.copyfile(command[-1], _kept(command))

        build.__globals__["_run"] = run_if_changed
        build(package / "runtime" / "libtide.so", folder, version)
        return {path.name: sha256(path.read_bytes()).digest() for path in folder.glob("*.o")}


def _write(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    # Python tells by its size and second alone whether what it compiled is current.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def _kept(command: Sequence[str]) -> Path:
    """Where an object file is kept, by the command and the contents of all that it was compiled from."""
    target, digest = Path(command[-1]), sha256(" ".join(command).encode())
    needs = target.with_suffix(".d")
    for name in needs.read_text().replace("\\\n", " ").split()[1:] if needs.exists() else ():
        digest.update(Path(name).read_bytes())
    return target.with_suffix(f".{digest.hexdigest()[:24]}.kept")


def folder_of(file: str) -> str:
    return next(folder for folder in FOLDERS if file.startswith(f"{folder}/"))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Returns the counts by folder, and the survivors."""
    counts = Counter((row, each["verdict"]) for each in records for row in (folder_of(each["file"]), "all"))
    lines = [f"{'folder':20}" + "".join(f"{verdict:>18}" for verdict in VERDICTS)]
    lines += [f"{row:20}" + "".join(f"{counts[row, name]:18}" for name in VERDICTS) for row in (*FOLDERS, "all")]
    return "\n".join([*lines, *(str(mutant_of(each)) for each in records if each["verdict"] == "survived")])


def mutant_of(record: dict[str, Any]) -> Mutant:
    return Mutant(**{field.name: record[field.name] for field in fields(Mutant)})


def read(results: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, metavar="N", help="mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (%(default)s)")
    parser.add_argument("--only", choices=FOLDERS, metavar="FOLDER", help=f"one of {', '.join(FOLDERS)}")
    parser.add_argument("--run", metavar="COMMAND", help="what has to notice them")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="a clone, or where to make one")
    parser.add_argument("--results", type=Path, metavar="FILE", help="what was found, and what a next run begins with")
    parser.add_argument("--again", type=Path, metavar="FILE", help="results whose survivors to run, and no others")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of COMMAND (%(default)s)")
    options = parser.parse_args(arguments)
    folders = [options.only] if options.only else [*FOLDERS]
    mutants = draw(options.tree, folders, options.seed)  # once the tree is there
    if options.again:
        mutants = (mutant_of(record) for record in read(options.again) if record["verdict"] == "survived")
    if not options.run:
        print(*itertools.islice(mutants, options.count), sep="\n")
        return 0
    if not options.results or options.tree.resolve() == ROOT:
        parser.error("--run needs --results, and a --tree that is not this checkout")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the mutant is taken out
    tree, records = Tree(options.tree, options.run, options.limit), read(options.results)
    if not records and (found := tree.run(""))["verdict"] != "survived":
        raise SystemExit(f"error: the command fails without a mutant: {found['by']}")
    for number, mutant in enumerate(mutants):
        if sum(record["verdict"] not in REPLACED for record in records[:number]) >= options.count:
            break
        if number < len(records):
            if mutant_of(records[number]) != mutant:
                raise SystemExit(f"error: {options.results} is of other mutants")
            continue
        records.append(asdict(mutant) | tree.verdict(mutant))
        with options.results.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(mutant, *(records[-1].get(name, "") for name in ("verdict", "seconds", "by")), sep="  ", flush=True)
    print(table(records))
    return int(any(record["verdict"] == "survived" for record in records))


if __name__ == "__main__":
    raise SystemExit(main())
