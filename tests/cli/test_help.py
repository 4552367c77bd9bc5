"""What `--help` shows, and what is said of a command, a model or an option that there is not."""

import argparse
import copy
import dataclasses
import pickle
import re
import shlex
from pathlib import Path

import pytest
from command_line import refused

import tide_export
from tide_export.cli.commands import COMMANDS as ABOUT
from tide_export.cli.commands import GROUPS
from tide_export.cli.main import COMMANDS, main
from tide_export.cli.options import build_parser

MODEL = str(Path(__file__).parents[2] / "demo" / "demo-llama")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_three_examples_that_parse_and_basic_options_that_exist(command: str, capsys) -> None:
    about, parser = ABOUT[command], build_parser()
    assert list(ABOUT) == list(COMMANDS)
    for example in about.examples:
        assert parser.parse_args(shlex.split(example)).command == command
    with pytest.raises(SystemExit):
        main([command, "--help"])
    short = capsys.readouterr().out.partition("three examples:")[0]
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    options = {one.dest: one.option_strings[0] for one in commands.choices[command]._actions if one.option_strings}
    shown = {dest for dest, option in options.items() if re.search(rf"^  {option}\b", short, re.MULTILINE)}
    if about.basic is None:
        assert len(options) <= 16
        assert shown == options.keys()
    else:
        assert len(about.basic) == 8
        assert shown == {*about.basic, "help", "help_all"}
        assert len(options) > 10


def test_a_misspelt_model_is_named_at_once_and_the_hub_is_asked_once(capsys, tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *given, **_: asked.append(given[1]) or 1 / 0)
    monkeypatch.setattr("tide_export.cli.main.COMMANDS", dict.fromkeys(COMMANDS, lambda _: pytest.fail("it ran")))
    says = "no model 'modell': there is no such folder, and the hub cannot be reached: "
    for words in (["export", "modell", "-o", "x"], ["probe", "modell"], ["adapt", "modell", "-o", "x"]):
        assert says in refused(capsys, *words)
    assert asked == ["modell"] * 3


def test_model_and_bundle_are_not_mixed_up(capsys, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "tide.json").touch()
    for command in (["generate", MODEL, "--prompt", "x"], ["inspect", MODEL], ["draft", MODEL, MODEL]):
        assert f"'{MODEL}' is a model, export it first: tide-export export {MODEL} -o BUNDLE" in refused(
            capsys, *command
        )
    for command in (["export", bundle, "-o", tmp_path / "x"], ["validate", bundle, "--model", bundle]):
        assert "is a bundle: give the model that it was made from" in refused(capsys, *command)


def test_the_commands_stand_in_groups_in_the_order_of_use(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    places = [text.index(f"\n{group}:\n") for group in GROUPS] + [text.index("\n  pull ")]
    assert places == sorted(places)
    assert re.findall(r"^  ([a-z]+) ", text, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tide_export.GenerationConfig(max_tokens=3), "has no option 'max_tokens': did you mean"),
        (lambda: tide_export.SchedulerLimits(slot=3), "SchedulerLimits has no option 'slot': did you mean 'slots'?"),
        (lambda: tide_export.AuditConfig(rates=0.1), "AuditConfig has no option 'rates': did you mean 'rate'?"),
        (
            lambda: tide_export.TideConfig(min_layer=3),
            "TideConfig has no setting 'min_layer': did you mean 'min_layers'?",
        ),
        (lambda: tide_export.DraftConfig(minute=3), "DraftConfig has no setting 'minute': did you mean 'minutes'?"),
        (lambda: tide_export.AdaptConfig(tokens="many"), "tokens must be a valid integer, "),
        (lambda: tide_export.tune("x", "y", epsilom=0.1, epsilon=0.1, delta=0.1), "no option 'epsilom'"),
        (lambda: tide_export.GenerationConfig(threshold="0.5"), "not '0.5', which is text: give a number"),
    ],
)
def test_what_python_gives_wrong_is_a_tide_error(make, says):
    with pytest.raises(tide_export.TideError, match=re.escape(says)):
        make()


def test_options_survive_copies():
    config = tide_export.GenerationConfig(max_new_tokens=3, stop="x")
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config)
