"""A small model of Ouro's layout as remote code in a folder, and the rule by which it chooses a loop."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CODE = Path(__file__).parent.parent / "demo" / "looped_code"
LAYERS, LOOPS = 2, 4
AUTO_MAP = {
    "AutoConfig": "configuration_looped.LoopedConfig",
    "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
}


@contextmanager
def own_code(folder: Path) -> Iterator[None]:
    """While open, copies of the code of models go to `folder`, and those of other folders are not known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(str(folder))
        forget_code()
        yield
        forget_code()


def forget_code() -> None:
    """Lets transformers read the code of models again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def make_looped(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Writes a random model into a new folder, with `config` in its config.json."""
    shutil.copytree(CODE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {"model_type": "tide_looped", "auto_map": AUTO_MAP, "eos_token_id": 0} | config
    (folder / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(seed)
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """The model as transformers loads it, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def full_tokens(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The greedy tokens after all loops, with the model's own cache of keys and values."""
    tokens, new, cache = list[int](), ids, None
    while len(tokens) < count:
        given = torch.tensor([new])
        output = model(given, past_key_values=cache, use_cache=True, exit_at_step=model.config.total_ut_steps - 1)
        new, cache = [int(output.logits[0, -1].argmax())], output.past_key_values
        tokens += new
    assert len(cache.layers) == model.config.num_hidden_layers * model.config.total_ut_steps
    return tokens


@torch.no_grad()
def gated_tokens(model: PreTrainedModel, ids: list[int], count: int, threshold: float) -> tuple[list[int], list[int]]:
    """The greedy tokens of the loops that the gates choose, and the layers that each ran.

    As arXiv 2510.25741 has it: the first loop up to which the exit distribution p_t = g_t * prod(1 - g_i) sums up to
    the threshold. Every layer runs for every token.
    """
    tokens, layers, loops_of = list(ids), list[int](), model.config.total_ut_steps
    while len(layers) < count:
        _, loops, gates = model.model(torch.tensor([tokens]))
        here = torch.sigmoid(torch.stack(gates)[:, 0, -1, 0]).tolist()
        shares, left = [], 1.0
        for gate in here[:-1]:
            shares.append(left * gate)
            left -= left * gate
        chosen = next((t for t in range(loops_of - 1) if sum(shares[: t + 1]) >= threshold), loops_of - 1)
        tokens.append(int(model.lm_head(loops[chosen][0, -1]).argmax()))
        layers.append((chosen + 1) * model.config.num_hidden_layers)
    return tokens[len(ids) :], layers
