"""Renders a conversation with a bundle's chat template, as `apply_chat_template` of transformers does."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tide_export.common.values import parse_json
from tide_export.errors import BundleError, GenerationError, first_line
from tide_export.runtime.tokenizer import BundleTokenizer

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Renders the chat template of one bundle.

    Attributes:
        source: the template's text.
    """

    def __init__(self, folder: Path) -> None:
        """Compiles the template in a bundle's folder.

        Raises:
            BundleError: the bundle has no template, or it cannot be compiled.
            GenerationError: jinja2 is missing.
        """
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise GenerationError(
                "a conversation needs the package 'jinja2': pip install 'tide_export[chat]'"
            ) from None
        path = folder / TEMPLATE_FILE
        try:
            source = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BundleError(
                f"bundle {folder} has no {TEMPLATE_FILE}: its model takes no conversations, only text"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"cannot read {path}: {first_line(error)}") from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.source = source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise BundleError(f"'{path}' is not a usable chat template: {first_line(error)}") from error
        self._tokens = special_tokens(folder)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the prompt for the assistant's next message.

        Args:
            tools: the tools that the message may call, in OpenAI's form.

        Raises:
            GenerationError: the template refuses the messages.
        """
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # a template's expressions may raise anything
            raise GenerationError(f"the chat template refuses the messages: {first_line(error)}") from error

    @property
    def takes_tools(self) -> bool:
        """Whether the template mentions tools."""
        return re.search(r"\btools\b", self.source) is not None

    def encode(
        self,
        tokenizer: BundleTokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the prompt for the assistant's next message as token ids.

        Raises:
            GenerationError: the template refuses the messages, or renders an empty text.
        """
        ids = tokenizer.encode_plain(self.render(messages, tools))
        if not ids:
            raise GenerationError("the chat template makes no text of the messages")
        return ids


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of a bundle's tokenizer_config.json, by their names.

    Raises:
        BundleError: the file cannot be read.
    """
    path = folder / CONFIG_FILE
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {path}: {first_line(error)}") from error
    fields = {name: config.get(name) for name in SPECIAL_TOKENS} if isinstance(config, dict) else {}
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in fields.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _refuse(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
