"""The options of every `tide-export` command, and their help.

An option's destination is the parameter it is given for. One that is not given stays None, so that the default of the
function, the recipe or the bundle holds.
"""

import argparse
from typing import NoReturn

from tide_export.bundle.manifest import FLAVOURS, NETWORK_MATRICES, NETWORK_PRECISIONS, TARGETS, WEIGHTS
from tide_export.cli.adapt import add_adapt_options
from tide_export.cli.draft import add_draft_options
from tide_export.cli.fields import field_option, whole_numbers, yes_or_no
from tide_export.cli.generate import add_prompt_options, add_sampling_options
from tide_export.cli.hub import add_pull_options, add_push_options
from tide_export.cli.inspect import add_inspect_options
from tide_export.cli.serve import add_serve_options
from tide_export.cli.triton import add_triton_options
from tide_export.thresholds.resolve import MODES
from tide_export.version import __version__

PROGRAM = "tide-export"
QUALITY_TOKENS = 2048  # of `validate --quality`


def _thresholds(text: str) -> float | list[float]:
    """One threshold for all checkpoints, or a list with one per checkpoint."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a threshold such as 0.85, nor a list of them") from None
    return values[0] if len(values) == 1 else values


def _threshold_list(text: str) -> list[float]:
    """Thresholds to try one after the other."""
    values = _thresholds(text)
    return values if isinstance(values, list) else [values]


SPEC_HELP = (
    "SPEC is a local .txt, .jsonl or .parquet file, a folder or a glob of them, or a Hugging Face dataset id "
    "(wikitext is wikitext-103-raw-v1). MODEL is a folder, a GGUF file or a Hugging Face hub id."
)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def build_parser(config: bool = True) -> argparse.ArgumentParser:
    """The parser of all commands; `command` in its result is the command's name.

    Args:
        config: with the options that set a `TideConfig`, which needs pydantic.
    """
    parser = _Parser(prog=PROGRAM, description="From a Hugging Face causal LM to an engine that really skips layers.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_adapt(commands, config)
    _add_calibrate(commands, config)
    _add_export(commands, config)
    _add_draft(commands, config)
    _add_build(commands)
    _add_validate(commands)
    _add_tune(commands)
    _add_generate(commands)
    _add_serve(commands, config)
    _add_triton(commands, config)
    _add_bench(commands)
    _add_inspect(commands)
    add_push_options(_command(commands, "push", "Upload a bundle to the Hugging Face hub, with a model card."))
    add_pull_options(_command(commands, "pull", "Download a bundle from the Hugging Face hub, and check every file."))
    return parser


def _command(commands, name: str, summary: str, epilog: str | None = None) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary, epilog=epilog, allow_abbrev=False)
    parser.add_argument("-q", "--quiet", action="count", default=0, help="only warnings and errors")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="more about what happens")
    parser.add_argument("--debug", action="store_true", help="a traceback with an error")
    return parser


def config_flag(field: str) -> str:
    """The option that sets a field of `TideConfig`."""
    return "--dataset" if field == "calibration_dataset" else f"--{field.replace('_', '-')}"


def _add_config(parser: argparse.ArgumentParser) -> None:
    from tide_export.config import TideConfig  # needs pydantic

    group = parser.add_argument_group("calibration and exits (defaults in parentheses)")
    group.add_argument("--recipe", metavar="FILE", help="TOML file with these settings, dashes written as underscores")
    for name, field in TideConfig.model_fields.items():
        group.add_argument(config_flag(name), dest=name, **field_option(name, field))


def _add_adapt(commands, config: bool) -> None:
    parser = _command(
        commands,
        "adapt",
        "Train a model so that its early layers agree with its last one, before `calibrate`.",
        SPEC_HELP,
    )
    _add_trust(parser)
    add_adapt_options(parser, config)


def _add_draft(commands, config: bool) -> None:
    parser = _command(commands, "draft", "Train a drafter for a bundle on its own answers: `lossless` gets faster.")
    _add_trust(parser)
    add_draft_options(parser, config)


def _add_calibrate(commands, config: bool) -> None:
    parser = _command(commands, "calibrate", "Fit one router per checkpoint on text and save them.", SPEC_HELP)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="router file to write (.safetensors)")
    parser.add_argument("--from-tide", metavar="FILE", help="convert TIDE's own router.pt instead of fitting anything")
    parser.add_argument(
        "--report", metavar="FILE", help="write what the model gains to this .html (and a .png beside it)"
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="keep hidden states on disk: a run that is killed goes on from there"
    )
    parser.add_argument("--device-map", choices=["auto"], help="spread a model larger than one device over several")
    _add_trust(parser)
    if config:
        _add_config(parser)


def _add_export(commands, config: bool) -> None:
    parser = _command(commands, "export", "Make a bundle; calibrates first unless --routers is given.", SPEC_HELP)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument("--routers", metavar="FILE", help="routers from `calibrate`, or TIDE's router.pt")
    parser.add_argument(
        "--target",
        dest="targets",
        action="append",
        choices=TARGETS,
        help="engine, may be repeated; every bundle runs on onnxruntime (onnxruntime)",
    )
    parser.add_argument(
        "--weights",
        choices=tuple(dict.fromkeys(("auto", *NETWORK_PRECISIONS, *WEIGHTS, *NETWORK_MATRICES))),
        help="onnxruntime: fp32, bf16, fp16, int8 or int4 (auto: as the checkpoint is: GPTQ or AWQ, bf16 or fp16, else "
        "fp32); tensorrt and tensorrt-rtx: fp32, fp16, bf16, int4 or fp8 (fp32)",
    )
    parser.add_argument("--quantization", metavar="X", help="int8, int4: rtn, round to nearest, or gptq, on text (rtn)")
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="weights of one scale; 16, 32, 64, 128, 256 (int4: 32, int8: 64)"
    )
    parser.add_argument(
        "--accuracy-level",
        type=int,
        metavar="N",
        help="integers: matmuls in 0 any type, 1 float32, 2 float16, 3 bfloat16, 4 int8 (4, much the fastest)",
    )
    parser.add_argument("--symmetric", type=yes_or_no, metavar="X", help="int8, int4: no zero points, yes or no (yes)")
    parser.add_argument(
        "--no-engines", dest="engines", action="store_false", help="build no engines: `build` does, on another machine"
    )
    _add_plugins(parser)
    parser.add_argument(
        "--device-map", choices=["auto"], help="spread a model larger than the memory over devices and disk"
    )
    _add_trust(parser)
    parser.add_argument("--max-length", type=int, metavar="N", help="longest sequence in tokens (the model's context)")
    _add_batch_size(parser, "8")
    parser.add_argument("--draft-head", metavar="HEAD", help="draft with an EAGLE-3 head, or MODEL's MTP layer (none)")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is there")
    parser.add_argument(
        "--no-validate",
        "--no-check",
        dest="validate",
        action="store_false",
        help="skip the short comparison with the model at the end",
    )
    parser.add_argument(
        "--no-report", dest="report", action="store_false", help="put no report.html and report.png into the bundle"
    )
    if config:
        _add_config(parser)


def _add_build(commands) -> None:
    parser = _command(
        commands, "build", "Build a bundle's TensorRT engines anew, for the GPU and the versions of this machine."
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="exported for tensorrt or tensorrt-rtx")
    parser.add_argument("--target", choices=FLAVOURS, help="(what the bundle was exported for)")
    _add_batch_size(parser, "as before")
    _add_plugins(parser)


def _add_validate(commands) -> None:
    parser = _command(
        commands,
        "validate",
        "Compare a bundle with its model and with TIDE's rule, token for token; exit code 1 when they differ.",
        SPEC_HELP,
    )
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--model", dest="model_name", required=True, metavar="MODEL", help="the model the bundle was made from"
    )
    _add_trust(parser)
    parser.add_argument("--dataset", metavar="SPEC", help="text for the prompts (what the routers were calibrated on)")
    parser.add_argument("--prompts", type=int, metavar="N", help="how many prompts (16)")
    parser.add_argument("--longest-prompt", type=int, metavar="N", help="in tokens (128)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="generated after each prompt (32)")
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
        help=f"measure perplexity, and how often the most likely token is full depth's, on N tokens of text that the "
        f"routers have not seen ({QUALITY_TOKENS})",
    )
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--provider", help="check only this engine (the graph and the segment networks, on the CPU)")
    _add_device(parser)
    _add_plugins(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_tune(commands) -> None:
    parser = _command(
        commands,
        "tune",
        "Find thresholds that hold a guarantee of how often a token differs from full depth, and store them; or, with "
        "--mode lossless, how to draft on this machine to be fastest.",
        SPEC_HELP,
    )
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--dataset", required=True, metavar="SPEC", help="text the routers have not seen")
    parser.add_argument("--mode", choices=["exit", "lossless"], help="exit: a guarantee; lossless: only speed (exit)")
    parser.add_argument("--epsilon", type=float, metavar="X", help="share of tokens that may differ; exit needs it")
    parser.add_argument("--delta", type=float, metavar="X", help="risk that the guarantee is wrong; exit needs it")
    parser.add_argument("--model", metavar="MODEL", help="check that the bundle was made from this model's weights")
    _add_trust(parser)
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="at most, a third of them to choose with (600; lossless 48)"
    )
    parser.add_argument(
        "--prompts-per-document",
        type=int,
        metavar="N",
        help="at most; with more than 1 the guarantee is about the documents tested (1; lossless 4)",
    )
    parser.add_argument(
        "--prompt-length", type=int, metavar="N", help="tokens before a scored or generated one (32; lossless 48)"
    )
    parser.add_argument("--positions", type=int, metavar="N", help="tokens scored per prompt; only exit (32)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens generated per prompt; only lossless (64)")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="of sampling them, 0 for greedy; only lossless (.8)"
    )
    parser.add_argument("--min-layers", type=int, metavar="N", help="checkpoints with fewer never exit (the bundle's)")
    parser.add_argument(
        "--slots",
        type=whole_numbers,
        metavar="N,N",
        help="sequences at once, 2 or more, for which it is measured too whether the mode pays (none)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the draw of prompts (0)")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--dry-run", action="store_true", help="leave the bundle as it is")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_generate(commands) -> None:
    parser = _command(commands, "generate", "Continue a prompt; text to stdout as it comes, statistics to stderr.")
    add_prompt_options(parser)
    _add_exit_options(parser)
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="auto: the fastest as measured by export or tune; full: every layer for every token; exit: tokens exit "
        "where a router's score is above its threshold; lossless: exits and n-grams of earlier text are drafts, which "
        "the full model verifies (auto, with --threshold or --min-layers exit)",
    )
    parser.add_argument(
        "--prompt-lookup", type=int, metavar="N", help="--mode lossless: draft up to N tokens from earlier text"
    )
    parser.add_argument("--drafter", type=int, metavar="N", help="--mode lossless: up to N drafts of the drafter")
    add_sampling_options(parser)
    parser.add_argument(
        "--compaction-threshold",
        type=float,
        metavar="X",
        help="of several prompts: where a smaller share than this needs a segment, only those run it (the "
        "bundle's; lossless 0)",
    )
    _add_engine_options(parser)


def _add_serve(commands, config: bool) -> None:
    parser = _command(commands, "serve", "Serve a bundle over HTTP, as OpenAI's API; ends with SIGTERM or Ctrl-C.")
    add_serve_options(parser, config)
    _add_engine_options(parser, json="log one JSON object a line")


def _add_triton(commands, config: bool) -> None:
    parser = _command(commands, "triton", "Add a bundle to a model repository of NVIDIA Triton.")
    add_triton_options(parser, config)
    _add_provider(parser)


def _add_bench(commands) -> None:
    parser = _command(
        commands, "bench", "Time prefill and decoding at full depth, with exits, and with every token exiting."
    )
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue (a built-in one)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="the prompt is cut to this (64)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="decoded in each run (64)")
    parser.add_argument("--repeat", type=int, metavar="N", help="interleaved runs of each mode (9)")
    _add_exit_options(parser)
    _add_engine_options(parser)


def _add_inspect(commands) -> None:
    add_inspect_options(_command(commands, "inspect", "Print what is in a bundle."))


def _add_exit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold", type=_thresholds, metavar="T[,T]", help="exit above this score, one value or one per checkpoint"
    )
    parser.add_argument("--min-layers", type=int, metavar="N", help="checkpoints with fewer layers never exit")
    parser.add_argument("--max-pending", type=int, metavar="N", help="tokens that may be pending before a segment runs")


def _add_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", help="engine to run on: auto, cpu, cuda, tensorrt, tensorrt-rtx (auto)")
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
        help=f"tensorrt and tensorrt-rtx: prompts in a batch, at most ({default})",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=int, metavar="N", help="number of the GPU to run on (0)")


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugins",
        metavar="LIBRARY",
        help="libtide_plugins.so for tensorrt engines, or none (TIDE_PLUGINS, or an installed one)",
    )


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        default=None,
        help="run Python code from the model's own folder (auto_map), which can do all that you can: only for a model "
        "whose code you have read or whose author you trust (no)",
    )
