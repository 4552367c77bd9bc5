"""Programs in C++ on the installed runtime have the tokens, exit layers and text that Python has."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builds import ROOT, Embedding, environment, run
from bundles import without
from option_table import option_rows

from tide_export import errors
from tide_export.bundle.manifest import AutoMode
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import replace_manifest
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1)


def answer_of(embedding: Embedding, bundle: Path, *arguments: object, **variables: object) -> dict[str, Any]:
    command = [embedding.program, bundle, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, env=environment(**variables)).stdout)


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on time."""
    stats = {name: value for name, value in answer["stats"].items() if "second" not in name}
    return {"tokens": answer["tokens"], "finish_reason": answer["finish_reason"], "stats": stats}


def of_python(generation: Generation) -> dict[str, Any]:
    stats = json.loads(json.dumps(generation.stats.as_dict()))
    return facts({"tokens": generation.tokens, "finish_reason": generation.finish_reason, "stats": stats})


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"mode": "exit", "threshold": [0.6, 0.7, 0.8], "min_layers": 0},
        {"mode": "lossless", "threshold": [0.3, 0.3, 0.3], "prompt_lookup": 3},
        {"temperature": 0.7, "seed": 5, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "seed": 5, "mode": "lossless", "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_a_prompt(
    embedding: Embedding,
    demo_bundle: Path,
    engine: Engine,
    demo_text_ids: list[int],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("\n".join(map(str, demo_text_ids[:30])))
    words = ["--ids-file", file, "--threads", 1, "--max-new-tokens", 16]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, list) else value]
    answer = answer_of(embedding, demo_bundle, *words)
    assert facts(answer) == of_python(engine.generate(demo_text_ids[:30], max_new_tokens=16, **options))


def test_several_prompts(embedding: Embedding, demo_bundle: Path, engine: Engine, demo_text_ids: list[int]) -> None:
    prompts = [[5, 17, 3], demo_text_ids[:30]]
    words = [word for prompt in prompts for word in ("--ids", ",".join(map(str, prompt)))]
    sampled = ["--seed", "1,2", "--temperature", 0.7, "--max-new-tokens", 8, "--threads", 1]
    answer = answer_of(embedding, demo_bundle, *words, *sampled)
    expected = engine.generate(prompts, max_new_tokens=8, seed=[1, 2], temperature=0.7)
    assert [facts(one) for one in answer["sequences"]] == list(map(of_python, expected))
    assert answer["total_tokens"] == sum(len(one.tokens) for one in expected)
    assert answer["tokens_per_second"] == pytest.approx(answer["total_tokens"] / answer["seconds"], rel=0.01)


def test_text(embedding: Embedding, demo_bundle: Path, engine: Engine, tokenizers_library: Path) -> None:
    words = ["--threads", 1, "--max-new-tokens", 8, "--prompt", "import os\n"]
    text = answer_of(embedding, demo_bundle, *words, TIDE_TOKENIZERS=tokenizers_library)["text"]
    ids = engine.tokenizer.encode("import os\n")
    assert text == engine.generate(ids, max_new_tokens=8, detokenize=True).text
    stop = text[2:5]
    stopped = answer_of(embedding, demo_bundle, *words, "--stop", stop, TIDE_TOKENIZERS=tokenizers_library)
    assert stopped["text"] == text.partition(stop)[0]
    done = subprocess.run(
        [embedding.program, demo_bundle, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "set TIDE_TOKENIZERS to one, or give token ids" in done.stderr


def test_the_mode_that_auto_is(embedding: Embedding, demo_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(without(demo_bundle, tmp_path / "b", "drafter.onnx"))

    def mode(*arguments: str) -> str:
        return answer_of(embedding, bundle.path, "--ids", "5,1", "--max-new-tokens", 2, *arguments)["mode"]

    assert mode() == "full"
    measured = AutoMode("exit", (0.5, 0.5, 0.5), 0.02, "cpu", 1.25, None, "a processor, 2 threads", {})
    replace_manifest(bundle, replace(bundle.manifest, auto=measured))
    assert mode() == "exit"
    assert mode("--mode", "lossless") == "lossless"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ids", "1"], "no bundle is given"),
        (["BUNDLE"], "the prompt is empty: give at least one token"),
        (["BUNDLE", "--ids", "1,x"], "--ids must be whole numbers, not 'x'"),
        (["BUNDLE", "--ids", "1", "--top-p", "a"], "--top-p must be a number, not 'a'"),
        (["BUNDLE", "--ids", "1", "--seed", "99999999999999999999"], "--seed must be whole numbers"),
        (["BUNDLE", "--ids"], "--ids needs a value"),
        (["BUNDLE", "--ids-file", "/nowhere"], "--ids-file '/nowhere' cannot be read"),
        (["BUNDLE", "--ids", "1", "--threshold", "7"], "threshold must lie in [0, 1], not 7.0"),
        (["BUNDLE", "--ids", "1", "--threads", "0"], "threads must be a whole number from 1 to 1024, not 0"),
        (["BUNDLE", "--colour"], "unknown argument '--colour'"),
        (["BUNDLE", "another"], "unknown argument 'another'"),
        (["nowhere", "--ids", "1"], "bundle 'nowhere' does not exist"),
    ],
)
def test_mistakes(embedding: Embedding, tiny_bundle: Path, arguments: list[str], sentence: str) -> None:
    given = [str(tiny_bundle) if word == "BUNDLE" else word for word in arguments]
    done = subprocess.run([embedding.program, *given], capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tide_generate: {sentence}")
    assert done.stderr.count("\n") == 1


def test_without_onnx_runtime_the_sentence_says_what_to_set(embedding: Embedding, tiny_bundle: Path) -> None:
    command = [embedding.program, tiny_bundle, "--ids", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(TIDE_ONNXRUNTIME="/no/such.so")
    )
    assert done.returncode == 2
    assert "ONNX Runtime" in done.stderr
    assert "TIDE_ONNXRUNTIME" in done.stderr


def test_onnx_runtime_leaves_nothing_to_send(embedding: Embedding, tiny_bundle: Path, tmp_path: Path) -> None:
    variables = environment(HOME=tmp_path, XDG_CACHE_HOME=tmp_path / "cache")
    left = {name: value for name, value in variables.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    subprocess.run([embedding.program, tiny_bundle, "--ids", "5,1"], env=left, check=True, capture_output=True)
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name] == []


def test_the_help_names_every_option(embedding: Embedding) -> None:
    text = run([str(embedding.program), "--help"])
    elsewhere = {"adapter", "cache_salt", "states", "prompt_logprobs"}  # neither loaded nor printed
    names = {"ids_file", "prompt", "threads", "ignore_eos", "no_verify"} | option_rows().keys() - elsewhere
    assert {name for name in names if f" --{name.replace('_', '-')}" not in text} == set()


def test_errors_have_the_names_of_python_s(embedding: Embedding) -> None:
    text = (embedding.prefix / "include" / "tide" / "errors.h").read_text()
    named = [line.split()[1] for line in text.splitlines() if line.startswith("struct ")]
    assert len(named) >= 6
    assert all(issubclass(getattr(errors, name), errors.TideError) for name in named)


def test_the_example_of_a_service(
    embedding: Embedding, demo_bundle: Path, engine: Engine, tokenizers_library: Path
) -> None:
    service = [embedding.build(ROOT / "examples" / "embed_cpp") / "tide_service", demo_bundle]
    prompts = ["import os", "def f(x):"]
    variables = environment(TIDE_TOKENIZERS=tokenizers_library)
    done = subprocess.run(service, input="\n".join(prompts), capture_output=True, text=True, check=False, env=variables)
    expected = [
        engine.generate(engine.tokenizer.encode(prompt), max_new_tokens=64, detokenize=True) for prompt in prompts
    ]
    assert done.stdout == "".join(f"{one.text}\n" for one in expected)
    assert [line.split()[0] for line in done.stderr.splitlines()] == [str(len(one.tokens)) for one in expected]
    refused = subprocess.run([*service[:1], "nowhere"], capture_output=True, text=True, check=False, env=variables)
    assert refused.returncode == 2
    assert refused.stderr.startswith("tide_service: ")


def test_the_guide_compiles() -> None:
    """The blocks of docs/guide/cpp.md that call the runtime, each in the scope of those before it."""
    text = (ROOT / "docs/guide/cpp.md").read_text()
    blocks = [block for block in re.findall(r"```cpp\n(.*?)```", text, re.DOTALL) if "tide::" in block]
    assert len(blocks) > 3
    body, include = "{\n".join(blocks) + "}" * len(blocks), r"^#include .*\n"
    includes = "".join(re.findall(include, body, re.MULTILINE)) + "using Ids = std::vector<std::int64_t>;\n"
    guide = "void guide(Ids const& prompt_ids, Ids const& first_ids, void send(std::int64_t)) {\n"
    command = ["c++", "-std=c++17", "-fsyntax-only", "-I", str(ROOT / "cpp" / "include"), "-x", "c++", "-"]
    run(command, includes + guide + re.sub(include, "", body, flags=re.MULTILINE))
