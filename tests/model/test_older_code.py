"""Code of a model's own that was written for transformers 4, as Ouro's is, loads and gives the same logits."""

import logging
from pathlib import Path

import pytest
import torch
from looped_models import forget_code, full_tokens, gated_tokens, make_looped, own_code, reference
from transformers import masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tide_export.calibration.self_generated import sample_answers
from tide_export.errors import ModelError
from tide_export.model.older_code import MASKS, older_code
from tide_export.model.source import load_model
from tide_export.pipeline.flow import export
from tide_export.pipeline.request import ExportRequest
from tide_export.runtime.engine import load

IDS = torch.tensor([[5, 9, 40, 3]])
OLDER = {
    "from .configuration": "from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS\n\nfrom .configuration",
    "            inputs_embeds=hidden_states,\n": (
        "            input_embeds=hidden_states,\n            cache_position=position_ids[0],\n"
    ),
    "class LoopedModel": """class LoopedRotaryEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.rope_type = config, "default"
        rates, self.attention_scaling = ROPE_INIT_FUNCTIONS[self.rope_type](config, None)
        self.register_buffer("inv_freq", rates, persistent=False)
        self.original_inv_freq = self.inv_freq


class LoopedModel""",
    "        self.total_ut_steps = config": (
        "        self.rotary_emb = LoopedRotaryEmbedding(config)\n        self.total_ut_steps = config"
    ),
    "        rates = self.config.rope_theta ** -(torch.arange(0, size, 2, device=input_ids.device).float() / size)\n": (
        "        rates = self.rotary_emb.inv_freq\n"
    ),
}


@pytest.fixture
def folder(tmp_path: Path):
    with own_code(tmp_path / "modules"):
        yield make_looped(tmp_path / "model", tie_word_embeddings=True)


def edit(folder: Path, changes: dict[str, str]) -> None:
    file = folder / "modeling_looped.py"
    code = file.read_text()
    for now, before in changes.items():
        assert code.count(now) == 1
        code = code.replace(now, before)
    file.write_text(code)
    forget_code()


def request(folder: Path, output: Path) -> ExportRequest:
    return ExportRequest(str(folder), str(output), routers="model", trust_remote_code=True)


def test_it_gives_what_code_of_today_gives(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = reference(folder)
    expected = load_model(folder, trust_remote_code=True).run(IDS, [2])
    edit(folder, OLDER)
    source = load_model(folder, trust_remote_code=True)
    assert source.model.model.rotary_emb.attention_scaling == 1
    found = source.run(IDS, [2])
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.raw[2], expected.raw[2], rtol=1e-6, atol=1e-6)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"early_exit_threshold": 1.0, ', 1))
    with caplog.at_level(logging.INFO, logger="tide_export"):
        export(request(folder, tmp_path / "bundle"))
    assert any(f"threshold of {folder} is 1, so mode exit runs all loops" in said for said in caplog.messages)
    engine, prompt = load(tmp_path / "bundle"), IDS[0].tolist()
    options = {"max_new_tokens": 12, "stop_token_ids": []}
    for mode in ("full", "lossless", "exit"):
        assert engine.generate(prompt, mode=mode, **options).tokens == full_tokens(model, prompt, 12)
    for threshold in (0.3, 0.6):
        out = engine.generate(prompt, mode="exit", threshold=threshold, **options)
        tokens, layers = gated_tokens(model, prompt, 12, threshold)
        assert (out.tokens, out.stats.exit_layer) == (tokens, layers)


def test_nothing_of_it_stays(folder: Path) -> None:
    masks = {name: getattr(masking_utils, name) for name in MASKS}
    load_model(folder, trust_remote_code=True)
    assert masks == {name: getattr(masking_utils, name) for name in MASKS}
    assert "default" not in ROPE_INIT_FUNCTIONS
    with older_code():
        assert "default" in ROPE_INIT_FUNCTIONS
    assert masks == {name: getattr(masking_utils, name) for name in MASKS}
    assert "default" not in ROPE_INIT_FUNCTIONS


def test_code_that_fails_is_named(folder: Path) -> None:
    last = '"early_exit_threshold", None)\n'
    edit(folder, {last: f'{last}        {{}}["gone"]\n'})
    number = (folder / "modeling_looped.py").read_text().split('["gone"]')[0].count("\n") + 1
    said = rf"fails at modeling_looped.py:{number} \(KeyError: .*gone.*look for newer code of this model"
    with pytest.raises(ModelError, match=said):
        load_model(folder, trust_remote_code=True)


def test_it_answers_prompts_with_a_cache_for_every_loop(folder: Path) -> None:
    source = load_model(folder, trust_remote_code=True)
    prompts = [[5, 9], [40, 3, 7, 20, 11]]
    answers = sample_answers(source, prompts, length=12, temperature=1e-4, seed=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert 0 < len(answer) <= 7
        for number, token in enumerate(answer):
            logits = source.run(torch.tensor([[*prompt, *answer[:number]]]), []).logits
            assert token == int(logits[0, -1].argmax())
