"""The interface for C: a program in C, and Python's ctypes, have the tokens and errors of the Python runtime."""

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest
from cpp_builds import ROOT, SANITIZE, CppBuild, onnxruntime_library

import tide_export
from tide_export.runtime.engine import Engine

PROMPT = [3, 14, 15]
GREEDY: dict[str, Any] = {"mode": "full", "max_new_tokens": 6, "stop_token_ids": []}


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


def onnxruntime_folder(cpp: CppBuild) -> Path:
    """The folder of libonnxruntime.so.1, which CMake made where there is none."""
    link = cpp.driver.parent / "onnxruntime"
    return link if link.is_dir() else onnxruntime_library().parent


def test_a_program_in_c(cpp: CppBuild, tiny_llama, engine: Engine) -> None:
    service = cpp.driver.parent / "tide_service"
    done = subprocess.run(
        [service, tiny_llama.exact],
        env=os.environ | {"LD_LIBRARY_PATH": str(onnxruntime_folder(cpp))},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    three, two, one = (" ".join(map(str, engine.generate(PROMPT[:n], **GREEDY).tokens)) for n in (3, 2, 1))
    depth = engine.manifest.model.num_layers
    assert done.stdout.splitlines() == [
        f"version {tide_export.__version__}",
        "missing failed with 3: bundle 'nowhere' does not exist",
        "slots 32",
        "stats 1",
        f"generated length {three}",
        f"streamed cancelled {' '.join(three.split()[:4])}",
        f"taken 4 {4 * depth}",
        "empty failed with 4: the prompt is empty: give at least one token",
        f"read {three} ended",
        f"cancelled cancelled {two.split()[0]}",
        "closed failed with 4: the scheduler is closed: it takes no more requests",
        f"drained length {one}",
    ]


class Token(ctypes.Structure):
    _fields_ = (("id", c_int64), ("exit_layer", c_int64), ("layers_run", c_int64))


OnToken = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Token))


@pytest.fixture(scope="module")
def library(cpp: CppBuild) -> ctypes.CDLL:
    if SANITIZE:
        pytest.skip("Python is not built with the sanitizer that the library needs")
    ctypes.CDLL(str(onnxruntime_library()), mode=ctypes.RTLD_GLOBAL)
    opened = ctypes.CDLL(str(cpp.prefix / "lib" / "libtide.so"))
    opened.tide_last_error.restype = c_char_p
    opened.tide_generation_stats.restype = c_char_p
    opened.tide_generation_finish_reason.restype = c_char_p
    opened.tide_generation_tokens.restype = POINTER(c_int64)
    return opened


def ids_of(prompt: list[int]) -> Any:
    return (c_int64 * len(prompt))(*prompt)


def text_of(options: Any) -> bytes:
    return json.dumps(options).encode()


@pytest.fixture(scope="module")
def loaded(library: ctypes.CDLL, tiny_llama) -> Callable[[], c_void_p]:
    handle = c_void_p()
    assert library.tide_load(str(tiny_llama.exact).encode(), text_of({"threads": 1}), byref(handle)) == 0
    yield handle
    library.tide_engine_free(handle)


def generation_of(library: ctypes.CDLL, generation: c_void_p) -> tuple[list[int], str, dict[str, Any]]:
    count = c_size_t()
    tokens = library.tide_generation_tokens(generation, byref(count))
    reason, stats = library.tide_generation_finish_reason(generation), library.tide_generation_stats(generation)
    result = tokens[: count.value], reason.decode(), json.loads(stats)
    library.tide_generation_free(generation)
    return result


OPTIONS: list[dict[str, Any]] = [
    GREEDY,
    GREEDY | {"mode": "exit", "threshold": 0.5, "min_layers": 0, "max_pending": 1, "prompt_lookup": None},
    GREEDY | {"mode": "lossless", "threshold": [0.5, 0.5], "prompt_lookup": 3},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "seed": 3, "max_new_tokens": 4, "stop_token_ids": [1, 2]},
    {"stop_token_ids": None},
    GREEDY | {"repetition_penalty": 1.6, "presence_penalty": 0.4, "logit_bias": {4: 0.4, 80: -100.0}},
    GREEDY | {"mode": "lossless", "frequency_penalty": 0.4},
    {"temperature": 0.7, "min_p": 0.2, "seed": 3, "max_new_tokens": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ctypes(library: ctypes.CDLL, loaded: c_void_p, engine: Engine, options: dict[str, Any]) -> None:
    generation, streamed = c_void_p(), list[int]()
    on_token = OnToken(lambda context, token: streamed.append(token.contents.id) or 1)
    request = (loaded, ids_of(PROMPT), c_size_t(len(PROMPT)), text_of(options))
    assert library.tide_stream(*request, on_token, None, byref(generation)) == 0
    tokens, reason, stats = generation_of(library, generation)
    assert streamed == tokens
    assert library.tide_generate(*request, byref(generation)) == 0
    assert generation_of(library, generation)[:2] == (tokens, reason)
    if options.get("temperature", 0) == 0:  # the two runtimes have other random numbers
        expected = engine.generate(PROMPT, **options)
        assert (tokens, reason) == (expected.tokens, expected.finish_reason)
        assert stats["layer_tokens_run"] == expected.stats.layer_tokens_run


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "the options are not valid JSON"),
        ("[]", "options: field '' must be an object, not a list"),
        ('{"max_tokens": 3}', "options: field 'max_tokens' is unknown"),
        ('{"max_new_tokens": 1.5}', "options: field 'max_new_tokens' must be a whole number, not 1.5"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be a whole number, 1 or more, not 0"),
        ('{"mode": "fast"}', "mode must be 'auto', 'full', 'exit' or 'lossless', not 'fast'"),
        ('{"threshold": ["x"]}', "options: field 'threshold.0' must be a number, not \"x\""),
        ('{"logit_bias": {"x": 1}}', "options: field 'logit_bias.x' is no token id"),
        ('{"min_p": 0.5}', "min_p is for a temperature above 0: without one the most likely token is taken"),
        ('{"seed": [1, 2], "temperature": 1}', "seed must be a whole number, 0 or more, not [1, 2]"),
    ],
)
def test_options_are_refused(library: ctypes.CDLL, loaded: c_void_p, text: str, sentence: str) -> None:
    generation = c_void_p()
    request = (loaded, ids_of(PROMPT), c_size_t(len(PROMPT)), text.encode())
    assert library.tide_generate(*request, byref(generation)) == 4
    assert library.tide_last_error().decode() == sentence
    assert generation.value is None


def test_other_errors(library: ctypes.CDLL, loaded: c_void_p, tiny_llama) -> None:
    path, other = str(tiny_llama.exact).encode(), c_void_p()
    for status, sentence, call in [
        (
            2,
            "threads must be a whole number from 1 to 1024, not 0",
            lambda: library.tide_load(path, b'{"threads": 0}', byref(other)),
        ),
        (2, "options: field 'slow' is unknown", lambda: library.tide_load(path, b'{"slow": 0}', byref(other))),
        (6, "provider", lambda: library.tide_load(path, b'{"provider": "abacus"}', byref(other))),
        (
            4,
            "slots must be a whole number, 1 or more, not 0",
            lambda: library.tide_scheduler_create(loaded, b'{"slots": 0}', byref(other)),
        ),
    ]:
        assert call() == status
        assert sentence in library.tide_last_error().decode()


def test_a_scheduler(library: ctypes.CDLL, loaded: c_void_p, engine: Engine) -> None:
    scheduler, timeout = c_void_p(), c_double(600.0)
    limits = text_of({"slots": 1, "waiting": 1, "kv_tokens": None, "prompt_tokens": 8})
    assert library.tide_scheduler_create(loaded, limits, byref(scheduler)) == 0
    requests = [c_void_p() for _ in range(3)]
    submitted = [
        library.tide_submit(scheduler, ids_of(PROMPT), c_size_t(3), text_of(GREEDY), byref(timeout), byref(request))
        for request in requests
    ]
    assert submitted == [0, 0, 5]
    assert library.tide_last_error() == b"1 requests are waiting already: submit again later"
    assert library.tide_scheduler_start(scheduler) == 0
    token, tokens = Token(), list[int]()
    while library.tide_request_next(requests[0], byref(token)) == 0:
        tokens.append(token.id)
    generation = c_void_p()
    assert library.tide_request_result(requests[1], byref(generation)) == 0
    expected = engine.generate(PROMPT, **GREEDY)
    assert tokens == generation_of(library, generation)[0] == expected.tokens
    library.tide_scheduler_free(scheduler)
    for request in requests:
        library.tide_request_free(request)


def test_the_guide(cpp: CppBuild, tiny_llama, engine: Engine, tmp_path: Path) -> None:
    """The blocks of docs/guide/c.md run."""
    if SANITIZE:
        pytest.skip("they are not built with the sanitizer that the library needs")
    prefix, libraries = cpp.prefix, onnxruntime_folder(cpp)
    names = {
        "out/demo": tiny_llama.exact,
        '"libonnxruntime.so.1"': f'"{onnxruntime_library()}"',
        '"libtide.so"': f'"{prefix}/lib/libtide.so"',
    }
    blocks = {}
    for language, text in re.findall(r"```(c|python)\n(.*?)```", (ROOT / "docs/guide/c.md").read_text(), re.DOTALL):
        for name, there in names.items():
            text = text.replace(name, str(there))
        blocks[language] = tmp_path / f"guide.{language}"
        blocks[language].write_text(text)
    expected = engine.generate([5, 17, 3], max_new_tokens=16)
    environment = os.environ | {"LD_LIBRARY_PATH": f"{prefix}/lib:{libraries}"}
    link = ["-L", prefix / "lib", "-ltide", f"-Wl,-rpath-link,{libraries}"]
    subprocess.run(
        [
            "cc",
            "-std=c99",
            "-x",
            "c",
            blocks["c"],
            "-x",
            "none",
            "-o",
            tmp_path / "guide",
            "-I",
            prefix / "include",
            *link,
        ],
        check=True,
    )
    done = subprocess.run([tmp_path / "guide"], env=environment, capture_output=True, text=True, check=True)
    *tokens, stats = done.stdout.splitlines()
    assert [int(token) for token in tokens] == expected.tokens
    assert json.loads(stats)["total_tokens"] == len(expected.tokens)
    done = subprocess.run([sys.executable, blocks["python"]], capture_output=True, text=True, check=True)
    pairs = zip(expected.tokens[:8], expected.stats.exit_layer, strict=False)
    assert done.stdout.splitlines() == [f"{token} after {layers} layers" for token, layers in pairs]


def test_the_header_says_what_the_library_exports(cpp: CppBuild) -> None:
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", cpp.prefix / "lib" / "libtide.so"], capture_output=True, text=True, check=True
    )
    symbols = {line.split()[-1] for line in exported.stdout.splitlines()}
    header = (ROOT / "cpp/include/tide/tide.h").read_text()
    assert symbols == set(re.findall(r"(tide_\w+)\(", header))
