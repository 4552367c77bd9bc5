"""Chat templates: what transformers renders, what a template refuses, and what a stranger's cannot do."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from bundles import put_text
from transformers import AutoTokenizer

from tide_export.bundle.opened import open_bundle
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.chat_template import ChatTemplate, special_tokens

TEMPLATE = (
    "{% for message in messages %}\n"
    "    {%- if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ bos_token }}{{ message['role'] | upper }}: {{ message['content'] | trim }}{{ {'a': 'é'} | tojson }}\n"
    "    {%- if loop.last %}{% break %}{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FILE = "chat_template.jinja"
MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi <b>"}]


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    shutil.copytree(demo_bundle, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    put_text(folder, "tokenizer_config.json", json.dumps(config | {"bos_token": "<|endoftext|>"}))
    put_text(folder, FILE, TEMPLATE)
    return folder


def template_of(bundle: Path, source: str | None = None) -> ChatTemplate:
    if source is not None:
        put_text(bundle, FILE, source)
    return ChatTemplate(open_bundle(bundle))


def test_it_renders_what_transformers_renders(bundle: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert template_of(bundle).render(MESSAGES) == expected
    assert "SYSTEM: Be brief." in expected


def test_what_it_refuses_is_an_error(bundle: Path) -> None:
    with pytest.raises(GenerationError, match="the chat template refuses the messages: no tools here"):
        template_of(bundle).render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"]
)
def test_a_template_is_no_program(bundle: Path, source: str) -> None:
    with pytest.raises(GenerationError, match="the chat template refuses the messages"):
        template_of(bundle, source).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes longer than 0.5 s"),
        ("{{ 'x' * 10 ** 12 }}", "needs more than 1024 MiB of memory"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "makes a text of more than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_has_bounds(bundle: Path, source: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_export.runtime import chat_template
    from tide_export.runtime.limited import LimitedProcess

    process = LimitedProcess("tide_export.runtime.template_process", 0.5)
    monkeypatch.setattr(chat_template, "_process", process)
    started = time.monotonic()
    with pytest.raises(GenerationError, match=f"the chat template refuses the messages: .*{says}"):
        template_of(bundle, source).render(MESSAGES)
    assert time.monotonic() - started < 30  # a machine that does something else, too
    assert template_of(bundle, "fine").render(MESSAGES) == "fine"
    process.close()


def test_one_that_cannot_be_compiled_is_named(bundle: Path) -> None:
    with pytest.raises(BundleError, match="is not a usable chat template"):
        template_of(bundle, "{% for x in %}")


def test_nothing_is_read_that_the_manifest_does_not_list(demo_bundle: Path, tmp_path: Path) -> None:
    """Neither a file that a link leads to, nor a pipe that nobody writes into, nor what replaced a listed file."""
    folder, secret = tmp_path / "bundle", tmp_path / "secret"
    shutil.copytree(demo_bundle, folder)
    secret.write_text("secret")
    (folder / FILE).symlink_to(secret)
    with pytest.raises(BundleError, match="takes no conversations"):
        template_of(folder)
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with pytest.raises(BundleError, match="takes no conversations"):
        template_of(folder)
    (folder / FILE).unlink()
    put_text(folder, FILE, "listed")
    opened = open_bundle(folder)
    (folder / FILE).write_text("forged")
    with pytest.raises(BundleError, match=r"changed after|its sha256 is not the manifest's"):
        ChatTemplate(opened)
    (folder / FILE).unlink()
    (folder / FILE).write_text("listed")
    config = folder / "tokenizer_config.json"
    config.write_text('{"eos_token": "!"}'.ljust(config.stat().st_size))
    with pytest.raises(BundleError, match="is corrupt"):
        special_tokens(open_bundle(folder, verify=False))
