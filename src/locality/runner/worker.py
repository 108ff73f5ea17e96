"""Carrying out one run in the process one is in, and worker processes that do so all day."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from locality.errors import UserError
from locality.runner.runs import Run
from locality.training import RunConfig
from locality.training.setup import launched_from_outside
from locality.training.signals import Interrupted

_PARENT_POLL_SECONDS = 1.0


def perform(run: Run) -> str | None:
    """Carry out a run here; what it prints goes to a file beside its folder.

    Returns:
        None if the folder now holds a result, else one sentence saying why not.
    """
    log = log_file(run.folder)
    try:
        with _printing_to(log):
            run.load_task()(_on_one_device(run.config), run.folder)
    except (UserError, FileNotFoundError, PermissionError) as error:
        return " ".join(str(error).split())
    except Interrupted as error:
        return str(error)
    except (KeyboardInterrupt, SystemExit):
        return "stopped at once; the same command resumes the run"
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return f"{type(error).__name__}: {' '.join(str(error).split())} (details in {log})"
    return None if run.is_finished() else f"it ended without a result.json (output in {log})"


def _on_one_device(config: RunConfig) -> RunConfig:
    """One device where the settings say all: runs go on side by side, each with its own.

    Starting further processes would mean to start this program again, which is no training
    command. Under srun, with several tasks, a run has as many devices as tasks.
    """
    if config.engine.devices or launched_from_outside():
        return config
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, devices=1))


def log_file(folder: Path) -> Path:
    """Where the output of a run goes: beside its folder, which is training's own."""
    return folder.with_name(folder.name + ".log")


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield


class WorkerProcess:
    """A process that carries out one run after the other, without importing everything anew.

    Args:
        threads: processor threads of its arithmetic.
        gpu: the one GPU it sees, as CUDA_VISIBLE_DEVICES names it; None leaves that alone.
    """

    def __init__(self, threads: int, gpu: str | None = None) -> None:
        # A forked child would inherit locks held by this process's threads.
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        # Not daemonic: training may start loading processes of its own.
        self._process = context.Process(target=_serve, args=(child, threads, gpu, os.getpid()))
        self._process.start()
        child.close()

    def perform(self, run: Run) -> str | None:
        """As `perform`, in the worker; a worker that dies is a failed run."""
        try:
            self._connection.send(run)
            return self._connection.recv()
        except (EOFError, ConnectionError, OSError):
            self._process.join()
            return f"its process ended unexpectedly ({_ending(self._process.exitcode)})"

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        """Ask the worker to save and end: it finishes the step it is in."""
        if self._process.is_alive():
            self._process.terminate()

    def close(self) -> None:
        """Send the worker home and wait for it."""
        self._connection.close()
        self._process.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _serve(connection: Connection, threads: int, gpu: str | None, parent: int) -> None:
    import torch

    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA is first used

    torch.set_num_threads(threads)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    # Ctrl-C reaches every process of a terminal. Between runs it is the parent's business; during
    # a run, training listens itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            run = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(perform(run))


def _follow(parent: int) -> None:
    """End with the parent, however it ended: as if asked to, so that a run saves first."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
