"""What can go wrong between a bundle and the hub: one sentence, exit code 2, and nothing half-written."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path

import huggingface_hub.constants
import pytest
from bundles import make_manifest, names_in, write
from command_line import refused
from hub_server import LARGE, Hub

from tide_export.bundle.store import write_manifest
from tide_export.cli.main import main


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "made", b"graph" * LARGE)


@pytest.fixture
def pushed(hub: Hub, bundle: Path, capsys) -> Path:
    """A bundle that is on the hub, as me/demo."""
    assert main(["push", "-q", str(bundle), "me/demo"]) == 0
    capsys.readouterr()
    return bundle


# --- push --------------------------------------------------------------------------------------------------------


def test_without_a_token_nothing_is_asked(hub: Hub, bundle: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "you have no token for the hub: log in" in refused(capsys, "push", bundle, "me/demo")
    assert hub.asked == []


def test_a_wrong_token(hub: Hub, bundle: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    line = refused(capsys, "push", bundle, "me/demo")
    assert "your token does not open repository 'me/demo' (401: Invalid username or password.)" in line


def test_another_user(hub: Hub, bundle: Path, capsys) -> None:
    line = refused(capsys, "push", bundle, "you/demo")
    assert "your token does not open repository 'you/demo' (403: You don't have the rights" in line


def test_a_damaged_bundle_is_not_uploaded(hub: Hub, bundle: Path, capsys) -> None:
    (bundle / "model.onnx").write_bytes(b"grapf" * LARGE)
    assert "is corrupt: its sha256 is not the manifest's" in refused(capsys, "push", bundle, "me/demo")
    assert "does not exist" in refused(capsys, "push", bundle / "none", "me/demo")
    assert hub.asked == []


def test_a_repository_of_something_else_is_left_alone(hub: Hub, bundle: Path, capsys) -> None:
    repository = hub.make("me/demo", {"config.json": b"{}"})
    line = refused(capsys, "push", bundle, "me/demo")
    assert "repository 'me/demo' holds files and no bundle (no tide.json): it is not overwritten" in line
    assert len(repository.commits) == 1


def test_what_is_to_be_private_is_not_published(hub: Hub, bundle: Path, capsys) -> None:
    repository = hub.make("me/demo")
    assert "repository 'me/demo' is public: make it" in refused(capsys, "push", bundle, "me/demo", "--private")
    assert len(repository.commits) == 1


@pytest.mark.parametrize("name", ["a/b/c", "me/de mo", "-"])
@pytest.mark.parametrize("command", ["push", "pull"])
def test_no_id(hub: Hub, bundle: Path, capsys, command: str, name: str) -> None:
    words = [bundle, name] if command == "push" else [name, bundle / "x"]
    assert f"{name!r} is no repository's id: give one such as user/name" in refused(capsys, command, *words)


# --- pull --------------------------------------------------------------------------------------------------------


def test_what_is_not_there(pushed: Path, hub: Hub, tmp_path: Path, capsys) -> None:
    hub.make("you/gated", gated=True)
    hub.make("you/secret", private=True)
    hub.make("you/model", {"config.json": b"{}", "model.safetensors": b"x" * LARGE})
    for words, says in {
        ("me/none",): "the hub has no repository 'me/none', or hides it",
        ("me/demo", "--revision", "int8"): "repository 'me/demo' has no revision 'int8'",
        ("you/model",): "repository 'you/model' holds no bundle: it has no tide.json",
    }.items():
        assert says in refused(capsys, "pull", "-q", words[0], tmp_path / "pulled", *words[1:])
    assert not [line for line in hub.asked if "model.safetensors" in line]
    assert names_in(tmp_path) <= {"made", "cache"}


def test_what_is_hidden(hub: Hub, tmp_path: Path, capsys, monkeypatch) -> None:
    hub.make("you/gated", gated=True)
    hub.make("you/secret", private=True)
    monkeypatch.delenv("HF_TOKEN")
    assert "repository 'you/gated' is gated: ask for" in refused(capsys, "pull", "you/gated", tmp_path / "pulled")
    assert "the hub has no repository 'you/secret'" in refused(capsys, "pull", "you/secret", tmp_path / "pulled")


def test_a_folder_that_is_there(pushed: Path, hub: Hub, tmp_path: Path, capsys) -> None:
    hub.asked.clear()
    assert "already exists: choose another name" in refused(capsys, "pull", "me/demo", pushed)
    (tmp_path / "mine").mkdir()
    line = refused(capsys, "pull", "me/demo", tmp_path / "mine", "--overwrite")
    assert "exists and is not a bundle (no tide.json): it is not overwritten" in line
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.onnx", b"grapf" * LARGE, "model.onnx' is corrupt"),
        ("model.onnx", b"graph", "model.onnx' is truncated"),
        ("model.onnx", None, "model.onnx' is missing"),
    ],
)
def test_a_damaged_bundle_is_not_put_in_place(
    pushed: Path, hub: Hub, tmp_path: Path, capsys, name: str, content: bytes | None, says: str
) -> None:
    repository = hub.repositories["me/demo"]
    files = repository.files() | {name: content}
    repository.commit("main", {name: content for name, content in files.items() if content is not None})
    line = refused(capsys, "pull", "-q", "me/demo", tmp_path / "pulled")
    assert "the bundle in repository 'me/demo' is damaged: bundle file" in line
    assert says in line
    assert names_in(tmp_path) == {"made", "cache"}


def test_a_bundle_of_another_release_is_not_downloaded(pushed: Path, hub: Hub, tmp_path: Path, capsys) -> None:
    repository = hub.repositories["me/demo"]
    manifest = json.loads(repository.files()["tide.json"]) | {"schema": "tide_export.bundle/1"}
    repository.commit("main", repository.files() | {"tide.json": json.dumps(manifest).encode()})
    line = refused(capsys, "pull", "me/demo", tmp_path / "pulled")
    assert "the tide.json of repository 'me/demo' has schema 'tide_export.bundle/1'" in line
    assert not [asked for asked in hub.asked if asked.endswith("/model.onnx")]


def test_a_download_that_breaks_off_goes_on(pushed: Path, hub: Hub, tmp_path: Path, capsys) -> None:
    (pushed / "second.bin").write_bytes(b"second" * LARGE)
    write_manifest(pushed, make_manifest())
    assert main(["push", "-q", str(pushed), "me/demo"]) == 0
    capsys.readouterr()
    hub.broken["/second.bin"] = 403
    line = refused(capsys, "pull", "-q", "me/demo", tmp_path / "pulled")
    assert "your token does not open repository 'me/demo' (403: out of order)" in line
    assert not (tmp_path / "pulled").exists()
    hub.broken.clear()
    assert main(["pull", "-q", "me/demo", str(tmp_path / "pulled")]) == 0
    assert (tmp_path / "pulled" / "second.bin").read_bytes() == b"second" * LARGE
    got = [line for line in hub.asked if line.startswith("GET") and line.endswith("/model.onnx")]
    assert len(got) == 1
    assert names_in(tmp_path) == {"made", "cache", "pulled"}


def test_an_interrupted_check_keeps_what_was_downloaded(pushed: Path, hub: Hub, tmp_path: Path, monkeypatch) -> None:
    def interrupted(bundle: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tide_export.hub.pull.open_bundle", interrupted)
        assert main(["pull", "-q", "me/demo", str(tmp_path / "pulled")]) == 130
    assert main(["pull", "-q", "me/demo", str(tmp_path / "pulled")]) == 0
    assert len([line for line in hub.asked if line.startswith("GET") and line.endswith("/model.onnx")]) == 1
    assert names_in(tmp_path) == {"made", "cache", "pulled"}


def test_a_disk_without_room(pushed: Path, hub: Hub, tmp_path: Path, capsys, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, (1 << 40) - 4999, 4999))
    line = refused(capsys, "pull", "-q", "me/demo", tmp_path / "pulled")
    assert f"no space left on the disk of '{tmp_path}' for 5.0 kB: 5.0 kB are free" in line
    assert not [asked for asked in hub.asked if asked.endswith("/model.onnx")]
    assert names_in(tmp_path) == {"made", "cache"}


def test_a_disk_that_fills_up(pushed: Path, hub: Hub, tmp_path: Path, capsys, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.HfApi.snapshot_download", full)
    line = refused(capsys, "pull", "-q", "me/demo", tmp_path / "pulled")
    assert f"no space left on the disk for bundle '{tmp_path / 'pulled'}': nothing was written" in line


# --- both --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["push", "pull"])
def test_no_network(bundle: Path, tmp_path: Path, capsys, monkeypatch, hub: Hub, command: str) -> None:
    words = [bundle, "me/demo"] if command == "push" else ["me/demo", tmp_path / "pulled"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    line = refused(capsys, command, *words)
    assert "the hub cannot be reached for repository 'me/demo': Cannot reach" in line
    assert "HF_HUB_OFFLINE" in line
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refused(capsys, command, *words)
    assert "the hub cannot be reached for repository 'me/demo': [Errno 111] Connection refused" in line


def test_a_hub_that_is_out_of_order(hub: Hub, bundle: Path, tmp_path: Path, capsys) -> None:
    hub.make("me/demo")
    hub.broken["/me/demo"] = 500
    assert "the hub failed with repository 'me/demo' (500: out of order)" in refused(capsys, "push", bundle, "me/demo")
    assert "(500: out of order)" in refused(capsys, "pull", "me/demo", tmp_path / "pulled")
