"""Adds the options of `tide-export tune`."""

import argparse

from tide_export.cli.fields import whole_numbers


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Adds bundle, text, mode and the fields of both modes' requests."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--dataset", required=True, metavar="SPEC", help="text the routers have not seen")
    parser.add_argument(
        "--mode", choices=["exit", "lossless"], help="exit: certify thresholds; lossless: tune drafting (exit)"
    )
    parser.add_argument("--epsilon", type=float, metavar="X", help="share of changed tokens; required for exit")
    parser.add_argument(
        "--perplexity-epsilon",
        type=float,
        metavar="X",
        help="share by which exits may raise perplexity; only exit (.02)",
    )
    parser.add_argument("--delta", type=float, metavar="X", help="risk that the guarantee is wrong; required for exit")
    parser.add_argument("--model", metavar="MODEL", help="check that the bundle was made from this model's weights")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="maximum prompts, a third of them to choose with (600; lossless 48)"
    )
    parser.add_argument(
        "--prompts-per-document",
        type=int,
        metavar="N",
        help="maximum; above 1 the guarantee is about the tested documents (1; lossless 4)",
    )
    parser.add_argument(
        "--prompt-length",
        type=int,
        metavar="N",
        help="tokens before the first scored or generated one (32; lossless 48)",
    )
    parser.add_argument("--positions", type=int, metavar="N", help="tokens scored per prompt; only exit (32)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens generated per prompt; only lossless (64)")
    parser.add_argument("--temperature", type=float, metavar="X", help="sampling temperature, 0 for greedy (.8)")
    parser.add_argument(
        "--min-layers", type=int, metavar="N", help="checkpoints with fewer layers never exit (the bundle's)"
    )
    parser.add_argument(
        "--slots",
        type=whole_numbers,
        metavar="N,N",
        help="concurrent sequences, 2 or more, for which the mode's speed is measured too (none)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the choice of prompts (0)")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--dry-run", action="store_true", help="do not change the bundle")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
