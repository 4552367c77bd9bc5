"""Compiles and renders chat templates, which may be a stranger's; runs in a `LimitedProcess`."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 22  # of a rendered text


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """Compiles a template as transformers does."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def check(source: str) -> None:
    """Compiles a template."""
    compiled(source)


def render(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    tokens: dict[str, str],
) -> str:
    """Renders a template; `tokens` are the special tokens by name."""
    pieces, characters = [], 0
    for piece in compiled(source).generate(messages=messages, tools=tools, add_generation_prompt=True, **tokens):
        characters += len(piece)
        if characters > MAX_CHARACTERS:
            raise ValueError(f"it makes a text of more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
