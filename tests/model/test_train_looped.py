"""demo/train_looped.py on a tiny model: a stopped training continues as if it had not been; its result is exported."""

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from looped_models import LAYERS, LOOPS, full_tokens, gated_tokens, own_code, reference
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tide_export.pipeline.flow import export
from tide_export.runtime.engine import load

DEMO = Path(__file__).parents[2] / "demo"
STEPS = 30
PROMPT = list(range(260, 290))


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The script's handlers, number of threads and code are gone after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(DEMO))
    with own_code(tmp_path / "modules"):
        yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(out: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None, **options: int) -> None:
    """Runs the script as a person does; a SIGTERM comes in step `stop_at`."""
    script = importlib.import_module("train_looped")
    given = {"steps": STEPS, "threads": 1, "layers": LAYERS, "loops": LOOPS, "hidden": 64, "batch": 1} | options
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    batch = script.Training.batch

    def batch_and_signal(training, tokens: torch.Tensor) -> torch.Tensor:
        if training.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(training, tokens)

    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["train_looped.py", str(out), *words, "--sources", str(out.parent / "sources")])
        patch.setattr(script.Training, "batch", batch_and_signal)
        patch.setattr(script, "LENGTH", 64)
        script.main()


def write_sources(folder: Path) -> None:
    folder.mkdir()
    for n in range(60):
        (folder / f"part{n}.py").write_text(
            "".join(f"def f{k}(a, b={n}):\n    return a * {k} + b\n\n" for k in range(12))
        )


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    write_sources(tmp_path / "sources")
    run(tmp_path / "whole", monkeypatch)
    said = capsys.readouterr().out
    assert f"loop {LOOPS}: loss" in said
    assert "the last loop's at 100.0 %" in said
    assert "gate at 0.5" in said
    for stop_at in (3, STEPS - 1):  # in stage 1, in stage 2
        run(tmp_path / "stopped", monkeypatch, stop_at)
        assert not (tmp_path / "stopped").exists()
    run(tmp_path / "stopped", monkeypatch)
    assert f"continues after step {STEPS}," in capsys.readouterr().out
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    with pytest.raises(SystemExit, match="is of a run with other options: continue with those, or remove it"):
        run(tmp_path / "stopped", monkeypatch, hidden=128)
    check_bundle(tmp_path / "stopped", tmp_path / "bundle")
    run(tmp_path / "plain", monkeypatch, loops=1)
    assert "loop 1: loss" in capsys.readouterr().out
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")) is LlamaForCausalLM


def test_the_model_of_the_demo(tmp_path: Path) -> None:
    check_bundle(DEMO / "demo-looped", tmp_path / "bundle")


def check_bundle(folder: Path, bundle: Path) -> None:
    """Its bundle decodes as its code does: all loops, and by its gate."""
    assert {"modeling_looped.py", "configuration_looped.py", "tokenizer.json"} < {one.name for one in folder.iterdir()}
    engine = load(
        export(str(folder), bundle, routers="model", weights="fp32", trust_remote_code=True), provider="cpu", threads=1
    )
    model, greedy = reference(folder), {"max_new_tokens": 12, "stop_token_ids": []}
    full = full_tokens(model, PROMPT, 12)
    assert engine.generate(PROMPT, mode="full", **greedy).tokens == full
    assert engine.generate(PROMPT, mode="lossless", threshold=0.0, **greedy).tokens == full
    for threshold in (0.2, 0.5, 0.8):
        tokens, layers = gated_tokens(model, PROMPT, 12, threshold)
        found = engine.generate(PROMPT, mode="exit", threshold=threshold, **greedy)
        assert (found.tokens, list(found.stats.exit_layer)) == (tokens, layers)
