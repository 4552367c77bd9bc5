"""The command `tide-export generate`: its options for prompts and sampling, and its output."""

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_export.cli.fields import given, number_option
from tide_export.errors import ConfigError, GenerationError, reason
from tide_export.runtime.config import NUMBERS, GenerationConfig

if TYPE_CHECKING:
    from tide_export.runtime.engine import Engine
    from tide_export.runtime.generation import Generation

FILES = ("json_schema", "grammar")  # options whose value is a file's name


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds the bundle and the options for prompts."""
    parser.add_argument("bundle", metavar="BUNDLE")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="prompt; if repeated, decoded as a batch")
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts to decode as a batch: one per line, or .jsonl with a field prompt or text",
    )
    parser.add_argument(
        "--chat", action="store_true", help="format each prompt as a user's message, by the bundle's template"
    )
    parser.add_argument("--system", metavar="TEXT", help="--chat: system message before the prompt")
    parser.add_argument("--echo", action="store_true", help="print the prompt before the text")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are numbers with a default, of constraints and of where the text ends."""
    for name, number in NUMBERS.items():
        if number.default is not None:
            parser.add_argument(f"--{name.replace('_', '-')}", **number_option(number))
    parser.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=X",
        help="add X to the logit of token ID; may be repeated",
    )
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="--json: log-probabilities of each token and the N most likely"
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json-schema", metavar="FILE", help="the text is JSON of this schema")
    forms.add_argument("--regex", metavar="REGEX", help="the text matches this regular expression")
    forms.add_argument("--grammar", metavar="FILE", help="the text follows this Lark grammar")
    parser.add_argument(
        "--json-whitespace",
        action="store_true",
        default=None,
        help="--json-schema: spaces and line breaks anywhere; without it the JSON is one line",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="sampling seed; equal seeds give equal text")
    parser.add_argument(
        "--ignore-eos",
        dest="stop_token_ids",
        action="store_const",
        const=(),
        help="do not stop at an end-of-sequence token",
    )


def run_generate(options: Namespace) -> int:
    """Generates text and prints it as it comes, or prints all of it as JSON."""
    from tide_export.bundle.auto_mode import sentence
    from tide_export.common.prompt_files import read_prompts
    from tide_export.runtime.engine import load

    prompts = options.prompt if options.prompts is None else read_prompts(Path(options.prompts))
    if len(prompts) == 1 and options.compaction_threshold is not None:
        raise ConfigError("--compaction-threshold is for several prompts")
    if options.logprobs is not None and not options.json:
        raise ConfigError("--logprobs is for --json: the text does not show them")
    if options.system is not None and not options.chat:
        raise ConfigError("--system is for --chat")
    read = {name: _read(name, path) for name in FILES if (path := getattr(options, name)) is not None}
    config = GenerationConfig(**given(options, GenerationConfig) | read, detokenize=True)
    adapters = {options.adapter: options.adapter} if options.adapter is not None else None
    engine = load(**given(options, load), adapters=adapters)
    encoded = _encoded(engine, options, prompts)
    mode = engine.resolved(config, len(prompts) if len(prompts) > 1 else None)["mode"]
    if config.mode == "auto" and options.threshold is None and options.min_layers is None and not options.quiet:
        print(sentence(engine.auto), file=sys.stderr)
    if len(prompts) > 1:
        started = time.perf_counter()
        done = engine.generate(encoded, config)
        seconds = time.perf_counter() - started
        _print_batch(options, mode, prompts, done, seconds)
    elif options.json:
        print(json.dumps(_answer(prompts[0], engine.generate(encoded[0], config)) | {"mode": mode}, indent=2))
    else:
        _print_stream(engine, options, prompts[0], encoded[0], config)
    return 0


def _encoded(engine: "Engine", options: Namespace, prompts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of the prompts, with --chat formatted as users' messages, but for beginnings."""
    if not options.chat:
        return [engine.tokenizer.encode(prompt) for prompt in prompts]
    from tide_export.common.prompt_files import Beginning
    from tide_export.runtime.chat_template import ChatTemplate

    template = ChatTemplate(engine.bundle)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [
        engine.tokenizer.encode(one)
        if isinstance(one, Beginning)
        else template.encode(engine.tokenizer, [*system, {"role": "user", "content": one}])
        for one in prompts
    ]


def _print_stream(engine: "Engine", options: Namespace, prompt: str, ids: list[int], config: GenerationConfig) -> None:
    if options.echo:
        print(prompt, end="", flush=True)
    stream, shown = engine.stream(ids, config), 0
    for _ in stream:
        text = stream.text or ""
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(flush=True)
    if not options.quiet:
        print(f"\n{stream.stats.summary()}\nended by {stream.finish_reason}", file=sys.stderr)


def _answer(prompt: str, generation: "Generation") -> dict[str, Any]:
    answer: dict[str, Any] = {
        "prompt": prompt,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict(),
    }
    if generation.logprobs is not None:
        answer["logprobs"] = [{"logprob": one.logprob, "top": one.top} for one in generation.logprobs]
    return answer


def _print_batch(
    options: Namespace, mode: str, prompts: Sequence[str], done: Sequence["Generation"], seconds: float
) -> None:
    """Prints the texts of several prompts in order, each under a line with its number."""
    total = sum(len(one.tokens) for one in done)
    if options.json:
        whole = {"mode": mode, "total_tokens": total, "seconds": seconds, "tokens_per_second": total / seconds}
        answers = [_answer(prompt, one) for prompt, one in zip(prompts, done, strict=True)]
        print(json.dumps(whole | {"sequences": answers}, indent=2))
        return
    for number, (prompt, one) in enumerate(zip(prompts, done, strict=True), 1):
        print(f"--- {number} of {len(done)}", flush=True)
        print((prompt if options.echo else "") + (one.text or ""), flush=True)
        if not options.quiet:
            print(f"\n{one.stats.summary()}\nended by {one.finish_reason}\n", file=sys.stderr)
    if not options.quiet:
        speed = f"{total / seconds:.1f} tokens/s"
        print(f"{total} tokens of {len(done)} prompts in {seconds:.3f} s ({speed})", file=sys.stderr)


def _read(name: str, path: str) -> str:
    """Returns the text of the file that an option names."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise GenerationError(f"--{name.replace('_', '-')}: cannot read {path}: {reason(error)}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number such as 42=-1.5") from None
