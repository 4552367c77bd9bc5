"""Mistakes through the C interface: each is refused with its status and one sentence."""

import ctypes
import json
import re
import threading
from ctypes import byref, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest
from builds import ROOT
from c_interface import CEngine, Refused

PROMPT = [3, 14, 15]
GREEDY: dict[str, Any] = {"mode": "full", "max_new_tokens": 6, "stop_token_ids": []}
DRAWN: dict[str, Any] = GREEDY | {"max_new_tokens": 12, "temperature": 1.3, "seed": 7}


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


def resolved(loaded: CEngine, prompts: int) -> None:
    text = ctypes.create_string_buffer(16)
    loaded.call("resolve", loaded.handle, b"{}", c_size_t(prompts), text, c_size_t(16), byref(c_size_t()))


def started(loaded: CEngine, max_pending: int) -> None:
    thresholds = (ctypes.c_double * 2)(2.0, 2.0)
    loaded.call(
        "sequence_create", loaded.handle, thresholds, c_size_t(2), c_int64(max_pending), None, byref(c_void_p())
    )


def test_other_errors(loaded: CEngine, tiny_llama, demo_bundle: Path) -> None:
    functions, bundle = loaded.functions, tiny_llama.exact
    manifest = (bundle / "tide.json").read_text()

    def opened(text: str, **files: int) -> CEngine:
        return CEngine(functions, bundle, opened={"manifest": text, "files": files})

    for status, sentence, call in [
        (2, "threads must be a whole number from 1 to 1024, not 0", lambda: CEngine(functions, bundle, threads=0)),
        (2, "options: field 'slow' is unknown", lambda: CEngine(functions, bundle, slow=0)),
        (6, "provider", lambda: CEngine(functions, bundle, provider="abacus")),
        (2, "options: field 'opened.files' is missing", lambda: CEngine(functions, bundle, opened={"manifest": ""})),
        (2, "field 'opened.files.a' is no descriptor", lambda: opened("", a=1 << 31)),
        (3, "is not valid JSON", lambda: opened("")),
        (3, "cannot read bundle file '.*': Bad file descriptor", lambda: opened(manifest)),
        (4, "slots must be a whole number, 1 or more, not 0", lambda: loaded.scheduler(slots=0)),
        (4, "slots must be a whole number from 1 to 1024, not 1025", lambda: loaded.scheduler(slots=1025)),
        (4, "a list has at most 16777216 prompts, not 18446744073709551615", lambda: resolved(loaded, 2**64 - 1)),
        (4, "max_pending must be a whole number, 0 or more, not -2", lambda: started(loaded, -2)),
        (3, "holds no tokenizer.json, so it can only be run on token ids", lambda: loaded.generate(PROMPT, stop="a")),
        (6, "text needs a library", lambda: CEngine(functions, demo_bundle, tokenizers="/no/such.so").encode("a")),
    ]:
        with pytest.raises(Refused, match=sentence) as refused:
            call()
        assert refused.value.status == status


NO_OBJECT = "options: field '' must be an object, not"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (b"", "the options are not valid JSON"),
        (b'{"threads": 1', "the options are not valid JSON"),
        (b'{"threads": 1} x', "the options are not valid JSON"),
        (b'{"threads": NaN}', "the options are not valid JSON"),
        (b'{"bundle": "\xff"}', "the options are not valid JSON"),
        (b"3", f"{NO_OBJECT} 3"),
        (b"null", f"{NO_OBJECT} null"),
        (b'{"Threads": 1}', "options: field 'Threads' is unknown"),
        (b'{"threads": "1"}', "options: field 'threads' must be a whole number, not \"1\""),
        (b'{"threads": true}', "options: field 'threads' must be a whole number, not true"),
        (b'{"threads": 1e2}', "options: field 'threads' must be a whole number, not 100.0"),
        (b'{"threads": 99999999999999999999}', "options: field 'threads' must be a whole number"),
        (b'{"verify": 1}', "options: field 'verify' must be true or false, not 1"),
        (b'{"provider": ["cpu"]}', "options: field 'provider' must be a string, not a list"),
        (b'{"device": -1, "provider": "cuda"}', "device must be a whole number from 0 to 1023, not -1"),
    ],
)
def test_options_of_an_engine_that_are_refused(
    c_library: ctypes.CDLL, tiny_llama, options: bytes, sentence: str
) -> None:
    engine = c_void_p()
    status = c_library.tide_load(str(tiny_llama.exact).encode(), options, byref(engine))
    said = c_library.tide_last_error().decode()
    assert (status, engine.value, said[: len(sentence)]) == (2, None, sentence)


DRAFTED: dict[str, Any] = {"mode": "lossless"}
DRAFTS = {"thresholds": [0, 0], "max_drafts": 4, "prompt_lookup": 4, "draft_costs": [0, 0], "verify_costs": [0] * 5}


@pytest.mark.parametrize(
    ("call", "options", "sentence"),
    [
        ("generate", {"temperature": "warm"}, "options: field 'temperature' must be a number, not \"warm\""),
        ("generate", {"temperature": -1}, "temperature must be 0 or more, not -1.0"),
        ("generate", {"stop_token_ids": 3}, "options: field 'stop_token_ids' must be a list, not 3"),
        ("generate", {"stop_token_ids": [1.5]}, "options: field 'stop_token_ids.0' must be a whole number, not 1.5"),
        ("generate", {"stop_token_ids": [-1]}, "stop_token_ids holds token id -1, outside the vocabulary"),
        ("generate", {"logit_bias": [1]}, "options: field 'logit_bias' must be an object, not a list"),
        ("generate", {"logit_bias": {"-1": 1}}, "a token id of logit_bias must be a whole number, 0 or more, not -1"),
        ("generate", {"logit_bias": {"1 ": 1}}, "options: field 'logit_bias.1 ' is no token id"),
        ("generate", {"drafting": {}}, "options: field 'drafting.thresholds' is missing"),
        ("generate", DRAFTED | {"drafting": DRAFTS | {"verify_costs": [0.1]}}, "drafting.verify_costs must have five"),
        ("generate", DRAFTED | {"drafting": DRAFTS | {"draft_costs": []}}, "drafting.draft_costs must have one value"),
        ("generate", DRAFTED | {"drafting": DRAFTS | {"thresholds": [0]}}, "drafting.thresholds must have one value"),
        ("generate", DRAFTED | {"drafting": DRAFTS | {"max_drafts": -1}}, "drafting.max_drafts must be 0 or more"),
        (
            "generate",
            DRAFTED | {"drafting": DRAFTS | {"draft_costs": [0, -1]}},
            "drafting.draft_costs holds a negative",
        ),
        ("generate", {"detokenize": "yes"}, "options: field 'detokenize' must be true or false, not \"yes\""),
        ("generate", {"compaction_threshold": 0.5}, "compaction_threshold is for a list of prompts"),
        ("scheduler", {"threads": 1}, "options: field 'threads' is unknown"),
        ("scheduler", {"slots": 1.0}, "options: field 'slots' must be a whole number, not 1.0"),
        ("scheduler", {"prompt_tokens": 0}, "prompt_tokens must be a whole number, 1 or more, not 0"),
        ("scheduler", {"waiting": 0}, "waiting must be a whole number, 1 or more, not 0"),
        ("scheduler", {"kv_tokens": -1}, "kv_tokens must be a whole number, 1 or more, not -1"),
        ("scheduler", {"prefix_cache_bytes": -1}, "prefix_cache_bytes must be a whole number, 0 or more, not -1"),
        ("scheduler", {"prefix_cache_bytes": 100}, "prefix_cache_bytes is 100, and the K/V of 16 tokens have"),
        ("scheduler", {"compaction_threshold": 2}, "compaction_threshold must lie in [0, 1], not 2.0"),
        ("scheduler", {"audit_rate": 0}, "audit rate must be above 0 and at most 1, not 0.0"),
    ],
)
def test_other_options_that_are_refused(loaded: CEngine, call: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        loaded.generate(PROMPT, **options) if call == "generate" else loaded.scheduler(**options)
    assert (refused.value.status, str(refused.value)[: len(sentence)]) == (4, sentence)


@pytest.mark.parametrize(
    ("options", "position", "sentence"),
    [
        (b"{", 0, "the options are not valid JSON"),
        (b'{"top_p": 0}', 0, "top_p must be above 0 and at most 1, not 0.0"),
        (None, -1, "position must be a whole number, 0 or more, not -1"),
    ],
)
def test_a_draw_that_is_refused(c_library: ctypes.CDLL, options: bytes | None, position: int, sentence: str) -> None:
    logits, token = (ctypes.c_float * 4)(0, 3, 2, 1), c_int64(-7)
    given = c_int64(position), logits, c_size_t(4), byref(token)
    assert (c_library.tide_sample(options, *given), token.value) == (4, -7)
    assert c_library.tide_last_error().decode() == sentence
    assert (c_library.tide_sample(None, c_int64(0), *given[1:]), token.value) == (0, 1)


def test_what_does_not_fit_is_cut(loaded: CEngine) -> None:
    """Text that has no room ends nowhere else, and its whole size is said."""
    size, whole = c_size_t(), ctypes.create_string_buffer(4096)
    loaded.call("resolve", loaded.handle, None, c_size_t(0), whole, c_size_t(4096), byref(size))
    assert json.loads(whole.value)["mode"] == "full"
    assert len(whole.value) == size.value
    for room in (0, 1, 7, size.value, size.value + 1):
        part = ctypes.create_string_buffer(b"#" * 4095)
        loaded.call("resolve", loaded.handle, None, c_size_t(0), part, c_size_t(room), byref(size))
        assert (size.value, part.raw[room:4095]) == (len(whole.value), b"#" * (4095 - room))
        assert part.raw[:room] == whole.raw[:room]


def test_tokens_beyond_the_last_are_none(loaded: CEngine) -> None:
    scheduler = loaded.scheduler()
    request, ids, status = scheduler.submit(PROMPT, **GREEDY), (c_int64 * 4)(), ctypes.c_int(-1)
    read = loaded.functions.tide_request_read
    read.restype = c_size_t
    assert (read(request.handle, c_size_t(2**63), ids, c_size_t(4), byref(status)), status.value) == (0, 0)
    tokens = request.result().tokens
    for start in (0, 3, 5, 6, 7, 2**63):
        count = read(request.handle, c_size_t(start), ids, c_size_t(4), byref(status))
        assert ids[:count] == tokens[start : start + 4]
        assert status.value == (1 if start + count >= 6 else 0)
    request.close()
    scheduler.close()


def test_nothing_is_freed_of_null(c_library: ctypes.CDLL) -> None:
    kinds = ["engine", "token_stream", "text_stream", "generation", "scheduler", "request", "sequence", "batch"]
    header = (ROOT / "cpp/include/tide/tide.h").read_text()
    assert sorted(re.findall(r"tide_(\w+)_free\(", header)) == sorted(kinds)
    for kind in kinds:
        getattr(c_library, f"tide_{kind}_free")(None)


def test_each_thread_has_its_last_error(c_library: ctypes.CDLL) -> None:
    said, engine = list[str](), c_void_p()

    def fail(name: bytes) -> None:
        c_library.tide_load(name, None, byref(engine))
        said.append(c_library.tide_last_error().decode())

    fail(b"mine")
    other = threading.Thread(target=fail, args=(b"another's",))
    other.start()
    other.join()
    assert [line.split(":")[0] for line in said] == [
        "bundle 'mine' does not exist",
        "bundle 'another's' does not exist",
    ]
    assert c_library.tide_last_error().decode() == said[0]
