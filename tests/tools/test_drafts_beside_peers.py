"""`tools/benchmarks/drafts_beside_peers.py`: our own cases for real, a server by a stand-in, and what is omitted and
why. No test looks at a time."""

import json
import sys
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parents[2] / "tools" / "benchmarks" / "prompts"

# As llama-server answers; with an option it says that it drafts, it takes a quarter of the time.
SERVER = """#!{python}
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["top_k"] == (7 if asked["temperature"] else 1) and not asked["cache_prompt"]
        if "greedy" in sys.argv and asked["temperature"]:
            self.send_error(500, "greedy only")
            return
        text = "a" if "--spec-type" in sys.argv and asked["seed"] else "b"
        timings = {{"predicted_ms": 100.0 if "--spec-type" in sys.argv else 400.0, "predicted_n": 5}}
        self.reply({{"content": text, "timings": timings}})

    def reply(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

if "--version" in sys.argv:
    print("version: 12 (abc) built for a machine")
else:
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def run(monkeypatch: pytest.MonkeyPatch, bundle: Path, *options: str) -> int:
    import drafts_beside_peers

    sizes = ["--threads", "1", "--new-tokens", "8", "--top-k", "7"]
    monkeypatch.setattr(sys, "argv", ["drafts_beside_peers", str(bundle), *sizes, *options])
    return drafts_beside_peers.main()


def test_ours_and_a_server_are_compared(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = tmp_path / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    prompts = tmp_path / "code.jsonl"
    prompts.write_text('{"text": "def area(width, height):"}\n{"text": "for i in range(10):"}\n')
    cases = {
        "ours, full": f"tide:{demo_bundle}:full",
        "ours, lossless": f"tide:{demo_bundle}:lossless",
        "ours, n-grams": f"tide:{demo_bundle}:ngrams",
        "a server, plain": f"server:{server} -m f",
        "a server, drafts": f"server:{server} -m f --spec-type ngram",
        "greedy, plain": f"server:{server} greedy",
    }
    options = [word for title, case in cases.items() for word in ("--case", f"{title}={case}")]
    files = ["--picture", str(tmp_path / "p.png"), "--json", str(tmp_path / "r.json")]
    against = ["--against", "a server, plain"]
    assert run(monkeypatch, demo_bundle, *options, "--prompts", str(prompts), *files, *against) == 0
    said, loud = capsys.readouterr()
    tables = said.split("temperature 0:")
    assert "temperature 0.8, top-k 7: tokens/s (times its own plain decoding, times a server, plain)" in tables[0]
    for part in tables:
        rows = {row.split(" | ")[0].removeprefix("| "): row for row in part.splitlines() if row.startswith("| ")}
        assert rows["a server, plain"] == "| a server, plain | 10.0 (1.00x, 1.00x) | 0 of 2 |"
        assert rows["a server, drafts"] == "| a server, drafts | 40.0 (4.00x, 4.00x) | 1 of 2 |"
        for ours in ("ours, full", "ours, lossless", "ours, n-grams"):
            assert rows[ours].endswith("| 0 of 2 |")
    assert "greedy, plain |" in tables[1]
    for out in (tables[0] + tables[1], loud):
        assert "OMITTED greedy, plain, temperature 0.8: HTTPError: HTTP Error 500: greedy only" in out
    answers = json.loads((tmp_path / "r.json").read_text())
    (kind, temperature, first), _ = answers["ours, lossless"]
    assert (kind, temperature, first["0"]["tokens"]) == ("code", 0.8, len(first["0"]["text"]) - 1)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_title_is_refused(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    options = ["--case", "a=tide:b:full", "--prompts", str(PROMPTS / "chat.txt"), "--against", "b"]
    with pytest.raises(SystemExit):
        run(monkeypatch, demo_bundle, *options)
    assert "--against b: no case has this title" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["chat.txt", "complete.jsonl", "edit.txt", "extract.jsonl", "questions.jsonl"])
def test_each_kind_has_forty_different_prompts(file: str) -> None:
    from tide_export.common.prompt_files import Beginning, read_prompts

    prompts = read_prompts(PROMPTS / file)
    assert len(set(prompts)) == 40
    assert {isinstance(prompt, Beginning) for prompt in prompts} == {file == "complete.jsonl"}
