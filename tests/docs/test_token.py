"""The page on how a token flows names files that exist: those of its diagrams, and those to touch and to copy."""

import re

from documents import ROOT

PAGE = (ROOT / "docs" / "architecture" / "token.md").read_text()


def test_every_path_exists() -> None:
    paths = re.findall(r"(?<![\w(/.])(?:tide_export|cpp|tests|tools|docs)/[\w./]*[\w/]", PAGE)
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_task_names_its_test() -> None:
    tasks = PAGE.partition("## Where do I add ...")[2].split("\n\n**")[1:]
    assert [task.partition("**")[0] for task in tasks] == [
        "a sampler",
        "a graph pass",
        "a model family",
        "an execution provider",
        "an HTTP route",
        "an option",
        "an operator",
    ]
    assert [task for task in tasks if "`tests/" not in task] == []
