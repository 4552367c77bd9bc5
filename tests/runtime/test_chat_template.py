"""Chat templates: what transformers renders, and what a template refuses."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.chat_template import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}\n"
    "    {%- if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ bos_token }}{{ message['role'] | upper }}: {{ message['content'] | trim }}{{ {'a': 'é'} | tojson }}\n"
    "    {%- if loop.last %}{% break %}{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi <b>"}]


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    shutil.copytree(demo_bundle, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
    return folder


def test_it_renders_what_transformers_renders(bundle: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(bundle).render(MESSAGES) == expected
    assert "SYSTEM: Be brief." in expected


def test_what_it_refuses_is_an_error(bundle: Path) -> None:
    template = ChatTemplate(bundle)
    with pytest.raises(GenerationError, match="the chat template refuses the messages: no tools here"):
        template.render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"]
)
def test_a_template_is_no_program(bundle: Path, source: str) -> None:
    (bundle / "chat_template.jinja").write_text(source)
    with pytest.raises(GenerationError, match="the chat template refuses the messages"):
        ChatTemplate(bundle).render(MESSAGES)


def test_one_that_cannot_be_compiled_is_named(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_text("{% for x in %}")
    with pytest.raises(BundleError, match="is not a usable chat template"):
        ChatTemplate(bundle)
    (bundle / "chat_template.jinja").unlink()
    with pytest.raises(BundleError, match="takes no conversations"):
        ChatTemplate(bundle)
