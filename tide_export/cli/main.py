"""The command `tide-export`: reads options, calls one function of the package, prints what it returns.

The options are in `cli.options`; here is a short function per command. The work is in `pipeline.flow`, `build`,
`validate`, `tune`, `bench`, `bundle.inspect` and the runtime, imported only by the command that needs them, so that
`generate`, `bench` and `inspect` work (and start fast) where PyTorch is not installed. Exit codes: 0 done, 1 `validate`
found a difference, 2 a user's mistake, told in one line on stderr, 130 interrupted.
"""

import json
import logging
import os
import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_export.cli.options import CALIBRATION_FIELDS, CONFIG_OPTIONS, PROGRAM, QUANTIZATION_FIELDS, build_parser
from tide_export.cli.torch_environment import prepare
from tide_export.errors import ConfigError, TideError

if TYPE_CHECKING:
    from tide_export.config import TideConfig
    from tide_export.runtime.engine import Engine
    from tide_export.runtime.tokenizer import BundleTokenizer

logger = logging.getLogger("tide_export")
RELEASED = {"weights": ("fp32", "fp16", "bf16", "int8", "int4")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (usage errors leave through SystemExit with code 2)."""
    options = build_parser().parse_args(arguments)
    prepare()  # before PyTorch is loaded
    with _log_to_stderr(options.verbose - options.quiet):
        return _run(options)


def _run(options: Namespace) -> int:
    """Runs the command; turns what a user can mend into one line and an exit code."""
    try:
        _refuse_unreleased(options)
        code = COMMANDS[options.command](options)
        sys.stdout.flush()  # here, where a reader that has left can still be noticed
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output (head, less) has left: nothing went wrong here
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TideError, OSError, MemoryError, ModuleNotFoundError) as error:
        if options.debug or (isinstance(error, ModuleNotFoundError) and str(error.name).startswith("tide_export")):
            raise
        return _fail(f"error: {_sentence(error)}", TideError.exit_code)


def _calibrate(options: Namespace) -> int:
    config = _config(options)
    if options.from_tide is None:
        from tide_export.pipeline.calibrate import calibrate

        made = calibrate(
            options.model,
            Path(options.output),
            config,
            report=options.report,
            cache=options.cache,
            device_map=options.device_map,
        )
        if made is None:  # one of several processes, and not the one that writes
            return 0
    else:
        _refuse_calibration_options(options, "--from-tide")
        for name in ("report", "cache", "device_map"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} does nothing with --from-tide: nothing is measured")
        from tide_export.routers.tide_import import import_routers

        import_routers(options.model, options.from_tide).save(options.output)
    print(options.output)
    return 0


def _export(options: Namespace) -> int:
    config = _config(options)
    if options.routers is not None:
        read = QUANTIZATION_FIELDS if options.quantization == "gptq" else set()
        _refuse_calibration_options(options, "--routers", CALIBRATION_FIELDS - read)
    from tide_export.pipeline.flow import export

    routers = None if options.routers is None else Path(options.routers)
    bundle = export(
        options.model,
        Path(options.output),
        routers=routers,
        config=config,
        targets=tuple(options.target or ("onnxruntime",)),
        weights=options.weights,
        quantization=options.quantization,
        block_size=options.block_size,
        accuracy_level=options.accuracy_level,
        symmetric=options.symmetric,
        engines=not options.no_engines,
        plugins=options.plugins,
        overwrite=options.overwrite,
        validate=not options.no_check,
        max_length=options.max_length,
        batch_size=options.batch_size,
        device_map=options.device_map,
    )
    print(bundle)
    return 0


def _build(options: Namespace) -> int:
    from tide_export.engines.rebuild import rebuild

    print(rebuild(options.bundle, options.target, options.plugins, options.batch_size).path)
    return 0


def _validate(options: Namespace) -> int:
    from tide_export.verify.validate import validate

    report = validate(
        options.bundle,
        options.model,
        options.dataset,
        prompts=options.prompts,
        longest_prompt=options.longest_prompt,
        new_tokens=options.new_tokens,
        thresholds=options.threshold,
        max_pending=options.max_pending,
        threads=options.threads,
        provider=options.provider,
        plugins=options.plugins,
    )
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0 if report.holds else 1


def _tune(options: Namespace) -> int:
    from tide_export.tuning.tune import tune

    names = (
        *("mode", "epsilon", "delta", "model", "prompts", "prompts_per_document", "prompt_length", "positions"),
        *("new_tokens", "min_layers", "seed", "threads", "dry_run"),
    )
    report = tune(options.bundle, options.dataset, **{name: getattr(options, name) for name in names})
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0


def _generate(options: Namespace) -> int:
    from tide_export.runtime.engine import load
    from tide_export.runtime.tokenizer import BundleTokenizer, read_prompts

    prompts = options.prompt if options.prompts is None else read_prompts(Path(options.prompts))
    if len(prompts) == 1 and options.compaction_threshold is not None:
        raise ConfigError("--compaction-threshold is for several prompts")
    engine = load(
        options.bundle,
        provider=options.provider,
        threads=options.threads,
        verify=not options.no_verify,
        plugins=options.plugins,
    )
    tokenizer = BundleTokenizer(Path(options.bundle))
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    exits = ("mode", "threshold", "min_layers", "max_pending", "prompt_lookup")
    common = (*exits, "temperature", "top_k", "top_p", "seed")
    request = {name: getattr(options, name) for name in common}
    request["stop_token_ids"] = [] if options.ignore_eos else None
    if len(prompts) > 1:
        return _generate_batch(options, engine, tokenizer, prompts, encoded, request)
    (prompt,) = encoded
    stream = engine.stream(prompt, max_new_tokens=options.max_new_tokens, **request)
    if options.json:
        tokens = list(stream)
        text = "".join(tokenizer.stream(prompt, tokens))
        answer = {"prompt": prompts[0], "text": text, "tokens": tokens, "finish_reason": stream.finish_reason}
        print(json.dumps(answer | {"mode": options.mode, "stats": stream.stats.as_dict()}, indent=2))
        return 0
    if options.echo:
        print(prompts[0], end="", flush=True)
    for piece in tokenizer.stream(prompt, stream):
        print(piece, end="", flush=True)
    print(flush=True)
    if not options.quiet:
        print(f"\n{stream.stats.summary()}\nended by {stream.finish_reason}", file=sys.stderr)
    return 0


def _generate_batch(
    options: Namespace,
    engine: "Engine",
    tokenizer: "BundleTokenizer",
    prompts: Sequence[str],
    encoded: list[list[int]],
    request: dict[str, Any],
) -> int:
    """Several prompts together: their texts in order, each under a line with its number."""
    started = time.perf_counter()
    done = engine.generate(
        encoded, max_new_tokens=options.max_new_tokens, compaction_threshold=options.compaction_threshold, **request
    )
    seconds = time.perf_counter() - started
    total = sum(len(one.tokens) for one in done)
    answers: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            "text": "".join(tokenizer.stream(ids, one.tokens)),
            "tokens": one.tokens,
            "finish_reason": one.finish_reason,
            "stats": one.stats.as_dict(),
        }
        for prompt, ids, one in zip(prompts, encoded, done, strict=True)
    ]
    if options.json:
        whole = {"mode": options.mode, "total_tokens": total, "seconds": seconds, "tokens_per_second": total / seconds}
        print(json.dumps(whole | {"sequences": answers}, indent=2))
        return 0
    for number, (answer, one) in enumerate(zip(answers, done, strict=True), 1):
        print(f"--- {number} of {len(done)}", flush=True)
        print((answer["prompt"] if options.echo else "") + answer["text"], flush=True)
        if not options.quiet:
            print(f"\n{one.stats.summary()}\nended by {one.finish_reason}\n", file=sys.stderr)
    if not options.quiet:
        print(
            f"{total} tokens of {len(done)} prompts in {seconds:.3f} s ({total / seconds:.1f} tokens/s)",
            file=sys.stderr,
        )
    return 0


def _bench(options: Namespace) -> int:
    from tide_export.runtime.bench import bench

    report = bench(
        options.bundle,
        prompt=options.prompt,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        threshold=options.threshold,
        min_layers=options.min_layers,
        max_pending=options.max_pending,
        provider=options.provider,
        threads=options.threads,
        verify=not options.no_verify,
        plugins=options.plugins,
    )
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0


def _inspect(options: Namespace) -> int:
    from tide_export.bundle.inspect import describe, render

    described = describe(options.bundle, verify=not options.no_verify)
    print(json.dumps(described, indent=2) if options.json else render(described))
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "calibrate": _calibrate,
    "export": _export,
    "build": _build,
    "validate": _validate,
    "tune": _tune,
    "generate": _generate,
    "bench": _bench,
    "inspect": _inspect,
}


def _config(options: Namespace) -> "TideConfig":
    """The settings from the recipe, if one is given, with the command line's own options on top."""
    from tide_export.config import TideConfig

    recipe = _recipe(options.recipe)
    try:
        TideConfig.from_options(**recipe)
    except ConfigError as error:
        raise ConfigError(f"recipe {options.recipe}: {error}") from None
    return TideConfig.from_options(**(recipe | _given(options)))


def _given(options: Namespace) -> dict[str, Any]:
    """The config fields set on the command line."""
    values = {option.field: getattr(options, option.field, None) for option in CONFIG_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def _recipe(path: str | None) -> dict[str, Any]:
    """The config fields in a TOML file."""
    if path is None:
        return {}
    try:
        recipe = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}{_recipes_near(Path(path))}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
    known = [option.field for option in CONFIG_OPTIONS]
    for name in recipe:
        if name not in known:
            meant = get_close_matches(name, known, n=1)
            raise ConfigError(f"recipe {path}: no setting is called {name!r}" + "".join(f"; {m}?" for m in meant))
    return recipe


def _recipes_near(path: Path) -> str:
    """The recipes in the folder that was meant, or in this repository's when a checkout is the current folder."""
    folders = [Path("calibration/recipes")] if path.parent == Path() else [path.parent, Path("calibration/recipes")]
    found = next((names for folder in folders if (names := sorted(map(str, folder.glob("*.toml"))))), [])
    return f"; there are {', '.join(found)}" if found else ""


def _refuse_calibration_options(options: Namespace, because: str, fields: Collection[str] = CALIBRATION_FIELDS) -> None:
    """With ready-made routers there is no calibration to set up; an option that would be ignored is a mistake.

    Raises:
        ConfigError: naming the option.
    """
    given = _recipe(options.recipe) | _given(options)
    for option in CONFIG_OPTIONS:
        if option.field in fields and option.field in given:
            raise ConfigError(f"{option.flag} does nothing with {because}: the routers are fitted already")


def _refuse_unreleased(options: Namespace) -> None:
    """What the design names but this release has not yet.

    Raises:
        ConfigError: naming the option and what there is.
    """
    for name, known in RELEASED.items():
        value = getattr(options, name, None)
        if value is not None and value not in known:
            raise ConfigError(f"--{name} {value}: this release has {_listed(known)} only")


def _listed(entries: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(entries[:-1]), entries[-1]]))


def _fail(message: str, code: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


def _sentence(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, ModuleNotFoundError):
        return f"this command needs the package {error.name!r}: pip install 'tide_export[export,cpu]'"
    return " ".join(str(error).split())


@contextmanager
def _log_to_stderr(verbosity: int) -> Iterator[None]:
    """Sends the package's log to stderr: -q warnings alone, by default what each stage does, -v everything."""
    level, handler = logger.level, logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(max(verbosity, -1), logging.DEBUG))
    logger.addHandler(handler)
    try:
        yield
    finally:  # main may be called from a program that has a log of its own
        logger.removeHandler(handler)
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
