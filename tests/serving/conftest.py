"""A served bundle with a chat template, and its engine."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundles import put_text
from running_server import Running

from tide_export.runtime.engine import Engine, load


@pytest.fixture(scope="module")
def chat_bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "demo"
    shutil.copytree(demo_bundle, folder)
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    put_text(folder, "chat_template.jinja", template)
    return folder


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Running]:
    running = Running(chat_bundle)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def engine(chat_bundle: Path) -> Engine:
    return load(chat_bundle, provider="cpu", threads=1)
