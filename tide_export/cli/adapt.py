"""The command `tide-export adapt`: its options, from the fields of `AdaptConfig`, and its output."""

import argparse
import json
from argparse import Namespace

from tide_export.cli.fields import field_option, given


def add_adapt_options(parser: argparse.ArgumentParser, config: bool) -> None:
    """Adds the options, with `config` also those of `AdaptConfig`, which need pydantic."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, metavar="MODEL2", help="folder to write the trained model to")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="folder of the snapshot to resume from (a hidden folder beside the output)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    if not config:
        return
    from tide_export.adaptation.config import AdaptConfig

    group = parser.add_argument_group("training (defaults in parentheses)")
    for name, field in AdaptConfig.model_fields.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, **field_option(name, field))


def run_adapt(options: Namespace) -> int:
    """Trains the model and prints the report."""
    from tide_export.adaptation.config import AdaptConfig
    from tide_export.adaptation.flow import adapt

    settings = {name: value for name, value in vars(options).items() if name in AdaptConfig.model_fields}
    report = adapt(**given(options, adapt), config=AdaptConfig.from_options(**settings))
    if report is not None:  # the main one of several processes
        print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0
