"""The interface for C: a program in C, and ctypes, have the tokens and errors that the Python package has."""

import ctypes
import json
import re
import subprocess
import sys
from ctypes import byref, c_int64, c_size_t, c_void_p
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builds import ROOT, Embedding, environment, run
from c_interface import CEngine, Refused, Token, hooks_of, logprobs_of

import tide_export
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.native import LIBRARY
from tide_export.runtime.tokenizer import LateText

PROMPT = [3, 14, 15]
GREEDY: dict[str, Any] = {"mode": "full", "max_new_tokens": 6, "stop_token_ids": []}
DRAWN: dict[str, Any] = GREEDY | {"max_new_tokens": 12, "temperature": 1.3, "seed": 7}


def parity(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Even and odd tokens by turns."""
    logits[(len(ids) + 1) % 2 :: 2] = -np.inf
    return logits


def from_package(folder: Path) -> Path:
    """service.c, linked with the package's library."""
    program, source = folder / "tide_service", Path(__file__).with_name("service.c")
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT}/cpp/include"]
    subprocess.run(["cc", *flags, source, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-o", program], check=True)
    return program


@pytest.mark.parametrize("of", ["package", "CMake"])
def test_a_program_in_c(of: str, request: pytest.FixtureRequest, tiny_llama, engine: Engine, tmp_path: Path) -> None:
    service = from_package(tmp_path) if of == "package" else request.getfixturevalue("embedding").service
    done = subprocess.run(
        [service, tiny_llama.exact],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    three, two = (" ".join(map(str, engine.generate(PROMPT[:n], **GREEDY).tokens)) for n in (3, 2))
    drawn = " ".join(map(str, engine.generate(PROMPT, **DRAWN).tokens))
    depth = engine.manifest.model.num_layers
    assert done.stdout.splitlines() == [
        f"version {tide_export.__version__}",
        "missing failed with 3: bundle 'nowhere' does not exist: `tide-export export MODEL -o nowhere` makes one",
        "slots 1024",
        "stats 1",
        f"generated length {three}",
        f"streamed cancelled {' '.join(three.split()[:4])}",
        f"taken 4 {4 * depth}",
        "empty failed with 4: the prompt is empty: give at least one token",
        f"drawn length {drawn}",
        f"drawn length {drawn}",
        "logprobs 2 1",
        "hook failed with 4: logits_processor failed: seven twice",
        f"encode failed with 3: bundle {tiny_llama.exact} holds no tokenizer.json, so it can only be run on token ids",
        f"read {three} ended",
        f"cancelled cancelled {two.split()[0]}",
        "closed failed with 4: the scheduler is closed: it takes no more requests",
        "drained length 7 7 7 7 7 7",
    ]


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
def test_ctypes(loaded: CEngine, engine: Engine, options: dict[str, Any]) -> None:
    streamed = list[int]()
    ours = loaded.generate(PROMPT, on_token=lambda token: streamed.append(token.id) is None, **options)
    assert streamed == ours.tokens
    again = loaded.generate(PROMPT, **options)
    assert (again.tokens, again.finish_reason) == (ours.tokens, ours.finish_reason)
    expected = engine.generate(PROMPT, **options)
    assert (ours.tokens, ours.finish_reason) == (expected.tokens, expected.finish_reason)
    assert ours.stats.layer_tokens_run == expected.stats.layer_tokens_run


def test_logprobs(loaded: CEngine, engine: Engine) -> None:
    """Of tokens as they come, of a request's and of a generation's."""
    options, streamed = GREEDY | {"logprobs": 2}, list[TokenLogprobs]()
    expected = engine.generate(PROMPT, **options).logprobs
    assert expected is not None

    def take(token: Token) -> bool:
        streamed.append(logprobs_of(token.logprobs, token.logprobs_count))
        return True

    ours = loaded.generate(PROMPT, on_token=take, **options).logprobs
    scheduler = loaded.scheduler()
    request = scheduler.submit(PROMPT, **options)
    read = [logprobs_of(token.logprobs, token.logprobs_count) for token in request]
    assert ours == streamed == read == request.result().logprobs
    request.close()
    scheduler.close()
    for one, right in zip(ours, expected, strict=True):
        assert one.logprob == pytest.approx(right.logprob)
        assert [token for token, _ in one.top] == [token for token, _ in right.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in right.top])


def test_a_logits_processor(loaded: CEngine, engine: Engine) -> None:
    def in_place(ids: list[int], logits: np.ndarray) -> int:
        parity(ids, logits)
        return 0

    hook = hooks_of(in_place)
    for mode in ({"mode": "full"}, {"mode": "exit", "threshold": 0.5}, {"mode": "lossless", "threshold": 0.5}):
        options = GREEDY | {"repetition_penalty": 1.2} | mode
        assert (
            loaded.generate(PROMPT, hook, **options).tokens
            == engine.generate(PROMPT, logits_processor=parity, **options).tokens
        )
    with pytest.raises(Refused, match="logits_processor failed") as refused:
        loaded.generate(PROMPT, hooks_of(lambda ids, logits: 4), **GREEDY)
    assert refused.value.status == 4


def test_text(c_library: ctypes.CDLL, demo_bundle: Path, tokenizers_library: Path) -> None:
    """Text in and out, whole and in pieces, and stop strings, are Python's."""
    python, ours = (
        load(demo_bundle, provider="cpu", threads=1),
        CEngine(c_library, demo_bundle, tokenizers=str(tokenizers_library)),
    )
    for text in ("def f(x):\n    return 'é😀'", "", "a\0b"):
        ids = python.tokenizer.encode_plain(text)
        assert ours.encode(text.replace("\0", ""), False) == python.tokenizer.encode_plain(text.replace("\0", ""))
        assert ours.decode(ids) == ours.decode(ids, room=1) == text
    prompt = ours.encode("import os\nimport sys\n\n", room=2)
    assert prompt == python.tokenizer.encode("import os\nimport sys\n\n")
    whole = ours.generate(prompt, detokenize=True, max_new_tokens=24, mode="full")
    assert whole.text == python.generate(prompt, detokenize=True, max_new_tokens=24, mode="full").text
    assert list(ours.pieces(prompt, whole.tokens)) == _pieces(python, prompt, whole.tokens)
    stop = whole.text[len(whole.text) // 2 :][:3]
    for stops in (stop, ["no such", stop]):
        stopped = ours.generate(prompt, stop=stops, max_new_tokens=24, mode="full")
        assert (stopped.text, stopped.finish_reason) == (whole.text.partition(stop)[0], "stop")
    for text, sentence in (
        ('{"stop": [""]}', "stop must be a string or a list of strings, none of them empty, not ['']"),
        ('{"stop": 3}', "options: field 'stop' must be a string, not 3"),
    ):
        with pytest.raises(Refused) as refused:
            ours.generate(prompt, **json.loads(text))
        assert str(refused.value) == sentence
    ours.close()


def _pieces(engine: Engine, prompt: list[int], tokens: list[int]) -> list[str]:
    text = LateText(engine.tokenizer, prompt)
    texts = [*(text.of(tokens[:count], False) for count in range(len(tokens) + 1)), text.of(tokens, True)]
    return [after[len(before) :] for before, after in pairwise(texts)]


def test_the_same_seed_gives_the_same_tokens(embedding: Embedding, loaded: CEngine, engine: Engine) -> None:
    """In Python, by ctypes and in C++, of a prompt, in a list and in a scheduler (in C: `test_a_program_in_c`)."""
    expected, prompts = engine.generate(PROMPT, **DRAWN).tokens, [[9], PROMPT, [5, 6]]
    assert expected != engine.generate(PROMPT, **DRAWN | {"seed": 8}).tokens
    python, c = engine.scheduler(), loaded.scheduler()
    for scheduler in (python, c):
        requests = [scheduler.submit(prompt, **DRAWN) for prompt in prompts]
        assert requests[1].result().tokens == expected
    del requests
    c.close()
    assert engine.generate(prompts, **DRAWN)[1].tokens == loaded.generate(PROMPT, **DRAWN).tokens == expected
    options = [
        "--mode",
        "full",
        "--max-new-tokens",
        "12",
        "--ignore-eos",
        "--temperature",
        "1.3",
        "--seed",
        "7",
        "--threads",
        "1",
    ]
    for given in (prompts, [PROMPT]):
        ids = [word for prompt in given for word in ("--ids", ",".join(map(str, prompt)))]
        answer = json.loads(run([str(embedding.program), str(engine.bundle.path), *ids, *options]))
        assert answer.get("sequences", [answer] * 2)[1]["tokens"] == expected


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_no_options_are_the_defaults(loaded: CEngine, engine: Engine) -> None:
    """NULL and {}; a field that is null is not given."""
    expected, prompt = engine.generate(PROMPT).tokens, (c_int64 * 3)(*PROMPT)
    for options in (None, b"{}", b'{"max_new_tokens": null, "seed": null}', b' {\n"mode" : "auto"} '):
        generation, scheduler, request = c_void_p(), c_void_p(), c_void_p()
        loaded.call("generate", loaded.handle, prompt, c_size_t(3), options, None, byref(generation))
        assert loaded.taken(generation).tokens == expected
        loaded.call("scheduler_create", loaded.handle, None, byref(scheduler))
        loaded.call("submit", scheduler, prompt, c_size_t(3), options, None, None, byref(request))
        loaded.call("request_result", request, byref(generation))
        assert loaded.taken(generation).tokens == expected
        loaded.functions.tide_request_free(request)
        loaded.functions.tide_scheduler_free(scheduler)


def test_a_prompt_without_tokens(loaded: CEngine) -> None:
    made, scheduler = c_void_p(), loaded.scheduler()
    for prompt in (None, (c_int64 * 1)(3)):
        for name, handle, more in (
            ("generate", loaded, ()),
            ("token_stream_open", loaded, ()),
            ("submit", scheduler, (None,)),
        ):
            with pytest.raises(Refused, match="the prompt is empty: give at least one token") as refused:
                loaded.call(name, handle.handle, prompt, c_size_t(0), None, None, *more, byref(made))
            assert (refused.value.status, made.value) == (4, None)
    scheduler.close()


def test_a_scheduler(loaded: CEngine, engine: Engine) -> None:
    scheduler = loaded.scheduler(slots=1, waiting=1, kv_tokens=None, prompt_tokens=8)
    first, second = (scheduler.submit(PROMPT, timeout=600.0, **GREEDY) for _ in range(2))
    with pytest.raises(Refused, match="1 requests are waiting already: submit again later") as refused:
        scheduler.submit(PROMPT, **GREEDY)
    assert refused.value.status == 5
    scheduler.start()
    expected = engine.generate(PROMPT, **GREEDY)
    assert [token.id for token in first] == second.result().tokens == expected.tokens
    scheduler.close()
    first.close()
    second.close()


def test_the_guide(embedding: Embedding, tiny_llama, engine: Engine, tmp_path: Path) -> None:
    """The blocks of docs/guide/c.md run."""
    prefix = embedding.prefix
    names = {"out/demo": tiny_llama.exact, '"libtide.so"': f'"{prefix}/lib/libtide.so"'}
    blocks = {}
    for language, text in re.findall(r"```(c|python)\n(.*?)```", (ROOT / "docs/guide/c.md").read_text(), re.DOTALL):
        for name, there in names.items():
            text = text.replace(name, str(there))
        blocks[language] = tmp_path / f"guide.{language}"
        blocks[language].write_text(text)
    expected = engine.generate([5, 17, 3], max_new_tokens=16)
    program, flags = tmp_path / "guide", ["-std=c99", "-I", prefix / "include"]
    subprocess.run(["cc", *flags, "-o", program, blocks["c"], "-L", prefix / "lib", "-ltide"], check=True)
    variables = environment(LD_LIBRARY_PATH=prefix / "lib")
    done = subprocess.run([program], env=variables, capture_output=True, text=True, check=True)
    *tokens, stats = done.stdout.splitlines()
    assert [int(token) for token in tokens] == expected.tokens
    assert json.loads(stats)["total_tokens"] == len(expected.tokens)
    done = subprocess.run([sys.executable, blocks["python"]], env=variables, capture_output=True, text=True, check=True)
    pairs = zip(expected.tokens[:8], expected.stats.exit_layer, strict=False)
    assert done.stdout.splitlines() == [f"{token} after {layers} layers" for token, layers in pairs]


@pytest.mark.parametrize("of", ["package", "CMake"])
def test_the_header_says_what_the_library_exports(of: str, request: pytest.FixtureRequest) -> None:
    library = LIBRARY if of == "package" else request.getfixturevalue("embedding").prefix / "lib" / "libtide.so"
    command = ["nm", "-D", "--defined-only", library]
    exported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in exported.splitlines()}
    header = (ROOT / "cpp/include/tide/tide.h").read_text()
    declared = set(re.findall(r"(tide_\w+)\(", header))
    assert symbols - {"RegisterCustomOps"} == declared  # which ONNX Runtime calls
