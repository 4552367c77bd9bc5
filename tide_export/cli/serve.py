"""The command `tide-export serve`: its options, from the fields of `ServerConfig`."""

import argparse
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tide_export.cli.fields import field_option
from tide_export.errors import ConfigError

if TYPE_CHECKING:
    from tide_export.serving.config import ServerConfig

PACKAGES = ("pydantic", "fastapi", "starlette", "uvicorn", "prometheus_client", "jinja2")


def add_serve_options(parser: argparse.ArgumentParser, config: bool) -> None:
    """Adds the options, with `config` also those of `ServerConfig`, which need pydantic."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--adapter",
        dest="adapters",
        type=_named_folder,
        action="append",
        metavar="NAME=FOLDER",
        help="load this low-rank adapter (LoRA), which requests name as their model; may be repeated",
    )
    if not config:
        return
    from tide_export.serving.config import ServerConfig

    add_server_fields(parser, ServerConfig.model_fields)


def _named_folder(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, folder


def add_server_fields(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds options for fields of `ServerConfig`."""
    from tide_export.serving.config import ServerConfig

    group = parser.add_argument_group("server (defaults in parentheses)")
    for name in names:
        option = field_option(name, ServerConfig.model_fields[name])
        if option.get("metavar") == "SPEC":
            option["metavar"] = "TEXT"
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, **option)


def server_config(options: Namespace) -> "ServerConfig":
    """Returns the `ServerConfig` of the options.

    Raises:
        ConfigError: an option is out of range.
    """
    from pydantic import ValidationError

    from tide_export.serving.config import ServerConfig

    given = {name: value for name, value in vars(options).items() if name in ServerConfig.model_fields}
    try:
        return ServerConfig(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option, reason = str(first["loc"][0]), first["msg"].replace("Input should be", "must be")
        raise ConfigError(f"--{option.replace('_', '-')} {reason}, not {given[option]}") from None


def run_serve(options: Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    config = server_config(options)
    try:
        from tide_export.serving.server import serve
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise ConfigError(f"serving needs the package {error.name!r}: pip install -e '.[serve]' in the clone") from None
    _log(options)
    serve(
        options.bundle,
        config,
        provider=options.provider or "auto",
        threads=options.threads,
        verify=options.verify,
        plugins=options.plugins,
        device=options.device,
        adapters=dict(options.adapters or ()),
    )
    return 0


def _log(options: Namespace) -> None:
    """Logs the server and uvicorn to stderr, as lines of text or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if options.json else logging.Formatter("%(asctime)s %(message)s"))
    for name in ("tide_export.serving", "tide_export.scheduling", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if options.quiet else logging.INFO)
    if options.json:
        for other in logging.getLogger("tide_export").handlers:
            other.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, with the entries of its `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        about = {"time": self.formatTime(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            about["traceback"] = self.formatException(record.exc_info)
        return json.dumps(about | getattr(record, "fields", {}))
