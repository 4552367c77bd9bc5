"""Two exports to one folder, exports that are killed, and full disks: no half bundle whatever happens."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import fail_with, make_manifest, names_in, tuned, write

import tide_export
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import replace_manifest, writing_bundle
from tide_export.errors import BundleError, ConfigError

HERE = [str(Path(__file__).parents[1]), str(Path(tide_export.__file__).parents[1])]
EXPORT = f"""
import sys
sys.path[:0] = {HERE!r}
from bundles import make_manifest
from tide_export.bundle.store import write_manifest, writing_bundle
with writing_bundle(sys.argv[1], overwrite=True) as folder:
    (folder / "model.onnx").write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()
    write_manifest(folder, make_manifest())
"""


def start_export(path: Path) -> "subprocess.Popen[str]":
    """An export in another process, inside the body, waiting for its stdin to close."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_second_export_to_the_same_folder_fails_at_once(tmp_path: Path) -> None:
    first = start_export(tmp_path / "b")
    try:
        with pytest.raises(BundleError, match=r"another export to .* is running"), writing_bundle(tmp_path / "b"):
            pytest.fail("the body ran")
        write(tmp_path / "other")  # another folder is nobody's business
        first.communicate("", timeout=60)
        assert first.returncode == 0
    finally:
        first.kill()
        first.wait()
    assert open_bundle(tmp_path / "b").file("model.onnx").read_bytes() == b"half"
    assert names_in(tmp_path) == {"b", "other"}


def test_a_manifest_is_not_replaced_during_an_export(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    export = start_export(tmp_path / "b")
    try:
        with pytest.raises(BundleError, match="another export to"):
            replace_manifest(opened, tuned(opened.manifest))
        export.communicate("", timeout=60)
    finally:
        export.kill()
        export.wait()
    assert open_bundle(tmp_path / "b").manifest.tuning is None


def test_of_many_threads_exporting_at_once_one_wins_and_nothing_is_mixed(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def export(number: int) -> None:
        try:
            write(tmp_path / "b", b"%d" % number, manifest=make_manifest(name=str(number)))
            outcomes.append(str(number))
        except BundleError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=export, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome.isdigit()]
    losers = [outcome for outcome in outcomes if "already exists" in outcome or "is running" in outcome]
    assert (len(winners), len(losers)) == (1, 7)
    opened = open_bundle(tmp_path / "b")
    assert opened.manifest.model.name == winners[0]
    assert opened.file("model.onnx").read_bytes() == winners[0].encode()
    assert names_in(tmp_path) == {"b"}


def test_a_killed_export_leaves_the_old_bundle_and_the_next_export_cleans_up(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    process = start_export(path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) > {"b"}  # leftovers there are, or this test shows nothing
    write(path, b"new", overwrite=True)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"new"
    assert names_in(tmp_path) == {"b"}


def test_killed_between_the_two_renames_the_old_bundle_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "b", b"old")
    path.rename(tmp_path / ".b.tide-old")  # what such a death leaves where folders cannot be exchanged
    with pytest.raises(BundleError, match="already exists"), writing_bundle(path):
        pytest.fail("the body ran")
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_one_sentence(tmp_path: Path, wrapped: bool) -> None:
    def fill() -> None:
        try:
            with Path("/dev/full").open("wb", buffering=0) as device:
                device.write(b"x")
        except OSError as error:
            if wrapped:
                raise RuntimeError("cannot serialize") from error
            raise

    path = write(tmp_path / "b", b"old")
    with pytest.raises(BundleError, match="no space left"):
        write(path, b"new", overwrite=True, then=fill)
    assert open_bundle(path).file("model.onnx").read_bytes() == b"old"
    assert names_in(tmp_path) == {"b"}


WRITERS = """
def python(file): file.write_bytes(bytes(100_000))
def numpy_contiguous(file): numpy.zeros((100, 100)).tofile(file)
def numpy_transposed(file): numpy.zeros((100, 100)).T.tofile(file)
def tensors(file): safetensors.numpy.save_file({"a": numpy.zeros(10_000)}, file)
def tokenizer(file):
    vocabulary = {str(n): n for n in range(5000)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(file))
def onnx_ir(file):
    weight = ir.tensor(numpy.zeros((100, 100), numpy.float32).T, name="w")
    graph = ir.Graph([], [], nodes=[], initializers=[ir.Value(name="w", const_value=weight)])
    ir.save(ir.Model(graph, ir_version=10), file.parent / "model.onnx", external_data=file.name)
"""


def test_a_file_size_limit_is_a_full_disk_whoever_writes(tmp_path: Path) -> None:
    """Every library that writes files of a bundle, each with its words for a short write."""
    code = f"""
import sys, resource
sys.path[:0] = {HERE!r}
import numpy, onnx_ir as ir, safetensors.numpy, tokenizers.models
from tide_export.bundle.store import writing_bundle
from tide_export.errors import BundleError
{WRITERS}
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for write in (python, numpy_contiguous, numpy_transposed, tensors, tokenizer, onnx_ir):
    try:
        with writing_bundle(sys.argv[1]) as folder:
            write(folder / "weights")
        print(write.__name__, "wrote it")
    except BundleError as error:
        print(write.__name__, error)
"""
    path = tmp_path / "b"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(said) == 6
    assert set(said.values()) == {f"no space left on the disk for bundle '{path}': nothing was written"}, said
    assert names_in(tmp_path) == set()


def test_a_failure_in_unknown_words_on_a_full_disk_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(4096))
    with pytest.raises(BundleError, match="no space left on the disk for bundle"):
        write(tmp_path / "b", then=fail_with(RuntimeError))
    with pytest.raises(ConfigError):  # what the user can mend is not hidden
        write(tmp_path / "b", then=fail_with(ConfigError))
    monkeypatch.undo()
    with pytest.raises(RuntimeError):
        write(tmp_path / "b", then=fail_with(RuntimeError))


# --- what others put in the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".b.tide-lock", ".b.tide-tmp", ".b.tide-old"])
@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "fifo", "other"])
def test_something_in_the_way_is_named_and_not_followed(tmp_path: Path, name: str, kind: str) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "in" / name
    planted.parent.mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis").write_text("mine")
    if kind.startswith("link"):
        planted.symlink_to(tmp_path / "folder" if kind == "link to a folder" else victim)
    elif kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.mkdir() if name.endswith("lock") else planted.write_text("")
    with pytest.raises(BundleError, match=re.escape(f"'{planted}' is in the way of the export")):
        write(tmp_path / "in" / "b")
    assert names_in(tmp_path) == {"in", "folder"}
    assert (tmp_path / "folder" / "thesis").read_text() == "mine"
    assert names_in(planted.parent) == {name}


def test_a_link_in_a_bundle_is_not_followed_by_tuning(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    planted = [f".tide.json.{process}.tide-tmp" for process in (os.getpid(), 2**22 + 1)]  # no such process: a leftover
    for name in [*planted, ".tide.json.tide-tmp"]:
        (tmp_path / "b" / name).symlink_to(tmp_path / "victim")
    replace_manifest(opened, tuned(opened.manifest))
    assert names_in(tmp_path) == {"b"}
    assert names_in(tmp_path / "b") == {"model.onnx", "engines", "tide.json", ".tide.json.tide-tmp"}


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("a" * 300, "File name too long"),
        ("a" * 250, "File name too long"),  # with what is added for the lock
        ("a" * 300 + "/b", "File name too long"),
        ("file/b", "cannot make folder '.*file': "),
        ("file/a/b", "cannot make folder '.*file/a': "),
        ("loop/b", "loop"),
        ("nul\0/b", "is not a usable path: embedded null"),
        (os.fsdecode(b"b\xff"), "is not a usable path: it is not UTF-8"),
    ],
)
def test_a_path_that_cannot_be_is_refused_before_any_work(tmp_path: Path, output: str, says: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BundleError, match=says), writing_bundle(tmp_path / output):
        pytest.fail("the body ran")
    assert names_in(tmp_path) == {"file", "loop"}


def test_of_many_tunings_at_once_one_is_stored(tmp_path: Path) -> None:
    opened = open_bundle(write(tmp_path / "b"))
    outcomes: list[str] = []

    def tune(number: int) -> None:
        try:
            replace_manifest(opened, replace(tuned(opened.manifest), thresholds=(number / 10, 1.0)))
            outcomes.append(str(number / 10))
        except BundleError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=tune, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = [outcome for outcome in outcomes if outcome[0] == "0"]
    refused = [outcome for outcome in outcomes if "changed by something else" in outcome or "is running" in outcome]
    assert (len(stored), len(refused)) == (1, 7)
    assert open_bundle(tmp_path / "b").manifest.thresholds[0] == float(stored[0])
    assert names_in(tmp_path) == {"b"}
