"""The command `tide-export`: reads options, calls one function of the package and prints its result.

`cli.options` defines the options. Each command has a short function here that imports what it calls, so that
`generate`, `bench` and `inspect` start fast and work without PyTorch. Exit codes: 0 done, 1 `validate` found a
difference, 2 a user's mistake, explained in one line on stderr, 130 interrupted.
"""

import io
import json
import logging
import os
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_export.cli.adapt import run_adapt
from tide_export.cli.draft import run_draft
from tide_export.cli.fields import given
from tide_export.cli.generate import run_generate
from tide_export.cli.hub import run_pull, run_push
from tide_export.cli.inspect import run_inspect
from tide_export.cli.options import PROGRAM, build_parser, config_flag
from tide_export.cli.probe import run_probe
from tide_export.cli.serve import run_serve
from tide_export.cli.torch_environment import prepare
from tide_export.cli.triton import run_triton
from tide_export.common.files import NO_SPACE
from tide_export.common.values import check_names
from tide_export.errors import ConfigError, TideError

if TYPE_CHECKING:
    from tide_export.calibration.config import TideConfig

logger = logging.getLogger("tide_export")

# Fields of `TideConfig` that export uses when the routers are already fitted.
EXPORT_FIELDS = {"epsilon", "perplexity_epsilon", "exit_threshold", "min_layers", "max_pending"}
EXPORT_FIELDS |= {"kv_cache_strategy", "kv_cache", "compaction_threshold"}
QUANTIZATION_FIELDS = {"calibration_dataset", "calibration_samples", "calibration_length"}  # gptq reads text

LOADING = ("adapt", "calibrate", "draft", "export", "probe", "tune", "validate")  # commands that import PyTorch
CONFIGURED = ("adapt", "calibrate", "draft", "export", "serve", "triton")  # commands whose options need pydantic


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; usage errors raise SystemExit with code 2."""
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        options = build_parser(config=command in CONFIGURED).parse_args(words)
    except ModuleNotFoundError as error:  # pydantic
        return _fail(f"error: {_sentence(error)}", TideError.exit_code)
    prepare()  # before PyTorch is loaded
    with _log_to_stderr(options.verbose - options.quiet):
        return _run(options)


def _run(options: Namespace) -> int:
    """Runs the command; turns errors that users can fix into one line and an exit code."""
    if sys.stdout is None:  # and what a command opens would take its place
        return _fail("error: standard output is closed: write it to a file, or to /dev/null", TideError.exit_code)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack a model's characters
    try:
        if options.command in LOADING:
            _check_paths(options)
        code = COMMANDS[options.command](options)
        sys.stdout.flush()  # raises BrokenPipeError here rather than at exit
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output (head, less) has ended, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TideError, OSError, MemoryError, ModuleNotFoundError) as error:
        if options.debug or (isinstance(error, ModuleNotFoundError) and str(error.name).startswith("tide_export")):
            raise
        return _fail(f"error: {_sentence(error)}", TideError.exit_code)


def _check_paths(options: Namespace) -> None:
    """Refuses a misspelt bundle or model before PyTorch is imported, which takes seconds."""
    from tide_export.bundle.opened import check_is_bundle
    from tide_export.model.paths import check_model

    if "bundle" in options:
        check_is_bundle(options.bundle)
    for name in ("model", "model_name"):
        if getattr(options, name, None) is not None:
            check_model(getattr(options, name))


def _calibrate(options: Namespace) -> int:
    config = _config(options)
    if options.from_tide is not None:
        return _import_from_tide(options)
    from tide_export.pipeline.calibrate import calibrate

    more = given(options, calibrate)
    if calibrate(**more, config=config) is not None:  # the main one of several processes
        print(options.output)
    return 0


def _import_from_tide(options: Namespace) -> int:
    _refuse_calibration_options(options, "--from-tide")
    for name in ("report", "cache", "device_map"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{config_flag(name)} does nothing with --from-tide: nothing is measured")
    from tide_export.routers.tide_import import import_routers

    import_routers(options.model, options.from_tide, bool(options.trust_remote_code)).save(options.output)
    print(options.output)
    return 0


def _export(options: Namespace) -> int:
    config = _config(options)
    if options.routers is not None:
        used = EXPORT_FIELDS | (
            QUANTIZATION_FIELDS if options.quantization == "gptq" or options.weights == "fp8" else set()
        )
        _refuse_calibration_options(options, "--routers", used)
    from tide_export.pipeline.flow import export
    from tide_export.pipeline.request import ExportRequest

    print(export(**given(options, ExportRequest), config=config))
    return 0


def _build(options: Namespace) -> int:
    from tide_export.plans.rebuild import rebuild

    print(rebuild(**given(options)).path)
    return 0


def _validate(options: Namespace) -> int:
    from tide_export.verify.validate import validate

    report = validate(**given(options))
    _print_report(options, report)
    return 0 if report.holds else 1


def _tune(options: Namespace) -> int:
    from tide_export.tuning.tune import tune

    _print_report(options, tune(**given(options)))
    return 0


def _bench(options: Namespace) -> int:
    from tide_export.runtime.bench import bench

    _print_report(options, bench(**given(options)))
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "probe": run_probe,
    "export": _export,
    "build": _build,
    "inspect": run_inspect,
    "validate": _validate,
    "bench": _bench,
    "generate": run_generate,
    "serve": run_serve,
    "triton": run_triton,
    "draft": run_draft,
    "tune": _tune,
    "calibrate": _calibrate,
    "adapt": run_adapt,
    "push": run_push,
    "pull": run_pull,
}


def _print_report(options: Namespace, report: Any) -> None:
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())


def _config(options: Namespace) -> "TideConfig":
    """Returns the settings of the recipe, if given, overridden by the command line."""
    from tide_export.calibration.config import TideConfig

    recipe = _recipe(options.recipe)
    try:
        TideConfig.from_options(**recipe)
    except ConfigError as error:
        raise ConfigError(f"recipe {options.recipe}: {error}") from None
    return TideConfig.from_options(**(recipe | _config_options(options)))


def _config_options(options: Namespace) -> dict[str, Any]:
    """Returns the fields of `TideConfig` set on the command line."""
    from tide_export.calibration.config import TideConfig

    return {name: value for name, value in given(options).items() if name in TideConfig.names()}


def _recipe(path: str | None) -> dict[str, Any]:
    """Returns the fields of `TideConfig` in a TOML file."""
    from tide_export.calibration.config import TideConfig

    if path is None:
        return {}
    try:
        recipe = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}{_recipes_near(Path(path))}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
    check_names(f"recipe {path}: no setting is called", recipe, TideConfig.names(), ConfigError)
    return recipe


def _recipes_near(path: Path) -> str:
    """Lists the recipes in the folder of `path`, or else in the checkout that is the current folder."""
    folders = [Path("calibration/recipes")] if path.parent == Path() else [path.parent, Path("calibration/recipes")]
    recipes = next((names for folder in folders if (names := sorted(map(str, folder.glob("*.toml"))))), [])
    return f"; there are {', '.join(recipes)}" if recipes else ""


def _refuse_calibration_options(options: Namespace, because: str, used: Collection[str] = EXPORT_FIELDS) -> None:
    """Refuses calibration options where routers are already fitted.

    Raises:
        ConfigError: such an option is given; the message names it.
    """
    for name in _recipe(options.recipe) | _config_options(options):
        if name not in used:
            raise ConfigError(f"{config_flag(name)} does nothing with {because}: the routers are fitted already")


def _fail(message: str, code: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


def _sentence(error: BaseException) -> str:
    """Returns an error's message on one line."""
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.filename is None and error.errno in NO_SPACE:
        return "no space left on the disk for standard output"
    if isinstance(error, ModuleNotFoundError):
        return f"this command needs the package {error.name!r}: pip install -e '.[export,cpu]' in the clone"
    return " ".join(str(error).split())


@contextmanager
def _log_to_stderr(verbosity: int) -> Iterator[None]:
    """Logs the package to stderr: a line per stage, with -q only warnings, with -v everything."""
    level, handler = logger.level, logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(max(verbosity, -1), logging.DEBUG))
    logger.addHandler(handler)
    try:
        yield
    finally:  # main may be called from a program that logs elsewhere
        logger.removeHandler(handler)
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
