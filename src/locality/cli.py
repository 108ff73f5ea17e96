"""The command `locality`: names, help, and what an error looks like. The work is elsewhere.

Each command is a function (arguments) → exit code | None, imported when it is called, so that
`--help` answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from locality import __version__
from locality.errors import RunFailed, one_line, out_of_memory, printable, unknown

# name → (function, as MODULE:NAME in `locality.commands` or in a package by its whole name; help)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("train:demo", "train ConViT and its DeiT baseline on digits and write a report"),
    "models": ("models:architectures", "list the models: sizes, cost, public weights"),
    "recipes": ("train:recipes", "list the training recipes, or show one in full"),
    "train": ("train:train", "train a model, or resume a run"),
    "search": (
        "locality_papers.commands:search",
        "search for a CvT's strides and MLP ratios, block by block",
    ),
    "finetune": ("train:finetune", "fine-tune on a custom dataset, from pretrained weights"),
    "compare": ("reports:compare", "which of several models suits a custom dataset"),
    "eval": ("images:evaluate", "accuracy of a run, a checkpoint or public weights"),
    "predict": ("images:predict", "classify images"),
    "report": ("reports:report", "write an HTML report from run folders"),
    "explore": (
        "images:explore",
        "write a page where one clicks a patch and sees what every head looks at",
    ),
    "serve": ("images:serve", "a page on this machine to try a model on images, and an endpoint"),
    "figure": ("images:figure", "draw one of the papers' figures from runs or models"),
    "reproduce": (
        "locality_papers.commands:reproduce",
        "run a table or figure of either paper, by name",
    ),
    "benchmark": ("models:benchmark", "speed and memory against timm and transformers"),
    "convert": ("models:convert", "turn weights from one format into another"),
    "transform": ("models:transform", "put gated attention in the place of a CNN's convolutions"),
    "export": ("models:export", "write a model as ONNX or a torch.export program"),
    "data": ("images:folders", "check a folder of images"),
}

# Errors in what the user gave, or in the files and folders they named.
USER_ERRORS = (ValueError, OSError, ImportError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `locality ARGUMENTS`; returns the exit code.

    0 done · 1 failed · 2 wrong input, said in one sentence · 130 and 143 interrupted, resumable ·
    137 a process of it was killed, resumable · 141 nobody read the output any longer.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        code = _answer(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has seen enough.
        code = 141
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"locality: output cannot be written: {one_line(error)}", file=sys.stderr)
        code = 2
    # Python would flush once more.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _open_streams() -> None:
    """Have what was closed open, since files would take its place, and any text be printable."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the process ends)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _answer(given: list[str]) -> int:
    """The exit code of a command; what stopped it is said."""
    try:
        with contextlib.redirect_stdout(_Printable(sys.stdout)):
            return _run(given) or 0
    except BrokenPipeError:
        raise
    except Exception as error:
        said = error if isinstance(error, RunFailed) else out_of_memory(error) or error
        shown = os.environ.get("LOCALITY_TRACEBACK") and not isinstance(error, RunFailed)
        if shown or not isinstance(said, (RunFailed, *USER_ERRORS)):
            raise
        print(f"locality: {one_line(said)}", file=sys.stderr)
        return said.exit_code if isinstance(said, RunFailed) else 2
    except KeyboardInterrupt:
        return 130


def _run(given: list[str]) -> int | None:
    first = given[0] if given else ""
    if first in _PRINTED:
        print(_PRINTED[first])
        return 0
    if not given:
        print("\n".join(COMMANDS) if "LOCALITY_COMPLETE" in os.environ else usage())
        return 2
    if first not in COMMANDS:
        raise unknown("command", first, COMMANDS)
    return load_command(first)([_with_underscores(word) for word in given[1:]])


def load_command(name: str) -> Callable[[Sequence[str]], int | None]:
    """The function of one of `COMMANDS`."""
    module, _, function = COMMANDS[name][0].partition(":")
    module = module if "." in module else f"locality.commands.{module}"
    return getattr(importlib.import_module(module), function)


def _with_underscores(word: str) -> str:
    """`--dry-run` and `--data.val-part=0.1` as commands know them; what is no option as it is."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def usage() -> str:
    """The text of `locality --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: locality COMMAND [options]",
            "",
            "Convolutional vision transformers: ConViT, CvT and the DeiT baseline.",
            "",
            *lines,
            "",
            "`locality COMMAND --help` lists a command's options.",
            'Completion in bash and zsh: eval "$(locality --completion)"',
            "Set LOCALITY_TRACEBACK=1 to see where an error came from.",
        ]
    )


_COMPLETION = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_locality() {
    local words=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    COMPREPLY=($(compgen -W "$(LOCALITY_COMPLETE=1 locality "${words[@]}" 2>/dev/null)" -- "$2"))
}
complete -o default -F _locality locality"""

_PRINTED = {
    **dict.fromkeys(("-h", "--help", "help"), usage()),
    **dict.fromkeys(("-V", "--version"), f"locality {__version__}"),
    "--completion": _COMPLETION,
}


class _Printable:
    """Standard output, on which names of files that hold control characters are spelt out."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text, keep="\n"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
