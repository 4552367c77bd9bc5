"""Each folder imports from lower floors only, `__init__` files hold one sentence, modules are short, and what runs
a bundle imports with NumPy alone."""

import ast
import sys
from pathlib import Path

from blocked_imports import ENGINES, EXPORT, run_blocked

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools" / "checks"))
try:
    import structure
finally:
    sys.path.pop(0)

# Units that import without the `export` extra and without an engine, all modules of them.
LIGHT = ("errors", "names", "common")
LIGHT += ("thresholds", "bundle", "runtime", "plans", "tuning", "cli")


def test_every_unit_has_a_floor() -> None:
    assert {structure.unit(module) for module in structure.modules(ROOT)} == structure.FLOOR.keys()


def test_imports_run_to_lower_floors_only() -> None:
    assert structure.upward(structure.imports(ROOT)) == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert structure.circles(structure.imports(ROOT)) == set()


def test_the_init_of_a_folder_holds_one_docstring() -> None:
    for module, path in structure.modules(ROOT).items():
        if path.name == "__init__.py" and module != structure.PACKAGE:
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), path
            assert len(tree.body) == 1, path


def test_no_source_is_longer_than_400_lines() -> None:
    sources = [*structure.source_files(ROOT), *(ROOT / "tools").rglob("*.py")]
    written = [path for path in sources if not path.name.endswith(".ptx.h")]  # not compiled, as those are
    assert [path for path in written if structure.count_lines(path) > structure.MAX_LINES] == []


def checkout(folder: Path, **sources: str) -> Path:
    """A checkout whose package has these modules, a folder's before a double underscore."""
    for name, source in {"__init__": "", **sources}.items():
        path = folder / structure.PACKAGE / f"{name.replace('__', '/', 1) if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def test_the_check_finds_imports_upward_and_in_circles(tmp_path: Path, monkeypatch, capsys) -> None:
    upward = checkout(
        tmp_path / "upward",
        names="from tide_export.errors import TideError\n",
        errors="def late():\n    import tide_export.bundle.store\n",
        bundle__store="from tide_export.bundle import manifest\n",
        bundle__manifest="",
    )
    circle = checkout(
        tmp_path / "circle",
        a="if TYPE_CHECKING:\n    from tide_export.b.one import f\n",
        b__one="import tide_export.b.two\n",
        b__two="from tide_export import a\n",
    )
    monkeypatch.setattr(sys, "argv", ["structure", str(upward), str(circle)])
    assert structure.main() == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"{circle}: a circle of tide_export.a, tide_export.b.one, tide_export.b.two",
        f"{circle}: tide_export.a imports tide_export.b.one, upward",
        f"{upward}: tide_export.errors imports tide_export.bundle.store, upward",
        f"{upward}: tide_export.names imports tide_export.errors, upward",
    ]
    table = {line[:34].strip(): line[34:].split() for line in said.out.splitlines()}
    assert table["upward imports between units"] == ["2", "1"]
    assert table["circles of units"] == ["0", "1"]
    assert table["floors"] == ["3", "1"]


def test_the_block_blocks() -> None:
    assert run_blocked(("torch",), "import torch").returncode == 1


def test_light_modules_import_without_the_export_extra_and_an_engine() -> None:
    code = """
for name in sys.argv[1:]:
    try: importlib.import_module(name)
    except ImportError as error: print(f"{name}: {error}")
"""
    light = [module for module in structure.modules(ROOT) if structure.unit(module) in LIGHT]
    done = run_blocked((*EXPORT, *ENGINES, "tokenizers"), code, *light)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
