"""Prompts: shipped ones and the user's, and which are held out."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiers

from tide_export.drafting.config import DraftConfig
from tide_export.drafting.prompts import HELD_OUT_PROMPTS, Prompts, check_prompts, choose_prompts
from tide_export.drafting.shipped_prompts import PLACEHOLDER, WRITTEN, shipped_prompts
from tide_export.errors import DraftError

ROOT = Path(__file__).parents[2]


def benchmark_prompts() -> list[str]:
    files = (ROOT / "tools" / "benchmarks" / "prompts").glob("*.txt")
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.mark.parametrize("chat", [True, False])
def test_shipped_prompts_are_many_and_none_is_of_the_benchmark(chat: bool) -> None:
    prompts = shipped_prompts(0, 5000, chat)
    assert len(prompts) == 5000
    assert 30 < len(set(prompts.values())) < 3000, "of many forms"
    some = shipped_prompts(0, 1000, chat)
    assert some == shipped_prompts(0, 1000, chat)
    assert len(set(some) & set(shipped_prompts(1, 1000, chat))) < 500
    for prompt in prompts:
        assert not PLACEHOLDER.search(prompt) or not chat
        assert prompt == prompt.rstrip(" ")
    assert max(map(len, prompts)) < 1000
    benchmark = {line.strip().lower() for line in benchmark_prompts()}
    assert len(benchmark) > 50
    drawn = shipped_prompts(0, tiers.sized(5000, 20_000), chat)
    assert not benchmark & {prompt.strip().lower() for prompt in drawn}


def test_shipped_prompts_are_of_many_kinds() -> None:
    prompts = shipped_prompts(0, 3000, True)
    for word in ("Python", "SQL", "email", "Translate", "story", "Was", "请", "Correct"):
        assert any(word in prompt for prompt in prompts), word
    beginnings = shipped_prompts(0, 3000, False)
    assert any(prompt.startswith("def ") for prompt in beginnings)


def test_written_prompts_are_taken_once_each() -> None:
    written = WRITTEN.read_text(encoding="utf-8").splitlines()
    assert len(written) == len(set(written)) > 2000
    prompts = shipped_prompts(0, 20_000, True)
    assert sum(prompt in prompts for prompt in written) > 0.95 * len(written)
    assert not set(written) & shipped_prompts(0, 3000, False).keys(), "they are no beginnings"


def test_no_written_prompt_is_like_one_of_the_benchmark() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[at : at + 3]) for at in range(len(words) - 2)}

    written = [runs(line) for line in WRITTEN.read_text(encoding="utf-8").splitlines()]
    for prompt in benchmark_prompts():
        of_prompt = runs(prompt)
        alike = [other for other in written if 2 * len(of_prompt & other) >= len(of_prompt | other)]
        assert not (of_prompt and alike), prompt


class Letters:
    """A tokenizer: one token per letter."""

    chat_template = None

    def __call__(self, text: str):
        return {"input_ids": [ord(letter) % 100 for letter in text]}


def test_held_out_prompts_are_never_trained_on() -> None:
    prompts = Prompts([f"prompt {n}" for n in range(50)], Letters(), 100, 0)  # type: ignore[arg-type]
    requests = [prompts.request(number) for number in range(3000)]
    held_out = [request for request in requests if request.held_out]
    assert len(held_out) == HELD_OUT_PROMPTS
    assert held_out[0].number == 0
    assert not {request.ids for request in held_out} & {request.ids for request in requests if not request.held_out}
    assert len({request.seed for request in requests}) == 3000
    assert prompts.request(17) == prompts.request(17)


def test_forms_of_held_out_prompts_are_never_trained_on() -> None:
    forms = {f"{form} {n}": f"form {form}" for form in range(20) for n in range(30)}
    prompts = Prompts(list(forms), Letters(), 100, 0, forms)  # type: ignore[arg-type]
    requests = [prompts.request(number) for number in range(2000)]
    of_ids = {tuple(ord(letter) % 100 for letter in text): form for text, form in forms.items()}
    held_out = {of_ids[request.ids] for request in requests if request.held_out}
    trained = {of_ids[request.ids] for request in requests if not request.held_out}
    assert (len(held_out), len(trained)) == (2, 18)
    assert not held_out & trained


def test_two_prompts_are_enough(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\none\n")
    config = DraftConfig(prompts=str(tmp_path / "prompts.txt"))
    texts = check_prompts(config)
    assert texts == ["one", "two"]
    prompts = choose_prompts(texts, Letters(), config, 64)  # type: ignore[arg-type]
    assert len({prompts.request(number).ids for number in range(30)}) == 2


class TestRefusals:
    def refused(self, tmp_path: Path, content: str, name: str = "prompts.txt") -> str:
        (tmp_path / name).write_text(content)
        config = DraftConfig(prompts=str(tmp_path / name))
        with pytest.raises(DraftError) as error:
            choose_prompts(check_prompts(config), Letters(), config, 64)  # type: ignore[arg-type]
        return str(error.value)

    def test_empty(self, tmp_path: Path) -> None:
        assert self.refused(tmp_path, "\n \n").endswith(
            "prompts.txt holds no prompts: write one a line, or .jsonl with `prompt` or `text`"
        )

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(DraftError, match=r"cannot read prompts from .*none.txt"):
            check_prompts(DraftConfig(prompts=str(tmp_path / "none.txt")))

    def test_other_format(self, tmp_path: Path) -> None:
        message = self.refused(tmp_path, '{"texts": "a"}\n', "prompts.jsonl")
        assert message.endswith("prompts.jsonl: entry 1 is no JSON object with a string `prompt` or `text`")

    def test_binary(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.txt").write_bytes(b"\xff\xfe\x00\x80")
        with pytest.raises(DraftError, match="cannot read prompts from"):
            check_prompts(DraftConfig(prompts=str(tmp_path / "prompts.txt")))

    def test_one(self, tmp_path: Path) -> None:
        assert "holds one prompt, and drafts are measured on another" in self.refused(tmp_path, "one\none\n")

    def test_too_long(self, tmp_path: Path) -> None:
        message = self.refused(tmp_path, "a" * 33 + "\n" + "b" * 40 + "\nshort\n")
        assert message.endswith("prompts.txt: 1 of its prompts have 1 to 32 tokens, and 2 are needed")

    def test_chat_template(self, tmp_path: Path) -> None:
        def refuse(*_, **__):
            raise ValueError("only system messages")

        tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=refuse)
        with pytest.raises(DraftError, match="the chat template refuses the prompt 'a': only system messages"):
            choose_prompts(["a", "b"], tokenizer, DraftConfig(), None)  # type: ignore[arg-type]
