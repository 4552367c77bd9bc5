"""The commands `tide-export push` and `tide-export pull`: their options, and what they print."""

import argparse
import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext

from tide_export.cli.fields import given


def add_push_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("repo", metavar="REPO", help="user/name, or the name of one of yours; made if it is missing")
    parser.add_argument("--private", action="store_true", help="make it private; refused where it is public already")
    parser.add_argument("--revision", metavar="BRANCH", help="made if it is missing (main)")
    parser.add_argument("--message", metavar="TEXT", help="of the commit (names the model and this release)")


def add_pull_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("repo", metavar="REPO", help="user/name")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="to write (the repository's name)")
    parser.add_argument("--revision", metavar="NAME", help="a branch, a tag or a commit (main)")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is there")


def run_push(options: Namespace) -> int:
    """Uploads, and prints the commit's address."""
    from tide_export.hub.push import push

    with _bars(options):
        print(push(**given(options)))
    return 0


def run_pull(options: Namespace) -> int:
    """Downloads, and prints the folder."""
    from tide_export.hub.pull import pull

    with _bars(options):
        print(pull(**given(options)))
    return 0


def _bars(options: Namespace) -> AbstractContextManager[object]:
    """The hub's client shows bars of its own, unless stderr is no terminal or the user asked for quiet."""
    from huggingface_hub.utils import disable_progress_bars

    return nullcontext() if sys.stderr.isatty() and not options.quiet else disable_progress_bars()
