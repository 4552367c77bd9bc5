"""The parser of the command line: help in groups, and errors that say in one sentence what to do."""

import argparse
import re
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn

from tide_export.cli.commands import COMMANDS, GROUPS, Command

WIDTH = 100  # of texts below the options


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose `--help` shows a command's basic options."""

    about: Command | None = None  # None: the program itself

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.register("type", int, _whole)
        self.register("type", float, _real)

    def describe(self, about: Command, epilog: str = "") -> None:
        """Sets description, examples and basic options."""
        self.about, self.description = about, textwrap.fill(about.summary, WIDTH)
        examples = "\n".join(["three examples:", *(f"  {self.prog.split()[0]} {one}" for one in about.examples)])
        self.epilog = "\n\n".join(filter(None, [examples, textwrap.fill(epilog, WIDTH)]))
        if about.basic is not None:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def format_help(self) -> str:
        """Returns the help with every option."""
        if self.about is not None:
            required = sorted((one for one in self._actions if one.required), key=lambda one: bool(one.option_strings))
            words = [" ".join([*one.option_strings[:1], str(one.metavar or one.dest)]) for one in required]
            self.usage = " ".join([self.prog, *words, "[options]"])
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Prints the help, of a command with many options the basic ones alone."""
        basic = None if self.about is None else self.about.basic
        others = [] if basic is None else [one for one in self._actions if one.option_strings]
        hidden = {one: one.help for one in others if one.dest not in (*(basic or ()), "help", "help_all")}
        for action in hidden:
            action.help = argparse.SUPPRESS
        super().print_help(file)
        for action, text in hidden.items():
            action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type of the typing stubs: overloads
        """Parses after naming an unknown option, with the nearest there is, and an unknown command."""
        words = list(args or ())
        known = {*self._option_string_actions}
        if self.about is None:
            options = list(takewhile(lambda word: word.startswith("-"), words))
            if len(options) < len(words) and words[len(options)] not in COMMANDS:
                self._refuse("command", words[len(options)], COMMANDS)
        else:
            options = list(takewhile(lambda word: word != "--", words))
        for word in options:
            name = word.partition("=")[0]
            short = not name.startswith("--") and name[:2] in known
            if re.match(r"--?[A-Za-z]", name) and " " not in word and name not in known and not short:
                self._refuse("option", name, known)
        parsed, left = super().parse_known_args(args, namespace)
        if left and self.about is not None:
            self.error(f"{' '.join(left)!r} is one argument too many: put a text with spaces in quotes")
        return parsed, left

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and one line, which names the help."""
        if self.about is not None and "required" in message:
            message += f"; such as: {self.prog.split()[0]} {self.about.examples[0]}"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _refuse(self, what: str, word: str, known: Sequence[str] | Any) -> NoReturn:
        meant = get_close_matches("--" * (what == "option") + word.lstrip("-"), known, n=1)
        self.error(f"no {what} {word}" + "".join(f": did you mean {one}?" for one in meant))


class _HelpAll(argparse.Action):
    """Prints the help with every option."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.dest = dest

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Prints it and ends the program."""
        print(parser.format_help(), end="")
        parser.exit()


def overview() -> str:
    """Returns the commands in groups, in the order in which they are used."""
    width = max(map(len, COMMANDS)) + 4
    lines = []
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for name, command in commands.items():
            lines += textwrap.wrap(
                command.summary, WIDTH, initial_indent=f"  {name:{width - 2}}", subsequent_indent=" " * width
            )
    return "\n".join(lines[1:])
