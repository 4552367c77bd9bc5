"""Two exports to one folder, exports that are killed, and full disks: no half bundle whatever happens."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bundles import make_manifest, names_in, tuned, write

import tide_export
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import replace_manifest, writing_bundle
from tide_export.errors import BundleError

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


WRITERS = {
    "python": "(folder / 'model.onnx').write_bytes(bytes(100_000))",
    "numpy": "import numpy; numpy.zeros(100_000).tofile(folder / 'model.onnx')",
    "safetensors": "import numpy, safetensors.numpy\n"
    "    safetensors.numpy.save_file({'a': numpy.zeros(100_000)}, folder / 'model.onnx')",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_size_limit_is_a_full_disk_whoever_writes(tmp_path: Path, writer: str) -> None:
    code = f"""
import sys, resource
sys.path[:0] = {HERE!r}
from tide_export.bundle.store import writing_bundle
from tide_export.errors import BundleError
def export():
  with writing_bundle(sys.argv[1]) as folder:
    {WRITERS[writer]}
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try: export()
except BundleError as error: sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no space left on the disk for bundle")
    assert names_in(tmp_path) == set()
