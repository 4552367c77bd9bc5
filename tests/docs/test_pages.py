"""What documents say is so: commands run or at least parse, Python runs, links lead somewhere, options exist."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from documents import DOCUMENTS, GUIDE, README, ROOT, blocks, blocks_of, commands, name, script_commands
from option_table import option_rows

import tide_export
from tide_export.cli.main import COMMANDS, _config, main
from tide_export.cli.options import build_parser

# A command with one of these words is parsed by the real parser and not run.
PARSED_ONLY = {
    "MODEL": "a placeholder, where a page is about models, engines or processes that tests have not",
    "BUNDLE": "as MODEL",
    "out/qwen": "the bundle of a model on the hub: tests have no network",
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": "that model",
    "model.Q4_K_M.gguf": "made by tests/model/test_gguf.py",
    "out/bf16": "run by tests/quantize on a smaller model",
    "out/looped": "made by tests/model/test_train_looped.py",
    "out/int4": "run by tests/quantize: quantized blocks are traced anew each time",
}
ELSEWHERE = {
    "tide-export export demo/demo-llama -o out/demo": "the exhaustive test of demo/run.sh",
    "tide-export serve": "tests/serving: it runs until it is told to stop",
    "tide-export push": "tests/hub, with a stand-in for the hub",
    "tide-export pull": "as push",
}
PYTHON_ELSEWHERE = {"your-own-model.md": "tests/model/test_structure.py", "c.md": "tests/embedding/test_c.py"}
# The same commands with less to do: of an option that is given twice the last one counts.
LESS = {
    "adapt": "--tokens 256 --length 32 --held-out-tokens 64",
    "calibrate": "--calibration-samples 12 --calibration-length 64 --router-epochs 1 --lens-tokens 300",
    "draft": "--minutes 0.02 --max-new-tokens 16",
    "validate": "--prompts 2 --new-tokens 4 --longest-prompt 16",
    "validate --quality": "--prompts 2 --new-tokens 4 --longest-prompt 16 --quality 64",
    "bench": "--repeat 1 --new-tokens 16",
    "tune exit": "--epsilon 0.1 --prompts 45 --prompts-per-document 12 --positions 1",
    "tune lossless": "--prompts 4 --new-tokens 8",
}


def runs(words: list[str]) -> bool:
    """Whether a test runs this command."""
    others = any(" ".join(words).startswith(command) for command in ELSEWHERE)
    return words[0] == "tide-export" and not others and not PARSED_ONLY.keys() & set(words)


def less(options: argparse.Namespace) -> list[str]:
    """Options that make this command quick."""
    kind = options.command
    if kind == "tune":
        kind = f"tune {options.mode or 'exit'}"
    elif kind == "validate" and options.quality:
        kind = "validate --quality"
    return LESS.get(kind, "").split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo_bundle: Path) -> Path:
    """A folder like this checkout after `make demo`, with a demo bundle that may be written to."""
    folder = tmp_path_factory.mktemp("checkout")
    for linked in ("demo", "calibration"):
        (folder / linked).symlink_to(ROOT / linked)
    shutil.copytree(demo_bundle, folder / "out" / "demo")
    (folder / "prompts.txt").write_text("import os\ndef main():\n")
    return folder


@pytest.fixture
def workplace(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def test_commands_run(workplace: None, unpictured: None, few_drafts: None, capsys) -> None:
    """Those of all pages, each once, in the order in which a reader meets them."""
    written = dict.fromkeys(tuple(words) for page in [README, *GUIDE] for words in commands(page) if runs(words))
    for words in written:
        assert main([*words[1:], *less(build_parser().parse_args(words[1:]))]) == 0, words
        assert capsys.readouterr().out, words


WITH_PYTHON = [page for page in [README, *GUIDE] if blocks(page, "python") and page.name not in PYTHON_ELSEWHERE]


@pytest.mark.parametrize("document", WITH_PYTHON, ids=name)
def test_python_runs(document: Path, workplace: None, capsys) -> None:
    """The blocks of a page one after the other, each with what those before it defined."""
    scope = {"__name__": "__main__"}
    for code in blocks(document, "python"):
        exec(compile(code, document.name, "exec"), scope)
        assert capsys.readouterr().out


# --- names: each of these tests reads all documents, and fails with a list of what does not exist ---------------------


def test_commands_exist() -> None:
    """Those of the two scripts that a reader runs first too."""
    for document in DOCUMENTS:
        for words in commands(document):
            check_command(document, words)
    for script in (ROOT / "demo" / "run.sh", ROOT / "examples" / "quickstart.sh"):
        written = script_commands(script)
        assert len(written) > 1
        for words in written:
            check_command(script, words)


def check_command(document: Path, words: list[str]) -> None:
    try:
        unknown = unknown_of(words)
    except (SystemExit, tide_export.TideError) as error:
        pytest.fail(f"{name(document)}: {shlex.join(words)}: {error}")
    assert not unknown, f"{name(document)}: {shlex.join(words)}: there is no {unknown}"


def unknown_of(words: list[str]) -> list[str]:
    """The programs, scripts, options, targets and extras of a command that do not exist."""
    program = words[0]
    if "tide_export.cli.main" in words or program == "tide-export":
        start = words.index("tide_export.cli.main") if program != "tide-export" else 0
        options = build_parser().parse_args(words[start + 1 :])
        if options.command in ("export", "calibrate"):
            _config(options)
        return []
    if program == "make":
        done = subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, check=False)
        return [words[1]] * (done.returncode != 0)
    if program == "python" and words[1] not in ("-m", "-c"):
        return unknown_options(words[2:], ROOT / words[1])
    if program == "cmake":
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        named = words[words.index("--preset") + 1 :][:1] if "--preset" in words else []
        files = [path for folder in ("cpp", "plugins") for path in (ROOT / folder).rglob("*CMakeLists.txt")]
        files += [ROOT / "CMakeLists.txt", *(ROOT / "cpp").rglob("*.cmake"), *(ROOT / "plugins").rglob("*.cmake")]
        cmake = "".join(path.read_text() for path in files) + "CMAKE_PREFIX_PATH"
        variables = re.findall(r" -D(\w+)=", " ".join(words))
        return [*({*named} - {preset["name"] for preset in presets}), *(v for v in variables if v not in cmake)]
    if program.endswith("pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = re.findall(r"(?:\.|tide_export)\[([\w,]+)\]", " ".join(words))
        return [extra for found in wanted for extra in found.split(",") if extra not in extras]
    if "tide_generate" in " ".join(words):
        of_table = {f"--{name.replace('_', '-')}" for name in option_rows()}
        return unknown_options([*({*words} - of_table)], ROOT / "cpp" / "examples" / "options.cpp")
    return [] if program in ("sh", "python", "git", "ctest", "curl") or (ROOT / program).exists() else [program]


def unknown_options(words: list[str], source: Path) -> list[str]:
    """The long options that neither a script's source nor a parser that it shares has."""
    text = source.read_text() + "".join(path.read_text() for path in source.parent.glob("harness/*.py"))
    return [word for word in words if word.startswith("--") and not re.search(rf"{word}\b", text)]


def test_links_lead_somewhere() -> None:
    texts = [(d, re.sub(r"^```.*?^```", "", d.read_text(), flags=re.DOTALL | re.MULTILINE)) for d in DOCUMENTS]
    links = [(d, link) for d, text in texts for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)]
    local = [(d, link) for d, link in links if not link.startswith(("http://", "https://"))]
    assert len(local) > 100
    assert [f"{name(d)}: {link}" for d, link in local if not (d.parent / link).exists()] == []


def paths_named(text: str) -> Iterator[str]:
    """Paths of this checkout, in backticks from the package's folder too, and in diagrams."""
    quoted = re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|cpp|h|toml|sh|txt))?)`", text)
    first = {path.name for base in (ROOT, ROOT / "tide_export") for path in base.iterdir() if path.is_dir()}
    yield from (path for path in quoted if path.split("/")[0] in first - {"build", "out"})
    for block in blocks_of(text):
        yield from re.findall(r"(?<![\w(/.])(?:tide_export|cpp|tests|tools|docs)/[\w./]*[\w/]", block)


def test_files_named_in_the_documents_exist() -> None:
    made_later = {"tide_export/lib/", "calibration/recipes/NAME.toml"}
    bases = (ROOT, ROOT / "tide_export", ROOT / "tide_export" / "calibration")
    named = {(name(document), path) for document in DOCUMENTS for path in paths_named(document.read_text())}
    assert len(named) > 200
    assert [
        (d, path) for d, path in named if path not in made_later and not any((b / path).exists() for b in bases)
    ] == []


def test_names_of_the_cpp_runtime_exist() -> None:
    headers = "".join(path.read_text() for path in (ROOT / "cpp/include/tide").iterdir()) + "tide_runtime"
    known = set(re.findall(r"\w+", headers))
    for document in DOCUMENTS:
        text = document.read_text()
        if "tide::" in text:
            members = {word for block in blocks(document, "cpp") for word in re.findall(r"[\w)]\.([a-z_]\w*)", block)}
            assert {*re.findall(r"tide::(\w+)", text), *members - {"h"}} <= known, name(document)


def test_options_named_in_the_documents_exist() -> None:
    """In a parser of the package, of a tool, or of the example in C++."""
    (found,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert found.choices.keys() == COMMANDS.keys()
    sources = [*ROOT.glob("tools/**/*.py"), *ROOT.glob("demo/*.py"), ROOT / "cpp" / "examples" / "options.cpp"]
    known = [command.format_help() for command in found.choices.values()] + [path.read_text() for path in sources]
    options = set(re.findall(r"--[a-z][a-z-]+", "\n".join(known)))
    for document in DOCUMENTS:
        assert set(re.findall(r"`(--[a-z][a-z-]+)", document.read_text())) <= options, name(document)


SETTINGS = {"TideConfig": "Text and memory", "AdaptConfig": "Training to exit", "DraftConfig": "Drafters", "": "Heads"}


@pytest.mark.parametrize(("settings", "until"), list(pairwise(SETTINGS)))
def test_every_setting_is_in_the_reference_with_its_default(settings: str, until: str) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    text = page.partition(f"## {SETTINGS[settings]}")[2].partition(f"\n## {SETTINGS[until]}")[0]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", text, re.MULTILINE)
    written = {"none": None, "yes": True, "no": False}
    defaults = {setting: written.get(default, default) for setting, default in rows}
    fields = getattr(tide_export, settings).model_fields
    assert defaults.keys() == fields.keys()
    for setting, default in defaults.items():
        expected = fields[setting].default
        assert default == expected or float(default) == expected, setting


def test_the_contracts_name_every_tensor_and_field() -> None:
    from tide_export.bundle import file_names
    from tide_export.bundle.manifest import SCHEMA, Manifest
    from tide_export.names import (
        batch_networks,
        networks,
        paged_drafter,
        segment_drafter,
        segment_networks,
        step_graph,
    )

    graph, bundle = ((ROOT / "docs" / "reference" / page).read_text() for page in ("graph.md", "bundle.md"))
    internal = ("DRAFT_HEAD_FUSION",)
    drafters = (paged_drafter, segment_drafter)
    for contract in (batch_networks, file_names, networks, segment_networks, step_graph, *drafters):
        for constant, value in vars(contract).items():
            if isinstance(value, str) and constant.isupper() and not constant.startswith(internal):
                assert value in graph + bundle, constant
    for field in Manifest.__dataclass_fields__:
        assert f"`{field}`" in bundle, field
    assert f"`{SCHEMA}`" in bundle
