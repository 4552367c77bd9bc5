"""tide.h by ctypes, as a program of another language calls it, and not as the Python package does."""

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.native import onnxruntime_library

ENDED = 1
ROOM = 4096


class Refused(Exception):
    """A call failed: its status, and the sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Logprob(Structure):
    _fields_ = (("id", c_int64), ("logprob", c_double))


class Token(Structure):
    _fields_ = (
        ("id", c_int64),
        ("exit_layer", c_int64),
        ("layers_run", c_int64),
        ("logprobs", POINTER(Logprob)),
        ("logprobs_count", c_size_t),
    )


OnToken = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Token))
ProcessLogits = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_int64), c_size_t, POINTER(ctypes.c_float), c_size_t)
Detokenize = ctypes.CFUNCTYPE(c_void_p, c_void_p, POINTER(c_int64), c_size_t, POINTER(c_size_t))
Process = Callable[[list[int], np.ndarray], int]


class Hooks(Structure):
    _fields_ = (
        ("context", c_void_p),
        ("process_logits", ProcessLogits),
        ("allows_token", c_void_p),
        ("detokenize", Detokenize),
        ("reports", c_int),
    )


def open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("tide_last_error", "tide_generation_stats", "tide_generation_finish_reason"):
        getattr(library, name).restype = c_char_p
    library.tide_generation_tokens.restype = POINTER(c_int64)
    library.tide_generation_text.restype = c_void_p
    library.tide_request_cached_tokens.restype = c_int64
    library.tide_generation_logprobs.restype = POINTER(Logprob)
    return library


def hooks_of(process: Process | None = None, decode: Callable[[list[int]], str | None] | None = None) -> Hooks:
    """Hooks that change the logits in place and return a status, and that give the text of tokens; None: it fails."""
    hooks, texts = Hooks(), list[Any]()

    def process_logits(_: int | None, ids: Any, count: int, logits: Any, vocabulary: int) -> int:
        assert process is not None
        return process(ids[:count], np.ctypeslib.as_array(logits, (vocabulary,)))

    def detokenize(_: int | None, ids: Any, count: int, size: Any) -> int | None:
        assert decode is not None
        text = decode(ids[:count])
        if text is None:
            return None
        texts[:] = [ctypes.create_string_buffer(text.encode())]  # until the next call
        size[0] = len(text.encode())
        return ctypes.addressof(texts[0])

    if process is not None:
        hooks.process_logits = ProcessLogits(process_logits)
    if decode is not None:
        hooks.detokenize = Detokenize(detokenize)
    return hooks


@dataclass(frozen=True)
class CGeneration:
    tokens: list[int]
    finish_reason: str
    stats: SimpleNamespace
    text: str | None
    logprobs: list[TokenLogprobs] | None


def _ids(ids: Sequence[int]) -> tuple[Any, c_size_t]:
    return (c_int64 * len(ids))(*ids), c_size_t(len(ids))


def _json(options: dict[str, Any]) -> bytes:
    return json.dumps(options).encode()


def logprobs_of(values: Any, count: int) -> TokenLogprobs:
    first, *top = ((values[i].id, values[i].logprob) for i in range(count))
    return TokenLogprobs(first[1], tuple(top))


class CEngine:
    """A loaded bundle. An option that is None is not given."""

    def __init__(self, functions: ctypes.CDLL, bundle: Path, **options: Any) -> None:
        self.functions, self.handle = functions, c_void_p()
        options = {"threads": 1, "onnxruntime": onnxruntime_library()} | options
        given = {name: value for name, value in options.items() if value is not None}
        self.call("load", str(bundle).encode(), _json(given), byref(self.handle))

    def close(self) -> None:
        self.functions.tide_engine_free(self.handle)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.functions, f"tide_{name}")(*arguments)
        if status:
            raise Refused(status, self.functions.tide_last_error().decode())

    def generate(
        self,
        ids: Sequence[int],
        hooks: Hooks | None = None,
        on_token: Callable[[Token], bool] | None = None,
        **options: Any,
    ) -> CGeneration:
        generation = c_void_p()
        request = (self.handle, *_ids(ids), _json(options), hooks and byref(hooks))
        if on_token is None:
            self.call("generate", *request, byref(generation))
        else:
            callback = OnToken(lambda _, token: int(on_token(token.contents)))
            self.call("stream", *request, callback, None, byref(generation))
        return self.taken(generation)

    def taken(self, generation: c_void_p) -> CGeneration:
        """Its content; it is freed."""
        count, functions = c_size_t(), self.functions
        tokens = functions.tide_generation_tokens(generation, byref(count))[: count.value]
        stats = json.loads(functions.tide_generation_stats(generation))
        text = functions.tide_generation_text(generation, byref(count))
        content = None if text is None else ctypes.string_at(text, count.value).decode()
        logprobs = []
        for number in range(len(tokens)):
            values = functions.tide_generation_logprobs(generation, c_size_t(number), byref(count))
            logprobs += [logprobs_of(values, count.value)] if values else []
        reason = functions.tide_generation_finish_reason(generation).decode()
        functions.tide_generation_free(generation)
        return CGeneration(tokens, reason, SimpleNamespace(**stats), content, logprobs or None)

    def encode(self, text: str, special_tokens: bool = True, room: int = ROOM) -> list[int]:
        ids, count = (c_int64 * room)(), c_size_t()
        self.call("encode", self.handle, text.encode(), int(special_tokens), ids, c_size_t(room), byref(count))
        return ids[: count.value] if count.value <= room else self.encode(text, special_tokens, count.value)

    def decode(self, ids: Sequence[int], special_tokens: bool = False, room: int = ROOM) -> str:
        text, size = ctypes.create_string_buffer(room), c_size_t()
        self.call("decode", self.handle, *_ids(ids), int(special_tokens), text, c_size_t(room), byref(size))
        return (
            text.raw[: size.value].decode() if size.value < room else self.decode(ids, special_tokens, size.value + 1)
        )

    def pieces(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[str]:
        """The text of each token, and the rest."""
        stream, piece, size = c_void_p(), c_void_p(), c_size_t()
        self.call("text_stream_create", self.handle, *_ids(prompt), byref(stream))
        for token in tokens:
            self.call("text_stream_push", stream, c_int64(token), byref(piece), byref(size))
            yield ctypes.string_at(piece, size.value).decode()
        self.call("text_stream_finish", stream, byref(piece), byref(size))
        yield ctypes.string_at(piece, size.value).decode()
        self.functions.tide_text_stream_free(stream)

    def scheduler(self, **limits: Any) -> "CScheduler":
        return CScheduler(self, limits)


class CScheduler:
    def __init__(self, engine: CEngine, limits: dict[str, Any]) -> None:
        self.engine, self.handle = engine, c_void_p()
        engine.call("scheduler_create", engine.handle, _json(limits), byref(self.handle))

    def start(self) -> None:
        self.engine.call("scheduler_start", self.handle)

    def close(self) -> None:
        self.engine.functions.tide_scheduler_free(self.handle)

    def step(self) -> bool:
        return bool(self.engine.functions.tide_scheduler_step(self.handle))

    def submit(
        self, ids: Sequence[int], hooks: Hooks | None = None, timeout: float | None = None, **options: Any
    ) -> "CRequest":
        handle, seconds = c_void_p(), None if timeout is None else byref(c_double(timeout))
        given = hooks and byref(hooks)
        self.engine.call("submit", self.handle, *_ids(ids), _json(options), given, seconds, byref(handle))
        return CRequest(self.engine, handle, hooks)


class CRequest:
    def __init__(self, engine: CEngine, handle: c_void_p, hooks: Hooks | None) -> None:
        self._engine, self.handle = engine, handle
        self._hooks = hooks  # which must live until the request has ended

    def __iter__(self) -> Iterator[Token]:
        token = Token()
        while (status := self._engine.functions.tide_request_next(self.handle, byref(token))) == 0:
            yield token
        if status != ENDED:
            raise Refused(status, self._engine.functions.tide_last_error().decode())

    @property
    def cached_tokens(self) -> int:
        return self._engine.functions.tide_request_cached_tokens(self.handle)

    def cancel(self) -> None:
        self._engine.functions.tide_request_cancel(self.handle)

    def result(self) -> CGeneration:
        generation = c_void_p()
        self._engine.call("request_result", self.handle, byref(generation))
        return self._engine.taken(generation)

    def close(self) -> None:
        self._engine.functions.tide_request_free(self.handle)
