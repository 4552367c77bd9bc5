"""`push` and `pull` with a stand-in for the hub: what goes up, and that what comes down is the bundle, to the byte."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hf_xet
import pytest
from bundles import PROFILES, make_manifest, names_in
from hub_server import LARGE, TOKEN, Hub

from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import NetworksInfo, PlansInfo
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.cli.main import main

LISTED = {"model.onnx", "model.onnx.data", "batch/head.onnx", "report.html", "tokenizer.json"}


def bundle_at(path: Path, weights: bytes = b"weights" * LARGE, *more: str) -> Path:
    """A bundle of bytes, with files that its manifest does not list."""
    with writing_bundle(path, overwrite=True) as folder:
        for name in [*LISTED, *more]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(weights if name == "model.onnx.data" else name.encode())
        write_manifest(folder, make_manifest())
    (path / ".cache").mkdir()
    (path / ".cache" / "state").write_text("of mine")
    (path / "notes.txt").write_text("mine")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_pulled_is_what_was_pushed(hub: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    bundle = bundle_at(tmp_path / "made")
    monkeypatch.chdir(tmp_path)
    assert main(["push", str(bundle), "me/demo", "--message", "the first"]) == 0
    assert capsys.readouterr().out == f"{hub.endpoint}/me/demo/commit/{2:040x}\n"
    repository = hub.repositories["me/demo"]
    assert repository.files().keys() == LISTED | {"tide.json", "README.md", ".gitattributes"}
    assert repository.messages[-1] == "the first"
    assert not repository.private
    assert main(["pull", "me/demo"]) == 0
    assert capsys.readouterr().out == "demo\n"
    assert contents(tmp_path / "demo") == {name: (bundle / name).read_bytes() for name in LISTED | {"tide.json"}}
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def test_large_files_go_by_xet(hub: Hub, tmp_path: Path) -> None:
    """In processes of their own, as users have them: the hub's address is an environment variable."""
    bundle = bundle_at(tmp_path / "made", os.urandom(200_000))
    weights = bundle / "model.onnx.data"
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    hub.xet_folder = str(tmp_path / "xet")
    hub.xet = {sha256: hf_xet.hash_files([str(weights)])[0].hash}
    hub.objects = {sha256: weights.read_bytes()}  # which the commit names alone
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    for words in (["push", bundle, "me/demo"], ["pull", "me/demo", tmp_path / "pulled"]):
        command = [sys.executable, "-m", "tide_export.cli.main", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "pulled") == {name: (bundle / name).read_bytes() for name in LISTED | {"tide.json"}}
    assert "GET /api/models/me/demo/xet-write-token/main" in hub.asked
    assert not [line for line in hub.asked if line.startswith("GET") and line.endswith("/model.onnx.data")]


def test_engines_stay_here(hub: Hub, tmp_path: Path) -> None:
    bundle = tmp_path / "made"
    parts = ["segment_00", "segment_01", "segment_02", "head", "best", "candidates"]
    with writing_bundle(bundle) as folder:
        for name in ("model.onnx", *(f"{kind}/{part}" for kind in ("segments", "engines") for part in parts)):
            ending = {"segments": ".onnx", "engines": ".engine"}.get(name.partition("/")[0], "")
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / f"{name}{ending}").write_bytes(name.encode())
        networks = NetworksInfo("fp32", 1024, 1280, 1024, 32, 128, 8, 32)
        engines = PlansInfo("tensorrt", "11.1.0.106", ("8.9",), "ab" * 32, PROFILES, 12.5)
        write_manifest(folder, replace(make_manifest(), networks=networks, engines=engines))
    assert main(["push", "-q", str(bundle), "me/demo"]) == 0
    assert main(["pull", "-q", "me/demo", str(tmp_path / "pulled")]) == 0
    before, after = open_bundle(bundle).manifest, open_bundle(tmp_path / "pulled").manifest
    assert before.engines is not None
    assert not [name for name in hub.repositories["me/demo"].files() if name.startswith("engines")]
    files = {name: info for name, info in before.files.items() if not name.startswith("engines")}
    assert after == replace(before, engines=None, files=files)


def test_a_bundle_that_is_there_is_replaced_in_one_commit(hub: Hub, tmp_path: Path) -> None:
    old = bundle_at(
        tmp_path / "old", b"old" * LARGE, "drafter.txt", "segments/segment_00.onnx", "segments/weights.data"
    )
    assert main(["push", "-q", str(old), "me/demo"]) == 0
    repository = hub.repositories["me/demo"]
    repository.commit("main", repository.files() | {"LICENSE": b"mine"})
    new = bundle_at(tmp_path / "new")
    assert main(["push", "-q", str(new), "me/demo"]) == 0
    assert len(repository.commits) == 4
    others = {"README.md", ".gitattributes", "LICENSE", "drafter.txt"}  # no networks, weights or report
    assert repository.files().keys() == LISTED | {"tide.json"} | others
    assert repository.files()["model.onnx.data"] == b"weights" * LARGE
    assert main(["push", "-q", str(new), "me/demo"]) == 0  # nothing to do
    assert len(repository.commits) == 4


def test_a_branch_and_a_commit_have_bundles_of_their_own(hub: Hub, tmp_path: Path) -> None:
    first, second = bundle_at(tmp_path / "first", b"first" * LARGE), bundle_at(tmp_path / "second", b"second" * LARGE)
    assert main(["push", "-q", str(first), "demo"]) == 0  # one of mine
    assert main(["push", "-q", str(second), "me/demo", "--revision", "int4"]) == 0
    repository = hub.repositories["me/demo"]
    assert "tide-export pull me/demo --revision int4" in repository.files("int4")["README.md"].decode()
    commit = repository.branches["main"]
    for revision, bundle in (("int4", second), ("main", first), (commit, first)):
        words = ["pull", "-q", "me/demo", str(tmp_path / "pulled"), "--revision", revision, "--overwrite"]
        assert main(words) == 0
        assert contents(tmp_path / "pulled")["model.onnx.data"] == (bundle / "model.onnx.data").read_bytes()


def test_private_is_private(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_at(tmp_path / "made")
    assert main(["push", "-q", str(bundle), "me/demo", "--private"]) == 0
    assert hub.repositories["me/demo"].private
    assert main(["push", "-q", str(bundle), "me/demo", "--private"]) == 0
    assert main(["pull", "-q", "me/demo", str(tmp_path / "pulled")]) == 0
    monkeypatch.setenv("HF_TOKEN", "of_another")
    assert main(["pull", "-q", "me/demo", str(tmp_path / "stolen")]) == 2
