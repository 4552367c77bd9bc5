"""`tide-export generate`: its text, its numbers, its options, one prompt or several."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from bundles import put_text
from command_line import refused

import tide_export
from tide_export.cli.main import COMMANDS, main

PROMPT = "def read_lines(path):\n"


def generated(capsys: pytest.CaptureFixture[str], bundle: Path, *arguments: object) -> dict:
    line = ["generate", str(bundle), "--prompt", PROMPT, "--json", "-q", *map(str, arguments)]
    assert main(line) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_streams_the_text_that_json_holds(demo_bundle: Path, capsys):
    answer = generated(capsys, demo_bundle, "--max-new-tokens", 12)
    assert main(["generate", str(demo_bundle), "--prompt", PROMPT, "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out == answer["text"] + "\n"
    assert "layers per token" in err
    assert answer["finish_reason"] == "length"
    assert len(answer["tokens"]) == answer["stats"]["total_tokens"] == 12
    assert sum(answer["stats"]["exits_per_layer"].values()) + answer["stats"]["remaining_tokens"] == 12


def test_echo_puts_the_prompt_first(demo_bundle: Path, capsys):
    answer = generated(capsys, demo_bundle, "--max-new-tokens", 4)
    assert main(["generate", str(demo_bundle), "--prompt", PROMPT, "--max-new-tokens", "4", "--echo", "-q"]) == 0
    assert capsys.readouterr().out == PROMPT + answer["text"] + "\n"


def test_generate_equals_the_python_interface(demo_bundle: Path, capsys):
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(demo_bundle / "tokenizer.json")).encode(PROMPT).ids
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 4}
    expected = tide_export.load(demo_bundle).generate(ids, max_new_tokens=10, mode="full", **options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert generated(capsys, demo_bundle, "--max-new-tokens", 10, "--mode", "full", *flags)["tokens"] == expected.tokens


def test_options_that_shape_the_text(demo_bundle: Path, tmp_path: Path, capsys):
    engine = tide_export.load(demo_bundle)
    ids, schema = engine.tokenizer.encode(PROMPT), tmp_path / "schema.json"
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.2, "logprobs": 2}
    expected = engine.generate(ids, max_new_tokens=10, mode="full", logit_bias={7: 2.0, 9: -1.0}, **options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += ["--logit-bias", "7=2", "--logit-bias", "9=-1", "--max-new-tokens", 10, "--mode", "full"]
    found = generated(capsys, demo_bundle, *flags)
    assert found["tokens"] == expected.tokens
    assert found["logprobs"][3]["top"] == [list(pair) for pair in expected.logprobs[3].top]
    whole = generated(capsys, demo_bundle, "--mode", "full", "--max-new-tokens", 12)["text"]
    line = ["generate", str(demo_bundle), "--prompt", PROMPT, "--mode", "full", "--max-new-tokens", "12", "-q"]
    assert main([*line, "--stop", "never", "--stop", whole[7:11]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[7:11])] + "\n"
    schema.write_text('{"enum": ["a", 12]}')
    assert generated(capsys, demo_bundle, "--json-schema", schema)["text"] in ('"a"', "12")
    schema.write_text('start: "left" | "right"')
    assert main([*line, "--grammar", str(schema)]) == 0
    assert capsys.readouterr().out in ("left\n", "right\n")


def test_a_conversation(demo_bundle: Path, tmp_path: Path, capsys, monkeypatch):
    bundle = tmp_path / "chat"
    shutil.copytree(demo_bundle, bundle)
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    put_text(bundle, "chat_template.jinja", template)
    engine = tide_export.load(bundle)
    ids = engine.tokenizer.encode_plain(f"# system: Be brief.\n# user: {PROMPT}\n# assistant:")
    expected = engine.generate(ids, max_new_tokens=8, mode="full").tokens
    line = ["--chat", "--system", "Be brief.", "--mode", "full", "--max-new-tokens", 8]
    assert generated(capsys, bundle, *line)["tokens"] == expected
    beginnings = tmp_path / "beginnings.jsonl"
    beginnings.write_text(json.dumps({"text": PROMPT}) + "\n")
    assert main(["generate", str(bundle), "-q", "--json", "--prompts", str(beginnings), *map(str, line)]) == 0
    expected = engine.generate(engine.tokenizer.encode(PROMPT), max_new_tokens=8, mode="full").tokens
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    monkeypatch.setitem(sys.modules, "jinja2", None)
    says = refused(capsys, "generate", bundle, "-q", "--prompt", PROMPT, "--chat")
    assert "a conversation needs the package 'jinja2': pip install -e '.[chat]' in the clone" in says


def test_thresholds_reach_the_graph(demo_bundle: Path, capsys):
    shallow = generated(capsys, demo_bundle, "--threshold", 0, "--min-layers", 0, "--max-new-tokens", 6)
    assert shallow["stats"]["exits_per_layer"] == {"3": 6, "6": 0, "9": 0}
    second = generated(capsys, demo_bundle, "--threshold", "1,0,1", "--min-layers", 0, "--max-new-tokens", 6)
    assert second["stats"]["exits_per_layer"] == {"3": 0, "6": 6, "9": 0}
    full = generated(capsys, demo_bundle, "--mode", "full", "--max-new-tokens", 6)
    assert full["stats"]["exit_rate"] == 0
    assert full["stats"]["layers_run_per_token"] == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--threshold", "1.5"], "[0, 1]"),
        (["--threshold", "0.5,0.5"], "3 checkpoints"),
        (["--min-layers", "-1"], "min_layers"),
        (["--max-pending", "-1"], "max_pending"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "-1"], "top_k"),
        (["--top-p", "0"], "top_p"),
        (["--prompt", ""], "empty"),
        (["--prompt", "word " * 3000], "context"),
        (["--threads", "0"], "threads must be a whole number from 1 to 1024, not 0"),
        (["--threads", "2147483648"], "threads must be a whole number from 1 to 1024, not 2147483648"),
        (["--threads", "100000"], "threads must be a whole number from 1 to 1024, not 100000"),
        (["--threshold", "1e400"], "threshold must lie in [0, 1], not inf"),
        (["--max-pending", "9" * 30], "max_pending must be a whole number from 0 to 9223372036854775807"),
        (["--prompt", "\udcff"], "the prompt is not valid Unicode: its character 1 is '\\udcff'"),
        (["--min-p", "0.1"], "min_p is for a temperature above 0"),
        (["--repetition-penalty", "0"], "repetition_penalty must be above 0"),
        (["--logit-bias", "99999=1"], "logit_bias holds token id 99999, outside the vocabulary"),
        (["--logprobs", "3"], "--logprobs is for --json"),
        (["--stop", ""], "stop must be a string or a list of strings, none of them empty"),
        (["--regex", "[a"], "regex cannot be compiled"),
        (["--json-schema", "gone.json"], "--json-schema: cannot read gone.json"),
        (["--json-whitespace"], "json_whitespace is for json_schema"),
        (["--system", "Be brief."], "--system is for --chat"),
        (["--chat"], "takes no conversations, only text"),
        (["--provider", "abacus"], "provider"),
        (["--provider", "tensorrt"], "holds no TensorRT plans: build them with"),
    ],
)
def test_bad_generation_options_are_one_line(demo_bundle: Path, capsys, options, says):
    assert says in refused(capsys, "generate", demo_bundle, "-q", "--prompt", PROMPT, *options)


def test_several_prompts_are_generated_together(demo_bundle: Path, tmp_path: Path, capsys):
    prompts = [PROMPT, "import os"]
    line = ["generate", str(demo_bundle), "--max-new-tokens", "6", "--threads", "1"]
    single = []
    for prompt in prompts:
        assert main([*line, "--prompt", prompt, "--json", "-q"]) == 0
        single.append(json.loads(capsys.readouterr().out))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    assert main([*line, "--prompts", str(file), "--json", "-q", "--compaction-threshold", "0.5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for one, other in zip(answer["sequences"], single, strict=True):
        assert [one[name] for name in ("prompt", "text", "tokens", "finish_reason")] == [
            other[name] for name in ("prompt", "text", "tokens", "finish_reason")
        ]
        assert one["stats"]["total_tokens"] == 6
    assert answer["total_tokens"] == 12
    assert answer["tokens_per_second"] > 0
    assert main([*line, "--prompt", prompts[0], "--prompt", prompts[1], "--echo"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"--- {n} of 2\n{one['prompt']}{one['text']}\n" for n, one in enumerate(single, 1))
    assert "12 tokens of 2 prompts" in err


def test_several_prompts_in_lossless_mode(demo_bundle: Path, tmp_path: Path, capsys):
    prompts = ["def main(self):", "import os"]
    line = ["generate", str(demo_bundle), "--max-new-tokens", "12", "--threads", "1", "--ignore-eos"]
    several = [option for prompt in prompts for option in ("--prompt", prompt)]
    assert main([*line, *several, "--mode", "full", "--json", "-q"]) == 0
    full = json.loads(capsys.readouterr().out)["sequences"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts) + "\n")
    drafting = ["--mode", "lossless", "--threshold", "0", "--max-pending", "3", "--prompt-lookup", "4"]
    assert main([*line, "--prompts", str(file), *drafting, "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mode"] == "lossless"
    assert [one["tokens"] for one in found["sequences"]] == [one["tokens"] for one in full]
    assert all(one["stats"]["drafted"] > 0 for one in found["sequences"])
    assert main([*line, *several, *drafting]) == 0
    assert capsys.readouterr().err.count(" accepted (") == 2


def test_what_a_batch_refuses_is_one_line(demo_bundle: Path, tmp_path: Path, capsys):
    one = ["--prompt", "a", "--compaction-threshold", "1"]
    assert "several prompts" in refused(capsys, "generate", demo_bundle, "-q", *one)
    gone = str(tmp_path / "gone.txt")
    assert "gone.txt" in refused(capsys, "generate", demo_bundle, "-q", "--prompts", gone)


def test_characters_that_the_locale_lacks_are_escaped(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setitem(COMMANDS, "inspect", lambda options: print("5 \u20ac") or 0)
    assert main(["inspect", "x"]) == 0
    assert output.getvalue() == b"5 \\u20ac\n"
