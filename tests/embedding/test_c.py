"""The interface for C: a program in C, and ctypes, have the tokens and errors that the Python package has."""

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from ctypes import byref, c_int64, c_size_t, c_void_p
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builds import ROOT, Embedding, environment
from c_interface import CEngine, Refused, Token, hooks_of, logprobs_of, open_library

import tide_export
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.native import LIBRARY
from tide_export.runtime.tokenizer import LateText

PROMPT = [3, 14, 15]
GREEDY: dict[str, Any] = {"mode": "full", "max_new_tokens": 6, "stop_token_ids": []}


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module")
def c_library() -> ctypes.CDLL:
    """The package's library, opened as another program opens it."""
    return open_library(LIBRARY)


def parity(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Even and odd tokens by turns."""
    logits[(len(ids) + 1) % 2 :: 2] = -np.inf
    return logits


def test_a_program_in_c(embedding: Embedding, tiny_llama, engine: Engine) -> None:
    done = subprocess.run(
        [embedding.service, tiny_llama.exact],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    three, two = (" ".join(map(str, engine.generate(PROMPT[:n], **GREEDY).tokens)) for n in (3, 2))
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
        "logprobs 2 1",
        "hook failed with 4: logits_processor failed: seven twice",
        f"encode failed with 3: bundle {tiny_llama.exact} holds no tokenizer.json, so it can only be run on token ids",
        f"read {three} ended",
        f"cancelled cancelled {two.split()[0]}",
        "closed failed with 4: the scheduler is closed: it takes no more requests",
        "drained length 7 7 7 7 7 7",
    ]


@pytest.fixture(scope="module")
def loaded(c_library: ctypes.CDLL, tiny_llama) -> Iterator[CEngine]:
    engine = CEngine(c_library, tiny_llama.exact)
    yield engine
    engine.close()


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
def test_options_are_refused(loaded: CEngine, text: str, sentence: str) -> None:
    generation = c_void_p()
    request = (loaded.handle, (c_int64 * 3)(*PROMPT), c_size_t(3), text.encode(), None)
    with pytest.raises(Refused) as refused:
        loaded.call("generate", *request, byref(generation))
    assert (refused.value.status, str(refused.value), generation.value) == (4, sentence, None)


def test_other_errors(loaded: CEngine, tiny_llama, demo_bundle: Path) -> None:
    functions, bundle = loaded.functions, tiny_llama.exact
    for status, sentence, call in [
        (2, "threads must be a whole number from 1 to 1024, not 0", lambda: CEngine(functions, bundle, threads=0)),
        (2, "options: field 'slow' is unknown", lambda: CEngine(functions, bundle, slow=0)),
        (6, "provider", lambda: CEngine(functions, bundle, provider="abacus")),
        (4, "slots must be a whole number, 1 or more, not 0", lambda: loaded.scheduler(slots=0)),
        (3, "holds no tokenizer.json, so it can only be run on token ids", lambda: loaded.generate(PROMPT, stop="a")),
        (6, "text needs a library", lambda: CEngine(functions, demo_bundle, tokenizers="/no/such.so").encode("a")),
    ]:
        with pytest.raises(Refused, match=sentence) as refused:
            call()
        assert refused.value.status == status


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
def test_the_header_says_what_the_library_exports(embedding: Embedding, of: str) -> None:
    library = LIBRARY if of == "package" else embedding.prefix / "lib" / "libtide.so"
    command = ["nm", "-D", "--defined-only", library]
    exported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in exported.splitlines()}
    header = (ROOT / "cpp/include/tide/tide.h").read_text()
    declared = set(re.findall(r"(tide_\w+)\(", header))
    others = {name for name in symbols if name == "RegisterCustomOps" or name.startswith("tide_ops_")}  # of operators
    assert symbols - others == declared
