"""Reading options: jsonargparse on the typed settings, with errors for the reader."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, NoReturn

from jsonargparse import ArgumentParser as _JsonArgumentParser
from jsonargparse import Namespace
from jsonargparse._actions import _ActionConfigLoad

from locality import checks
from locality.checkpoints.where import kind_of, refuse_entry
from locality.errors import UserError, near
from locality.files import parse_yaml, read_yaml
from locality.settings import described

if TYPE_CHECKING:
    from locality.checkpoints.open import Classifier


# Of settings by dotted name, those that the first screen of help shows.
_FIRST = (
    *("model.name", "data.dataset", "data.root", "data.fraction", "optim.lr"),
    *("schedule.epochs", "schedule.steps", "engine.batch_size"),
)


class Parser(_JsonArgumentParser):
    """An argument parser without abbreviations, whose errors are one sentence.

    Args:
        command: its name.
        text: what it does, of which the first paragraph is told: a function's docstring.
        words: those before the options that the caller reads by itself, for the help.

    Attributes:
        given: the options that the command line gave, by dotted name, without defaults.
    """

    def __init__(self, command: str, text: str | None, words: str = "") -> None:
        super().__init__(
            prog=f"locality {command}",
            description=" ".join(cleandoc(text or "").partition("\n\n")[0].split()),
            exit_on_error=False,
            allow_abbrev=False,
        )
        self._words = words
        self._counts: list[str] = []
        self.given: dict[str, Any] = {}

    def add(self, name: str, default: Any, help: str, type: Any = None) -> None:
        """Add an option that takes one value of its default's type, or is a switch (False).

        A whole number is 1 or more unless its type is given as int.
        """
        if default is False:
            self.add_argument(name, action="store_true", help=help)
        elif type is None and not isinstance(default, (int, float)):
            self.add_argument(name, default=default, help=help)
        else:
            self.add_argument(name, type=type or default.__class__, default=default, help=help)
            self._counts += [name[2:]] * (type in (None, int | None))

    def add_model(self, name: str, **how: Any) -> None:
        """Add an argument that names a model, and the options that `open_given` reads with it."""
        self.add_argument(name, **({"help": MODEL} | how))
        self.add("--variant", None, "architecture, if the weights do not tell")
        self.add("--entry", None, "which state dict, if a file has several")
        self.add_argument(
            "--set",
            action="append",
            type=str,
            default=[],
            metavar="NAME=VALUE",
            help="a setting of the model, where the weights do not tell it: kv_stride=1",
        )

    def read(self, arguments: Sequence[str]) -> Namespace:
        """The options in `arguments`.

        Raises:
            UserError: for an unknown option (with the nearest) or a value of the wrong type.
        """
        if "LOCALITY_COMPLETE" in os.environ:
            print("\n".join(f"--{name}" for name in self._options()))
            raise SystemExit(0)
        if "--help.all" in arguments:
            print(self._help(everything=True))
            raise SystemExit(0)
        try:
            options = self.parse_args(list(arguments))
            self.given = vars(self.parse_args(list(arguments), defaults=False).as_flat())
        except argparse.ArgumentError as error:
            raise self._readable(error) from None
        for name in self._counts:
            if options[name] is not None:
                checks.integer(name, options[name], 1)
        return options

    def refuse(self, options: str, why: str) -> None:
        """Refuse options that would do nothing.

        Args:
            options: names, separated by spaces.
            why: the rest of the sentence.

        Raises:
            UserError: if one of them is given.
        """
        given, flags = self.given, self._option_string_actions
        if found := [name for name in options.split() if given.get(name) is not None]:
            named = [f"--{name}" if f"--{name}" in flags else str(given[name]) for name in found]
            raise UserError(f"{' and '.join(named)} {why}")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def format_help(self, formatter: Any = None) -> str:
        return self._help(everything=False)

    def _help(self, everything: bool) -> str:
        """What is shown for `--help`: of settings in groups the first ones, or all of them."""
        places = [action for action in self._actions if not action.option_strings]
        words = [self._words, *(_place(action) for action in places)]
        shown = [f"usage: {self.prog} {' '.join(filter(None, words))} [options]", ""]
        shown += [*textwrap.wrap(self.description or "", _WIDTH), ""]
        shown += [line for action in places for line in _row(action.dest, action.help or "")]
        shown += [""] * bool(places)
        rest: dict[str, list[str]] = {}
        for name, action in self._options().items():
            group, dot, setting = name.partition(".")
            if everything or not dot or name in _FIRST:
                shown += _row(f"--{name}", _explained(action, everything))
            else:
                rest.setdefault(group, []).append(setting)
        titles = {each.title or "": each._group_actions for each in self._action_groups}
        about = {a.dest.partition(".")[0]: title for title, of in titles.items() for a in of}
        for group, names in rest.items():
            some = ", ".join(names[:6]) + ", …" * (len(names) > 6)
            shown += _row(f"--{group}.*", f"{about[group].lower()}: {some}")
        if rest:
            shown += ["", f"`{self.prog} --help.all` shows every setting, and what it accepts."]
        return "\n".join(shown) + "\n"

    def _options(self) -> dict[str, argparse.Action]:
        """The options by name, without dashes, and without those of jsonargparse itself."""
        return {
            flag[2:]: action
            for flag, action in self._option_string_actions.items()
            if flag.startswith("--") and flag[-1] != "+" and action.help != argparse.SUPPRESS
            if flag != "--help" and not isinstance(action, _ActionConfigLoad)
        }

    def _readable(self, error: argparse.ArgumentError) -> UserError:
        message = " ".join(error.message.split())
        options = self._options()
        stray = re.search(r"[Uu]nrecognized arguments: (\S+)|(--print_shtab)", message)
        if stray:
            word = stray[1] or stray[2]
            if word.startswith("--"):
                return self._unknown(word[2:].partition("=")[0])
            return UserError(f"'{word}' is one word too many; see {self.prog} --help")
        wrong = re.search(r'Parser key "([^"]+)": (.*?)(?:Got value: (.*))?$', message)
        if wrong:
            name, value = wrong[1], wrong[3]
            accepted = _accepted(options[name]) if name in options else wrong[2].strip(" .")
            return UserError(f"{name} is {value or 'something else'}; give {accepted}")
        lacking = re.search(
            r"arguments are required: ([\w.-]+)|argument --(\S+): expected", message
        )
        if lacking:
            name = lacking[1] or lacking[2]
            action = next(action for action in self._actions if action.dest == name)
            flag = f"--{name}" if action.option_strings else name
            return UserError(
                f"{self.prog} needs {flag}{' VALUE' * bool(lacking[2])}: {action.help}"
            )
        return UserError(f"{message}; see {self.prog} --help")

    def _unknown(self, name: str) -> UserError:
        """The error for an option that does not exist: a name like it, or what its text tells."""
        options = self._options()
        said = rf"\b{re.escape(name.replace('_', ' '))}\b"
        told = [each for each, action in options.items() if re.search(said, action.help or "")]
        like = near(name, options)
        exact = any(each.rpartition(".")[2] == name for each in like)
        found = like if exact or not told else told[:3]
        hint = f"did you mean --{' or --'.join(found)}?" if found else f"see {self.prog} --help"
        return UserError(f"unknown setting '{name}'; {hint}")


_WIDTH = 98
_INDENT = 26


def _place(action: argparse.Action) -> str:
    """An argument without a name of its own, in a line of usage."""
    word = action.dest.upper()
    many = f"{word} ..." if action.nargs == "+" else word
    return f"[{many}]" if action.nargs in ("?", "*") else many


def _row(name: str, text: str) -> list[str]:
    """A name and what it means, in two columns."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    first = f"  {name:<{_INDENT - 2}}"
    head = [first + lines.pop(0)] if len(first) <= _INDENT else [first]
    return head + [" " * _INDENT + line for line in lines]


def _explained(action: argparse.Action, everything: bool) -> str:
    """The text of an option and its default; what it accepts, if everything is wanted."""
    text = (action.help or "").rstrip(".")
    if everything and (accepted := _accepted(action)):
        text += f"; {accepted}"
    default = "" if action.default in (None, False, [], {}, "") else f" ({action.default})"
    return text + default


def _accepted(action: argparse.Action) -> str:
    """What an option accepts, in words."""
    hint = getattr(action, "_typehint", action.type)
    return described(hint) if hint is not None else ""


MODEL = "run folder, weights of any layout, public name, hub repository or ONNX graph"
"""What a command that asks for a model takes."""


def open_given(what: str, options: Any) -> Classifier:
    """What `what` names, opened with the options that `Parser.add_model` added.

    Raises:
        FileNotFoundError, UserError: if it cannot be opened, naming it and the cause.
    """
    check_given(what, options)
    from locality.checkpoints.open import open_model

    return open_model(what, options.variant, options.entry, read_settings(options))


def check_given(what: str, options: Any) -> str:
    """Check that what `what` names is there and takes these options; its kind. Without torch.

    Raises:
        FileNotFoundError, UserError: if it is not, or does not.
    """
    kind = kind_of(what)
    if kind != "path":
        refuse_entry(what, options.entry)
    if kind == "graph" and (options.variant or options.set):
        raise UserError(f"{what} is a graph, which is run as it is; leave out --variant and --set")
    return kind


def say(sentence: str) -> None:
    """Print a sentence where it is not taken for a result."""
    print(f"locality: {sentence}", file=sys.stderr)


def read_settings(options: Namespace) -> dict[str, Any]:
    """The settings that `--set` gave, values as YAML has them.

    Raises:
        UserError: for words that are no NAME=VALUE.
    """
    settings = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UserError(f"--set takes NAME=VALUE, such as --set kv_stride=1, not '{word}'")
        settings[name.strip()] = parse_yaml(value, f"--set {name}")
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


def taken(words: Iterable[str], *flags: str) -> tuple[list[list[str]], list[str]]:
    """The values of each `FLAG VALUE` or `FLAG=VALUE` in `words` by flag, and the other words."""
    values: dict[str, list[str]] = {flag: [] for flag in flags}
    rest, remaining = [], iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag in values and equals:
            values[flag].append(value)
        elif flag in values and (following := next(remaining, None)) is not None:
            values[flag].append(following)
        else:
            rest.append(word)
    return list(values.values()), rest


def with_aliases(arguments: Iterable[str], aliases: dict[str, str]) -> list[str]:
    """`arguments` with short options written out: `--model X` as `--model.name X`."""
    parts = (argument.partition("=") for argument in arguments)
    return [aliases.get(flag, flag) + equals + value for flag, equals, value in parts]


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
