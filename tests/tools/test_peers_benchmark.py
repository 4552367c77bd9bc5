"""`tools/benchmarks/peers.py`: the pipe to a peer's process, what is left out and why. No test looks at a time."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

# A peer of any name that says what a file says, or fails as its name asks.
STAND_IN = """
import os, sys
sys.path.insert(0, {folder!r})
import numpy as np
import peer_process

class StandIn:
    def __init__(self, job):
        print("libraries print to standard output")
        if job.peer == "optimum":
            import a_package_that_is_not_there
        if job.peer == "exporters":
            print("last words", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        self.version = f"stand-in of {{job.threads}} threads, {{os.environ['GOMP_SPINCOUNT']}}"
        self.ids = [*job.context, 7]
        self.logits = np.load({logits!r})
        if job.peer == "tide":
            self.logits = -self.logits

    def step(self):
        print("and in every step")
        return 0.5

peer_process.PEERS = dict.fromkeys(peer_process.PEERS, StandIn)
peer_process.set_up_torch = lambda threads: None
peer_process.main()
"""
CONTEXT = 16


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_bundle: Path) -> Path:
    """Its logits are the demo bundle's behind the context that the tool uses."""
    from harness import peer_case as peers
    from harness.engine_case import logits_after, tokens

    from tide_export.runtime.engine import load

    engine = load(demo_bundle, "cpu", 1)
    ids = [*tokens(CONTEXT, engine.manifest.model.vocab_size), 7]
    np.save(tmp_path / "logits.npy", logits_after(engine, ids))
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(folder=str(peers.CHILD.parent), logits=str(tmp_path / "logits.npy")))
    monkeypatch.setattr(peers, "CHILD", script)
    return script


def start(name: str, folder: Path, python: str = sys.executable):
    from harness.peer_case import PEERS, PeerProcess

    spec = next(spec for spec in PEERS if spec.name == name)
    return PeerProcess(spec, python, Path("model"), [1, 2, 3], 2, folder)


def test_a_peer_answers_steps_and_logits_whatever_libraries_print(stand_in: Path, tmp_path: Path) -> None:
    peer = start("eager", tmp_path / "kept")
    assert peer.version == "stand-in of 2 threads, 1000"
    assert peer.step() == peer.step() == 0.5
    ids, logits = peer.logits()
    assert ids == [1, 2, 3, 7]
    np.testing.assert_array_equal(logits, np.load(tmp_path / "logits.npy").astype(float))
    assert (tmp_path / "kept").is_dir()
    peer.close()
    assert peer._process.returncode is not None


@pytest.mark.parametrize(
    ("name", "python", "says"),
    [
        ("optimum", sys.executable, "No module named 'a_package_that_is_not_there'"),
        ("exporters", sys.executable, "it has ended: last words"),
        ("eager", "/nowhere/python", "/nowhere/python cannot be run"),
    ],
)
def test_a_peer_that_cannot_start_says_why(stand_in: Path, tmp_path: Path, name: str, python: str, says: str) -> None:
    from harness.peer_case import PeerError

    with pytest.raises(PeerError, match=says):
        start(name, tmp_path / "kept", python)


def test_a_peer_that_dies_or_hangs_is_noticed(stand_in: Path, tmp_path: Path, monkeypatch) -> None:
    from harness import peer_case as peers

    peer = start("eager", tmp_path)
    monkeypatch.setattr(peers, "STEP_LIMIT", 0.2)
    os.kill(peer._process.pid, signal.SIGSTOP)
    with pytest.raises(peers.PeerError, match=r"no answer within 0\.2 s"):
        peer.step()
    peer._process.wait()
    with pytest.raises(peers.PeerError, match="it has ended"):
        peer.step()
    peer.close()


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([1.0, 2.0, 3.0, 0.0], "logits are"),
        ([1.0, 3.001, 3.0], "likeliest token 1, ours 2"),
        ([1.0, 2.1, 3.0], "3.3e-02 of the largest apart"),
        ([1.0, float("nan"), 3.0], "not ours"),
    ],
)
def test_logits_that_are_not_ours_are_refused(theirs: list[float], says: str) -> None:
    from harness.peer_case import PeerError, check_logits

    ours = np.array([1.0, 2.999, 3.0]) if "likeliest" in says else np.array([1.0, 2.0, 3.0])
    with pytest.raises(PeerError, match=says):
        check_logits(np.array(theirs), ours)


def test_the_hugging_face_peer_says_what_we_say(demo_model: Path, demo_bundle: Path, tmp_path: Path) -> None:
    import torch
    from harness.engine_case import logits_after
    from harness.peer_case import check_logits
    from harness.peer_process import Eager, Job

    from tide_export.runtime.engine import load

    with torch.no_grad():
        peer = Eager(Job("eager", str(demo_model), [5, 6, 7, 8], 1, 20, str(tmp_path)))
        for _ in range(2):  # the second step must be behind the same context
            assert peer.step() > 0
            assert check_logits(peer.logits, logits_after(load(demo_bundle, "cpu", 1), [5, 6, 7, 8, 8])) < 1e-5


def test_peers_are_timed_or_left_out_with_the_reason(
    stand_in: Path, demo_graphs: Path, demo_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    import peers as benchmark_peers

    monkeypatch.setattr(benchmark_peers, "genai_installed", lambda: False)
    options = ["--context", str(CONTEXT), "--loads", "2", "--rounds", "2", "--threads", "1", "--check"]
    files = ["--graphs", str(demo_graphs), "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    monkeypatch.setattr(sys, "argv", ["peers", str(demo_model), *options, *files])
    assert benchmark_peers.main() == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["median_ms"]) == [benchmark_peers.OURS, benchmark_peers.MAY_EXIT, "Hugging Face eager"]
    assert result["median_ms"]["Hugging Face eager"] == 500
    assert set(result["left_out"]) == {
        "TIDE 0.2.1",
        "Optimum-ONNX",
        "transformers.exporters, fused",
        benchmark_peers.GENAI_TITLE,
    }
    said, loud = capsys.readouterr()
    assert "NOT MEASURED at least 2x as fast as Optimum-ONNX" in said
    assert "met     at least 3x as fast as Hugging Face eager" in said
    for out in (said, loud):
        assert "OMITTED TIDE 0.2.1: its logits are not ours" in out
        assert "--peer optimum=ENVIRONMENT/bin/python" in out
        assert "OMITTED transformers.exporters, fused: it has ended: last words" in out
    assert (tmp_path / "r.png").stat().st_size > 5_000


@pytest.mark.parametrize("option", ["torch=/usr/bin/python", "eager", "tide="])
def test_interpreters_of_no_peer_are_refused(option: str) -> None:
    from peers import interpreters

    with pytest.raises(SystemExit, match="NAME=PYTHON"):
        interpreters([option])
    assert interpreters(["tide=/a=b"]) == {"tide": "/a=b"}
