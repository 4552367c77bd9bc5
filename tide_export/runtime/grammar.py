"""Constrains a generation to a JSON schema, a regular expression or a Lark grammar.

After each token, llguidance (extra `grammar`) returns the tokens that may follow. At the end of the grammar these are
the model's end-of-sequence tokens alone.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.opened import Bundle, BundleFile
from tide_export.errors import ConstraintError, GenerationError, one_line
from tide_export.runtime.tokenizer import tokenizer_of

KINDS = ("json_schema", "regex", "grammar")  # options of `GenerationConfig`
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}  # JSON, for llguidance
_vocabularies = WeakKeyDictionary[BundleFile, Any]()  # by open tokenizer file: creating one takes a second


class Grammar:
    """Compiles a grammar for the tokens of one bundle."""

    def __init__(self, bundle: Bundle, kind: str, text: str, json_whitespace: bool = False) -> None:
        """Compiles `text`, whose language is `kind`, one of KINDS.

        Args:
            json_whitespace: as in `GenerationConfig`; "x-guidance" in the schema takes precedence.

        Raises:
            GenerationError: it cannot be compiled; the model has no end-of-sequence token; llguidance is missing, or
                cannot use the tokenizer.
            BundleError: the tokenizer cannot be used.
        """
        matcher_class = _matcher_class(kind)
        from_schema = partial(matcher_class.grammar_from_json_schema, defaults=None if json_whitespace else ONE_LINE)
        compilers: dict[str, Any] = {
            "json_schema": from_schema,
            "regex": matcher_class.grammar_from_regex,
            "grammar": matcher_class.grammar_from_lark,
        }
        tokens = _vocabulary(bundle, kind)
        try:
            matcher = matcher_class(tokens, compilers[kind](text), log_level=0)
        except ValueError as error:
            raise GenerationError(f"{kind} cannot be compiled: {one_line(error)}") from error
        if matcher.is_error():
            raise GenerationError(f"{kind} cannot be compiled: {' '.join(matcher.get_error().split())[:200]}")
        self.kind, self._matcher, self._size = kind, matcher, bundle.manifest.model.vocab_size

    def start(self) -> "GrammarState":
        """Returns the state before the first token of a text."""
        return GrammarState(self.kind, self._matcher, self._size)


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


def schema_error(schema: str) -> str:
    """Returns the reason why a JSON schema cannot be made a grammar; empty: it can.

    Raises:
        GenerationError: llguidance is missing.
    """
    matcher = _matcher_class("json_schema")
    try:
        reason = matcher.validate_grammar(matcher.grammar_from_json_schema(schema))
    except ValueError as error:
        return one_line(error)
    return " ".join(reason.split())[:200]


def _matcher_class(kind: str) -> Any:
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise GenerationError(f"{kind} needs the package 'llguidance': pip install 'tide_export[grammar]'") from None
    return LLMatcher


def _vocabulary(bundle: Bundle, kind: str) -> Any:
    """Returns llguidance's tables of a bundle's tokens, created once per bundle."""
    from llguidance import LLTokenizer

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
