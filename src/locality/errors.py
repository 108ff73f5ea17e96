"""Errors that are written for the person who reads them."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib.util
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")

# Letters of a message: no sentence is longer, but what it quotes may be.
_LONGEST = 2000
# Up to this many names are listed even if one of them is near.
_FEW = 5
# At most this many are listed.
_MOST = 25


class UserError(ValueError):
    """Something the user gave cannot be used; the message says what, and what to do instead.

    The command line prints it as one line and exits with code 2.
    """


class UnknownSetting(UserError, TypeError):
    """A setting by a name that does not exist: to Python and timm, an unexpected argument."""


class NonFiniteLogits(UserError):
    """Logits of a model are infinite or not a number, so that they mean no class."""


class RunFailed(RuntimeError):
    """A run had to stop; the message says why, what is kept, and what to do.

    Attributes:
        exit_code: what the process should exit with.
    """

    exit_code = 1


@contextlib.contextmanager
def prefix_errors(what: object) -> Iterator[None]:
    """Put `what`, such as a file, in front of the message of a `UserError` in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error


@contextlib.contextmanager
def wrap_errors(sentence: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn a library's `errors` in the block into a `UserError`: `sentence`, and the reason."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise UserError(f"{sentence}: {one_line(error)}") from error


def printable(text: str, keep: str = "") -> str:
    """`text` as a terminal may show it: control characters, as file names may have, spelt out."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text
    )


def one_line(error: BaseException) -> str:
    """An error's message without line breaks and control characters, shortened in its middle."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        said = f"{error.filename}: {error.strerror}"
    text = printable(" ".join(said.split())) or type(error).__name__
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def some(names: Iterable[str], most: int = 5, quote: str = "'") -> str:
    """A few names, and how many more there are."""
    names = list(names)
    text = ", ".join(f"{quote}{name}{quote}" for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def near(given: str, accepted: Iterable[str], texts: Mapping[str, str] = {}) -> list[str]:
    """The names most like the given one, three at most; a setting may be given by its last part.

    Args:
        given: the name as the user wrote it.
        accepted: every name that exists.
        texts: what some of them mean, in which the given name may stand: "learning_rate" is `lr`.
    """
    word = given.replace("-", "_")
    last: dict[str, list[str]] = {}
    for name in sorted(accepted):
        last.setdefault(name.rpartition(".")[2], []).append(name)
    own = word.rpartition(".")[2] if texts else word
    parts = {word: None, own: None}
    if exact := [name for part in parts for name in last.get(part, ())]:
        return exact[:3]
    said = re.escape(own.replace("_", " "))
    if first := [name for name, text in texts.items() if re.match(rf"(the )?{said}\b", text)]:
        return first[:3]
    like = [each for part in parts for each in difflib.get_close_matches(part, last, 1, cutoff=0.8)]
    found = [name for each in like for name in last[each]]
    found += [name for name, text in texts.items() if re.search(rf"\b{said}\b", text)]
    names = [name for each in last.values() for name in each]
    return list(dict.fromkeys(found))[:3] or difflib.get_close_matches(word, names, 3, cutoff=0.5)


def unknown(
    kind: str,
    given: str,
    accepted: Iterable[str],
    error: type[UserError] = UserError,
    texts: Mapping[str, str] = {},
) -> UserError:
    """The error for a name that does not exist, with the nearest one that does.

    Args:
        kind: what was looked up, in the singular ("model", "recipe").
        given: the name as the user wrote it.
        accepted: every name that exists.
        error: the exception to make.
        texts: what some of them mean, for `near`.
    """
    names = sorted(accepted)
    found = near(given, names, texts)
    hints = [f"did you mean {' or '.join(found)}?"] if found else []
    if not found or len(names) <= _FEW:
        hints.append("known: " + some([name or "''" for name in names], _MOST, quote=""))
    return error(f"unknown {kind} '{given}'; {' '.join(hints)}")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """What a table of things of some `kind` has under a name; else an error with the nearest."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


def check_known(
    kind: str, given: Iterable[str], accepted: Iterable[str], error: type[UserError]
) -> None:
    """Raise an `error` for the first name that is not accepted, with the nearest that is."""
    accepted = list(accepted)
    for name in given:
        if name not in accepted:
            raise unknown(kind, name, accepted, error)


def require(purpose: str, install: str, *modules: str) -> None:
    """Check that the packages a `purpose` needs are there, or say what to `pip install`."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UserError(f"{purpose} needs {' and '.join(missing)}: pip install '{install}'")


class OutOfMemory(RunFailed):
    """Memory ran out, in this process and where it could be said."""


_NO_MEMORY = re.compile(
    r"(allocate|enough|out of) memory|failed to map segment|can't start new thread", re.I
)


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """The error to raise in the place of a library's, if that, or one before it, is for want of
    memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (
            cause.errno == errno.ENOMEM
            if isinstance(cause, OSError)
            else not isinstance(cause, UserError) and _NO_MEMORY.search(str(cause))
        ):
            return OutOfMemory(
                f"memory ran out ({one_line(cause)}): smaller batches or images need less, and the "
                f"limit may be the container's or the shell's (ulimit -v)"
            )
        cause = None if isinstance(cause, UserError) else cause.__cause__ or cause.__context__
    return None


class NonFiniteLoss(RunFailed):
    """The loss of a step was infinite or not a number; the update was not made."""


class NonFiniteWeights(RunFailed):
    """Weights became infinite or not a number; they were not saved."""


class CheckpointNotSaved(RunFailed):
    """A checkpoint could not be written; the message says what is still there."""


class ProcessKilled(RunFailed):
    """A process that another one needs was ended by a signal that was not meant to stop it.

    Attributes:
        what: the process, in words.
        signum: the signal; SIGKILL is what a system short of memory sends.
        resumes: what it was for goes on from a checkpoint.
        exit_code: 128 + the signal's number, 137 after SIGKILL, as a shell has it.
    """

    def __init__(self, what: str, signum: int = signal.SIGKILL, resumes: bool = False) -> None:
        super().__init__(what, signum, resumes)
        self.what, self.signum, self.resumes = what, signum, resumes
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        how = f"died of {signal.Signals(self.signum).name}"
        if self.signum == signal.SIGKILL:
            how = "was killed from outside (SIGKILL), most often because memory ran out"
        elif self.signum == signal.SIGBUS:
            how = "died of SIGBUS, since shared memory is full (give Docker --shm-size=1g)"
        then = "goes on from the last checkpoint" if self.resumes else "starts again"
        return f"{self.what} {how}; the same command {then}"


class Interrupted(RunFailed):
    """A signal stopped the run after it had saved a checkpoint.

    Attributes:
        signum: the signal.
        step: steps finished and saved.
        exit_code: what the process should exit with: 128 + the signal's number (130 after Ctrl-C,
            143 after SIGTERM).
    """

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(signum, step)
        self.signum = signum
        self.step = step
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        return f"stopped by {name} after step {self.step}; the same command resumes the run"
