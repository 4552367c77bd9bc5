"""Fuzzes one target by coverage of Python and of the library, by atheris: libFuzzer for Python.

test_fuzz_targets.py starts it. Its arguments are libFuzzer's, which starts it anew with others to merge; what it needs
is in the environment.
"""

import ctypes
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import atheris
from atheris import core_with_libfuzzer
from mutations import mutated_json

COMPARISONS = ("cmp1", "cmp2", "cmp4", "cmp8", "const_cmp1", "const_cmp2", "const_cmp4", "const_cmp8", "switch")


def count(library: ctypes.CDLL) -> None:
    """Gives libFuzzer the counters of a library (counters.c), and gives the library libFuzzer's comparisons."""
    libfuzzer = ctypes.CDLL(core_with_libfuzzer.__file__)
    size = ctypes.c_size_t.in_dll(library, "tide_fuzz_size").value
    for function, table, width in (("8bit_counters", "counters", 1), ("pcs", "places", 16)):
        start = ctypes.addressof(ctypes.c_char.in_dll(library, f"tide_fuzz_{table}"))
        libfuzzer[f"__sanitizer_cov_{function}_init"](ctypes.c_void_p(start), ctypes.c_void_p(start + width * size))
    for name in COMPARISONS:
        function = ctypes.cast(libfuzzer[f"__sanitizer_cov_trace_{name}"], ctypes.c_void_p)
        ctypes.c_void_p.in_dll(library, f"tide_fuzz_{name}").value = function.value


def mutator(json_in: Callable[[bytes, Callable[[bytes], bytes]], bytes]) -> Callable[[bytes, int, int], bytes]:
    """Half of the time another structure of the JSON in the bytes; else what libFuzzer does with bytes."""

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            try:
                return json_in(data, lambda text: mutated_json(random, json.loads(text)).encode())[:most]
            except (ValueError, RecursionError):
                pass
        return atheris.Mutate(data, most)

    return mutated


def main() -> None:
    name, library, bundle = (os.environ[f"TIDE_FUZZ_{what}"] for what in ("TARGET", "LIBRARY", "BUNDLE"))
    with atheris.instrument_imports(include=["tide_export"]):
        import targets

        from tide_export.runtime import native
    native.LIBRARY = Path(library)
    count(native.library())
    target = targets.TARGETS[name]
    logging.disable(logging.CRITICAL)
    given = targets.Given(Path(tempfile.mkdtemp()), native.LIBRARY, Path(bundle), ExitStack())
    check = target.make(given)
    atheris.Setup([f"{sys.executable} {__file__}", *sys.argv[1:]], check, custom_mutator=mutator(target.json))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
