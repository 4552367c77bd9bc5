"""The command line: its options, its exit codes, and one clear line for everything a user can get wrong."""

import dataclasses
import inspect
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused

import tide_export
from tide_export.calibration.config import TideConfig
from tide_export.cli.fields import OWN_OPTIONS
from tide_export.cli.main import COMMANDS, _config, main
from tide_export.cli.options import build_parser, config_flag
from tide_export.pipeline.request import ExportRequest
from tide_export.plans.rebuild import rebuild
from tide_export.tuning.request import REQUESTS

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "demo" / "demo-llama")


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["calibrate", "export"])
def test_every_config_field_has_an_option_whose_help_shows_its_default(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    for name, field in TideConfig.model_fields.items():
        default = {True: "yes", False: "no"}[field.default] if isinstance(field.default, bool) else field.default
        shown = "" if default is None else f" ({default:g})" if isinstance(default, float) else f" ({default})"
        assert re.search(f"{config_flag(name)} [^ ]+ {re.escape(field.description + shown)} ", text), name


@pytest.mark.parametrize("command", ["calibrate", "export"])
def test_options_reach_the_config(command):
    given = ["--checkpoints", "3,6,9", "--exit-threshold", "0.5", "--min-layers", "3", "--label", "cosine"]
    given += ["--exit-strategy", "lens", "--class-balance", "yes", "--router-shortlist", "0"]
    config = _config(build_parser().parse_args([command, MODEL, "-o", "x", *given]))
    assert (config.checkpoints, config.exit_threshold, config.min_layers) == ((3, 6, 9), 0.5, 3)
    assert config.label == "cosine"
    assert (config.exit_strategy, config.class_balance, config.router_shortlist) == ("lens", True, 0)
    assert config.calibration_samples == TideConfig().calibration_samples


PARAMETERS = {
    "build": rebuild,
    "validate": tide_export.validate,
    "bench": tide_export.bench,
}


@pytest.mark.parametrize("command", PARAMETERS)
def test_options_are_named_like_the_parameters_they_are_for(command):
    required = {"validate": ["--model", "x"]}.get(command, [])
    options = vars(build_parser().parse_args([command, "x", *required]))
    assert options.keys() - set(OWN_OPTIONS) == inspect.signature(PARAMETERS[command]).parameters.keys()


def test_every_field_of_a_request_has_an_option():
    options = vars(build_parser().parse_args(["export", MODEL, "-o", "x"]))
    assert {field.name for field in dataclasses.fields(ExportRequest)} - {"config"} <= options.keys()
    options = vars(build_parser().parse_args(["generate", MODEL, "--prompt", "x"]))
    of_python = {
        "cache_salt",
        "detokenize",
        "logits_processor",
        "prediction",
        "prompt_logprobs",
        "special_tokens",
        "states",
    }
    assert {field.name for field in dataclasses.fields(tide_export.GenerationConfig)} - of_python <= options.keys()
    options = vars(build_parser().parse_args(["tune", "x", "--dataset", "x"]))
    wanted = {field.name for request in REQUESTS.values() for field in dataclasses.fields(request)}
    assert options.keys() - set(OWN_OPTIONS) == wanted | {"bundle", "mode"}


def test_checkpoints_may_be_left_to_us():
    options = build_parser().parse_args(["calibrate", MODEL, "-o", "x", "--checkpoints", "auto"])
    assert TideConfig.from_options(checkpoints=options.checkpoints).checkpoints == "auto"


def test_version_and_help_need_neither_torch_nor_an_engine():
    code = (
        "import sys; from tide_export.cli.main import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'onnxruntime', 'pydantic', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_prints_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "tide_export.cli.main", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tide-export {tide_export.__version__}\n"


# --- usage errors and what this release does not have --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["tone", "x"], "no command tone: did you mean tune?"),
        (["--verson"], "no option --verson: did you mean --version?"),
        (["tune", "x"], "arguments are required: --dataset; such as: tide-export tune out/demo --dataset "),
        (["generate", "x", "--promt", "a"], "generate: error: no option --promt: did you mean --prompt?"),
        (["generate", "x", "-prompt=a"], "no option -prompt: did you mean --prompt?"),
        (["generate", "x", "--prompt", "a", "b"], "'b' is one argument too many: put a text with spaces in quotes"),
        (["serve", "x", "--port", "http"], "argument --port: must be a whole number, not 'http'"),
        (["serve", "x", "--port", "99999"], "--port must be less than or equal to 65535, not 99999"),
        (["export", MODEL], "-o/--output"),
        (["export", MODEL, "-o", "x", "--checkpoints", "3,x"], "'3,x' is not auto or none, nor a list of layer counts"),
        (["calibrate", MODEL, "-o", "x", "--class-balance", "maybe"], "'maybe' is not yes or no"),
        (["calibrate", MODEL, "-o", "x", "--device-map", "cuda"], "invalid choice: 'cuda'"),
        (["export", MODEL, "-o", "x", "--checkpoint", "3"], "no option --checkpoint: did you mean --checkpoints?"),
        (["generate", "x", "--prompt", "a", "--threshold", "high"], "'high' is not a threshold"),
        (["generate", "x", "--prompt", "a", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["export", MODEL, "-o", "x", "--target", "abacus"], "invalid choice: 'abacus'"),
        (["export", MODEL, "-o", "x", "--weights", "int2"], "--weights: invalid choice: 'int2'"),
        (["generate", "x", "--prompt", "a", "--mode", "fast"], "invalid choice: 'fast'"),
        (["generate", "x", "--prompt", "a", "two\nlines"], "'two\\nlines' is one argument too many"),
    ],
)
def test_usage_errors_are_one_line(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


# --- bad input to calibrate and export: nothing is written -----------------------------------------------------------


@pytest.mark.parametrize("command", ["calibrate", "export"])
@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("./no-such-model", [], "no-such-model"),
        (str(ROOT / "tests"), [], "holds no config.json"),
        (MODEL, ["--dataset", "./no-such.txt"], "no such file"),
        (MODEL, ["--dataset", "./none/*.txt"], "no file matches"),
        (MODEL, ["--dataset", "EMPTY"], "holds no text"),
        (MODEL, ["--checkpoints", "3,12"], "must lie in 1..11"),
        (MODEL, ["--checkpoints", "6,3"], "distinct and ascending"),
        (MODEL, ["--checkpoint-interval", "12"], "leaves no checkpoint"),
        (MODEL, ["--exit-threshold", "1.5"], "exit_threshold"),
        (MODEL, ["--max-pending", "-1"], "max_pending"),
        (MODEL, ["--label", "vibes"], "label"),
        (MODEL, ["--exit-strategy", "teleport"], "--exit-strategy: invalid choice: 'teleport'"),
        (MODEL, ["--lens-rank", "0"], "lens_rank"),
        (MODEL, ["--kl-bound", "0"], "kl_bound"),
        (MODEL, ["--router-shortlist", "-1"], "router_shortlist"),
        (MODEL, ["--validation-fraction", "0.5"], "validation_fraction"),
        (MODEL, ["--recipe", "no-such.toml"], "no recipe at no-such.toml"),
    ],
)
def test_bad_input_writes_nothing(capsys, tmp_path, monkeypatch, command, model, options, says):
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    options = [str(empty) if option == "EMPTY" else option for option in options]
    if "--dataset" not in options:
        options += ["--dataset", str(empty)]
    assert says in refused(capsys, command, model, "-o", "result", *options)
    assert sorted(tmp_path.iterdir()) == [empty]


def test_a_recipe_is_read_and_its_mistakes_are_named(capsys, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("checkpoints = [3, 12]\n")
    assert "must lie in 1..11" in refused(capsys, "export", MODEL, "-o", tmp_path / "x", "--recipe", recipe)
    recipe.write_text("checkpoint = [3]\n")
    assert "checkpoint" in refused(capsys, "export", MODEL, "-o", tmp_path / "x", "--recipe", recipe)
    recipe.write_text("checkpoints = \n")
    assert "not valid TOML" in refused(capsys, "export", MODEL, "-o", tmp_path / "x", "--recipe", recipe)


@pytest.mark.parametrize("recipe", sorted((ROOT / "calibration" / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_the_recipes_in_the_repository_are_usable(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = build_parser().parse_args(["export", MODEL, "-o", "x", "--recipe", str(recipe), "--seed", "7"])
    assert _config(options).seed == 7


def test_calibration_options_beside_finished_routers_are_refused(capsys, tmp_path):
    line = refused(capsys, "export", MODEL, "-o", tmp_path / "x", "--routers", "r.pt", "--dataset", "wikitext")
    assert "--dataset does nothing with --routers" in line
    line = refused(capsys, "calibrate", MODEL, "-o", tmp_path / "x", "--from-tide", "r.pt", "--checkpoints", "3")
    assert "--checkpoints does nothing with --from-tide" in line
    for flag, value in (("--report", "r.html"), ("--cache", "c"), ("--device-map", "auto")):
        line = refused(capsys, "calibrate", MODEL, "-o", tmp_path / "x", "--from-tide", "r.pt", flag, value)
        assert f"{flag} does nothing with --from-tide" in line


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ("report.pdf", "must end in .html"),
        ("none/report.html", "there is no folder"),
        ("folder.html", "is a folder"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    capsys, tmp_path, monkeypatch, report, says
):
    from tide_export.pipeline import calibrate as pipeline

    monkeypatch.setattr(pipeline, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "folder.html").mkdir()
    line = refused(capsys, "calibrate", MODEL, "-o", tmp_path / "r.safetensors", "--report", tmp_path / report)
    assert says in line
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(tide_export.TideError):
        main(["inspect", str(tmp_path / "none"), "--debug"])


# --- bundles that are not right ------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("command", ["inspect", "generate", "bench", "validate"])
@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("model.onnx", truncate, "truncated"),
        ("model.onnx", flip, "corrupt"),
        ("model.onnx.data", truncate, "truncated"),
        ("model.onnx.data", flip, "corrupt"),
        ("routers.safetensors", flip, "corrupt"),
        ("tokenizer.json", Path.unlink, "missing"),
        ("tide.json", truncate, "not valid JSON"),
        ("tide.json", Path.unlink, "not a bundle"),
    ],
)
def test_a_damaged_bundle_is_named_and_nothing_runs(demo_bundle, tmp_path, capsys, command, name, damage, says):
    copy = Path(shutil.copytree(demo_bundle, tmp_path / "copy"))
    damage(copy / name)
    options = {"generate": ["--prompt", "x"], "validate": ["--model", MODEL]}.get(command, [])
    line = refused(capsys, command, copy, *options)
    assert says in line
    assert str(copy) in line


@pytest.mark.parametrize("command", ["inspect", "generate", "bench", "validate"])
def test_a_bundle_that_is_not_there_is_said_so(tmp_path, capsys, command):
    options = {"generate": ["--prompt", "x"], "validate": ["--model", MODEL]}.get(command, [])
    assert "does not exist" in refused(capsys, command, tmp_path / "none", *options)


def test_an_output_that_exists_is_refused_before_any_work(demo_bundle: Path, capsys):
    before = {path: path.stat().st_mtime_ns for path in demo_bundle.iterdir()}
    assert "already exists" in refused(capsys, "export", MODEL, "-o", demo_bundle, "--dataset", "./none.txt")
    assert before == {path: path.stat().st_mtime_ns for path in demo_bundle.iterdir()}


# --- what is nobody's option -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(28, "No space left on device", "/x/y"), 2, "error: [Errno 28] No space left on device: '/x/y'"),
        (MemoryError(), 2, "error: not enough memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "needs the package 'torch'"),
        (tide_export.TideError("two\nlines"), 2, "error: two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_other_failures_are_one_line_too(monkeypatch, capsys, error, code, says):
    def fail(options):
        raise error

    monkeypatch.setitem(COMMANDS, "inspect", fail)
    assert main(["inspect", "x"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1


def test_nothing_is_left_in_the_logging_of_the_process(tmp_path, capsys):
    log = logging.getLogger("tide_export")
    before = log.level, list(log.handlers)
    assert main(["inspect", str(tmp_path / "none"), "-v"]) == 2
    assert (log.level, log.handlers) == before


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def fail(options):
        raise ModuleNotFoundError("No module named 'tide_export.gone'", name="tide_export.gone")

    monkeypatch.setitem(COMMANDS, "inspect", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["inspect", "x"])


def test_a_reader_that_leaves_is_no_error(demo_bundle: Path):
    """`tide-export inspect ... | head -1`: the pipe is closed before anything is written."""
    command = [sys.executable, "-m", "tide_export.cli.main", "inspect", str(demo_bundle)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_a_closed_standard_output_is_said_at_once() -> None:
    command = f"{sys.executable} -m tide_export.cli.main inspect no-such-bundle >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tide-export: error: standard output is closed: write it to a file, or to /dev/null\n"


# --- a machine that only runs bundles --------------------------------------------------------------------------------

WITHOUT_EXPORT_EXTRA = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "pydantic", "rich", "onnx", "onnxscript", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

sys.meta_path.insert(0, Blocked())
from tide_export.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def without_export_extra(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_EXPORT_EXTRA, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("inspect", []),
        ("generate", ["--prompt", "import os", "--max-new-tokens", 3]),
        ("bench", ["--repeat", 1, "--new-tokens", 2]),
    ],
)
def test_running_a_bundle_needs_no_export_extra(demo_bundle: Path, command, options):
    done = without_export_extra(command, demo_bundle, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("calibrate", ["-o", "x"]),
        ("export", ["-o", "x"]),
        ("validate", ["--model", MODEL]),
    ],
)
def test_making_one_without_it_says_what_to_install(tmp_path: Path, command, options):
    (tmp_path / "tide.json").touch()
    done = without_export_extra(command, tmp_path if command == "validate" else MODEL, *options)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "pip install -e '.[export,cpu]' in the clone" in done.stderr


@pytest.mark.parametrize(("given", "skipped"), [([], False), (["--no-validate"], True), (["--no-check"], True)])
def test_the_check_before_a_bundle_is_written_can_be_skipped(given, skipped):
    assert build_parser().parse_args(["export", MODEL, "-o", "x", *given]).validate is not skipped
