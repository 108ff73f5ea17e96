"""A training run from beginning to end: check, lock, start the processes, train, write the result.

`train` is the whole of it. Lightning Fabric finds the devices, starts the processes and wraps the
model for precision and data parallelism; the loop is ours (`locality.training.loop`).
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
import torch
from lightning_fabric import Fabric
from timm.utils import ModelEmaV3
from torch.amp import GradScaler

from locality.checkpoints.run_state import DamagedCheckpoint, read_checkpoint
from locality.data.checking import ImageRecord, verify
from locality.errors import Interrupted, NonFiniteLoss, UserError
from locality.files import write_atomic
from locality.models import ImageClassifier
from locality.training.config import RunConfig
from locality.training.distributed import (
    Interruption,
    children_taken_over,
    create_fabric,
    end_processes,
    exit_code,
    forwarded_to_children,
    waited_for,
)
from locality.training.loop import Components, Loop
from locality.training.objective import class_weights, load_teacher, objective_class
from locality.training.optim import create_optimizer, create_schedule
from locality.training.preview import (
    Preview,
    build_model,
    check_memory,
    preview,
    span,
    starting_model,
)
from locality.training.recorder import Counts, Observer, Recorder
from locality.training.runs import RunFolder

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
        folder: its folder; see `locality.training.runs` for what is in it.
        quiet: print nothing.
        observer: is shown the model now and then; changes no number of the run.

    Returns:
        the content of result.json.

    Raises:
        UserError: if the run cannot work as configured, or the folder is another run's.
        Interrupted: if a signal stopped it; the checkpoint is written and the same call resumes.
        NonFiniteLoss: if the loss is not finite and no update may be skipped for it.
        DamagedCheckpoint: if there are checkpoints and none is whole.
        CheckpointNotSaved: if the disk is full.
    """
    run = RunFolder(folder)
    status = ""
    try:
        fabric, prepared = _prepare(config, run)
    except (UserError, OSError) as error:
        fabric, prepared = create_fabric(config.engine, "fp32"), None
        if not waited_for(fabric):
            raise
        # The other processes were started by torchrun or srun and wait to hear about it.
        status = str(error)
    try:
        within = config.engine.strategy in ("ddp_spawn", "ddp_fork")
        given = None if config.engine.strategy == "ddp_spawn" else prepared
        with forwarded_to_children() if within else contextlib.nullcontext():
            outcome = fabric.launch(
                partial(_train_here, config, folder, quiet, observer, status, given)
            )
    finally:
        run.lock.release()
    if "signum" in outcome:
        raise Interrupted(outcome["signum"], outcome["step"], exit_code(fabric, None))
    if "raised" in outcome:
        if fabric.global_rank > 0:
            # The same on every rank, and the first one says it.
            raise SystemExit(exit_code(fabric, 1))
        raise outcome["raised"]
    return outcome


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the variables that the traceback of an error, and of those before it, hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _prepare(config: RunConfig, run: RunFolder) -> tuple[Fabric, Preview]:
    """Check and build what comes before the processes; the first process takes the folder."""
    seen = preview(config, resumes=run.has_begun())
    fabric = create_fabric(config.engine, seen.precision)
    if fabric.global_rank == 0:
        if config.engine.strategy != "ddp_fork":  # whose processes must be the first to use a GPU
            check_memory(seen)
        run.prepare(config)
        if run.result() is None:
            run.check_space(seen.checkpoint_bytes, best=seen.plan.patience is not None)
    return fabric, seen


def _train_here(
    config: RunConfig,
    folder: Path | str,
    quiet: bool,
    observer: Observer | None,
    status: str,
    prepared: Preview | None,
    fabric: Fabric,
) -> dict[str, Any]:
    """One process's part; what it returns says how it ended."""
    atexit.register(end_processes, fabric)
    run = RunFolder(folder)
    try:
        status = fabric.broadcast(status)
        if status:
            return {"raised": UserError(status)}
        run.lock.join()
        result = run.result()
        if result is not None:
            if fabric.is_global_zero and not quiet:
                print(f"run {run.path} is finished: top-1 {result['top1']:.2f}%")
            return result
        seen = preview(config, resumes=run.has_begun()) if prepared is None else prepared
        with Interruption().listening() as interruption:
            return _run(fabric, run, seen, interruption, quiet, observer)
    except BaseException as error:
        # Its traceback holds the model, which holds the process group.
        _forget_locals(error)
        children_taken_over(fabric)
        if isinstance(error, Interrupted):
            return {"signum": error.signum, "step": error.step}
        if isinstance(error, (NonFiniteLoss, DamagedCheckpoint, _Refused)):
            return {"raised": error}  # raised on every rank alike
        raise
    finally:
        run.lock.release()


def _run(
    fabric: Fabric,
    run: RunFolder,
    seen: Preview,
    interruption: Interruption,
    quiet: bool,
    observer: Observer | None,
) -> dict[str, Any]:
    config = seen.config
    state, notes = _last_state(fabric, run)
    fingerprint, looked = _by_first(fabric, partial(_look_at_images, run, seen, state))
    # A resumed run takes its weights from the checkpoint, wherever they once came from.
    classes = len(seen.splits.classes)
    if state is None:
        model, changes = starting_model(config, classes)
        notes += changes
    else:
        model = build_model(config, classes)
    parts = build_components(fabric, seen, model)
    at = Counts() if state is None else parts.load(state)
    recorder = Recorder(run if fabric.is_global_zero else None, seen, at, quiet, observer)
    try:
        loop = Loop(fabric, seen, parts, recorder, interruption, at, fingerprint)
        if fabric.is_global_zero:
            run.note_start(config, at.step, str(fabric.device), seen.precision)
            resumed = [f"resumed after step {at.step:,}"] if at.step else []
            said = [f"run {run.path}, seed {config.seed}", *str(seen).splitlines()]
            said += [f"note    {note}" for note in (*resumed, *notes, *looked)]
            recorder.say("\n  ".join(said))
        row = loop.run()
        return _finish(fabric, run, seen, recorder, at.step, row)
    finally:
        recorder.close()


class _Refused(UserError):
    """What every rank raises alike."""


def _by_first(fabric: Fabric, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank; so is what it raises for the user."""
    outcome: Any = None
    if fabric.is_global_zero:
        try:
            outcome = work()
        except UserError as error:
            outcome = _Refused(str(error))
        except DamagedCheckpoint as error:
            outcome = error
    outcome = fabric.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _last_state(fabric: Fabric, run: RunFolder) -> tuple[dict[str, Any] | None, list[str]]:
    """The checkpoint to go on from, on every rank, and what is to be said about it.

    Rank 0 decides which one is whole; the others read the same file.

    Raises:
        DamagedCheckpoint: if there are checkpoints and none is whole; on every rank.
    """
    state = None

    def load() -> tuple[str, list[str]]:
        nonlocal state
        state, name, passed_over = run.checkpoints.load()
        notes = [f"{reason}; going on from the one before it" for reason in passed_over]
        if state is None and run.metrics_file.exists():
            notes.append(f"{run.path} has measurements and no checkpoint: starting again")
        elif state is not None and not run.metrics_file.exists():
            notes.append(f"{run.metrics_file} is missing: the curve begins here")
        return name, notes

    name, notes = _by_first(fabric, load)
    if name and state is None:
        state = read_checkpoint(run.checkpoints.path / name)
    return state, notes


def build_components(fabric: Fabric, seen: Preview, model: ImageClassifier) -> Components:
    """Model, optimiser, schedule, average and loss of a run, on their device."""
    config, engine = seen.config, seen.config.engine
    classes = len(seen.splits.classes)
    if engine.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = model.to(fabric.device)
    ema = None
    if engine.ema_decay is not None:
        ema = ModelEmaV3(model, decay=engine.ema_decay, use_warmup=engine.ema_warmup)
    optimizer = create_optimizer(model, config.optim, engine.batch_size)
    schedule = create_schedule(optimizer, config.schedule, seen.plan)
    teacher = None
    if config.objective.teacher is not None:
        with fabric.rank_zero_first(local=True):
            teacher = load_teacher(config.objective, config.input, classes).to(fabric.device)
    labels = seen.splits.train.labels if config.objective.class_weights else None
    weights = None if labels is None else class_weights(labels, classes).to(fabric.device)
    kind = objective_class(config.objective)
    objective = kind(config.objective, config.augment, classes, teacher, fabric.autocast, weights)
    called: Any = objective.trained(model)
    called = torch.compile(called) if engine.compile else called
    forward = fabric.setup_module(called)
    model.train()
    scaler = getattr(fabric.strategy.precision, "scaler", None) or GradScaler(enabled=False)
    return Components(model, forward, optimizer, schedule, ema, objective, scaler)


def _look_at_images(
    run: RunFolder, seen: Preview, state: dict[str, Any] | None
) -> tuple[str, list[str]]:
    """The fingerprint of the images, and what is to be said about them.

    Raises:
        UserError: if the run cannot go on with them.
    """
    record, notes = ImageRecord.of(seen.splits), []
    if state is not None:
        notes = _same_images(run, seen, state, record)
    elif seen.config.data.on_bad(training=False) == "error":
        notes = [note for note in [verify(seen.splits.val)] if note]
    write_atomic(run.images_file, record.table)
    run.write_json(run.classes_file, seen.splits.classes)
    classes = seen.splits.classes
    counts = np.bincount(seen.splits.train.labels, minlength=len(classes)).tolist()
    run.write_json(run.counts_file, dict(zip(classes, counts, strict=True)))
    return record.fingerprint, notes


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
    if before == record.labels:
        return [
            "the checkpoint is of a version that kept no record of image files, so only their "
            "number, labels and classes are known to be the same"
        ]
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


def _finish(
    fabric: Fabric,
    run: RunFolder,
    seen: Preview,
    recorder: Recorder,
    step: int,
    row: dict[str, Any],
) -> dict[str, Any]:
    """Write result.json, after `step` steps of which `row` is kept; the same on every rank."""
    result: dict[str, Any] = {}
    if fabric.is_global_zero:
        config, seconds = seen.config, recorder.seconds
        result = {
            "model": config.model.name,
            "recipe": config.recipe,
            "dataset": config.data.dataset,
            "fraction": config.data.fraction,
            "seed": config.seed,
            "steps": step,
            "best_step": row["step"],
            "top1": row["top1"],
            "top5": row["top5"],
            "val_loss": row["val_loss"],
            "parameters": seen.parameters,
            "macs": seen.macs,
            "train_images": len(seen.splits.train),
            "val_images": len(seen.splits.val),
            "seconds": round(seconds, 3),
            "images_per_second": round(step * seen.plan.batch_size / seconds, 1)
            if seconds
            else None,
        }
        run.write_json(run.result_file, result)
        at = f" at step {row['step']}" if row["step"] < step else ""
        recorder.say(f"finished in {span(seconds)}: top-1 {row['top1']:.2f}%{at}")
    return fabric.broadcast(result)
