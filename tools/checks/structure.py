"""Measures how the package is layered; fails where an import runs upward or in a circle.

    python tools/checks/structure.py [CHECKOUT]...

Prints one column per checkout (default: this one), so that the trees before and after a change can be compared. It
reads sources and imports nothing of them. A unit is a folder or module at the root of `tide_export`, its `__init__`
included. Every import counts: at the top of a module, inside a function, and for type checkers only. `FLOORS` orders
the units of this checkout; in one with other units, the upward imports are the fewest without which the rest runs one
way. Exit code 1 when a checkout has an upward import or a circle.
"""

import argparse
import ast
import io
import itertools
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "tide_export"
# Bottom to top: why each floor stands where it does, and its units. A unit imports only from lower floors, not from its
# own.
FLOORS = {
    "Every unit may raise these errors and use these names; they import nothing.": ("errors", "names"),
    "Helpers that know neither models nor bundles.": ("common", "graph"),
    "Thresholds are checked alike in a manifest, an option and a report.": ("thresholds",),
    "A bundle is the contract between what makes one and what runs one.": ("bundle",),
    "Each needs bundles alone: to share them, to run them, and to know a source model by their fields.": (
        "hub",
        "model",
        "runtime",
    ),
    "Each adds one thing to those below: answers to requests, engines, texts, quantized weights, routers.": (
        "data",
        "plans",
        "quantize",
        "routers",
        "serving",
    ),
    "A traced model, fitted routers and tuned thresholds are what a bundle is made of.": (
        "calibration",
        "trace",
        "tuning",
    ),
    "Works on what was traced or calibrated.": ("adaptation", "compose", "report"),
    "Composed graphs get one engine's operators.": ("lower",),
    "Uses composed and lowered graphs: to add a drafter, to check a bundle.": ("drafting", "verify"),
    "Runs every stage of an export in order.": ("pipeline",),
    "Exports a few layers to predict what the whole model would gain.": ("probing",),
    "What users call: commands, and the public API.": ("cli", PACKAGE),
}
FLOOR = {unit: floor for floor, units in enumerate(FLOORS.values()) for unit in units}
MAX_LINES = 400

Arrows = set[tuple[str, str]]  # importer, imported


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[2]], metavar="CHECKOUT")
    columns, problems = [], []
    for checkout in parser.parse_args().checkouts:
        arrows = imports(checkout)
        columns.append(measure(checkout, arrows))
        problems += [f"{checkout}: {importer} imports {imported}, upward" for importer, imported in upward(arrows)]
        problems += [f"{checkout}: a circle of {', '.join(sorted(circle))}" for circle in circles(arrows)]
    for rows in zip(*(column.items() for column in columns), strict=True):
        print(f"{rows[0][0]:36}", *(f"{value:>24}" for _, value in rows))
    for problem in sorted(problems):
        print(problem, file=sys.stderr)
    return int(bool(problems))


def measure(checkout: Path, arrows: Arrows) -> dict[str, str]:
    """The numbers of one checkout, each under the name it is printed with."""
    lines = Counter[str]()  # by folder: cpp/, the folders of the package, and the package for its modules
    for path in source_files(checkout):
        first, second, *rest = path.relative_to(checkout).parts
        lines[second if rest and first == PACKAGE else first] += count_lines(path)
    largest, count = lines.most_common(1)[0]
    root = checkout / PACKAGE
    between = units(arrows)
    return {
        "modules at the package's root": str(len([*root.glob("[!_]*.py")])),
        "folders at the package's root": str(len([*root.glob("*/__init__.py")])),
        "floors": str(floors(between)),
        "imports between units": str(len(between)),
        "upward imports between units": str(len(units(upward(arrows)))),
        "circles of units": str(len(circles(between))),
        "circles of modules": str(len(circles(arrows))),
        "largest folder's share of lines": f"{count / lines.total():.0%} ({largest})",
        f"files over {MAX_LINES} lines": str(sum(count_lines(path) > MAX_LINES for path in source_files(checkout))),
        "lines of tide_export/ and cpp/": str(lines.total()),
        "of these code": str(sum(map(count_code, source_files(checkout)))),
    }


def modules(checkout: Path) -> dict[str, Path]:
    """The package's modules by dotted name; a folder's name stands for its `__init__`."""
    paths = sorted((checkout / PACKAGE).rglob("*.py"))
    names = (".".join(path.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return dict(zip(names, paths, strict=True))


def source_files(checkout: Path) -> Iterable[Path]:
    folders = [checkout / PACKAGE, checkout / "cpp"]
    return (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def count_code(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring; of C++, comments that have a line of their own."""
    text = path.read_text()
    if path.suffix != ".py":
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for token in tokens if token.type not in skipped for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def imports(checkout: Path) -> Arrows:
    """The imports of one module by another, within the package."""
    known = modules(checkout)
    arrows = set()
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.split(".")[0] == PACKAGE:
                    arrows.add((module, name if name in known else name.rpartition(".")[0]))
    return arrows


def unit(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def units(arrows: Arrows) -> Arrows:
    """The same imports, between units."""
    return {(unit(a), unit(b)) for a, b in arrows if unit(a) != unit(b)}


def upward(arrows: Arrows) -> Arrows:
    """The imports that do not run to a lower floor."""
    between = units(arrows)
    if all(name in FLOOR for pair in between for name in pair):
        against = {(a, b) for a, b in between if FLOOR[a] <= FLOOR[b]}
    else:
        against = set().union(*(fewest_against(between, circle) for circle in circles(between)))
    return {(a, b) for a, b in arrows if (unit(a), unit(b)) in against}


def fewest_against(arrows: Arrows, circle: frozenset[str]) -> Arrows:
    """The fewest imports without which a circle is none; tries all orders, so circles must be small."""
    inside = {pair for pair in arrows if circle.issuperset(pair)}
    orders = itertools.permutations(sorted(circle))
    return min(({(a, b) for a, b in inside if order.index(a) < order.index(b)} for order in orders), key=len)


def circles(arrows: Arrows) -> set[frozenset[str]]:
    """The sets of nodes each of which reaches all others."""
    reached = reach(arrows)
    return {frozenset(b for b in reached[a] if a in reached[b]) for a in reached if a in reached[a]}


def floors(arrows: Arrows) -> int:
    """The length of the longest chain of imports; a circle is one floor."""
    reached = reach(arrows)
    heights: dict[str, int] = {}
    for node in sorted(reached, key=lambda node: len(reached[node] | {node})):
        below = (heights[other] for other in reached[node] if node not in reached.get(other, ()))
        heights[node] = max(below, default=0) + 1
    return max(heights.values())


def reach(arrows: Arrows) -> dict[str, set[str]]:
    """The nodes that can be reached from each one, itself only through a circle."""
    reached: dict[str, set[str]] = {node: set() for pair in arrows for node in pair}
    grown = True
    while grown:
        grown = False
        for a, b in arrows:
            new = {b, *reached[b]} - reached[a]
            reached[a] |= new
            grown |= bool(new)
    return reached


if __name__ == "__main__":
    sys.exit(main())
