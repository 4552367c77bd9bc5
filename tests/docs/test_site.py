"""The site builds, without the network, and a broken link or an unknown name fails the build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed")


@pytest.mark.exhaustive  # `make docs` builds it too; test_pages.py looks for the files of links
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    environment |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert "--max-new-tokens" in pages[tmp_path / "site" / "reference" / "cli.html"]
    for path, page in pages.items():
        for loaded in ('<link rel="stylesheet" href="http', '<script src="http', "fonts.g"):
            assert loaded not in page, path
