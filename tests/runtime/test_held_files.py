"""A loaded engine runs on the files that were checked, whatever becomes of their folder, and hashes large ones once."""

import ctypes
import gc
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from bundles import without
from private_memory import private_memory
from tiny_model import TinyModel

from tide_export.bundle.file_names import MANIFEST_FILE, PLANS_FOLDER, WEIGHTS_FILE, batch_file
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import _exchange, write_manifest
from tide_export.errors import BundleError
from tide_export.names.networks import HEAD
from tide_export.runtime.engine import Engine, load, open_engine

SINGLE, PROMPTS = [5, 9, 40], [[5, 9, 40], [7], [300, 2, 61, 8]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "mode": "full", "stop_token_ids": []}
CHANGED = "was changed after the bundle was loaded: load it again"
KEPT = 1000  # notes of verified files


def opens(bundle: Path) -> Engine:
    return load(bundle, provider="cpu", threads=1)


@pytest.fixture(scope="module")
def original(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without(demo_bundle, tmp_path_factory.mktemp("original") / "bundle", PLANS_FOLDER)


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def other(bundle: Path, tmp_path: Path) -> Path:
    """A bundle of the same shapes and other weights."""
    folder = tmp_path / "other"
    shutil.copytree(bundle, folder)
    damage(folder / WEIGHTS_FILE)
    write_manifest(folder, open_bundle(bundle, verify=False).manifest)
    return folder


@pytest.fixture(scope="module")
def expected(original: Path) -> tuple[list[int], list[list[int]]]:
    return tokens_of(load(original, provider="cpu", threads=1))


def damage(file: Path) -> None:
    """Negates the second half of the numbers, in place."""
    weights = np.fromfile(file, np.float32)
    weights[len(weights) // 2 :] *= -1
    with file.open("r+b") as stream:
        stream.write(weights.tobytes())


def list_tokens(engine: Engine) -> list[list[int]]:
    return [one.tokens for one in engine.generate(PROMPTS, **OPTIONS)]


def tokens_of(engine: Engine) -> tuple[list[int], list[list[int]]]:
    return engine.generate(SINGLE, **OPTIONS).tokens, list_tokens(engine)


def replaced(bundle: Path, other: Path) -> None:
    assert _exchange(bundle, other)


def replaced_and_deleted(bundle: Path, other: Path) -> None:
    replaced(bundle, other)
    shutil.rmtree(other)


def files_replaced(bundle: Path, other: Path) -> None:
    for file in [entry for entry in other.rglob("*") if entry.is_file()]:
        file.rename(bundle / file.relative_to(other))


@pytest.mark.parametrize("exchange", [replaced, replaced_and_deleted, files_replaced])
def test_an_engine_stays_the_model_that_was_loaded(
    bundle: Path, other: Path, expected: tuple[list[int], list[list[int]]], exchange: Callable
) -> None:
    engine = opens(bundle)
    exchange(bundle, other)
    assert tokens_of(engine) == expected
    assert tokens_of(opens(bundle)) != expected, "the other model is another one"


@pytest.mark.parametrize("exchange", [replaced, replaced_and_deleted, files_replaced])
def test_the_library_loads_what_was_opened(
    bundle: Path, other: Path, expected: tuple[list[int], list[list[int]]], exchange: Callable
) -> None:
    opened = open_bundle(bundle, verify=False)
    exchange(bundle, other)
    assert tokens_of(open_engine(opened, "cpu", threads=1, verify=True)) == expected


def test_a_deleted_bundle_still_runs(bundle: Path, expected: tuple[list[int], list[list[int]]]) -> None:
    engine = opens(bundle)
    bundle.rename(bundle.with_name("moved"))
    shutil.rmtree(bundle.with_name("moved"))
    assert tokens_of(engine) == expected


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", [WEIGHTS_FILE, batch_file(HEAD)])
def test_a_file_changed_in_place_is_noticed_or_not_read_again(
    bundle: Path, expected: tuple[list[int], list[list[int]]], name: str, truncated: bool
) -> None:
    engine, half = opens(bundle), (bundle / name).stat().st_size // 2
    with (bundle / name).open("r+b") as stream:
        if truncated:
            stream.truncate(half)
        else:
            stream.write(bytes(half))
    if name == WEIGHTS_FILE:  # the open session shares them
        with pytest.raises(BundleError, match=f"{Path(name).name}' {CHANGED}"):
            engine.generate(SINGLE, **OPTIONS)
        with pytest.raises(BundleError, match=f"{Path(name).name}' {CHANGED}"):
            list_tokens(engine)
    else:  # which was read when the session was opened
        assert tokens_of(engine) == expected
    with pytest.raises(BundleError, match="is truncated" if truncated else "is corrupt"):
        opens(bundle)


def test_weights_are_hashed_again_where_they_were_touched(bundle: Path) -> None:
    folder = Path(os.environ["XDG_CACHE_HOME"], "tide_export", "verified")

    def notes() -> set[str]:
        return {note.name for note in folder.iterdir()} if folder.exists() else set()

    before, weights = notes(), bundle / WEIGHTS_FILE
    opens(bundle)
    (note,) = notes() - before
    opens(bundle)
    assert notes() - before == {note}
    times = weights.stat()
    damage(weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(BundleError, match=f"{WEIGHTS_FILE}' is corrupt"):
        opens(bundle)


def test_a_verified_file_is_not_hashed_again(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    manifest = open_bundle(bundle, verify=False).manifest
    wrong = replace(manifest.files[WEIGHTS_FILE], sha256="0" * 64)
    text = (bundle / MANIFEST_FILE).read_text()
    (bundle / MANIFEST_FILE).write_text(text.replace(manifest.files[WEIGHTS_FILE].sha256, wrong.sha256))
    with pytest.raises(BundleError, match="is corrupt"):
        opens(bundle)
    identity = open_bundle(bundle, verify=False).files[WEIGHTS_FILE].identity
    note = tmp_path / "tide_export" / "verified" / hashlib.sha256(f"{identity} {wrong.sha256}".encode()).hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    note.touch()
    assert opens(bundle).generate(SINGLE, max_new_tokens=1).tokens


@pytest.mark.parametrize("home", [False, True])
def test_without_a_cache_files_are_hashed_each_time(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: bool
) -> None:
    if home:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
    opens(bundle)
    damage(bundle / WEIGHTS_FILE)
    with pytest.raises(BundleError, match="is corrupt"):
        opens(bundle)


def test_the_oldest_notes_are_removed(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "tide_export" / "verified"
    folder.mkdir(parents=True)
    for number in range(KEPT + 2):
        (folder / f"{number}").touch()
        os.utime(folder / f"{number}", (number, number))
    opens(bundle)
    notes = {note.name for note in folder.iterdir()}
    assert {str(number) for number in range(3, KEPT + 2)} == {note for note in notes if note.isdecimal()}
    assert len(notes) == KEPT, "and that of the weights"


def test_loads_while_bundles_are_replaced(tmp_path: Path) -> None:
    """What was one failure in 357 loads: the old folder's files deleted between two of them being opened."""
    models = [TinyModel(seed=seed).write(tmp_path / f"model{seed}") for seed in range(2)]
    for model in models:
        for number in range(40):
            (model / f"{number}.bin").write_bytes(model.name.encode())
        write_manifest(model, open_bundle(model).manifest)
    wanted = {opens(model).generate([1, 2], max_new_tokens=8).tokens[-1] for model in models}
    assert len(wanted) == 2, "the models can be told apart"
    target = tmp_path / "bundle"
    shutil.copytree(models[0], target)
    engine, found = opens(target), set()
    with replacing(target, models):
        for _ in range(tiers.sized(20, 100)):
            engine = opens(target)
            found.add(engine.generate([1, 2], max_new_tokens=8).tokens[-1])
    assert found == wanted


def test_descriptors_are_closed_with_the_engine(bundle: Path, tiny_bundle: Path) -> None:
    engine = opens(tiny_bundle)
    folder = Path("/proc/self/fd")

    def held() -> list[str]:
        files = [str(entry.resolve()) for entry in folder.iterdir()]
        return [file for file in files if file.startswith(str(bundle.resolve()))]

    for _ in range(3):
        engine = opens(bundle)
        list_tokens(engine)
        assert set(held()) == {str(bundle.resolve() / name) for name in open_bundle(bundle, verify=False).files}
    engine = opens(tiny_bundle)
    assert not held()
    (bundle / WEIGHTS_FILE).unlink()
    with pytest.raises(BundleError, match="is missing"):
        opens(bundle)
    assert not held()


def test_weights_are_mapped_as_long_as_the_engine_is_there(bundle: Path) -> None:
    engine = opens(bundle)
    maps = Path("/proc/self/maps")
    assert f"{bundle.resolve()}/{WEIGHTS_FILE}" in maps.read_text()
    del engine
    assert str(bundle.resolve()) not in maps.read_text()


def test_memory_returns_to_the_system_with_the_engine(tiny_bundle: Path, tmp_path: Path) -> None:
    """The C library would keep twice what is gained here."""
    large = TinyModel(vocabulary=300_000).write(tmp_path / "large")
    engine = opens(tiny_bundle)
    gc.collect(1)  # young objects: all take seconds in a process of many tests
    ctypes.CDLL(None).malloc_trim(0)  # that of the tests before, which the engine would take
    before = private_memory(engine)
    engine = opens(large)
    engine.generate([1, 2], max_new_tokens=2)
    gained = private_memory(engine) - before
    assert gained > 25 << 20
    engine = opens(tiny_bundle)
    assert private_memory(engine) - before < gained / 3


@contextmanager
def replacing(target: Path, models: list[Path]) -> Iterator[None]:
    """Replaces the bundle at `target` as `export --overwrite` does, and deletes the old one, again and again."""
    done = threading.Event()

    def keep_replacing() -> None:
        fresh = target.with_name("fresh")
        while not done.is_set():
            for model in models:
                shutil.copytree(model, fresh)
                assert _exchange(fresh, target)
                shutil.rmtree(fresh)

    thread = threading.Thread(target=keep_replacing)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
