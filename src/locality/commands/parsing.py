"""Reading options: jsonargparse on the typed settings, with errors for the reader."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from jsonargparse import ArgumentParser as _JsonArgumentParser
from jsonargparse import Namespace

from locality.errors import UserError, unknown
from locality.files import read_yaml

if TYPE_CHECKING:
    from locality.checkpoints.open import Classifier


class Parser(_JsonArgumentParser):
    """An argument parser without abbreviations, whose errors are one sentence."""

    def __init__(self, command: str, description: str, **options: Any) -> None:
        super().__init__(
            prog=f"locality {command}",
            description=description,
            exit_on_error=False,
            allow_abbrev=False,
            **options,
        )

    def add(self, name: str, default: Any, help: str, type: Any = None) -> None:
        """Add an option that takes one value of its default's type, or is a switch (False)."""
        if default is False:
            self.add_argument(name, action="store_true", help=help)
        elif type is None and not isinstance(default, (int, float)):
            self.add_argument(name, default=default, help=help)
        else:
            self.add_argument(name, type=type or default.__class__, default=default, help=help)

    def read(self, arguments: Sequence[str]) -> Namespace:
        """The options in `arguments`.

        Raises:
            UserError: for an unknown option (with the nearest) or a value of the wrong type.
        """
        try:
            return self.parse_args(list(arguments))
        except argparse.ArgumentError as error:
            raise self._readable(error) from None

    def given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Those options that `arguments` give, by dotted name, without the defaults of others."""
        return vars(self.parse_args(list(arguments), defaults=False).as_flat())

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def options(self) -> list[str]:
        """Every option's name, without its dashes."""
        return [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]

    def _readable(self, error: argparse.ArgumentError) -> UserError:
        message = " ".join(error.message.split())
        stray = re.search(r"[Uu]nrecognized arguments: (\S+)", message)
        if stray:
            word = stray[1]
            if word.startswith("--"):
                return unknown("setting", word[2:].partition("=")[0], self.options())
            return UserError(f"'{word}' is one word too many; see {self.prog} --help")
        wrong = re.search(r'Parser key "([^"]+)": (.*?)(?:Got value: (.*))?$', message)
        if wrong:
            name, expected, value = wrong[1], wrong[2].strip(" ."), wrong[3]
            expected = re.sub(r"<class '(\w+)'>", r"\1", expected.removeprefix("Expected "))
            expected = expected.replace("typing.", "").removeprefix("a ").removeprefix("an ")
            given = f" is {value}; it" if value is not None else ""
            return UserError(f"{name}{given} has to be: {expected}")
        return UserError(f"{message}; see {self.prog} --help")


MODEL = "run folder, weights of any layout, public name, hub repository or ONNX graph"
"""What a command that asks for a model takes."""


def add_model_options(parser: Parser) -> None:
    """Add the options of opening a model; `open_given` reads them."""
    parser.add_argument("--variant", default=None, help="architecture, if the weights do not tell")
    parser.add_argument("--entry", default=None, help="which state dict, if a file has several")
    parser.add_argument(
        "--set",
        action="append",
        type=str,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the model, where the weights do not tell it: kv_stride=1",
    )


def open_given(what: str, options: Any) -> Classifier:
    """What `what` names, opened with the options that `add_model_options` added.

    Raises:
        FileNotFoundError, UserError: if it cannot be opened, naming it and the cause.
    """
    from locality.checkpoints.open import open_model

    return open_model(what, options.variant, options.entry, read_settings(options))


def read_settings(options: Namespace) -> dict[str, Any]:
    """The settings that `--set` gave, values as YAML has them.

    Raises:
        UserError: for words that are no NAME=VALUE.
    """
    settings = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        try:
            settings[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals or not name.strip():
            raise UserError(f"--set takes NAME=VALUE, such as --set kv_stride=1, not '{word}'")
    return settings


def read_settings_file(path: str) -> dict[str, Any]:
    """The settings in a YAML file, nested.

    Raises:
        OSError, UserError: if it cannot be read, or holds something else.
    """
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise UserError(f"{path} does not hold settings by name")
    return values


def taken(flag: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of every `flag VALUE` and `flag=VALUE` in `words`, and the other words."""
    values, rest, wanted = [], [], False
    for word in words:
        name, equals, value = word.partition("=")
        if wanted or (name == flag and equals):
            values.append(word if wanted else value)
            wanted = False
        elif name == flag:
            wanted = True
        else:
            rest.append(word)
    return values, [*rest, flag] if wanted else rest


def with_aliases(arguments: Iterable[str], aliases: dict[str, str]) -> list[str]:
    """`arguments` with short options written out: `--model X` as `--model.name X`."""
    result = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        result.append(aliases.get(flag, flag) + equals + value)
    return result


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """A plain text table: the first column left-aligned, the others by content."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [
        all(re.match(r"^[-+]?[\d.,]*[%MGx×]?$", row[column]) for row in cells[1:])
        for column in range(len(header))
    ]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)
