"""Option parsing: argparse for typed settings, with one-sentence errors."""

from __future__ import annotations

import argparse
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
from locality.settings import Setting, flatten, parse, settings_of, to_dict

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
        self._settings: set[str] = set()
        self.given: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}

    def add(self, name: str, default: Any, help: str, type: Any = None, **how: Any) -> None:
        """Add an option with one value, or a switch if the default is False.

        Without `type`, the value is a string, or a positive integer if the default is an integer;
        `how` is passed to argparse.
        """
        if default is False:
            how |= {"action": "store_true"}
        elif how:
            how["type"] = type or str
        else:
            how = _typed(name[2:], type or (Count if isinstance(default, int) else str))
        self._values[name[2:]], self._texts[name[2:]] = default, help
        self.add_argument(name, default=SUPPRESS, help=_explained(help, default), **how)

    def add_settings(
        self,
        config: Any,
        group: str = "",
        skip: Container[str] = (),
        others: Mapping[str, Setting] = {},
        short: Mapping[str, str] = {},
    ) -> None:
        """Add an option for each setting of a configuration, with its value as the default.

        Args:
            config: a configuration dataclass.
            group: prefix of the option names.
            skip: groups to omit.
            others: further settings, such as an architecture's.
            short: short options by dotted name.
        """
        values, known = flatten(to_dict(config), 1), settings_of(type(config))
        for name, setting in {**others, **known}.items():
            if name.partition(".")[0] not in skip:
                option, default = f"{group}{name}", values.get(name)
                flags = [*([short[name]] if name in short else []), f"--{option}"]
                self._values[option], self._texts[option] = default, setting.text
                self._settings.add(option)
                how = _typed(option, setting.hint)
                if name not in known:
                    how["type"] = _typed(option, Any)["type"]  # digests use it as written
                help = _explained(setting.text, default)
                self.add_argument(*flags, dest=option, default=SUPPRESS, help=help, **how)

    def add_model(self, name: str, **how: Any) -> None:
        """Add an argument that names a model, and the options of `GivenModel`."""
        self.add_argument(name, **({"help": MODEL} | how))
        self.add("--variant", None, "architecture, if the weights do not record it")
        self.add("--entry", None, "state dict to load, if a file has several")
        text = "a model setting that the weights do not record: kv_stride=1"
        self.add("--set", [], text, action="append", metavar="NAME=VALUE", type=_assigned)

    def add_overwrite(self) -> None:
        """Add the option to replace files that the command did not write."""
        text = "replace an existing output, even if this command did not write it"
        self.add("--overwrite", False, text)

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Parse `arguments`."""
        options = self._options()
        places = [action for action in self._actions if not action.option_strings]
        shown = [f"[{each.dest}]" if each.nargs in ("?", "*") else each.dest for each in places]
        self.usage = " ".join(["%(prog)s", *shown, "[options]"])
        if "LOCALITY_COMPLETE" in os.environ:
            print("\n".join(f"--{name}" for name in options))
            raise SystemExit(0)
        if self._settings:
            self._shorten("--help.all" in arguments)
        for word in arguments:  # settings of an unknown architecture
            name = word.partition("=")[0].removeprefix("--")
            if name.startswith("model.") and name not in options and "model.name" in options:
                self._settings.add(name)
                how = _typed(name, Any)
                options[name] = self.add_argument(f"--{name}", default=SUPPRESS, **how)
        try:
            found, others = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            name, said = error.argument_name or "", error.message
            named = name.rpartition("--")[2] in said
            sentence = said if named else f"{name}: {said}"
            raise UserError(f"{sentence}; see {self.prog} --help") from None
        if others:
            raise self._unknown(others[0])
        self.given = {name: value for name, value in vars(found).items() if value not in (None, [])}
        self.settings = {name: x for name, x in vars(found).items() if name in self._settings}
        return Namespace(**self._values | vars(found))

    def refuse(self, options: str, why: str) -> None:
        """Raise an error if one of `options` (names separated by spaces) was given."""
        flags = self._option_string_actions
        if found := [name for name in options.split() if self.given.get(name) is not None]:
            named = [f"--{n}" if f"--{n}" in flags else str(self.given[n]) for n in found]
            raise UserError(f"{' and '.join(named)} {why}")

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def _options(self) -> dict[str, argparse.Action]:
        """Options by name, without dashes."""
        return {
            flag[2:]: action
            for flag, action in self._option_string_actions.items()
            if flag[:2] == "--" and flag != "--help"
        }

    def _shorten(self, everything: bool) -> None:
        """Hide settings in groups, except the main ones, unless `--help.all` is given."""
        others = [name for name in self._values if "." in name and name not in _FIRST]
        for name in [] if everything else others:
            self._options()[name].help = SUPPRESS
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
        return UserError(f"unknown setting '{name}'; {hint}")


def _typed(name: str, hint: Any) -> dict[str, Any]:
    """argparse keywords to parse and name a value of a type."""

    def read(text: str) -> Any:
        try:
            return parse(text, hint, name)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    names = choices(hint) or re.findall(r"\b(int|float|bool|str)\b", str(hint))
    shown = "|".join(dict.fromkeys(names)) or "VALUE"
    return {"type": read, "metavar": f"[{shown}, …]" if "tuple" in str(hint) else shown}


def _assigned(word: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, with a YAML value."""
    name, equals, value = word.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"got '{word}', expected NAME=VALUE, such as kv_stride=1")
    return name.strip(), _typed(f"--set {name}", Any)["type"](value)


def _explained(text: str, default: Any) -> str:
    shown = "" if default in (None, False, [], {}, "") else f" ({default})"
    return (text.rstrip(".") + shown).replace("%", "%%")


def first_word(arguments: Sequence[str]) -> str | None:
    """The first argument, unless it is an option."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else None


def peek(arguments: Sequence[str], *flags: str) -> str | None:
    """The last value of an option by one of its names, before parsing."""
    given = None
    for word, following in zip(arguments, [*arguments[1:], None], strict=False):
        flag, equals, value = word.partition("=")
        if flag in flags:
            given = value if equals else following
    return given
