"""`--self-generated`: answers are the model's own, whole and the same after a kill; only their positions are kept."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tide_export.calibration.config import TideConfig
from tide_export.calibration.flow import calibrate
from tide_export.calibration.sampling_plan import Plan
from tide_export.calibration.self_generated import answer_prompts, prompts_to_answer
from tide_export.cli.main import main
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError, DatasetError
from tide_export.routers.router_set import RouterSet

MODEL = Path(__file__).parents[2] / "demo" / "demo-llama"
PROMPTS = [
    "import os\n",
    "def main(argv=None):",
    "x",
    "class Reader:\n    def read(self, size):\n        return",
    "for i in range(10):\n    print(",
    "# Copyright",
    'raise ValueError("',
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return path


def config_of(prompts: Path, **options) -> TideConfig:
    return TideConfig(self_generated=str(prompts), calibration_length=28, calibration_batch=3, **options)


@pytest.fixture(scope="module")
def once(demo, tokenizer, prompts):
    """The answers of seed 0."""
    return answer_prompts(demo, tokenizer, config_of(prompts), None)


def test_without_chance_the_answers_are_greedy_decoding_of_each_prompt_alone(demo, tokenizer, prompts):
    answered = answer_prompts(demo, tokenizer, config_of(prompts, self_generated_temperature=1e-4), None)
    assert [sequence.document for sequence in answered.sequences] == list(range(len(PROMPTS)))
    for sequence, prompt in zip(answered.sequences, PROMPTS, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        assert sequence.first == len(ids) - 1
        with torch.no_grad():
            logits = demo.model(input_ids=torch.tensor([sequence.ids.tolist()])).logits[0]
        assert sequence.ids[: len(ids)].tolist() == ids
        assert sequence.ids[len(ids) :].tolist() == logits[len(ids) - 1 : -1].argmax(-1).tolist() != []
        assert sequence.ids[-1] in demo.eos_token_ids or len(sequence.ids) <= 28
        assert not set(sequence.ids[len(ids) : -1].tolist()) & set(demo.eos_token_ids)


def test_answers_depend_on_the_seed_alone(demo, tokenizer, prompts, once):
    def answers(seed: int) -> list[list[int]]:
        answered = answer_prompts(demo, tokenizer, config_of(prompts, seed=seed), None)
        return [sequence.ids.tolist() for sequence in answered.sequences]

    torch.manual_seed(3)
    first, drawn = answers(0), torch.rand(1)
    assert [sequence.ids.tolist() for sequence in once.sequences] == first != answers(1)
    torch.manual_seed(3)
    assert torch.rand(1) == drawn, "PyTorch's own generator must be left alone"


def test_more_answers_are_sampled_anew_and_belong_to_the_same_prompt(demo, tokenizer, prompts, once):
    twice = answer_prompts(demo, tokenizer, config_of(prompts, self_generated_answers=2), None)
    assert [s.document for s in twice.sequences] == [number for number in range(len(PROMPTS)) for _ in range(2)]
    ids = [s.ids.tolist() for s in twice.sequences]
    assert ids[::2] == [s.ids.tolist() for s in once.sequences]
    assert all(first != second for first, second in zip(ids[::2], ids[1::2], strict=True))
    assert (twice.hashes, twice.sha256) == (once.hashes, once.sha256)


def test_a_killed_run_resumes_with_the_batches_that_are_missing(demo, tokenizer, prompts, once, tmp_path, monkeypatch):
    generate, batches = demo.model.generate, []

    def killed(*given, **options):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(given)
        return generate(*given, **options)

    monkeypatch.setattr(demo.model, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(demo, tokenizer, config_of(prompts), tmp_path)
    batches.clear()
    resumed = answer_prompts(demo, tokenizer, config_of(prompts), tmp_path)
    assert len(batches) == 1
    assert [s.ids.tolist() for s in resumed.sequences] == [s.ids.tolist() for s in once.sequences]
    for file in (tmp_path / "answers").iterdir():
        file.write_text("[[1, ")
    with pytest.raises(CalibrationError, match=r"is damaged \(.*-0000.json\): delete it"):
        answer_prompts(demo, tokenizer, config_of(prompts), tmp_path)


def test_the_chat_template_is_used(demo, tokenizer, prompts, monkeypatch):
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    _, usable = prompts_to_answer(tokenizer, str(prompts), 100, 2)
    assert [tokenizer.decode(ids) for ids in usable.values()] == [
        f"# user: {prompt}\n# assistant:" for prompt in PROMPTS[:2]
    ]
    beginnings = prompts.with_name("beginnings.jsonl")
    beginnings.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS[:2]))
    _, usable = prompts_to_answer(tokenizer, str(beginnings), 100, 2)
    assert [tokenizer.decode(ids) for ids in usable.values()] == PROMPTS[:2]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('only systems may speak') }}")
    with pytest.raises(DatasetError, match=r"the chat template refuses the prompt 'import os.*only systems may speak"):
        prompts_to_answer(tokenizer, str(prompts), 100, 2)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", "\n\n", "holds no prompts"),
        ("rows.jsonl", '{"texts": "x"}', "entry 1 is no JSON object with a string `prompt`"),
        ("none.txt", None, "cannot read prompts from"),
        ("long.txt", "word " * 200, "none of its 1 prompts has 1 to 14 tokens, half of calibration_length"),
    ],
)
def test_bad_prompts_are_one_sentence(demo, tokenizer, tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=says):
        answer_prompts(demo, tokenizer, config_of(tmp_path / name), None)


def test_prompts_that_leave_no_room_are_counted(tokenizer, tmp_path, caplog):
    path = tmp_path / "prompts.txt"
    path.write_text("x\n" + "word " * 200)
    _, usable = prompts_to_answer(tokenizer, str(path), 40, 10)
    assert list(usable) == [0]
    assert "1 of 2 prompts are left out" in caplog.text


def test_a_model_that_cannot_generate_is_one_sentence(demo, tokenizer, prompts, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    monkeypatch.setattr(demo.model, "generate", fails)
    with pytest.raises(CalibrationError, match=r"cannot answer prompts: probability tensor .*calibrate on text with"):
        answer_prompts(demo, tokenizer, config_of(prompts), None)


def test_positions_of_a_prompt_are_not_kept():
    sequences = [TokenSequence(n, np.arange(10, dtype=np.int32), first=n) for n in range(8)]
    for capacity in (10**6, 20):
        plan = Plan.make(sequences, capacity, seed=1, rows_per_pass=3, tokens_per_pass=None)
        assert plan.seen == sum(10 - n for n in range(8))
        assert all(position >= number for number, position in plan.locations)
        assert len({tuple(one) for one in plan.locations.tolist()}) == plan.kept == min(capacity, plan.seen)


def test_the_command_calibrates_on_the_answers(demo, tokenizer, prompts, tmp_path):
    file, cache = tmp_path / "routers.safetensors", tmp_path / "cache"
    words = ["--self-generated", str(prompts), "--calibration-length", "64", "--checkpoints", "6", "-q"]
    words += ["--router-epochs", "1", "--cache", str(cache)]
    assert main(["calibrate", str(MODEL), "-o", str(file), *words]) == 0
    record = RouterSet.load(file).provenance
    assert record["dataset"] == record["config"]["self_generated"] == str(prompts)
    assert record["documents"] == record["sequences"] == len(PROMPTS)
    assert 0 < record["tokens"] <= 64 * len(PROMPTS) - sum(len(tokenizer(one)["input_ids"]) - 1 for one in PROMPTS)
    assert len(list((cache / "answers").iterdir())) == 1

    answered = calibrate(
        demo, tokenizer, TideConfig(**record["config"]), cache
    )  # the same, from the answers and states that were kept
    assert answered.routers.provenance["report"] == record["report"]
