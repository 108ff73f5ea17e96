"""The command `locality`: subcommands, help and error output.

Each subcommand is a function (arguments) → exit code | None, imported when it is called, so that
`--help` is fast.
"""

import contextlib
import importlib
import io
import mmap
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

from locality import __version__
from locality.errors import RunFailed, one_line, out_of_memory, printable, unknown

# name → (function, as MODULE:NAME in `locality.commands` or with a full module path; help)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo:demo", "fine-tune ConViT, DeiT and CvT on photographs and write a report"),
    "models": ("models:architectures", "list the models: sizes, cost, public weights"),
    "recipes": ("train:recipes", "list the training recipes, or show one in full"),
    "train": ("train:train", "train a model, or resume a run"),
    "search": ("locality_papers.commands:search", "search a CvT's strides and MLP ratios"),
    "finetune": ("train:finetune", "fine-tune on a custom dataset, from pretrained weights"),
    "compare": ("reports:compare", "compare several models on a custom dataset"),
    "eval": ("images:evaluate", "accuracy of a run, a checkpoint or public weights"),
    "predict": ("images:predict", "classify images"),
    "report": ("reports:report", "write an HTML report from run folders"),
    "explore": ("images:explore", "write a page: every head's attention for a clicked patch"),
    "serve": ("images:serve", "serve a model as a local web page and an HTTP endpoint"),
    "reproduce": ("locality_papers.commands:reproduce", "reproduce a paper's table or figure"),
    "convert": ("models:convert", "convert weights from one format to another"),
    "export": ("models:export", "write a model as an ONNX graph"),
    "data": ("images:folders", "check a folder of images"),
}

# Errors in the user's input, or in the files and folders given.
USER_ERRORS = (ValueError, OSError, ImportError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `locality ARGUMENTS` and return the exit code.

    0 success · 1 failed · 2 wrong input, with a one-line message · 130 and 143 interrupted,
    resumable · 137 a process was killed, resumable · 141 the reader of the output closed it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        try:
            return _answer(given)
        finally:  # also after --help, which exits
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, for example `head`, has closed the pipe.
        code = 141
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"locality: output cannot be written: {one_line(error)}", file=sys.stderr)
        code = 2
    # Python flushes the streams again at exit.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _open_streams() -> None:
    """Reopen closed standard streams, whose descriptors files would get, and escape any text."""
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
    """Run a command; print its error, if any, and return the exit code."""
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
        print(usage())
        return 2
    if first not in COMMANDS:
        raise unknown("command", first, COMMANDS)
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        # OpenBLAS, which scipy loads after torch, repeats an allocation that fails for ever.
        importlib.import_module("torch")
        mmap.mmap(-1, 1 << 30).close()
    return load_command(first)([_with_underscores(word) for word in given[1:]])


def load_command(name: str) -> Callable[[Sequence[str]], int | None]:
    """The function of one of `COMMANDS`."""
    module, _, function = COMMANDS[name][0].partition(":")
    module = module if "." in module else f"locality.commands.{module}"
    return getattr(importlib.import_module(module), function)


def _with_underscores(word: str) -> str:
    """Replace hyphens in an option's name: `--dry-run` → `--dry_run`; other words are unchanged."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def usage() -> str:
    """The text of `locality --help`."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items())
    return f"""usage: locality COMMAND [options]

Convolutional vision transformers: ConViT, CvT and the DeiT baseline.

{listed}

`locality COMMAND --help` lists a command's options.
Set LOCALITY_TRACEBACK=1 to see the traceback of an error."""


_PRINTED = {
    **dict.fromkeys(("-h", "--help", "help"), usage()),
    **dict.fromkeys(("-V", "--version"), f"locality {__version__}"),
}


class _Printable:
    """Standard output that escapes control characters, which filenames may contain."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text, keep="\n"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
