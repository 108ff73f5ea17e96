"""A training run from beginning to end: check, lock, start the processes, train, write the result.

`train` is the whole of it. Lightning Fabric finds the devices, starts the processes and makes the
model data parallel; the loop is ours (`locality.training.loop`).
"""

from __future__ import annotations

import atexit
import contextlib
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from lightning_fabric import Fabric
from torch.multiprocessing import ProcessExitedException

from locality.checkpoints.run_state import DamagedCheckpoint, read_checkpoint
from locality.data.checking import ImageRecord, verify
from locality.data.loader import naming_killed_workers
from locality.errors import Interrupted, NonFiniteLoss, ProcessKilled, UserError
from locality.files import write_atomic
from locality.training.config import RunConfig
from locality.training.devices import create_fabric
from locality.training.loop import Loop
from locality.training.model import build_model, starting_model
from locality.training.peers import Peers, end_processes
from locality.training.recorder import Observer, Recorder, restore_metrics
from locality.training.resolved_run import Preview, check_memory
from locality.training.run_folder import RunFolder
from locality.training.signals import Interruption, forwarded_to_children
from locality.training.state import Components, Counts

T = TypeVar("T")


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    quiet: bool = False,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Train as `config` says, in `folder`; resume what is there, or return what was finished.

    Everything that can be checked is checked before the first step.

    Args:
        config: the whole run.
        folder: its folder; see `locality.training.run_folder` for what is in it.
        quiet: print nothing.
        observer: is shown the model now and then; changes no number of the run.

    Returns:
        the content of result.json.

    Raises:
        UserError: if the run cannot work as configured, or the folder is another run's.
        Interrupted: if a signal stopped it; the checkpoint is written and the same call resumes.
        ProcessKilled: if another process of it was killed, as for want of memory; so does it.
        NonFiniteLoss: if the loss is not finite and no update may be skipped for it.
        DamagedCheckpoint: if there are checkpoints and none is whole.
        CheckpointNotSaved: if the disk is full.
    """
    fabric = create_fabric(config.engine)
    peers = Peers(fabric)
    within = config.engine.strategy in ("ddp_spawn", "ddp_fork")
    here = partial(_train_here, config, RunFolder(folder), quiet, observer, peers)
    try:
        with forwarded_to_children() if within else peers.watched():
            outcome = fabric.launch(here)
    except ProcessExitedException as error:
        if error.exit_code >= 0:
            raise
        raise ProcessKilled(
            f"rank {error.error_index} of the run", -error.exit_code, resumes=True
        ) from error
    except RuntimeError as error:
        # Of the processes' first meeting, before the run.
        if not (lost := peers.explained(error)):
            raise
        outcome = lost
    if isinstance(outcome, dict):
        return outcome
    raise peers.leave(outcome) if fabric.global_rank > 0 else outcome


def _train_here(
    config: RunConfig,
    run: RunFolder,
    quiet: bool,
    observer: Observer | None,
    peers: Peers,
    fabric: Fabric,
) -> dict[str, Any] | Exception:
    """One process's part: what is in result.json, or what every process is to raise."""
    atexit.register(end_processes)
    try:
        with naming_killed_workers():
            return _run(config, run, quiet, observer, fabric)
    except BaseException as error:
        # Its traceback holds the model, which holds the process group.
        _forget_locals(error)
        if isinstance(error, _OnEveryRank):
            return error.args[0]
        if isinstance(error, ProcessKilled):
            return ProcessKilled(error.what, error.signum, resumes=True)
        if isinstance(error, (Interrupted, NonFiniteLoss, DamagedCheckpoint)):
            return error
        if lost := peers.explained(error):
            return lost
        raise
    finally:
        run.lock.release()


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the variables that the traceback of an error, and of those before it, hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _run(
    config: RunConfig, run: RunFolder, quiet: bool, observer: Observer | None, fabric: Fabric
) -> dict[str, Any]:
    told, own = _by_first(fabric, partial(_begin, config, run))
    if isinstance(told, dict):
        if fabric.is_global_zero and not quiet:
            print(f"run {run.path} is finished: top-1 {told['top1']:.2f}%")
        return told
    checkpoint, fingerprint, notes = told
    seen, state = own or _follow(config, run, checkpoint)
    classes = len(seen.splits.classes)
    with Interruption().listening() as interruption:
        # A resumed run takes its weights from the checkpoint, wherever they once came from.
        if state is None:
            model, changes = starting_model(config, classes)
            notes += changes
        else:
            model = build_model(config, classes)
        parts = Components(fabric, seen, model)
        at = Counts() if state is None else parts.load(state)
        folder = run if fabric.is_global_zero else None
        with contextlib.closing(Recorder(folder, seen, at, quiet, observer)) as recorder:
            loop = Loop(fabric, seen, parts, recorder, interruption, at, fingerprint)
            if fabric.is_global_zero:
                run.note_start(config, at.step, str(fabric.device), seen.precision)
                resumed = [f"resumed after step {at.step:,}"] if at.step else []
                said = [f"run {run.path}, seed {config.seed}", *str(seen).splitlines()]
                said += [f"note    {note}" for note in (*resumed, *notes)]
                recorder.say("\n  ".join(said))
            return fabric.broadcast(recorder.finished(loop.run()))


class _OnEveryRank(Exception):
    """Carries what every rank raises alike."""


def _by_first(fabric: Fabric, work: Callable[[], tuple[Any, T | None]]) -> tuple[Any, T | None]:
    """What `work` returns on rank 0: the first of two on every rank, the second on that alone.

    What it raises for the user is raised on every rank.
    """
    told, own = None, None
    if fabric.is_global_zero:
        try:
            told, own = work()
        except (UserError, OSError, DamagedCheckpoint) as error:
            told = error
    told = fabric.broadcast(told)
    if isinstance(told, Exception):
        raise _OnEveryRank(told) from told
    return told, own


_Opened = tuple[Preview, dict[str, Any] | None]


def _begin(config: RunConfig, run: RunFolder) -> tuple[Any, _Opened | None]:
    """Check everything and take the folder, on rank 0.

    Returns:
        the result of a finished run, or the name of the checkpoint to go on from ("" for none),
        the fingerprint of the images and what is to be said; and the run with its last state.

    Raises:
        UserError: if the run cannot work as configured, or cannot go on with its images.
        DamagedCheckpoint: if there are checkpoints and none is whole.
    """
    seen = Preview(config, resumes=run.has_begun())
    check_memory(seen)
    run.prepare(config)
    result = run.result()
    if result is not None:
        return result, None
    run.check_space(seen.checkpoint_bytes, best=seen.plan.patience is not None)
    state, checkpoint, passed_over = run.checkpoints.load()
    notes = [f"{reason}; going on from the one before it" for reason in passed_over]
    if state is None and run.metrics_file.exists():
        notes.append(f"{run.path} has measurements and no checkpoint: starting again")
    splits, record = seen.splits, ImageRecord.of(seen.splits)
    if state is not None:
        run.check_saved(config, state.get("config", {}))  # earlier versions kept none
        notes += _same_images(run, seen, state, record) + restore_metrics(run, state)
    elif config.data.on_bad(training=False) == "error":
        notes += [note for note in [verify(splits.val)] if note]
    write_atomic(run.images_file, record.table)
    run.write_json(run.classes_file, splits.classes)
    counts = np.bincount(splits.train.labels, minlength=len(splits.classes)).tolist()
    run.write_json(run.counts_file, dict(zip(splits.classes, counts, strict=True)))
    return (checkpoint, record.fingerprint, notes), (seen, state)


def _follow(config: RunConfig, run: RunFolder, checkpoint: str) -> _Opened:
    """What the other ranks open when the first one has found that it is there."""
    run.lock.join()
    seen = Preview(config, resumes=run.has_begun())
    return seen, read_checkpoint(run.checkpoints.path / checkpoint) if checkpoint else None


def _same_images(
    run: RunFolder, seen: Preview, state: dict[str, Any], record: ImageRecord
) -> list[str]:
    """Compare a checkpoint's images with those there are now; notes on what differs.

    Raises:
        UserError: they differ, and the run was not told to go on with others, or cannot.
    """
    before = state["data"]
    if before == record.fingerprint:
        return []
    found = "other images, labels or classes"
    if run.images_file.exists():
        found = record.differences(run.images_file.read_bytes()) or found
    changed = f"the images of run folder {run.path} have changed since its checkpoint ({found})"
    if seen.config.data.on_changed_images == "error":
        raise UserError(
            f"{changed}; restore them, start in a new folder, or go on with them: "
            f"data.on_changed_images resume"
        )
    if run.classes() != seen.splits.classes or state["step"] > seen.plan.steps:
        raise UserError(
            f"{changed}, and with them the classes or the number of steps, so that it cannot go "
            f"on; restore them or start in a new folder"
        )
    return [changed]
