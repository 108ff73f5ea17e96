"""User-facing errors."""

import contextlib
import difflib
import errno
import importlib.util
import re
import signal
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")

_JOINERS = "\u200c\u200d"
# Characters of a message; quoted text may be longer.
_LONGEST = 2000
# Up to this many known names are listed even if there is a near match.
_FEW = 5
# At most this many known names are listed.
_MOST = 25


class UserError(ValueError):
    """Invalid user input; the message says what is wrong and what to do.

    The command line prints it on one line and exits with code 2.
    """


class UnknownSetting(UserError, TypeError):
    """An unknown setting; a `TypeError`, as for an unexpected argument in Python and timm."""


class NonFiniteLogits(UserError):
    """A model's logits are infinite or NaN."""


class RunFailed(RuntimeError):
    """A run had to stop; the message says why, what is kept, and what to do.

    Attributes:
        exit_code: exit code of the process.
    """

    exit_code = 1


@contextlib.contextmanager
def wrap_errors(sentence: object, *errors: type[Exception]) -> Iterator[None]:
    """Convert `errors` in the block to a `UserError`: `sentence`, and the reason.

    A `UserError` itself is only converted if `errors` names it.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, UserError) and UserError not in errors:
            raise
        raise UserError(f"{sentence}: {one_line(error)}") from error


def prefix_errors(what: object) -> contextlib.AbstractContextManager[None]:
    """Prefix the message of a `UserError` in the block with `what`, for example a file."""
    return wrap_errors(what, UserError)


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters escaped, which filenames may contain.

    Spaces of any width and joiners, which Persian, Hindi and emoji are written with, are kept.
    """
    if text.isprintable():
        return text
    keep += _JOINERS
    return "".join(
        letter
        if letter.isprintable() or letter in keep or unicodedata.category(letter) == "Zs"
        else ascii(letter)[1:-1]
        for letter in text
    )


def one_line(error: BaseException) -> str:
    """An error's message on one line, escaped, and shortened in the middle if long."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        said = f"{error.filename}: {error.strerror}"
    text = printable(" ".join(said.split())) or type(error).__name__
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def counted(count: int, noun: str) -> str:
    """ "1 class", "2 classes", "3 images"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def some(names: Iterable[str], most: int = 5, quote: str = "'") -> str:
    """The first `most` names, escaped, and the number of others."""
    names = list(names)
    text = ", ".join(f"{quote}{printable(name)}{quote}" for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def near(given: str, accepted: Iterable[str], texts: Mapping[str, str] = {}) -> list[str]:
    """The up to three nearest names; the last part of a dotted name also matches.

    Args:
        given: the name as the user wrote it.
        accepted: all known names.
        texts: help texts by name, in which the given name is also searched: "learning_rate" finds
            `lr`.
    """
    word = given.replace("-", "_")
    last: dict[str, list[str]] = {}
    for name in sorted(accepted):
        last.setdefault(name.rpartition(".")[2], []).append(name)
    own = word.rpartition(".")[2] if texts else word
    parts, said = dict.fromkeys((word, own)), re.escape(own.replace("_", " "))

    def ending(words: Iterable[str]) -> list[str]:
        return [name for each in words for name in last.get(each, ())]

    def explained(pattern: str) -> list[str]:
        return [name for name, text in texts.items() if re.search(pattern, text)]

    like = [each for part in parts for each in difflib.get_close_matches(part, last, 1, cutoff=0.8)]
    matches = ending(parts) or explained(rf"^(the )?{said}\b")
    matches = matches or [*ending(like), *explained(rf"\b{said}\b")]
    matches = matches or difflib.get_close_matches(word, ending(last), 3, cutoff=0.5)
    return list(dict.fromkeys(matches))[:3]


def unknown(
    kind: str,
    given: str,
    accepted: Iterable[str],
    error: type[UserError] = UserError,
    texts: Mapping[str, str] = {},
) -> UserError:
    """The error for an unknown name, suggesting the nearest.

    Args:
        kind: kind of name, in the singular ("model", "recipe").
        given: the name as the user wrote it.
        accepted: all known names.
        error: exception class.
        texts: help texts by name, for `near`.
    """
    names = sorted(accepted)
    suggested = near(given, names, texts)
    hints = [f"did you mean {' or '.join(suggested)}?"] if suggested else []
    if not suggested or len(names) <= _FEW:
        hints.append("known: " + some([name or "''" for name in names], _MOST, quote=""))
    return error(f"unknown {kind} '{given}'; {' '.join(hints)}")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a table by name.

    Raises:
        UserError: for an unknown name (suggesting the nearest).
    """
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


def check_known(
    kind: str, given: Iterable[str], accepted: Iterable[str], error: type[UserError]
) -> None:
    """Raise an `error` for the first unknown name, suggesting the nearest."""
    accepted = list(accepted)
    for name in given:
        if name not in accepted:
            raise unknown(kind, name, accepted, error)


def require(purpose: str, install: str, *modules: str) -> None:
    """Check that packages are installed; the error says what to `pip install`."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UserError(f"{purpose} needs {' and '.join(missing)}: pip install '{install}'")


def not_utf8(what: str) -> UserError:
    """The error for a name that is not UTF-8, or not read as UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        return UserError(f"{what} is not read as UTF-8 but as {encoding}; set PYTHONUTF8=1")
    return UserError(f"{what} is not UTF-8; rename it")


class OutOfMemory(RunFailed):
    """Memory ran out in this process."""


_NO_MEMORY = re.compile(
    r"(allocate|enough|out of) memory|failed to map segment|can't start new thread", re.I
)


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """The error to raise instead of a library's, if it or one of its causes is lack of memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (
            cause.errno == errno.ENOMEM
            if isinstance(cause, OSError)
            else not isinstance(cause, UserError) and _NO_MEMORY.search(str(cause))
        ):
            return OutOfMemory(
                f"memory ran out ({one_line(cause)}); use smaller batches or images, or raise a "
                f"limit of the container or shell (ulimit -v)"
            )
        cause = None if isinstance(cause, UserError) else cause.__cause__ or cause.__context__
    return None


class NonFiniteLoss(RunFailed):
    """The loss of a step is infinite or NaN; the update was not made."""


class NonFiniteWeights(RunFailed):
    """Weights are infinite or NaN; they were not saved."""


class CheckpointNotSaved(RunFailed):
    """A checkpoint could not be written; the message says which earlier one is kept."""


class ProcessKilled(RunFailed):
    """A required process was killed by an unexpected signal.

    Attributes:
        what: description of the process.
        signum: the signal; the kernel sends SIGKILL when memory runs out.
        resumes: whether the work resumes from a checkpoint.
        exit_code: 128 + the signal's number as in a shell, 137 for SIGKILL.
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
            how = "died of SIGBUS because shared memory is full (with Docker, use --shm-size=1g)"
        then = "resumes from the last checkpoint" if self.resumes else "starts again"
        return f"{self.what} {how}; the same command {then}"


class Interrupted(RunFailed):
    """A signal stopped the run after it had saved a checkpoint.

    Attributes:
        signum: the signal.
        step: steps finished and saved.
        exit_code: 128 + the signal's number (130 after Ctrl-C, 143 after SIGTERM).
    """

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(signum, step)
        self.signum = signum
        self.step = step
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        return f"stopped by {name} after step {self.step}; the same command resumes the run"
