"""The command `tide-export triton`: its options, some of them fields of `ServerConfig`."""

import argparse
from argparse import Namespace

from tide_export.cli.serve import add_server_fields, server_config

FIELDS = ("slots", "waiting", "prompt_tokens", "kv_tokens", "request_seconds")
LOADING = ("provider", "threads", "plugins", "device")


def add_triton_options(parser: argparse.ArgumentParser, config: bool) -> None:
    """Adds the options, with `config` also those of `ServerConfig`, which need pydantic."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("--repository", required=True, metavar="FOLDER", help="of tritonserver --model-repository")
    parser.add_argument("--name", metavar="TEXT", help="name of the model (the bundle's folder)")
    parser.add_argument("--copy", action="store_true", help="copy the bundle instead of linking to it")
    if config:
        add_server_fields(parser, FIELDS)


def run_triton(options: Namespace) -> int:
    """Writes the model and prints its folder."""
    from tide_export.serving.triton.repository import write_repository

    server_config(options)  # refuses what is out of range
    given = {name: getattr(options, name) for name in (*FIELDS, *LOADING) if getattr(options, name) is not None}
    print(write_repository(options.bundle, options.repository, options.name, options.copy, given))
    return 0
