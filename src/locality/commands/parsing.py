"""Reading options: argparse on the typed settings, with errors for the reader."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_origin

from locality import checks
from locality.checkpoints.registry import check_no_entry, detect_kind
from locality.errors import UserError, near
from locality.files import parse_yaml, read_yaml
from locality.settings import Setting, described, flatten, parse, settings_of, to_dict

if TYPE_CHECKING:
    from locality.checkpoints.api import Classifier


# Of settings by dotted name, those that the first screen of help shows.
_FIRST = (
    *("model.name", "data.dataset", "data.root", "data.fraction", "optim.lr"),
    *("schedule.epochs", "schedule.steps", "engine.batch_size"),
)


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations, whose errors are one sentence.

    Args:
        command: its name.
        text: what it does, of which the first paragraph is shown: a function's docstring.
        words: those before the options that the caller reads by itself, for the help.

    Attributes:
        given: the options that the command line gave, by name, without defaults.
        settings: of those, the settings of `add_settings`, by dotted name.
    """

    def __init__(self, command: str, text: str | None, words: str = "") -> None:
        super().__init__(
            prog=f"locality {command}",
            description=" ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split()),
            exit_on_error=False,
            allow_abbrev=False,
        )
        self._words = words
        self._values: dict[str, Any] = {}
        self._hints: dict[str, Any] = {}
        self._counts: list[str] = []
        self._groups: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self.given: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}

    def add(self, name: str, default: Any, help: str, type: Any = None, **how: Any) -> None:
        """Add an option that takes one value of its default's type, or is a switch (False).

        A whole number is 1 or more unless its type is given as int, a number above 0. `how` goes to
        argparse.
        """
        if default is False:
            how |= {"action": "store_true"}
        elif type is not None or isinstance(default, (int, float)):
            self._hints[name[2:]] = type or default.__class__
            self._counts += [name[2:]] if type in (None, int | None, float, float | None) else []
        self._values[name[2:]] = default
        self.add_argument(name, default=argparse.SUPPRESS, help=help, **how)

    def _add_setting(self, name: str, default: Any, setting: Setting, path: str) -> None:
        self._hints[name], self._values[name], self._paths[name] = setting.hint, default, path
        self.add_argument(f"--{name}", default=argparse.SUPPRESS, help=setting.text)

    def add_settings(
        self, config: Any, group: str = "", within: str = "", skip: Container[str] = ()
    ) -> None:
        """Add an option for each setting of a configuration, whose values are the defaults.

        Args:
            config: a configuration dataclass.
            group: what comes before the names of the options.
            within: what comes before the names in `settings`.
            skip: groups to leave out.
        """
        values = flatten(to_dict(config), 1)
        for name, setting in settings_of(type(config)).items():
            if name.partition(".")[0] not in skip:
                self._add_setting(f"{group}{name}", values[name], setting, f"{within}{name}")
        groups = {name: type(getattr(config, name)) for name in to_dict(config)}
        for name, of in ({group.rstrip("."): type(config)} if group else groups).items():
            self._groups[name] = (inspect.getdoc(of) or "").partition("\n")[0].rstrip(".").lower()

    def add_model(self, name: str, **how: Any) -> None:
        """Add an argument that names a model, and the options that `open_given` reads with it."""
        self.add_argument(name, **({"help": MODEL} | how))
        self.add("--variant", None, "architecture, if the weights do not tell")
        self.add("--entry", None, "which state dict, if a file has several")
        text = "a setting of the model, where the weights do not tell it: kv_stride=1"
        self.add("--set", [], text, str, action="append", metavar="NAME=VALUE")

    def add_overwrite(self) -> None:
        """Add the option to replace a file that the command did not write."""
        self.add(
            "--overwrite", False, "replace what is there, even if this command did not write it"
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
        self._add_fields(arguments)
        needed = [action for action in self._actions if action.required]
        for action in needed:
            action.required = False  # which is said below, in words of ours
        try:
            found, others = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            raise self._readable(error) from None
        if others:
            raise self._unknown(others[0])
        for action in needed:
            if getattr(found, action.dest, None) is None:
                raise self._lacking(action)
        given = {name: value for name, value in vars(found).items() if value not in (None, [])}
        for name in given.keys() & self._hints.keys():
            given[name] = parse(given[name], self._hints[name], name)
        for name in self._counts:
            if isinstance(given.get(name), float):
                checks.number(name, given[name], 0, above=True)
            elif given.get(name) is not None:
                checks.integer(name, given[name], 1)
        self.given = given
        self.settings = {to: given[name] for name, to in self._paths.items() if name in given}
        return Namespace(**self._values | vars(found) | given)

    def _add_fields(self, arguments: Sequence[str]) -> None:
        """Add `--model.overrides.depth`, where it is given: a value of a setting of many."""
        for flag in dict.fromkeys(word.partition("=")[0] for word in arguments):
            whole, _, field = flag[2:].rpartition(".")
            if get_origin(self._hints.get(whole)) is dict:
                setting = Setting(Any, self._options()[whole].help or "")
                self._add_setting(flag[2:], None, setting, f"{self._paths[whole]}.{field}")

    def refuse(self, options: str, why: str) -> None:
        """Refuse options that would do nothing.

        Args:
            options: names, separated by spaces.
            why: the rest of the sentence.

        Raises:
            UserError: if one of them is given.
        """
        flags = self._option_string_actions
        if found := [name for name in options.split() if self.given.get(name) is not None]:
            named = [f"--{n}" if f"--{n}" in flags else str(self.given[n]) for n in found]
            raise UserError(f"{' and '.join(named)} {why}")

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def format_help(self) -> str:
        return self._help(everything=False)

    def _help(self, everything: bool) -> str:
        """What is shown for `--help`: of settings in groups the first ones, or all of them."""
        places = [action for action in self._actions if not action.option_strings]
        words = [self._words, *(_place(action) for action in places)]
        shown = [f"usage: {self.prog} {' '.join(filter(None, words))} [options]", ""]
        shown += [*textwrap.wrap(self.description or "", _WIDTH), ""]
        shown += [line for action in places for line in _row(action.dest, action.help or "")]
        shown += [""] if places else []
        rest: dict[str, list[str]] = {}
        for name, action in self._options().items():
            group, dot, setting = name.partition(".")
            if everything or not dot or name in _FIRST:
                shown += _row(f"--{name}", self._explained(name, action.help or "", everything))
            else:
                rest.setdefault(group, []).append(setting)
        for group, names in rest.items():
            first = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
            shown += _row(f"--{group}.*", f"{self._groups[group]}: {first}")
        if rest:
            shown += ["", f"`{self.prog} --help.all` shows every setting, and what it accepts."]
        return "\n".join(shown) + "\n"

    def _explained(self, name: str, text: str, everything: bool) -> str:
        """The text of an option and its default; what it accepts, if everything is wanted."""
        accepted = described(self._hints[name]) if everything and name in self._hints else ""
        default = self._values.get(name)
        text = text.rstrip(".") + (f"; {accepted}" if accepted else "")
        return text if default in (None, False, [], {}, "") else f"{text} ({default})"

    def _options(self) -> dict[str, argparse.Action]:
        """The options by name, without dashes."""
        return {
            flag[2:]: action
            for flag, action in self._option_string_actions.items()
            if flag[:2] == "--" and flag != "--help"
        }

    def _readable(self, error: argparse.ArgumentError) -> UserError:
        action = self._option_string_actions.get((error.argument_name or "").rpartition("/")[2])
        if action is None:
            return UserError(f"{error.message}; see {self.prog} --help")
        if action.nargs == 0:
            return UserError(f"--{action.dest} takes no value; see {self.prog} --help")
        return self._lacking(action, " VALUE")

    def _lacking(self, action: argparse.Action, value: str = "") -> UserError:
        flag = f"--{action.dest}" if action.option_strings else action.dest
        return UserError(f"{self.prog} needs {flag}{value}: {action.help}")

    def _unknown(self, word: str) -> UserError:
        """The error for a word that is no option: a name like it, or what its text says."""
        if not word.startswith("-"):
            return UserError(f"'{word}' is one word too many; see {self.prog} --help")
        name = word.lstrip("-").partition("=")[0]
        texts = {each: action.help or "" for each, action in self._options().items()}
        found = " or ".join(f"--{each}" for each in near(name, texts, texts))
        hint = f"did you mean {found}?" if found else f"see {self.prog} --help"
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


MODEL = "run folder, weights of any format, public name, hub repository or ONNX graph"
"""What a command that asks for a model takes."""


def open_given(what: str, options: Any) -> Classifier:
    """What `what` names, opened with the options that `Parser.add_model` added.

    Raises:
        FileNotFoundError, UserError: if it cannot be opened, naming it and the cause.
    """
    check_given(what, options)
    from locality.checkpoints.api import open_model

    return open_model(what, options.variant, options.entry, read_settings(options))


def check_given(what: str, options: Any) -> str:
    """Check that what `what` names is there and takes these options; its kind. Without torch.

    Raises:
        FileNotFoundError, UserError: if it is not, or does not.
    """
    kind = detect_kind(what)
    if kind != "path":
        check_no_entry(what, options.entry)
    if kind == "graph" and (options.variant or options.set):
        raise UserError(f"{what} is a graph, which is run as it is; leave out --variant and --set")
    return kind


def say(sentence: str) -> None:
    """Print a sentence to standard error, apart from results."""
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


def pop_options(words: Iterable[str], *flags: str) -> tuple[list[list[str]], list[str]]:
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
    columns = []
    for title, *column in zip(*cells, strict=True):
        width = max(map(len, (title, *column)))
        numeric = all(re.match(r"^[-+]?[\d.,]*[%MGx×]?$", cell) for cell in column)
        aligned = [f"{cell:{'>' if numeric else '<'}{width}}" for cell in (title, *column)]
        columns.append([aligned[0], "─" * width, *aligned[1:]])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
