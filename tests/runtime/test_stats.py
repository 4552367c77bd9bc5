"""The numbers of a generation: TIDE's counts, layers that were run, and text for people."""

import json

import pytest

from tide_export.runtime.stats import NO_LAYER, ExitStats


def filled() -> ExitStats:
    made = {"exit_layer": [12, 4, 4, 8, 4], "layers_run": [12, 4, 4, 8, 12]}
    stats = ExitStats(checkpoints=(4, 8), num_layers=12, prompt_tokens=5, **made)
    stats.layer_tokens_run, stats.layer_tokens_total = 90, 108
    stats.prefill_seconds, stats.decode_seconds = 0.5, 0.25
    return stats


def test_counts() -> None:
    stats = filled()
    assert stats.total_tokens == 5
    assert stats.exits_per_layer == {4: 3, 8: 1}
    assert (stats.total_exited, stats.remaining_tokens, stats.exit_rate) == (4, 1, 0.8)
    assert stats.layers_run_per_token == 40 / 5
    assert stats.layers_skipped_per_token == 12 - 40 / 5
    assert stats.tokens_per_second == 4 / 0.25


def test_the_last_layer_is_no_exit() -> None:
    stats = ExitStats(checkpoints=(4, 8), num_layers=12, exit_layer=[12], layers_run=[12])
    assert stats.exits_per_layer == {4: 0, 8: 0}
    assert stats.exit_rate == 0.0
    assert stats.remaining_tokens == 1


def test_nothing_generated_divides_by_nothing() -> None:
    stats = ExitStats(checkpoints=(), num_layers=12)
    assert (stats.exit_rate, stats.layers_run_per_token, stats.layers_skipped_per_token) == (0.0, 0.0, 0.0)
    assert stats.tokens_per_second == 0.0
    assert "0 tokens generated" in stats.summary()
    assert "after layer  12 of 12:     0 tokens    0.0%" in stats.summary()


def test_summary_says_what_matters() -> None:
    lines = filled().summary().splitlines()
    assert lines[0] == "5 tokens generated after a prompt of 5"
    assert lines[1] == "exit rate 80.0%: 4 exited, 1 at full depth"
    assert [" ".join(line.split()) for line in lines[2:5]] == [
        "after layer 4 of 12: 3 tokens 60.0%",
        "after layer 8 of 12: 1 tokens 20.0%",
        "after layer 12 of 12: 1 tokens 20.0%",
    ]
    assert lines[5] == "layers per token: 8.00 of 12 run, 4.00 skipped"
    assert lines[6] == "never computed: 18 of 108 (positions x layers, prompt included)"
    assert lines[7] == "prefill 0.500 s, decode 0.250 s (16.0 tokens/s)"


def test_summary_of_drafts() -> None:
    made = {"exit_layer": [12, NO_LAYER, 4, NO_LAYER], "layers_run": [12, 0, 4, 0]}
    stats = ExitStats(checkpoints=(4,), num_layers=12, prompt_tokens=5, **made)
    stats.drafted, stats.accepted, stats.lookup_drafted, stats.lookup_accepted = 8, 3, 5, 2
    lines = stats.summary().splitlines()
    assert lines[4].split() == ["prompt", "lookup:", "2", "tokens", "50.0%"]
    assert lines[6] == "drafts: 3 of 8 accepted (37.5%): 1 of 3 early exits, 2 of 5 by prompt lookup"
    assert lines[7] == "time saved, by costs: 0.000 s early exits, 0.000 s by prompt lookup"
    assert lines[8] == "never computed: 0 of 0 (positions x layers, prompt included)"
    assert lines[9] == "prefill 0.000 s, decode 0.000 s (one step only)"


def test_as_dict_is_json_and_complete() -> None:
    stats = filled()
    data = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert data["exits_per_layer"] == {"4": 3, "8": 1}
    assert data["exit_layer"] == [12, 4, 4, 8, 4]
    assert data["layers_run"] == [12, 4, 4, 8, 12]
    for name in ("total_tokens", "exit_rate", "layers_skipped_per_token", "layer_tokens_run", "tokens_per_second"):
        assert data[name] == pytest.approx(getattr(stats, name))
