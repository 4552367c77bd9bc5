"""The commands `tide-export push` and `tide-export pull`: their options and output."""

import argparse
import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext

from tide_export.cli.fields import given


def add_push_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("repo", metavar="REPO", help="user/name, or a name of your own; created if missing")
    parser.add_argument("--private", action="store_true", help="create it private; refused if it is public")
    parser.add_argument("--revision", metavar="BRANCH", help="branch, created if missing (main)")
    parser.add_argument("--message", metavar="TEXT", help="commit message (names the model and this release)")


def add_pull_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("repo", metavar="REPO", help="user/name")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="folder to write (the repository's name)")
    parser.add_argument("--revision", metavar="NAME", help="a branch, a tag or a commit (main)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")


def run_push(options: Namespace) -> int:
    """Uploads the bundle and prints the commit's URL."""
    from tide_export.hub.push import push

    with _bars(options):
        print(push(**given(options)))
    return 0


def run_pull(options: Namespace) -> int:
    """Downloads the bundle and prints its folder."""
    from tide_export.hub.pull import pull

    with _bars(options):
        print(pull(**given(options)))
    return 0


def _bars(options: Namespace) -> AbstractContextManager[object]:
    """Hides the hub client's progress bars if stderr is no terminal or the user asked for quiet."""
    from huggingface_hub.utils import disable_progress_bars

    return nullcontext() if sys.stderr.isatty() and not options.quiet else disable_progress_bars()
