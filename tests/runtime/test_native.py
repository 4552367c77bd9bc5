"""Libraries that cannot be used: one sentence says what is wrong, and what to do."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tide_export.common.version import __version__
from tide_export.errors import ProviderError
from tide_export.runtime import native

AGAIN = "install tide_export again on this machine"
CANNOT = "the runtime's library '{path}' cannot be opened "


def with_bytes(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", CANNOT + "({path}: file too short): "),
    "text": (lambda _: b"a library\n" * 100, CANNOT + "({path}: invalid ELF header): "),
    "half": (lambda content: content[: len(content) // 2], CANNOT + "(it is truncated: {half} of {size} bytes): "),
    "a header": (lambda content: content[:4096], CANNOT + "(it is truncated: 4096 of {size} bytes): "),
    "no end": (lambda content: content[:-1], CANNOT + "(it is truncated: {last} of {size} bytes): "),
    "another CPU": (
        lambda content: with_bytes(content, 18, b"\xf3\0"),  # RISC-V
        CANNOT + "(it is for another kind of CPU): ",
    ),
    "another version": (
        lambda content: content.replace(b"\0%b\0" % __version__.encode(), b"\0%b\0" % (b"9" * len(__version__))),
        "'{path}' is of tide_export {nines}, not " + __version__ + ": ",
    ),
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the package looks for its library; a test that opens one opens another than the one in use."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libtide.so")
    return tmp_path / "libtide.so"


@pytest.mark.parametrize("name", DAMAGE)
def test_a_library_that_is_damaged_or_another(library: Path, name: str) -> None:
    content = Path(native.__file__).with_name("libtide.so").read_bytes()
    damage, sentence = DAMAGE[name]
    library.write_bytes(damage(content))
    size, nines = len(content), "9" * len(__version__)
    with pytest.raises(ProviderError) as error:
        native.library.__wrapped__()
    facts = {"path": library, "size": size, "half": size // 2, "last": size - 1, "nines": nines}
    assert str(error.value) == sentence.format(**facts) + AGAIN


def test_a_library_that_is_not_there(library: Path) -> None:
    for make in (lambda: None, library.mkdir):
        make()
        with pytest.raises(ProviderError) as error:
            native.library.__wrapped__()
        assert str(error.value) == CANNOT.format(path=library) + f"(it is missing): {AGAIN}"


def test_a_library_of_older_sources(library: Path, compile_library: Callable[..., Path]) -> None:
    shutil.copyfile(compile_library("older", more="int tide_version;"), library)
    with pytest.raises(ProviderError, match=f"was compiled from older sources .*tide_last_error.*: {AGAIN}"):
        native.library.__wrapped__()


# --- ONNX Runtime ----------------------------------------------------------------------------------------------------

OLD = """
struct base { const void* (*api)(unsigned); const char* (*version)(void); };
static const void* api(unsigned version) { return 0; }
static const char* version(void) { return "1.9.1"; }
static const struct base base = {api, version};
const struct base* OrtGetApiBase(void) { return &base; }
"""
ADVICE = ": install it (pip install onnxruntime), or name its library in the option onnxruntime or in TIDE_ONNXRUNTIME"
CHILD = """
import json, os, sys
from tide_export import errors, load
said = []
for path in json.loads(sys.argv[2]):
    os.environ["TIDE_ONNXRUNTIME"] = path
    try:
        said.append(len(load(sys.argv[1], threads=1).generate([1, 2], max_new_tokens=3).tokens))
    except errors.ProviderError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_onnx_runtime_is_missing_damaged_or_old(
    tiny_bundle: Path, tmp_path: Path, compile_library: Callable[..., Path]
) -> None:
    """In one process, which then opens the right one."""
    text, old = tmp_path / "text.so", compile_library("old", more=OLD)
    text.write_text("no library\n" * 100)
    right, missing, other = native.onnxruntime_library(), tmp_path / "no.so", compile_library("other")
    if right is None:
        right = os.environ["TIDE_ONNXRUNTIME"]
    paths = [str(path) for path in (missing, text, other, old, right)]
    command = [sys.executable, "-c", CHILD, str(tiny_bundle), json.dumps(paths)]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    reason = "cannot open shared object file: No such file or directory"
    assert said == [
        f"ONNX Runtime cannot be opened ({missing}: {reason}){ADVICE}",
        f"ONNX Runtime cannot be opened ({text}: invalid ELF header){ADVICE}",
        f"'{other}' is no library of ONNX Runtime{ADVICE}",
        f"'{old}' is ONNX Runtime 1.9.1, which is older than 1.18{ADVICE}",
        3,
    ]
