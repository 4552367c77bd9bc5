"""`tools/benchmarks/cpu_peers.py`: our own case for real, others by a stand-in; what is omitted and why. No test looks
at a time."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

# A runtime of any name, which fails as its file asks.
STAND_IN = """
import sys
sys.path.insert(0, {folder!r})
import runtime_process

class StandIn:
    version = "a stand-in"

    def __init__(self, job):
        print("libraries print to standard output")
        self._file = job.file
        if job.file == "missing":
            import a_package_that_is_not_there

    def generate(self, prompts, tokens):
        if self._file == "small" and len(prompts) > 1:
            raise ValueError("no room for two")
        assert len({{len(prompt) for prompt in prompts}}) == 1
        return len(prompts[0]) / 100, (tokens - 1) / 10

    def nll(self, ids):
        return [0.5] * (len(ids) - 1)

runtime_process.RUNTIMES = dict.fromkeys(runtime_process.RUNTIMES, StandIn)
runtime_process.main()
"""


# As llama-server answers.
SERVER = """#!{python}
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and asked["ignore_eos"] and not asked["cache_prompt"]
        tokens = 1 if asked["prompt"] == [0] else asked["n_predict"]
        timings = {{"prompt_ms": 100 * len(asked["prompt"]), "predicted_ms": 40.0, "predicted_n": tokens}}
        self.reply({{"timings": timings}})

    def reply(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

if "--version" in sys.argv:
    print("version: 12 (abc) built for a machine")
else:
    option = {{name: value for name, value in zip(sys.argv, sys.argv[1:]) if name.startswith("-")}}
    assert (option["-m"], option["-t"], option["-c"], option["-np"]) == ("f.gguf", "1", "128", "2")
    http.server.ThreadingHTTPServer(("127.0.0.1", int(option["--port"])), Handler).serve_forever()
"""


def run(monkeypatch: pytest.MonkeyPatch, model: Path, *options: str) -> int:
    import cpu_peers

    monkeypatch.setattr(sys, "argv", ["cpu_peers", str(model), "--threads", "1", *options])
    return cpu_peers.main()


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    file = tmp_path / "text.txt"
    file.write_text("def area(width, height):\n    return width * height\n\n" * 20)
    return ["--dataset", str(file)]


def test_cases_are_compared_or_omitted_with_the_reason(
    demo_model: Path, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    import cpu_peers

    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(folder=str(cpu_peers.CHILD.parent)))
    monkeypatch.setattr(cpu_peers, "CHILD", script)
    cases = ["--case", "good=genai:g", "--case", "small=llama.cpp:small", "--case", "none=openvino:missing"]
    files = ["--json", str(tmp_path / "r.json")]
    sizes = ["--contexts", "8,20", "--batches", "1,2", "--tokens", "5", "--perplexity", "16", "--rounds", "2"]
    assert run(monkeypatch, demo_model, *text, *cases, *files, *sizes) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    good, small = result["cases"]
    assert good["tokens_per_second"]["20x2"] == pytest.approx({"prompt": 200.0, "decode": 20.0})
    assert good["perplexity"] == pytest.approx(np.exp(0.5))
    assert good["megabytes"] > 1
    assert set(small["tokens_per_second"]) == {"8x1", "20x1"}
    assert "No module named 'a_package_that_is_not_there'" in result["omitted"]["none"]
    assert result["omitted"]["small, 20x2"] == "ValueError: no room for two"
    said, loud = capsys.readouterr()
    for out in (said, loud):
        assert "OMITTED small, 8x2: ValueError: no room for two" in out


def test_our_own_case_generates_and_reads_text(demo_bundle: Path, demo_model: Path) -> None:
    from harness.runtime_process import Job, Tide, nats

    from tide_export.runtime.engine import load

    runtime = Tide(Job("tide", f"{demo_bundle}:exit", 1, 64, 2))
    for prompts in ([[5, 6, 7]], [[5, 6, 7], [8, 9, 10]]):
        first, rest = runtime.generate(prompts, 4)
        assert first > 0
        assert rest > 0
    ids = [5, 6, 7, 8]
    sequence = load(demo_bundle, "cpu", 1).start([2.0, 2.0, 2.0])
    assert runtime.nll(ids) == [nats(sequence.step([a]).logits, b) for a, b in pairwise(ids)]
    assert nats(np.log(np.array([0.25, 0.75], np.float32)), 0) == pytest.approx(np.log(4))


def test_the_hugging_face_case_says_what_we_say(demo_model: Path, demo_bundle: Path) -> None:
    import torch
    from harness.runtime_process import Job, Tide, Transformers

    with torch.no_grad():
        theirs = Transformers(Job("eager", str(demo_model), 1, 64, 2))
        assert min(theirs.generate([[5, 6, 7], [8, 9, 10]], 3)) > 0
        ids = [5, 6, 7, 8, 8]
        assert theirs.nll(ids) == pytest.approx(Tide(Job("tide", str(demo_bundle), 1, 64, 1)).nll(ids), abs=1e-4)


def test_a_program_that_cannot_start_dies_or_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import child_process as children

    with pytest.raises(children.PeerError, match="/nowhere/python cannot be run"):
        children.ChildProcess(["/nowhere/python"], 1)
    dies = "import sys; print('last words', file=sys.stderr); sys.exit(3)"
    with pytest.raises(children.PeerError, match="it has ended: last words"):
        children.ChildProcess([sys.executable, "-c", dies], 1)
    hangs = "print('{}', flush=True); input(); import time; time.sleep(60)"
    child = children.ChildProcess([sys.executable, "-c", hangs], 1)
    monkeypatch.setattr(children, "ANSWER_LIMIT", 0.2)
    with pytest.raises(children.PeerError, match=r"no answer within 0\.2 s"):
        child.ask({})
    with pytest.raises(children.PeerError, match="it has ended"):
        child.ask({})
    child.close()


def test_a_server_times_itself(tmp_path: Path) -> None:
    from harness.runtime_process import Job, Server, resident

    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    server = Server(Job("server", f"{program} -m f.gguf", 1, 64, 2))
    assert server.version == "version: 12 (abc)"
    assert server.generate([[5, 6, 7]], 4) == pytest.approx((0.3, 0.04))
    assert server.generate([[5, 6, 7], [8, 9, 10]], 4)[0] == pytest.approx(0.3)
    assert resident(server.process_id) > 1
    with pytest.raises(ValueError, match="an answer of 1 tokens, not 4"):
        server.generate([[0]], 4)
    with pytest.raises(ValueError, match="the server ended with exit code 1"):
        Server(Job("server", f"{program} -m another.gguf", 1, 64, 2))


def test_a_server_ends_with_its_runtime(tmp_path: Path) -> None:
    from harness.child_process import ChildProcess
    from harness.runtime_process import __file__ as script

    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    job = {"runtime": "server", "file": f"{program} -m f.gguf", "threads": 1, "length": 64, "batch": 2}
    child = ChildProcess([sys.executable, "-P", script, json.dumps(job)], 1)
    assert child.ask({"do": "generate", "prompts": [[5, 6]], "tokens": 3})["rest"] == pytest.approx(0.04)
    mine = [path for path in Path("/proc").glob("[0-9]*") if runs(path, str(program))]
    assert mine
    child.close()
    for _ in range(100):
        if not any(runs(path, str(program)) for path in mine):
            break
        time.sleep(0.05)
    assert not any(runs(path, str(program)) for path in mine)


def runs(process: Path, program: str) -> bool:
    try:
        return program in (process / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--case", "a=tide"], "--case a=tide: TITLE=RUNTIME:FILE"),
        (["--case", "a=vllm:b"], "RUNTIME one of tide, llama.cpp, server, genai, openvino, eager"),
        (["--case", "a=tide:b", "--contexts", "4096"], "fewer than a context of 4096"),
        (["--case", "a=tide:/nowhere", "--contexts", "4", "--batches", "1"], "no case could be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    demo_model: Path, text: list[str], monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    with pytest.raises(SystemExit, match=says):
        run(monkeypatch, demo_model, *text, *options)
