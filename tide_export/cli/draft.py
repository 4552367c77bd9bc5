"""The command `tide-export draft`: its options, from the fields of `DraftConfig`, and its output."""

import argparse
import json
from argparse import Namespace

from tide_export.cli.fields import field_option, given


def add_draft_options(parser: argparse.ArgumentParser, config: bool) -> None:
    """Adds the options, with `config` also those of `DraftConfig`, which need pydantic."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a Hugging Face hub id")
    parser.add_argument("bundle", metavar="BUNDLE", help="bundle of MODEL to write the drafter into")
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="folder that keeps answers and training (a hidden folder beside the bundle, removed at the end)",
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
    """Trains the drafter and prints the report."""
    from tide_export.drafting.config import DraftConfig
    from tide_export.drafting.flow import draft

    settings = {name: value for name, value in vars(options).items() if name in DraftConfig.model_fields}
    report = draft(**given(options, draft), config=DraftConfig.from_options(**settings))
    if report is not None:  # the main one of several processes
        print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0
