"""What documents say is so: commands run or at least parse, Python runs, links lead somewhere, options exist."""

import argparse
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from documents import DOCUMENTS, GUIDE, README, ROOT, blocks, commands, name

import tide_export
from tide_export.cli.main import COMMANDS, _config, main
from tide_export.cli.options import build_parser

# A command with one of these words is parsed by the real parser and not run.
PARSED_ONLY = {
    "MODEL": "a placeholder, where a page is about models, engines or processes that tests have not",
    "BUNDLE": "as MODEL",
    "Qwen/Qwen2.5-0.5B": "a model on the hub: tests have no network",
    "out/qwen": "made from that model",
    "model.Q4_K_M.gguf": "made by tests/model/test_gguf.py",
    "out/bf16": "run by tests/quantize on a smaller model",
    "out/int4": "run by tests/quantize: quantized blocks are traced anew each time",
}
ELSEWHERE = {
    "tide-export export demo/demo-llama -o out/demo": "the slow test of demo/run.sh",
    "tide-export serve": "tests/serving: it runs until it is told to stop",
    "tide-export push": "tests/hub, with a stand-in for the hub",
    "tide-export pull": "as push",
}
PYTHON_ELSEWHERE = {"your-own-model.md": "tests/model/test_structure.py", "c.md": "tests/embedding/test_c.py"}
# The same commands with less to do: of an option that is given twice the last one counts.
LESS_TEXT = [
    "--calibration-samples",
    "24",
    "--calibration-length",
    "96",
    "--router-epochs",
    "1",
    "--lens-tokens",
    "999",
]
LESS = {
    "adapt": ["--tokens", "256", "--length", "32", "--held-out-tokens", "64"],
    "calibrate": LESS_TEXT,
    "export": [*LESS_TEXT, "--no-report"],  # calibrate writes one
    "export --routers": [],
    "validate": ["--prompts", "4", "--new-tokens", "8", "--longest-prompt", "32"],
    "validate --quality": ["--prompts", "4", "--new-tokens", "8", "--longest-prompt", "32", "--quality", "64"],
    "bench": ["--repeat", "1", "--new-tokens", "16"],
    "tune exit": ["--epsilon", "0.1", "--prompts", "45", "--prompts-per-document", "12", "--positions", "1"],
    "tune lossless": ["--prompts", "6", "--new-tokens", "12"],
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
    elif kind == "export" and options.routers:
        kind = "export --routers"
    elif kind == "validate" and options.quality:
        kind = "validate --quality"
    return LESS.get(kind, [])


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


def test_commands_run(workplace: None, traces, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Those of all pages, each once, in the order in which a reader meets them."""
    from tide_export.pipeline import flow

    monkeypatch.setattr(flow, "trace", traces)
    written = dict.fromkeys(tuple(words) for page in [README, *GUIDE] for words in commands(page) if runs(words))
    for words in written:
        assert main([*words[1:], *less(build_parser().parse_args(words[1:]))]) == 0, words
        assert capsys.readouterr().out, words


@pytest.mark.parametrize("document", [d for d in [README, *GUIDE] if blocks(d, "python")], ids=name)
def test_python_runs(document: Path, workplace: None, capsys) -> None:
    if document.name in PYTHON_ELSEWHERE:
        pytest.skip(f"run by {PYTHON_ELSEWHERE[document.name]}")
    for code in blocks(document, "python"):
        exec(compile(code, document.name, "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if commands(d)], ids=name)
def test_commands_exist(document: Path) -> None:
    for words in commands(document):
        check_command(words)


def check_command(words: list[str]) -> None:
    """Fails where a command names a program, script, option, target or extra that does not exist."""
    program = words[0]
    if "tide_export.cli.main" in words or program == "tide-export":
        start = words.index("tide_export.cli.main") if program != "tide-export" else 0
        options = build_parser().parse_args(words[start + 1 :])
        if options.command in ("export", "calibrate"):
            _config(options)
    elif program == "make":
        assert subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, check=False).returncode == 0
    elif program == "python" and words[1] not in ("-m", "-c"):
        check_options(words[2:], ROOT / words[1])
    elif program == "cmake":
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        if "--preset" in words:
            assert words[words.index("--preset") + 1] in {preset["name"] for preset in presets}, words
        cmake = "".join(path.read_text() for path in [*ROOT.glob("CMakeLists.txt"), *ROOT.glob("*/**/CMakeLists.txt")])
        cmake += "".join(path.read_text() for path in ROOT.glob("*/**/*.cmake")) + "CMAKE_PREFIX_PATH"
        for variable in re.findall(r" -D(\w+)=", " ".join(words)):
            assert variable in cmake, variable
    elif program.endswith("pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = [
            extra
            for found in re.findall(r"(?:\.|tide_export)\[([\w,]+)\]", " ".join(words))
            for extra in found.split(",")
        ]
        assert set(wanted) <= extras.keys(), words
    elif "tide_generate" in " ".join(words):
        check_options(words, ROOT / "cpp" / "examples" / "options.cpp")
    else:
        exists = program in ("sh", "python", "git", "ctest", "curl") or (ROOT / program).exists()
        assert exists, f"{program}: what is to be known of it?"


def check_options(words: list[str], source: Path) -> None:
    """Every long option of a script is written in its source, or in a parser that it shares."""
    text = source.read_text() + "".join(path.read_text() for path in source.parent.glob("harness/*.py"))
    for option in [word for word in words if word.startswith("--")]:
        assert re.search(rf"{option}\b", text), f"{source}: {option}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if not link.startswith(("http://", "https://")):
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_named_in_the_documents_exist(document: Path) -> None:
    made_later = {"tide_export/lib/", "calibration/recipes/NAME.toml"}
    package = ROOT / "tide_export"
    bases = (ROOT, package, package / "calibration")
    first = {path.name for base in (ROOT, package) for path in base.iterdir() if path.is_dir()} - {"build", "out"}
    for path in re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|cpp|h|toml|sh|txt))?)`", document.read_text()):
        if path.split("/")[0] in first and path not in made_later:
            assert any((base / path).exists() for base in bases), path


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if "tide::" in d.read_text()], ids=name)
def test_names_of_the_cpp_runtime_exist(document: Path) -> None:
    headers = "".join(path.read_text() for path in ROOT.glob("cpp/include/tide/*.h")) + "tide_runtime"
    text = document.read_text()
    members = {word for block in blocks(document, "cpp") for word in re.findall(r"[\w)]\.([a-z_]\w*)", block)}
    for word in {*re.findall(r"tide::(\w+)", text), *members - {"h"}}:
        assert re.search(rf"\b{word}\b", headers), word


@pytest.fixture(scope="module")
def known_options() -> str:
    """The sources of every argument parser, and the help of every command."""
    helps = [command.format_help() for command in subparsers().values()]
    tools = [path.read_text() for path in ROOT.glob("tools/**/*.py")]
    return "\n".join([*helps, *tools, (ROOT / "cpp" / "examples" / "options.cpp").read_text()])


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_options_named_in_the_documents_exist(document: Path, known_options: str) -> None:
    for option in set(re.findall(r"`(--[a-z][a-z-]+)", document.read_text())):
        assert option in known_options, option


def subparsers() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    (found,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    assert found.choices.keys() == COMMANDS.keys()
    return found.choices


@pytest.mark.parametrize("page", GUIDE, ids=name)
def test_a_page_of_the_guide_is_short(page: Path) -> None:
    assert len(page.read_text().split()) < 1000


@pytest.mark.parametrize(
    ("page", "settings"), [("settings", "TideConfig"), ("adapt", "AdaptConfig"), ("draft", "DraftConfig")]
)
def test_every_setting_is_in_the_reference_with_its_default(page: str, settings: str) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text().partition("## `adapt.json`")[0]
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
