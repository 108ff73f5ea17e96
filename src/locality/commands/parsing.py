"""Option parsing: argparse for typed settings, with one-sentence errors."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
from argparse import SUPPRESS, Namespace
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from locality.checks import Count, choices
from locality.commands import MODEL
from locality.errors import UserError, near
from locality.settings import flatten, parse, settings_of, to_dict

# Settings shown by --help; --help.all shows all.
_FIRST = (
    *("model.name", "model.depth", "model.locality_strength", "model.gating_init"),
    *("model.kv_stride", "data.dataset", "data.root", "data.fraction", "optim.lr"),
    *("schedule.epochs", "schedule.steps", "engine.batch_size"),
)


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations and with one-sentence errors.

    Args:
        command: name of the command.
        text: its function's docstring, whose first paragraph is the description.

    Attributes:
        given: options given on the command line, by name, without defaults.
        settings: the given options that were added by `add_settings`.
    """

    def __init__(self, command: str, text: str | None) -> None:
        super().__init__(
            prog=f"locality {command}",
            description=" ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split()),
            exit_on_error=False,
            allow_abbrev=False,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=26, width=98),
        )
        self._texts: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._types: dict[str, Any] = {}
        self._settings: set[str] = set()
        self.given: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}

    def add(
        self, flag: str, default: Any, text: str, hint: Any = None, *short: str, **how: Any
    ) -> None:
        """Add an option with one value, or a switch if the default is False and no type is given.

        Args:
            flag: the option, "--" and its name.
            default: its value if it is not given.
            text: help text.
            hint: its type; by default a string, or a positive integer if the default is an integer.
            short: short forms of the option.
            how: passed to argparse.
        """
        name = flag.removeprefix("--")
        if default is False and hint is None:
            how["action"] = "store_true"
        else:
            hint = hint or (Count if isinstance(default, int) else str)
            how = {"metavar": _shown(hint)} | how
            self._types[name] = hint
        self._values[name], self._texts[name] = default, text
        known = "" if default in (None, False, [], {}, "") else f" ({default})"
        help = (text.rstrip(".") + known).replace("%", "%%")
        self.add_argument(*short, flag, dest=name, default=SUPPRESS, help=help, **how)

    def add_settings(
        self,
        config: Any,
        group: str = "",
        skip: Container[str] = (),
        short: Mapping[str, str] = {},
    ) -> None:
        """Add an option for each setting of a configuration, with its value as the default.

        Args:
            config: a configuration dataclass.
            group: prefix of the option names.
            skip: groups to omit.
            short: short options by dotted name.
        """
        values, known = flatten(to_dict(config), 1), settings_of(config)
        for name, setting in known.items():
            if name.partition(".")[0] not in skip:
                flags = [short[name]] if name in short else []
                shown, option = values.get(name), group + name
                self.add(f"--{option}", shown, setting.text, setting.hint, *flags)
                self._settings.add(option)

    def add_setting(self, flag: str) -> None:
        """Add an option for a setting of any type, unless it exists."""
        if flag not in self.options:
            self.add(flag, None, "", Any)
            self._settings.add(flag.removeprefix("--"))

    def add_model(self, name: str, graph: bool = False, **how: Any) -> None:
        """Add an argument that names a model, or a graph, and the options of `GivenModel`."""
        self.add_argument(name, **({"help": MODEL + ", or ONNX graph" * graph} | how))
        self.add("--variant", None, "architecture, if the weights do not record it")
        self.add("--entry", None, "state dict to load, if a file has several")
        text = "a model setting that the weights do not record: kv_stride=1"
        self.add("--set", [], text, action="append", metavar="NAME=VALUE")

    def add_overwrite(self) -> None:
        """Add the option to replace an existing output."""
        self.add("--overwrite", False, "replace an existing output")

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Parse `arguments`."""
        places = [action for action in self._actions if not action.option_strings]
        shown = [f"[{each.dest}]" if each.nargs in ("?", "*") else each.dest for each in places]
        self.usage = " ".join(["%(prog)s", *shown, "[options]"])
        if "LOCALITY_COMPLETE" in os.environ:
            print("\n".join(self.options))
            raise SystemExit(0)
        if self._settings:
            self._shorten("--help.all" in arguments)
        try:
            found, others = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            raise UserError(f"{error}; see {self.prog} --help") from None
        if others:
            raise self._unknown(others[0])
        given = {name: self._value(name, value) for name, value in vars(found).items()}
        self.given = {name: value for name, value in given.items() if value not in (None, [])}
        self.settings = {name: x for name, x in given.items() if name in self._settings}
        return Namespace(**self._values | given)

    def _value(self, name: str, given: Any) -> Any:
        """The value of an option, whose text is `given`."""
        if name == "set":
            return dict(map(_assigned, given))
        if name not in self._types:
            return given
        if isinstance(given, list):
            return [parse(each, self._types[name], name) for each in given]
        return parse(given, self._types[name], name)

    def refuse(self, options: str, why: str) -> None:
        """Raise an error if one of `options` (names separated by spaces) was given."""
        if found := [name for name in options.split() if self.given.get(name) is not None]:
            named = [f"--{n}" if n in self._texts else str(self.given[n]) for n in found]
            raise UserError(f"{' and '.join(named)} {why}")

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    @property
    def options(self) -> dict[str, argparse.Action]:
        """Options with two dashes, short ones too."""
        flags = self._option_string_actions.items()
        return {flag: action for flag, action in flags if flag[:2] == "--" and flag != "--help"}

    def _shorten(self, everything: bool) -> None:
        """Hide settings in groups, except the main ones, unless `--help.all` is given."""
        others = [name for name in self._texts if "." in name and name not in _FIRST]
        for name in [] if everything else others:
            self.options[f"--{name}"].help = SUPPRESS
        groups = Counter(name.partition(".")[0] for name in others)
        listed = ", ".join(f"--{group}.* ({count})" for group, count in groups.items())
        self.add_argument("--help.all", action="help", help=f"show all settings: {listed}")

    def _unknown(self, word: str) -> UserError:
        """The error for an unknown option, with similar options as a hint."""
        if not word.startswith("-"):
            return UserError(f"unrecognized argument '{word}'; see {self.prog} --help")
        name = word.lstrip("-").partition("=")[0]
        found = " or ".join(f"--{each}" for each in near(name, self._texts, self._texts))
        hint = f"did you mean {found}?" if found else f"see {self.prog} --help"
        return UserError(f"unknown option '--{name}'; {hint}")


def _shown(hint: Any) -> str:
    """The values of a type, for help."""
    names = choices(hint) or re.findall(r"\b(int|float|bool|str)\b", str(hint))
    shown = "|".join(dict.fromkeys(names)) or "VALUE"
    return f"[{shown}, …]" if "tuple" in str(hint) else shown


def _assigned(word: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, with a YAML value."""
    name, equals, value = word.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set got '{word}', expected NAME=VALUE, such as kv_stride=1")
    return name.strip(), parse(value, Any, f"--set {name}")


def first_word(arguments: Sequence[str]) -> str | None:
    """The first argument, unless it is an option."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else None


def peek(arguments: Sequence[str], *flags: str) -> str | None:
    """The value of an option by one of its names, before parsing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(*flags, dest="value")
    with contextlib.suppress(argparse.ArgumentError):
        return parser.parse_known_args(arguments)[0].value
    return None
