"""The options of every `tide-export` command, and their help.

Destinations are parameters of functions. What is not given is None: the default of function, recipe or bundle holds.
"""

import argparse

from tide_export.bundle.manifest import FLAVOURS, NETWORK_MATRICES, NETWORK_PRECISIONS, TARGETS, WEIGHTS
from tide_export.cli.adapt import add_adapt_options
from tide_export.cli.commands import COMMANDS, Command
from tide_export.cli.draft import add_draft_options
from tide_export.cli.fields import field_option, yes_or_no
from tide_export.cli.generate import add_prompt_options, add_sampling_options
from tide_export.cli.hub import add_pull_options, add_push_options
from tide_export.cli.inspect import add_inspect_options
from tide_export.cli.parser import Parser, overview
from tide_export.cli.probe import add_probe_options
from tide_export.cli.serve import add_serve_options
from tide_export.cli.triton import add_triton_options
from tide_export.cli.tune import add_tune_options
from tide_export.common.version import __version__
from tide_export.thresholds.resolve import MODES

PROGRAM = "tide-export"
QUALITY_TOKENS = 2048  # of `validate --quality`


def _thresholds(text: str) -> float | list[float]:
    """Parses one threshold for all checkpoints, or a list with one per checkpoint."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a threshold such as 0.85, nor a list of them") from None
    return values[0] if len(values) == 1 else values


def _threshold_list(text: str) -> list[float]:
    """Parses a list of thresholds to try one after the other."""
    values = _thresholds(text)
    return values if isinstance(values, list) else [values]


SPEC_HELP = (
    "SPEC is a local .txt, .jsonl or .parquet file, a folder or a glob of them, or a Hugging Face dataset id "
    "(wikitext is wikitext-103-raw-v1). MODEL is a folder, a GGUF file or a Hugging Face hub id."
)


def build_parser(config: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of all commands; `command` in its result is the command's name.

    Args:
        config: include the options that are fields of settings, which need pydantic.
    """
    parser = Parser(
        prog=PROGRAM,
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="From a Hugging Face causal LM to an engine: the same text faster by drafts, or fewer layers per "
        "token with a bound on what changes.",
        epilog=f"{overview()}\n\nOptions and examples of one: {PROGRAM} COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS, prog=PROGRAM
    )
    made = {name: _command(commands, name, about) for name, about in COMMANDS.items()}
    add_probe_options(made["probe"])
    _add_export(made["export"], config)
    _add_build(made["build"])
    add_inspect_options(made["inspect"])
    _add_validate(made["validate"])
    _add_bench(made["bench"])
    _add_generate(made["generate"])
    add_serve_options(made["serve"], config)
    _add_engine_options(made["serve"], json="log one JSON object per line")
    add_triton_options(made["triton"], config)
    _add_provider(made["triton"])
    add_draft_options(made["draft"], config)
    add_tune_options(made["tune"])
    _add_calibrate(made["calibrate"], config)
    add_adapt_options(made["adapt"], config)
    add_push_options(made["push"])
    add_pull_options(made["pull"])
    for name in ("adapt", "calibrate", "draft", "export", "probe", "tune", "validate"):
        _add_trust(made[name])
    for command in made.values():
        _add_logging(command)
    return parser


def _command(commands, name: str, about: Command) -> Parser:
    parser = commands.add_parser(name)
    parser.describe(about, SPEC_HELP if name in ("adapt", "calibrate", "export", "tune", "validate") else "")
    return parser


def _add_logging(parser: Parser) -> None:
    parser.add_argument("-q", "--quiet", action="count", default=0, help="only warnings and errors")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log everything, such as what passes change")
    parser.add_argument("--debug", action="store_true", help="print tracebacks")


def config_flag(field: str) -> str:
    """Returns the option that sets a field of `TideConfig`."""
    return "--dataset" if field == "calibration_dataset" else f"--{field.replace('_', '-')}"


def _add_config(parser: argparse.ArgumentParser) -> None:
    from tide_export.calibration.config import KV_CACHE_STRATEGY, TideConfig  # needs pydantic

    group = parser.add_argument_group("calibration and exits (defaults in parentheses)")
    group.add_argument("--recipe", metavar="FILE", help="TOML file with these settings, dashes written as underscores")
    for name, field in TideConfig.model_fields.items():
        group.add_argument(config_flag(name), dest=name, **field_option(name, field))
    group.add_argument(config_flag(KV_CACHE_STRATEGY), help=argparse.SUPPRESS)  # for scripts: exact, or refused


def _add_calibrate(parser: Parser, config: bool) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="router file to write (.safetensors)")
    parser.add_argument("--from-tide", metavar="FILE", help="convert TIDE's own router.pt instead of fitting anything")
    parser.add_argument(
        "--report", metavar="FILE", help="write a report of the gains: this .html, and a .png beside it"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="keep hidden states on disk, from which a killed run resumes")
    parser.add_argument("--device-map", choices=["auto"], help="spread the model over several devices")
    if config:
        _add_config(parser)


def _add_export(parser: Parser, config: bool) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument("--routers", metavar="FILE", help="from `calibrate`, TIDE's, or model: a looped model's gate")
    parser.add_argument(
        "--target",
        dest="targets",
        action="append",
        choices=TARGETS,
        help="runtime beside onnxruntime, which every bundle has; at most one (onnxruntime alone)",
    )
    parser.add_argument(
        "--weights",
        choices=tuple(dict.fromkeys(("auto", *NETWORK_PRECISIONS, *WEIGHTS, *NETWORK_MATRICES))),
        help="onnxruntime: fp32, bf16, fp16, int8 or int4 (auto: the model's integers of GPTQ, AWQ, "
        "compressed-tensors, MXFP4, GGUF Q8_0 and Q4_0, or its bf16 or fp16, else fp32); "
        "cuda: bf16, fp16 or int4 (auto: else fp16); tensorrt and tensorrt-rtx: fp32, fp16, bf16, int4 or fp8 (fp32)",
    )
    parser.add_argument(
        "--quantization", metavar="X", help="int8, int4: rtn (round to nearest) or gptq (on text) (rtn)"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="weights per scale; 16, 32, 64, 128, 256 (int4: 32, int8: 64)"
    )
    parser.add_argument(
        "--accuracy-level",
        type=int,
        metavar="N",
        help="type of integer matmuls: 0 any, 1 float32, 2 float16, 3 bfloat16, 4 int8 (4, by far the fastest)",
    )
    parser.add_argument(
        "--bits", type=float, metavar="X", help="int4: mean bits of the weights, scales included, 4.5 to 8 (5)"
    )
    parser.add_argument("--symmetric", type=yes_or_no, metavar="X", help="int8, int4: no zero points, yes or no (yes)")
    parser.add_argument(
        "--no-engines",
        dest="engines",
        action="store_false",
        help="build no plans; run `build` on another machine instead",
    )
    _add_plugins(parser)
    parser.add_argument("--device-map", choices=["auto"], help="spread the model over devices, memory and disk")
    parser.add_argument("--max-length", type=int, metavar="N", help="longest sequence in tokens (the model's context)")
    _add_batch_size(parser, "8")
    parser.add_argument(
        "--lora-rank", type=int, metavar="N", help="leave room for low-rank adapters (LoRA) of at most this rank (none)"
    )
    heads = "draft with an EAGLE-3 or DFlash head, a Gemma 4 assistant or MODEL's MTP"
    parser.add_argument("--draft-head", metavar="HEAD", help=heads)
    parser.add_argument("--no-draft-head", dest="draft_head", action="store_const", const="none", help="no MTP layer")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
    parser.add_argument(
        "--no-validate",
        "--no-check",
        dest="validate",
        action="store_false",
        help="skip the comparison with the model at the end",
    )
    parser.add_argument("--no-report", dest="report", action="store_false", help="write no report.html and report.png")
    if config:
        _add_config(parser)


def _add_build(parser: Parser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle exported for tensorrt or tensorrt-rtx")
    parser.add_argument("--target", choices=FLAVOURS, help="TensorRT to build for (the bundle's target)")
    _add_batch_size(parser, "as before")
    _add_plugins(parser)


def _add_validate(parser: Parser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--model", dest="model_name", required=True, metavar="MODEL", help="the model the bundle was made from"
    )
    parser.add_argument("--dataset", metavar="SPEC", help="text for the prompts (the text of the calibration)")
    parser.add_argument("--prompts", type=int, metavar="N", help="number of prompts (16)")
    parser.add_argument("--longest-prompt", type=int, metavar="N", help="in tokens (128)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens generated per prompt (32)")
    parser.add_argument(
        "--threshold",
        dest="thresholds",
        type=_threshold_list,
        metavar="T,T",
        help="thresholds to try (0.3,0.5,0.7,0.85,0.95)",
    )
    parser.add_argument("--max-pending", type=int, metavar="N", help="(the bundle's)")
    parser.add_argument(
        "--quality",
        type=int,
        nargs="?",
        const=QUALITY_TOKENS,
        metavar="N",
        help="measure changed tokens and the change of perplexity on N tokens of text that the routers have not "
        f"seen ({QUALITY_TOKENS})",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="of --quality: at which tokens are compared, 0 for greedy (.8)"
    )
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--provider", help="check only this engine (the graph and the segment networks, on the CPU)")
    _add_device(parser)
    _add_plugins(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_generate(parser: Parser) -> None:
    add_prompt_options(parser)
    _add_exit_options(parser)
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="auto: the fastest as measured by export, draft or tune; full: every layer for every token; exit: tokens "
        "exit where a router's score is above its threshold; lossless: the full model verifies drafts by the bundle's "
        "drafter, by n-grams and by exits (auto, with --threshold or --min-layers exit)",
    )
    parser.add_argument(
        "--prompt-lookup",
        type=int,
        metavar="N",
        help="--mode lossless: maximum tokens of an n-gram draft from earlier text",
    )
    parser.add_argument("--drafter", type=int, metavar="N", help="--mode lossless: maximum drafts of the drafter")
    parser.add_argument("--adapter", metavar="FOLDER", help="run with this low-rank adapter (LoRA), as peft writes it")
    add_sampling_options(parser)
    parser.add_argument(
        "--compaction-threshold",
        type=float,
        metavar="X",
        help="several prompts: if a smaller share of them than this needs a segment, only those run it (the bundle's; "
        "lossless 0)",
    )
    _add_engine_options(parser)


def _add_bench(parser: Parser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue (a built-in one)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens of the prompt, cut to this (64)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens decoded per run (64)")
    parser.add_argument("--repeat", type=int, metavar="N", help="interleaved runs of each mode (9)")
    _add_exit_options(parser)
    _add_engine_options(parser)


def _add_exit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold", type=_thresholds, metavar="T[,T]", help="exit above this score, one value or one per checkpoint"
    )
    parser.add_argument("--min-layers", type=int, metavar="N", help="checkpoints with fewer layers never exit")
    parser.add_argument("--max-pending", type=int, metavar="N", help="tokens that may be pending before a segment runs")


def _add_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", help="what to run on: auto, cpu, cuda, tensorrt, tensorrt-rtx (auto)")
    _add_device(parser)
    _add_plugins(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (the engine's own choice)")


def _add_engine_options(parser: argparse.ArgumentParser, json: str = "print one JSON object instead") -> None:
    _add_provider(parser)
    parser.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not hash the bundle's files before running it"
    )
    parser.add_argument("--json", action="store_true", help=json)


def _add_batch_size(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=f"cuda, tensorrt and tensorrt-rtx: maximum prompts in a batch ({default})",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=int, metavar="N", help="number of the GPU to run on (0)")


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugins",
        metavar="LIBRARY",
        help="libtide_plugins.so for tensorrt plans, or none (TIDE_PLUGINS, or the installed library)",
    )


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        default=None,
        help="run Python code from the model's folder (auto_map) with all your rights: only for a model whose code you "
        "have read or whose author you trust (no)",
    )
