"""Constrains a generation to a JSON schema, a regular expression or a Lark grammar.

After each token, llguidance (extra `grammar`) returns the tokens that may follow. At the end of the grammar these are
the model's end-of-sequence tokens alone. Compiling a grammar can take hours and gigabytes, so another process tries it.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.opened import Bundle, BundleFile
from tide_export.errors import ConstraintError, GenerationError, one_line
from tide_export.runtime.limited import LimitedProcess, LimitError
from tide_export.runtime.tokenizer import tokenizer_of

KINDS = ("json_schema", "regex", "grammar")  # options of `GenerationConfig`
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}  # JSON, for llguidance
GRAMMAR_SECONDS, VOCABULARY_SECONDS = 5.0, 120.0  # of compiling a request's, and of the tables of a large vocabulary
LAST_SECONDS = 0.01  # for what is compiled when they have passed
GRAMMAR_BYTES = 1 << 31
_process = LimitedProcess("tide_export.runtime.grammar_process", GRAMMAR_SECONDS, GRAMMAR_BYTES)
_vocabularies = WeakKeyDictionary[BundleFile, Any]()  # by open tokenizer file: creating one takes a second
_turns = defaultdict[int, Lock](Lock)  # of threads to compile, by process: a fork has its own
_request: ContextVar["Compilations | None"] = ContextVar("_request", default=None)


class Grammar:
    """Compiles a grammar for the tokens of one bundle."""

    def __init__(self, bundle: Bundle, kind: str, text: str, json_whitespace: bool = False) -> None:
        """Compiles `text`, whose language is `kind`, one of KINDS.

        Args:
            json_whitespace: as in `GenerationConfig`; "x-guidance" in the schema takes precedence.

        Raises:
            GenerationError: it cannot be compiled, or not within the time of `Compilations`; the model has no
                end-of-sequence token; llguidance is missing, or cannot use the tokenizer.
            BundleError: the tokenizer cannot be used.
        """
        tokens = _vocabulary(bundle, kind)
        grammar, wrong = _compiled(bundle, kind, text, not json_whitespace)
        if wrong:
            raise GenerationError(f"{kind} cannot be compiled: {wrong}")
        from llguidance import LLMatcher

        from tide_export.runtime.grammar_process import limits

        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise GenerationError(f"{kind} cannot be compiled: {' '.join(matcher.get_error().split())[:200]}")
        self.kind, self._matcher, self._size = kind, matcher, bundle.manifest.model.vocab_size

    def start(self) -> "GrammarState":
        """Returns the state before the first token of a text."""
        return GrammarState(self.kind, self._matcher, self._size)


class Compilations:
    """Compiles the grammars of one request: each once, and all of them within GRAMMAR_SECONDS.

    What is compiled outside of `shared` is a request of its own.
    """

    def __init__(self) -> None:
        """Starts with the whole time."""
        self._left, self.grammars = GRAMMAR_SECONDS, dict[tuple[BundleFile, str, str, bool], Grammar]()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Takes what this thread compiles in a `with` block as the request's."""
        before = _request.set(self)
        try:
            yield
        finally:
            _request.reset(before)

    def compiled(self, *asked: Any) -> Any:
        """Calls `compiled` of the other process within the time that is left; LimitError if it was too little."""
        end = time.monotonic() + self._left
        try:
            found = _process.call("compiled", *asked, seconds=self._left)
        except LimitError:
            if time.monotonic() < end:
                raise
            raise LimitError(f"takes longer than {GRAMMAR_SECONDS:g} s") from None
        if found is not None:  # otherwise it was the start of the process
            self._left = max(end - time.monotonic(), LAST_SECONDS)
        return found


class GrammarState:
    """Tracks the position of one text in a grammar."""

    def __init__(self, kind: str, matcher: Any, vocab_size: int) -> None:
        """Copies `matcher`, llguidance's matcher at the start of a text."""
        self._kind, self._matcher, self._size = kind, matcher.deep_copy(), vocab_size
        self._tokens: list[int] = []
        self._after_stop = 0  # tokens after the end of the grammar

    def read(self, tokens: list[int]) -> None:
        """Moves to the end of `tokens`, the text read before with tokens added or removed at its end.

        Raises:
            ConstraintError: the grammar became too complex.
        """
        kept = min(len(self._tokens), len(tokens))
        while self._tokens[:kept] != tokens[:kept]:
            kept -= 1
        self._rewind(len(self._tokens) - kept)
        self._tokens = tokens[:kept]
        for token in tokens[kept:]:
            self._accept(token)
            self._tokens.append(token)

    def mask(self) -> np.ndarray:
        """Returns which tokens may follow, bool [V].

        Raises:
            ConstraintError: the grammar became too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._size, bitorder="little").view(bool)

    def allows(self, token: int) -> bool:
        """Whether a token may follow, and more after it."""
        return not self._matcher.is_stopped() and self._matcher.validate_tokens([token]) == 1

    def _accept(self, token: int) -> None:
        if self._matcher.is_stopped():  # an end-of-sequence token follows, which llguidance does not count
            self._after_stop += 1
        else:
            self._matcher.consume_token(token)
            self._check()

    def _rewind(self, count: int) -> None:
        uncounted = min(count, self._after_stop)
        self._after_stop -= uncounted
        if count > uncounted:
            self._matcher.rollback(count - uncounted)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().split("<state>")[0]
            raise ConstraintError(f"{self._kind} cannot be followed: {' '.join(reason.split())[:200]}")


def stop_compiling() -> None:
    """Ends a compilation that another thread waits for, which is refused then."""
    _process.interrupt()


def grammar_of(bundle: Bundle, kind: str, text: str, json_whitespace: bool) -> Grammar:
    """Returns a `Grammar`, in a block of `Compilations.shared` the one that the request already has.

    Raises:
        GenerationError, BundleError: as `Grammar` raises them.
    """
    grammars = (_request.get() or Compilations()).grammars
    key = bundle.files[TOKENIZER_FILE], kind, text, json_whitespace
    if key not in grammars:
        grammars[key] = Grammar(bundle, kind, text, json_whitespace)
    return grammars[key]


def schema_error(bundle: Bundle, schema: str) -> str:
    """Returns the reason why a JSON schema cannot be made a grammar; empty: it can.

    Raises:
        GenerationError, BundleError: as `Grammar` raises them.
    """
    _vocabulary(bundle, "json_schema")
    return _compiled(bundle, "json_schema", schema, False)[1]


def _compiled(bundle: Bundle, kind: str, text: str, one_line_json: bool) -> tuple[str, str]:
    """Compiles a text in another process; returns llguidance's grammar, and why it cannot be used."""
    model = bundle.manifest.model
    key, options = bundle.manifest.files[TOKENIZER_FILE].sha256, ONE_LINE if one_line_json else None
    request = _request.get() or Compilations()
    try:
        with _turns[os.getpid()]:  # what others compile takes none of its time
            while (found := request.compiled(key, kind, text, options)) is None:
                tokenizer, ends = tokenizer_of(bundle).to_json(), list(model.eos_token_ids)
                _process.call("keep_vocabulary", key, tokenizer, model.vocab_size, ends, seconds=VOCABULARY_SECONDS)
    except (LimitError, ValueError) as error:
        return "", str(error)
    grammar, wrong = found
    return grammar, wrong


def _vocabulary(bundle: Bundle, kind: str) -> Any:
    """Returns llguidance's tables of a bundle's tokens, created once per bundle."""
    try:
        from llguidance import LLTokenizer
    except ModuleNotFoundError:
        raise GenerationError(
            f"{kind} needs the package 'llguidance': pip install -e '.[grammar]' in the clone"
        ) from None
    ends, file = list(bundle.manifest.model.eos_token_ids), bundle.files[TOKENIZER_FILE]
    if not ends:
        raise GenerationError(f"{kind} needs a model with an end-of-sequence token, and that of {bundle.path} has none")
    if file not in _vocabularies:
        text = tokenizer_of(bundle).to_json()
        try:
            _vocabularies[file] = LLTokenizer(text, n_vocab=bundle.manifest.model.vocab_size, eos_token=ends)
        except Exception as error:  # Rust raises several kinds
            raise GenerationError(f"{kind} cannot be used with the bundle's tokenizer: {one_line(error)}") from error
    return _vocabularies[file]
