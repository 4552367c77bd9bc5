"""Prompts that a chat model writes itself: what chat templates put around them, and which of them are answered."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tide_export.calibration.self_generated import encode_prompt
from tide_export.drafting import answers as answers_module
from tide_export.drafting import flow
from tide_export.drafting import prompts as prompts_module
from tide_export.drafting.answers import Answerer
from tide_export.drafting.config import DraftConfig
from tide_export.drafting.prompts import Prompts, choose_prompts
from tide_export.drafting.store import SETTINGS_FILE, AnswerStore
from tide_export.drafting.written_prompts import MAX_NEW_TOKENS, MIN_TOKENS, PromptWriter
from tide_export.errors import DraftError

WIDTH = 3
END = 2  # of messages where nothing is written
MARKS = (
    *("<s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>"),
)
CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = "{{ bos_token }}{% for message in messages %}[INST] {{ message.content }}[/INST]{% endfor %}"
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INSTRUCTION = "{% for message in messages %}### Instruction:\n{{ message.content }}\n\n### Response:\n{% endfor %}"
STYLES = {  # template, beginning of sequence, head, tail
    "chatml": (
        *(CHATML, "<s>", "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"),
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama 3": (
        *(LLAMA3, "<|begin_of_text|>", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"),
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (MISTRAL, "<s>", "<s>[INST]", "[/INST]"),
    "mistral, a space before the end": (MISTRAL.replace("[/", " [/"), "<s>", "<s>[INST]", "[/INST]"),
    "gemma": (GEMMA, "<bos>", "<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    "a line's end": (INSTRUCTION, "<s>", "### Instruction:\n", "\n\n### Response:\n"),
}


def tokenizer_of(demo_model: Path, template: str | None, bos: str = "<s>") -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    tokenizer.add_special_tokens({"bos_token": bos, "additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return tokenizer_of(demo_model, CHATML)


class ScriptedEngine:
    """Writes a message by each seed, as `generate` ends it; answers prompts with three tokens."""

    def __init__(self, message) -> None:
        self._message = message
        self.asked: list[tuple[list[list[int]], object]] = []
        self.answered: list[tuple[tuple[int, ...], int]] = []

    def generate(self, ids, config):
        assert config.mode == "full"
        if config.states:
            self.answered += [(tuple(prompt), seed) for prompt, seed in zip(ids, config.seed, strict=True)]
            return [
                SimpleNamespace(tokens=[5, 6, 7], states=np.zeros((len(one) + 2, WIDTH), np.float32)) for one in ids
            ]
        self.asked.append((ids, config))
        return [SimpleNamespace(tokens=self._ended(seed, config), states=None) for seed in config.seed]

    def _ended(self, seed, config) -> list[int]:
        tokens = self._message(seed)[: config.max_new_tokens]
        ends = [place for place, token in enumerate(tokens) if token in config.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens


def written(writer: PromptWriter, message: list[int]) -> tuple[int, ...] | None:
    (prompt,) = writer.write(ScriptedEngine(lambda seed: message), [0])
    return prompt


class TestTemplates:
    @pytest.mark.parametrize("style", STYLES)
    def test_head_and_tail_are_those_of_any_message(self, style: str, demo_model: Path) -> None:
        template, bos, head, tail = STYLES[style]
        tokenizer = tokenizer_of(demo_model, template, bos)
        writer = PromptWriter.of(tokenizer, 200)
        assert writer is not None
        assert (tokenizer.decode(writer.head), tokenizer.decode(writer.tail)) == (head, tail)
        assert writer.head.count(tokenizer.bos_token_id) == template.count("bos_token")
        for text in ("Sort this list, please.", "def f(x):\n    return 2"):
            ids = encode_prompt(tokenizer, text)
            message = ids[len(writer.head) : -len(writer.tail)]
            assert tokenizer.decode(message).strip() == text
            assert written(writer, [*message, writer.tail[0], 9, 9]) == tuple(ids)

    @pytest.mark.parametrize(
        "template",
        [
            None,
            CHATML.replace("message.content", "message.content | upper"),
            CHATML.replace("{{ message.content }}", "hello"),
            CHATML.replace("{{ message.content }}", "{{ message.content }} {{ message.content }}"),
            "{{ raise_exception('only system messages') }}",
            "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}",
            "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}",
            "{% for message in messages %}USER: {{ message.content }} ASSISTANT:{% endfor %}",
        ],
        ids=["none", "changed", "left out", "repeated", "refused", "no head", "no tail", "a word ends it"],
    )
    def test_a_template_that_a_message_cannot_be_read_from(self, template: str | None, demo_model: Path) -> None:
        assert PromptWriter.of(tokenizer_of(demo_model, template), 200) is None

    def test_a_limit_that_leaves_no_room(self, tokenizer: PreTrainedTokenizerBase) -> None:
        writer = PromptWriter.of(tokenizer, 200)
        assert writer is not None
        around = len(writer.head) + len(writer.tail)
        assert PromptWriter.of(tokenizer, around + MIN_TOKENS - 1) is None
        tight = PromptWriter.of(tokenizer, around + MIN_TOKENS)
        assert tight is not None
        prompt = written(tight, [10] * MIN_TOKENS + [tight.tail[0]])
        assert prompt == (*tight.head, *[10] * MIN_TOKENS, *tight.tail)
        assert len(prompt) == tight.limit
        assert written(tight, [10] * (MIN_TOKENS + 1) + [tight.tail[0]]) is None


class TestMessages:
    @pytest.fixture
    def writer(self, tokenizer: PreTrainedTokenizerBase) -> PromptWriter:
        writer = PromptWriter.of(tokenizer, 400)
        assert writer is not None
        return writer

    def test_what_the_model_is_asked(self, writer: PromptWriter) -> None:
        engine = ScriptedEngine(lambda seed: [seed % 100 + 10] * 6 + [writer.tail[0]])
        found = writer.write(engine, [3, 8])
        assert len(set(found)) == 2
        assert found == writer.write(engine, [3, 8])
        assert found[1:] == writer.write(engine, [8])
        ids, config = engine.asked[0]
        assert ids == [list(writer.head)] * 2
        assert config.stop_token_ids == (writer.tail[0],)
        assert config.max_new_tokens == MAX_NEW_TOKENS
        assert config.temperature > 0
        assert not config.states

    def test_nothing_to_write(self, writer: PromptWriter) -> None:
        engine = ScriptedEngine(lambda seed: [])
        assert writer.write(engine, []) == []
        assert not engine.asked

    def test_messages_that_are_not_used(self, writer: PromptWriter, tokenizer: PreTrainedTokenizerBase) -> None:
        end, other = writer.tail[0], tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert written(writer, [10] * 20 + [end]) is not None
        assert written(writer, [10] * 20) is None, "it does not end"
        assert written(writer, [10] * MAX_NEW_TOKENS + [end]) is None, "it ends too late"
        assert written(writer, [10] * (MIN_TOKENS - 1) + [end]) is None, "it is too short"
        assert written(writer, [end]) is None
        assert written(writer, [10] * 6 + [tokenizer.eos_token_id] + [10] * 6 + [end]) is None, "it ended before"
        assert written(writer, [10] * 6 + [other] + [10] * 6 + [end]) is None, "it holds another turn"


def message_of(seed: int, end: int) -> list[int]:
    """A message that differs from seed to seed; one of seven does not end."""
    return [*(100 + seed // 20**place % 20 for place in range(6)), end if seed % 7 else 100]


class TestAnswers:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompts_module, "MAX_PROMPTS", 300)
        for name in ("FIRST_BATCH", "MIN_BATCH", "MAX_BATCH"):
            monkeypatch.setattr(answers_module, name, 40)

    def answered(self, prompts: Prompts, folder: Path, batches: int, rank: int = 0, count: int = 1) -> ScriptedEngine:
        end = END if prompts.writer is None else prompts.writer.tail[0]
        engine = ScriptedEngine(lambda seed: message_of(seed, end))
        store = AnswerStore(folder, WIDTH, rank, count)
        before = store.own
        answerer = Answerer(engine, prompts, store, DraftConfig())
        for _ in range(batches):
            answerer.answer_batch(1e9)
        own = [answer for answer in store.answers if answer.process == rank][before:]
        assert [tuple(answer.ids[: answer.prompt]) for answer in own] == [ids for ids, _ in engine.answered]
        store.close()
        return engine

    def test_three_of_four_that_are_trained_on(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        prompts = choose_prompts(None, tokenizer, DraftConfig(), None)
        writer = prompts.writer
        assert writer is not None
        engine = self.answered(prompts, tmp_path, 2)
        assert len(engine.answered) == 80
        requests = [prompts.request(number) for number in range(80)]
        assert [seed for _, seed in engine.answered] == [request.seed for request in requests]
        places = [place for place, one in enumerate(requests) if not one.held_out and place % 4 != 0]
        asked = [seed for _, config in engine.asked for seed in config.seed]
        assert len(set(asked)) == len(places) > 50
        assert not set(asked) & {request.seed for request in requests}
        expected = [request.ids for request in requests]
        for place, seed in zip(places, asked, strict=True):
            if (message := message_of(seed, writer.tail[0]))[-1] == writer.tail[0]:
                expected[place] = (*writer.head, *message, *writer.tail[1:])
        assert [ids for ids, _ in engine.answered] == expected
        assert sum(ids != request.ids for ids, request in zip(expected, requests, strict=True)) > 40

    def test_none_of_a_model_that_never_ends_one(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        prompts = choose_prompts(None, tokenizer, DraftConfig(), None)
        engine, store = ScriptedEngine(lambda seed: [7] * 200), AnswerStore(tmp_path, WIDTH)
        answerer = Answerer(engine, prompts, store, DraftConfig())
        for _ in range(5):
            answerer.answer_batch(1e9)
        store.close()
        assert len(engine.answered) == 200
        asked = sum(len(ids) for ids, _ in engine.asked)
        assert answers_module.FIRST_ASKED <= asked < answers_module.FIRST_ASKED + 40, "then it is asked no more"

    def test_a_training_that_goes_on_has_the_same(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        def run(folder: str, batches: int, seed: int = 0) -> list[tuple[tuple[int, ...], int]]:
            (tmp_path / folder).mkdir(exist_ok=True)
            prompts = choose_prompts(None, tokenizer, DraftConfig(seed=seed), None)
            return self.answered(prompts, tmp_path / folder, batches).answered

        whole = run("whole", 2)
        assert run("resumed", 1) + run("resumed", 1) == whole
        assert run("other", 2, seed=1) != whole

    def test_processes_share_the_prompts_of_one(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        prompts = choose_prompts(None, tokenizer, DraftConfig(), None)
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
        whole = self.answered(prompts, tmp_path / "one", 2).answered
        for rank in range(2):
            assert self.answered(prompts, tmp_path / "two", 1, rank, 2).answered == whole[rank::2]

    def test_of_prompts_of_the_user_none(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        texts = [f"message {number}" for number in range(30)]
        prompts = choose_prompts(texts, tokenizer, DraftConfig(), None)
        assert prompts.writer is None
        engine = self.answered(prompts, tmp_path, 1)
        assert not engine.asked
        assert {ids for ids, _ in engine.answered} <= {tuple(encode_prompt(tokenizer, text)) for text in texts}

    def test_of_a_base_model_none(self, demo_model: Path, tmp_path: Path) -> None:
        prompts = choose_prompts(None, tokenizer_of(demo_model, None), DraftConfig(), None)
        assert not self.answered(prompts, tmp_path, 1).asked


class Reached(Exception):
    """The cache was accepted."""


@pytest.mark.parametrize("template", [CHATML, None], ids=["chat", "base"])
def test_a_cache_of_before_is_refused(
    template: str | None, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SimpleNamespace(manifest=SimpleNamespace(weights="fp32"))
    source = SimpleNamespace(weights_sha256="ab" * 32, context_length=512, release=lambda: None)
    target = SimpleNamespace(weights_sha256=source.weights_sha256, embeddings=np.zeros((2, WIDTH)))
    monkeypatch.setattr(prompts_module, "MAX_PROMPTS", 300)
    monkeypatch.setattr(flow, "check_bundle", lambda *_: opened)
    monkeypatch.setattr(flow, "load_model", lambda *_, **__: source)
    monkeypatch.setattr(flow, "load_tokenizer", lambda *_: tokenizer_of(demo_model, template))
    monkeypatch.setattr(flow, "Target", SimpleNamespace(of=lambda _: target))

    def reached(*_) -> None:
        raise Reached

    monkeypatch.setattr(flow, "Run", reached)
    for _ in range(2):
        with pytest.raises(Reached):
            flow.draft("model", tmp_path, cache=tmp_path / "cache")
    file = tmp_path / "cache" / SETTINGS_FILE
    settings = json.loads(file.read_text())
    assert settings.pop("written_prompts") is (template is not None)
    file.write_text(json.dumps(settings))
    with pytest.raises(
        DraftError,
        match=r"cache is of a training with written_prompts None, not (True|False): give the same settings to",
    ):
        flow.draft("model", tmp_path, cache=tmp_path / "cache")
