"""Compiles grammars, which may be a stranger's, for the first time; runs in a `LimitedProcess`.

llguidance bounds most of what a grammar can cost, but not all: {"multipleOf": 9999991} would take hours.
"""

from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tide_export.errors import one_line

_vocabularies = dict[str, LLTokenizer]()


def limits() -> LLParserLimits:
    """Returns llguidance's bounds on a grammar."""
    # With its default of 2,000 items an ambiguous grammar's mask takes a second; so 25 ms.
    return LLParserLimits(max_items_in_row=500)


def keep_vocabulary(key: str, tokenizer: str, size: int, ends: list[int]) -> None:
    """Makes llguidance's tables of a tokenizer, for the grammars that name `key`."""
    _vocabularies[key] = LLTokenizer(tokenizer, n_vocab=size, eos_token=ends)


def compiled(key: str, kind: str, text: str, json_options: Any) -> tuple[str, str] | None:
    """Returns a text as a grammar of llguidance, and why it cannot be used; "": it can.

    None: there is no vocabulary `key` yet.
    """
    if key not in _vocabularies:
        return None
    try:
        if kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=json_options)
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(_vocabularies[key], grammar, log_level=0, limits=limits())
        matcher.compute_bitmask()
    except ValueError as error:
        return "", one_line(error)
    reason = " ".join(matcher.get_error().split("<state>")[0].split())[:200]
    return grammar, "it allows no text" if reason.startswith("NoExtension") else reason
