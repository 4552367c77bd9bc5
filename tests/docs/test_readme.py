"""The documentation says what is so: its commands run, its Python runs, its links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tide_export.cli.main import COMMANDS, _config, main
from tide_export.cli.options import build_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob("[a-z]*/*/README.md")]
)
DOCUMENTS.remove(ROOT / "CHANGELOG.md")  # a history: its links are those of their day


def blocks(language: str) -> list[str]:
    """The contents of the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def shell_commands() -> list[list[str]]:
    return [words for block in blocks("bash") for line in block.splitlines() if (words := shlex.split(line, True))]


TIDE_COMMANDS = [words[1:] for words in shell_commands() if words[0] == "tide-export"]
MAKE_COMMANDS = [words for words in shell_commands() if words[0] == "make"]


def test_every_command_of_the_readme_is_one_of_ours():
    assert {words[0] for words in shell_commands()} == {"tide-export", "make"}
    assert [words[1] for words in MAKE_COMMANDS] == ["demo", "test"]
    assert set(COMMANDS) - {words[0] for words in TIDE_COMMANDS} == {"build", "calibrate", "tune"}


@pytest.mark.parametrize("words", TIDE_COMMANDS, ids=" ".join)
def test_its_options_exist(words):
    options = build_parser().parse_args(words)
    if options.command == "export":
        _config(options)


@pytest.mark.parametrize("words", [w for w in TIDE_COMMANDS if w[0] != "export"], ids=" ".join)
def test_its_commands_run(words, demo_bundle: Path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    fewer = ["--prompts", "4"] if words[0] == "validate" else []  # with its default of 16 it takes half a minute
    assert main([str(demo_bundle) if word == "out/demo" else word for word in words] + fewer) == 0
    assert capsys.readouterr().out


def test_its_export_is_the_demo_s():
    """So the slow test of demo/run.sh below runs it."""
    (words,) = [w for w in TIDE_COMMANDS if w[0] == "export" and "demo/demo-llama" in w]
    written_out = build_parser().parse_args(words)
    recipe = str(ROOT / "calibration" / "recipes" / "demo-llama.toml")
    by_recipe = build_parser().parse_args(["export", "demo/demo-llama", "-o", "x", "--recipe", recipe])
    assert _config(written_out) == _config(by_recipe)


def test_its_python_runs(demo_bundle: Path, tmp_path: Path):
    (code,) = blocks("python")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "demo").symlink_to(demo_bundle)
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2 + 8, "the text, the statistics and eight tokens"


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_its_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_installs_torch_first_and_exactly_as_pinned(tmp_path: Path):
    command = ["make", "-n", "demo", f"VENV={tmp_path}/venv"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [line.split("pip install", 1)[1].split()[-1] for line in lines if "pip install" in line]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    assert installs == [torch, "'.[export,cpu]'"]


@pytest.mark.slow
def test_the_demo_runs_from_end_to_end(tmp_path: Path):
    """What `make demo` runs after installing, with this interpreter's `tide-export`."""
    script = tmp_path / "bin" / "tide-export"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tide_export.cli.main "$@"\n')
    script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    command = ["sh", str(ROOT / "demo" / "run.sh"), str(tmp_path / "bundle")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "HOLDS: every token equals its reference" in done.stdout
    assert "layer passes per token" in done.stderr
    assert re.search(r"^  exit +[\d.]+ +[\d.]+x", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not link.startswith(("http://", "https://")):
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_named_in_the_documents_exist(document: Path, capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
    helps = capsys.readouterr().out
    for option in set(re.findall(r"`(--[a-z][a-z-]+)", document.read_text())):
        assert option in helps, option
