"""The command `tide-export probe`: its options and output."""

import argparse
import json
from argparse import Namespace


def add_probe_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a Hugging Face hub id")
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON")


def run_probe(options: Namespace) -> int:
    """Probes the model and prints the prediction."""
    from tide_export.probing.flow import probe

    report = probe(options.model, trust_remote_code=bool(options.trust_remote_code))
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.render())
    return 0
