"""The command `tide-export inspect`: its options and output."""

import argparse
import json
from argparse import Namespace

from tide_export.errors import ConfigError


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not hash the bundle's files")
    parser.add_argument(
        "--roofline",
        metavar="GPU",
        help="predict a token's time with TensorRT on a GPU, such as H100-SXM, or at a bandwidth, such as 1.2TB/s",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="--roofline: tokens in the K/V cache (1024, or half of shorter buffers)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument(
        "--trtexec", action="store_true", help="print the trtexec command that builds each plan, for TensorRT"
    )


def run_inspect(options: Namespace) -> int:
    """Prints a bundle's contents, its trtexec commands or its roofline."""
    from tide_export.bundle.inspect import describe, render
    from tide_export.bundle.opened import open_bundle

    if options.roofline is None and options.context is not None:
        raise ConfigError("--context is for --roofline")
    if options.trtexec and options.roofline is not None:
        raise ConfigError("--roofline prints no commands: omit it, or --trtexec")
    if options.trtexec:
        from tide_export.plans.trtexec import trtexec_lines

        print("\n".join(trtexec_lines(open_bundle(options.bundle, verify=options.verify).manifest, options.bundle)))
    elif options.roofline is not None:
        from tide_export.bundle.roofline import predict

        line = predict(open_bundle(options.bundle, verify=options.verify), options.roofline, options.context)
        print(json.dumps(line.as_dict(), indent=2) if options.json else line.render())
    else:
        described = describe(options.bundle, verify=options.verify)
        print(json.dumps(described, indent=2) if options.json else render(described))
    return 0
