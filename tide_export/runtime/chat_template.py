"""Renders a conversation with a bundle's chat template, as `apply_chat_template` of transformers does.

A template is a program in a small language: it runs in a process with limits on time, memory and output.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tide_export.bundle.file_names import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from tide_export.bundle.opened import Bundle
from tide_export.common.values import parse_json
from tide_export.errors import BundleError, GenerationError, first_line
from tide_export.runtime.limited import LimitedProcess, LimitError
from tide_export.runtime.tokenizer import BundleTokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
SECONDS = 5.0  # of one rendering
_process = LimitedProcess("tide_export.runtime.template_process", SECONDS)


class ChatTemplate:
    """Renders the chat template of one bundle.

    Attributes:
        source: the template's text.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Compiles the bundle's template.

        Raises:
            BundleError: the bundle has no template, or it cannot be compiled.
            GenerationError: jinja2 is missing.
        """
        if find_spec("jinja2") is None:
            raise GenerationError("a conversation needs the package 'jinja2': pip install -e '.[chat]' in the clone")
        source = bundle.text(TEMPLATE_FILE)
        if source is None:
            raise BundleError(
                f"bundle {bundle.path} has no {TEMPLATE_FILE}: its model takes no conversations, only text"
            )
        self.source = source
        try:
            _process.call("check", source)
        except (ValueError, LimitError) as error:
            raise BundleError(
                f"'{bundle.path / TEMPLATE_FILE}' is not a usable chat template: {first_line(error)}"
            ) from error
        self._tokens = special_tokens(bundle)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the prompt for the assistant's next message.

        Args:
            tools: the tools that the message may call, in OpenAI's form.

        Raises:
            GenerationError: the template refuses the messages, or takes too long or too much memory.
        """
        try:
            text: str = _process.call("render", self.source, messages, tools, self._tokens)
        except (ValueError, LimitError) as error:
            raise GenerationError(f"the chat template refuses the messages: {first_line(error)}") from error
        return text

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
            GenerationError: as `render` raises it; or the template renders an empty text.
        """
        ids = tokenizer.encode_plain(self.render(messages, tools))
        if not ids:
            raise GenerationError("the chat template makes no text of the messages")
        return ids


def special_tokens(bundle: Bundle) -> dict[str, str]:
    """Returns the special tokens of a bundle's tokenizer_config.json, by their names.

    Raises:
        BundleError: the file cannot be read.
    """
    try:
        config = parse_json(bundle.text(TOKENIZER_CONFIG_FILE) or "{}")
    except ValueError as error:
        raise BundleError(f"cannot read '{bundle.path / TOKENIZER_CONFIG_FILE}': {first_line(error)}") from error
    fields = {name: config.get(name) for name in SPECIAL_TOKENS} if isinstance(config, dict) else {}
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in fields.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}
