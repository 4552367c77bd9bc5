"""The command `tide-export draft`: its options, from the fields of `DraftConfig`, and what it prints."""

import argparse
import json
from argparse import Namespace

from tide_export.cli.fields import field_option


def add_draft_options(parser: argparse.ArgumentParser, config: bool) -> None:
    """Adds the options; with `config` those of `DraftConfig` too, which needs pydantic."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a Hugging Face hub id")
    parser.add_argument("bundle", metavar="BUNDLE", help="made of MODEL by export; gets the drafter")
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="where answers and training are kept, also afterwards (a hidden folder beside the bundle, then removed)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    if not config:
        return
    from tide_export.drafting.config import DraftConfig

    group = parser.add_argument_group("answers and training (defaults in parentheses)")
    for name, field in DraftConfig.model_fields.items():
        option = field_option(name, field)
        if name == "prompts":
            option["metavar"] = "FILE"
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, **option)


def run_draft(options: Namespace) -> int:
    """Trains, and prints the report."""
    from tide_export.drafting.config import DraftConfig
    from tide_export.drafting.flow import draft

    given = {name: value for name, value in vars(options).items() if name in DraftConfig.model_fields}
    report = draft(
        options.model,
        options.bundle,
        DraftConfig.from_options(**given),
        cache=options.cache,
        trust_remote_code=bool(options.trust_remote_code),
    )
    if report is not None:  # the main one of several processes
        print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0
