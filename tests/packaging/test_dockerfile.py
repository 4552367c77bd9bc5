"""The Dockerfile names files, extras and options that exist. Nothing builds it here: there is no Docker."""

import json
import re
import shlex
import tomllib
from pathlib import Path

from tide_export.cli.options import build_parser

ROOT = Path(__file__).parents[2]
LINES = [line.split(" ", 1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]


def values(instruction: str) -> list[str]:
    return [value for name, value in LINES if name == instruction]


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    sources = [source for value in values("COPY") for source in shlex.split(value)[:-1]]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(sources) == sorted(allowed)
    assert all((ROOT / source).exists() for source in sources)


def test_what_the_sources_include_is_copied() -> None:
    copied = [ROOT / source for value in values("COPY") for source in shlex.split(value)[:-1]]
    for file in (entry for entry in (ROOT / "cpp").rglob("*") if entry.suffix in (".cpp", ".h", ".inc")):
        for name in re.findall(r'^#include "(\.\./.*)"', file.read_text(), re.MULTILINE):
            included = (file.parent / name).resolve()
            assert included.is_file(), (file, name)
            assert any(included.is_relative_to(one) for one in copied), (file, name)


def test_the_extras_it_installs_exist() -> None:
    (command,) = values("RUN")
    found = re.search(r"'\.\[([\w,]+)\]'", command)
    assert found is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(found[1].split(",")) <= set(extras)


def test_its_command_is_one_of_ours() -> None:
    (entry,) = values("ENTRYPOINT")
    options = build_parser().parse_args(json.loads(entry)[1:])
    assert (options.command, options.bundle, options.host) == ("serve", "/bundle", "0.0.0.0")
    (health,) = values("HEALTHCHECK")
    assert f":{values('EXPOSE')[0]}/health" in health
    compile(json.loads(health[health.index("[") :])[2], "HEALTHCHECK", "exec")
