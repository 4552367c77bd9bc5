"""`tools/benchmarks/context_length.py` and what the speed tools share: kept graphs, room, goals. No test looks at a
time."""

import json
import sys
from pathlib import Path

import pytest


def test_every_length_and_case_gets_a_row(
    demo_graphs: Path, demo_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    import context_length as benchmark_length

    monkeypatch.setattr(benchmark_length, "genai_installed", lambda: False)
    options = ["--decode", "8,24", "--prefill", "8,24", "--loads", "1", "--rounds", "2", "--threads", "1", "--check"]
    files = ["--graphs", str(demo_graphs), "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    monkeypatch.setattr(sys, "argv", ["context_length", str(demo_model), *options, *files])
    assert benchmark_length.main() == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["median_ms"]) == 2 * 3 + 2 * 4
    assert [goal["ratio"] for goal in result["goals"]] == [None] * 5
    said = capsys.readouterr().out
    assert said.count("exits, all wait") == 2
    assert "NOT MEASURED decode step after 24 tokens over one after 8" in said
    assert "OMITTED ORT-GenAI's graph" in said
    assert (tmp_path / "r.png").stat().st_size > 5_000


def test_cases_do_what_they_say(demo_bundle: Path) -> None:
    from harness.engine_case import UNLIMITED, DecodeSteps, tokens

    from tide_export.runtime.engine import load

    engine = load(demo_bundle, "cpu", 1)
    context = tokens(20, engine.manifest.model.vocab_size)
    stepper = DecodeSteps(engine, context)
    for _ in range(3 * stepper.room):
        stepper.first_exit()
        assert stepper.state.length <= len(context) + stepper.room + 1
        assert stepper.state.pending[0] == stepper.state.length - len(context)
    stepper.deep_over(8)()
    assert set(stepper.state.computed) == {stepper.state.length}
    for limit, ran in ((UNLIMITED, 1), (4, 4)):  # a prompt longer than what may wait runs whole
        state = engine.start([-1.0] * 3, limit)
        assert state.step(context).segments_run == ran


def test_growth_is_held_against_the_peers() -> None:
    from context_length import growth

    medians = {
        "full depth, decode 128": 2.0,
        "full depth, decode 4096": 5.0,
        "ORT-GenAI's graph, decode 128": 2.0,
        "ORT-GenAI's graph, decode 4096": 4.0,
    }
    (found,) = growth(medians, [128, 4096])
    assert (found["ratio"], found["limit"], found["met"]) == (2.5, 2.0, False)
    medians["full depth, decode 4096"] = 4.0
    assert growth(medians, [128, 4096])[0]["met"]


def test_turns_are_summed_up_and_judged() -> None:
    import random

    from harness.interleave import UNTIMED, Goal, interleave, render_table, summary

    order, seconds, took = random.Random(0), {}, {"a": 0.001, "b": 0.002}
    turns = dict.fromkeys(took, 0)

    def case(name: str):
        def case() -> float:
            turns[name] += 1
            return took[name]

        return case

    interleave({name: case(name) for name in took}, 4, order, seconds)
    assert turns == {"a": 4 + UNTIMED, "b": 4 + UNTIMED}
    goals = [Goal("half", "a", "b", 0.5), Goal("less", "b", "a", 1.9), Goal("of none", "a", "c", 1.0)]
    result = summary(seconds, ["b", "c", "a"], "a", goals)
    assert result["median_ms"] == {"b": 2.0, "a": 1.0}
    assert result["relative"] == {"b": 2.0, "a": 1.0}
    assert [goal["met"] for goal in result["goals"]] == [True, False, False]
    assert "NOT MEASURED of none" in render_table(result, "a")


def test_a_kept_folder_refuses_another_recipe(tmp_path: Path) -> None:
    from harness.graphs import Graphs, Recipe

    Graphs(Recipe("m", checkpoints=(4, 8)), tmp_path)
    Graphs(Recipe("m", checkpoints=(4, 8)), tmp_path)
    with pytest.raises(SystemExit, match="another checkpoints, shortlist"):
        Graphs(Recipe("m", checkpoints=(4, 9), shortlist=0), tmp_path)


def test_a_stretched_model_is_the_same_but_for_its_context(demo_model: Path, tmp_path: Path) -> None:
    from harness.graphs import Graphs, Recipe

    copy = Graphs(Recipe(str(demo_model), stretch=5000), tmp_path).model
    own, new = (json.loads((folder / "config.json").read_text()) for folder in (demo_model, copy))
    assert new == own | {"max_position_embeddings": 5000}
    assert (copy / "model.safetensors").samefile(demo_model / "model.safetensors")
    assert Graphs(Recipe(str(demo_model)), tmp_path / "other").model == demo_model


def test_a_context_without_room_is_refused() -> None:
    from harness.engine_case import steps_after

    assert steps_after(128, None) == steps_after(128, 1024) == 48
    assert steps_after(1000, 1024) == 8
    with pytest.raises(SystemExit, match="--stretch"):
        steps_after(1020, 1024)
