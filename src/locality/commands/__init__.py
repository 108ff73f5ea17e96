"""The commands: each parses its options and calls the package that does the work.

This module holds the parser, argparse for typed settings with one-sentence errors, and other shared
helpers.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import sys
from argparse import SUPPRESS, Namespace
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from locality.checkpoints.registry import detect_kind
from locality.checks import Count, choices
from locality.data.config import DataConfig
from locality.data.tables import has_table
from locality.errors import UserError, near, prefix_errors
from locality.files import missing, read_text
from locality.machine import spare_threads
from locality.settings import flatten, parse, settings_of, to_dict
from locality.training.config import RunConfig, read_config

if TYPE_CHECKING:
    from locality.checkpoints.api import Classifier

MODEL = "run folder, weights of any format, public name or hub repository"
"""Help text of arguments that name a model."""

# Settings shown by --help; --help.all shows all.
_FIRST = (
    *("model.name", "model.img_size", "data.dataset", "optim.lr"),
    *("optim.freeze", "schedule.minutes", "schedule.epochs", "schedule.steps"),
    *("engine.batch_size", "engine.threads"),
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
        self.model = ""  # whose settings begin with --model.
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
        text = "file of the weights' class names, one a line, if they have none"
        self.add("--class_map", None, text)

    def add_overwrite(self) -> None:
        """Add the option to replace an existing output."""
        self.add("--overwrite", False, "replace an existing output")

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Parse `arguments`."""
        places = [action for action in self._actions if not action.option_strings]
        shown = [f"[{each.dest}]" if each.nargs in ("?", "*") else each.dest for each in places]
        self.usage = " ".join(["%(prog)s", *shown, "[options]"])
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
        of = f" of {self.model}" if self.model and name.startswith("model.") else ""
        return UserError(f"unknown option '--{name}'{of}; {hint}")


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


class GivenModel:
    """A model given to a command, checked to exist; torch is imported by `opened`, and by
    `config` unless it is a run.

    Args:
        what: its path or name.
        options: the options added by `Parser.add_model`.
    """

    def __init__(self, what: str, options: Any) -> None:
        self.what, self._options = what, options
        self.kind = detect_kind(what, options.entry)
        if self.kind == "graph" and (options.variant or options.set):
            raise UserError(
                f"{what} is an ONNX graph, whose architecture is fixed; omit --variant and --set"
            )

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration; for other models the defaults, and how images are decoded."""
        if self.kind == "run":
            return read_config(Path(self.what))
        wanted = self.opened.preprocessing
        return RunConfig(data=DataConfig(exif=wanted.exif, grey_bits=wanted.grey_bits))

    @cached_property
    def opened(self) -> Classifier:
        """The loaded model."""
        from locality.checkpoints.api import open_model
        from locality.checkpoints.native import with_classes

        _use_spare_threads()
        given = self._options
        opened = open_model(self.what, given.variant, given.entry, given.set)
        if (names := self.class_names) is None:
            return opened
        with prefix_errors(given.class_map):
            named: Classifier = with_classes(opened, opened.num_classes, names)
            return named

    @property
    def class_names(self) -> list[str] | None:
        """The lines of `--class_map`."""
        file = self._options.class_map
        return None if file is None else read_text(file).removeprefix("\ufeff").splitlines()


@cache  # a second model would otherwise halve the threads again
def _use_spare_threads() -> None:
    import torch

    torch.set_num_threads(spare_threads())


def say(sentence: str) -> None:
    """Print a message to standard error."""
    print(f"locality: {sentence}", file=sys.stderr)


def report_unreadable(bad: Sequence[str], count: int, what: str) -> int:
    """Print the errors of unreadable files; raise the first if all `count` of them are unreadable.

    Returns:
        the exit code.
    """
    if bad and len(bad) == count:
        others = f" (the other {count - 1} {what} cannot be read either)" if count > 1 else ""
        raise UserError(bad[0] + others)
    for sentence in bad:
        say(sentence)
    if bad:
        say(f"{len(bad)} of {count} {what} could not be read")
    return 1 if bad else 0


def images_at(name: str) -> dict[str, Any]:
    """The settings of a custom dataset, a table or a folder of images."""
    path = Path(name)
    if not path.exists():
        raise missing(path)
    table = path.is_file() or has_table(path)
    return {"data.root": str(path), "data.dataset": "table" if table else "folder"}


def folder_name(images: Path | str) -> str:
    """The images' part of a run's name: their path from here, such as clothes-train."""
    path = Path(images).resolve()
    path = path.parent if path.is_file() else path
    here = Path.cwd()
    parts = path.relative_to(here).parts if path != here and path.is_relative_to(here) else ()
    return "-".join((parts or path.parts[1:])[-3:]) or "images"


def page_in(given: Sequence[str], name: str) -> Path:
    """Default path of a page: in the given folder if it is the only one, else here."""
    place = Path(given[0])
    return place / name if len(given) == 1 and place.is_dir() else Path(name)


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """A plain text table; columns of numbers are right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    columns = []
    for title, *column in zip(*cells, strict=True):
        width = max(map(len, (title, *column)))
        numeric = all(re.match(r"^[-+]?[\d.,]*[%MGx×]?$", cell) for cell in column)
        aligned = [f"{cell:{'>' if numeric else '<'}{width}}" for cell in (title, *column)]
        columns.append([aligned[0], "─" * width, *aligned[1:]])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
