"""Every recipe that ships is valid and fits the models it names; a mistake in one's own is told in one line."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.routers.router_set import RouterSet

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "calibration" / "recipes"
DEPTHS = {  # of models each recipe names
    "demo-llama": (12,),
    "deepseek": (28, 30, 32),
    "falcon": (32, 60),
    "gemma": (18, 26, 28, 42),
    "gpt2": (12, 24, 36, 48),
    "gpt_neox": (12, 16, 24, 32),
    "layerskip": (16, 32, 40),
    "llama": (16, 28, 32),
    "mistral": (32, 40),
    "mixtral": (32,),
    "opt": (12, 24, 32),
    "phi": (24, 32, 40),
    "qwen": (24, 28, 36),
    "thorough": (16, 28, 30, 32),
}


def test_every_family_has_one():
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(DEPTHS)


@pytest.mark.parametrize("name", DEPTHS)
def test_a_recipe_is_valid_and_leaves_exits_open(name):
    values = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    config = TideConfig.from_options(**values)
    assert {field: getattr(config, field) for field in values} == {
        field: tuple(value) if isinstance(value, list) else value for field, value in values.items()
    }
    for depth in DEPTHS[name]:
        checkpoints = config.resolve_checkpoints(depth)
        assert sum(config.min_layers <= c for c in checkpoints) >= 2, f"{depth} layers"
        assert min(c for c in checkpoints if c >= config.min_layers) <= depth / 2, f"{depth} layers"


@pytest.mark.parametrize("name", sorted(set(DEPTHS) - {"demo-llama", "thorough"}))
def test_a_recipe_says_what_it_costs_in_memory(name):
    """For the checkpoints and the width it states; the comments must not outlive a change of the values."""
    text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    config = TideConfig.from_options(**tomllib.loads(text))
    share, width = re.search(r"([\d.]+) % of a layer's work at hidden size (\d+)", text).groups()
    assert float(share) == pytest.approx(100 * config.router_shortlist / (12 * int(width)), abs=0.05)
    stated = re.search(r"([\d.]+) GiB keep about ([\d,]+) training tokens at (\d+) checkpoints of .* (\d+)\.", text)
    if stated is None:
        assert config.calibration_memory == TideConfig().calibration_memory
        return
    memory, kept, checkpoints, hidden = (float(number.replace(",", "")) for number in stated.groups())
    assert memory == config.calibration_memory
    assert checkpoints in {len(config.resolve_checkpoints(depth)) for depth in DEPTHS[name]}
    assert kept == pytest.approx(config.tokens_kept(int(hidden), int(checkpoints) + 1), abs=500)


def test_a_model_trained_to_exit_is_calibrated_as_it_is(tmp_path, monkeypatch):
    """With the config of a LayerSkip checkpoint (a plain Llama's): no lens, and exits at the identity."""
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "num_hidden_layers": 16,
    }
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(**described, **sizes, vocab_size=4096, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "layerskip")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "demo" / "demo-llama" / name, tmp_path / "layerskip" / name)
    less = ["--calibration-samples", "8", "--calibration-length", "16", "--router-epochs", "1", "--checkpoints", "4,8"]
    text = ["--dataset", str(ROOT / "calibration" / "text" / "python-stdlib.jsonl"), "-q"]
    output = tmp_path / "routers.safetensors"
    recipe = str(RECIPES / "layerskip.toml")
    assert main(["calibrate", str(tmp_path / "layerskip"), "-o", str(output), "--recipe", recipe, *text, *less]) == 0
    routers = RouterSet.load(output)
    assert routers.lenses == {}
    assert routers.provenance["exit_strategy"] == "identity"


def refused(capsys, recipe) -> str:
    assert (
        main(["calibrate", str(ROOT / "demo" / "demo-llama"), "-o", "none.safetensors", "--recipe", str(recipe)]) == 2
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("checkpoint_intervall = 4", "no setting is called 'checkpoint_intervall': did you mean 'checkpoint_interval'"),
        ("min-layers = 4", "no setting is called 'min-layers': did you mean 'min_layers'?"),
        ("zzz = 4", "no setting is called 'zzz'\n"),
        ("min_layers = -4", "min_layers must be "),
        ("checkpoints = 'three'", "checkpoints must be auto, none"),
        ("[calibration]\nmin_layers = 4", "no setting is called 'calibration'"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(capsys, tmp_path, line, says):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(line + "\n")
    err = refused(capsys, recipe)
    assert f"recipe {recipe}: " in err
    assert says in err


def test_a_recipe_s_mistake_is_not_hidden_by_an_option(capsys, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("min_layers = -4\n")
    assert (
        main(["calibrate", str(ROOT / "demo" / "demo-llama"), "-o", "x", "--recipe", str(recipe), "--min-layers", "4"])
        == 2
    )
    assert f"recipe {recipe}: min_layers must be" in capsys.readouterr().err


def test_a_missing_recipe_lists_those_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "llama").endswith("no recipe at llama\n")
    assert f"{RECIPES / 'gpt2.toml'}, " in refused(capsys, RECIPES / "gpt-2.toml")
    monkeypatch.chdir(ROOT)
    assert "calibration/recipes/llama.toml, " in refused(capsys, "llama")
