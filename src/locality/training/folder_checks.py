"""May a run start or continue in a folder? Checks without torch that write nothing."""

import contextlib
import json
import shutil
import tempfile
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from locality.checkpoints.registry import detect_kind
from locality.data.config import DataConfig
from locality.data.sources import DataSplits, FileSource, ImageFingerprint
from locality.errors import UserError, some, wrap_errors
from locality.runs import Run, check_outside_runs, is_run_folder
from locality.settings import differences
from locality.training.config import RunConfig, identity, read_config


def check_places(config: RunConfig, folder: Path) -> None:
    """Check a run's weights and folder, and that its images are in place; changes nothing.

    Raises:
        FileNotFoundError, UserError: if one of them cannot be used.
    """
    teacher = config.objective.teacher
    given = [("objective.teacher", teacher, None), ("weights", config.weights, config.entry)]
    if is_run_folder(folder):
        Run(folder).check_images(config.data)
        given = given[:1]
    for name, what, entry in given:
        if what is not None:
            with wrap_errors(name, FileNotFoundError, UserError):
                detect_kind(what, entry)
    check_folder(folder, config)


def check_folder(folder: Path, config: RunConfig) -> None:
    """Check that a folder is writable, and is free or belongs to this configuration."""
    check_outside_runs(folder.absolute().parent)
    existing = existing_folder(folder)
    if not existing.is_dir():
        raise UserError(f"{existing} is a file; a run needs a folder")
    with writing(folder):
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    if not is_run_folder(folder):
        names = sorted(entry.name for entry in folder.glob("*"))
        ours = ("lock", "checkpoints")
        if others := [n for n in names if n not in ours and not n.endswith(".tmp")]:
            raise UserError(
                f"{folder} has {some(others)} and is not a run folder; choose a new or empty one"
            )
    else:
        check_same(folder, read_config(folder), config)


def existing_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def check_same(folder: Path, before: RunConfig, now: RunConfig) -> None:
    """Check that the settings with which a run started have not changed."""
    # Of files that may have moved, the identity has only the names.
    for name, old, new in (
        ("weights", before.weights, now.weights),
        ("objective.teacher", before.objective.teacher, now.objective.teacher),
    ):
        paths = [Path(each) for each in (old, new) if each is not None and Path(each).exists()]
        if len(paths) == 2 and not paths[0].samefile(paths[1]):
            raise UserError(
                f"run folder {folder} was started with {name} {old}, not {new}; choose another "
                f"folder (--output)"
            )
    shown = partial(json.dumps, ensure_ascii=False)
    changed = "; ".join(
        f"{name}: {shown(old)} there, {shown(new)} now"
        for name, old, new in differences(identity(before, "resume"), identity(now, "resume"))
    )
    if changed:
        raise UserError(
            f"run folder {folder} was started with other settings ({changed}); restore them to "
            f"resume it, or choose another folder"
        )


def check_decay(
    folder: Run, config: RunConfig, step: int, recorded: tuple[int, int] | None = None
) -> None:
    """Check that nobody has edited the decay of a run of minutes.

    Args:
        folder: the run folder.
        config: its configuration.
        step: that of its checkpoint or, once it has finished, its last.
        recorded: the decay in the checkpoint; None before it began.
    """
    decay = config.schedule.decay
    if decay is None and recorded is None:
        return
    if folder.is_finished:
        same = decay is not None and decay[1] == step
    else:  # a decay that began after the checkpoint starts after it
        same = decay == recorded or (recorded is None and decay is not None and decay[0] >= step)
    if not same:
        before = f"ends at step {step:,}" if recorded is None else f"has {[*recorded]}"
        raise UserError(
            f"{folder.config_file}: schedule.decay is {decay and [*decay]}, but the run {before}; "
            f"restore it"
        )


def writing(folder: Path) -> AbstractContextManager[None]:
    """Raise an error that names the run folder if writing to it fails in the block."""
    remedy = "choose another, or check its disk and permissions"
    return wrap_errors(f"run folder {folder} cannot be written to; {remedy}", OSError)


def check_space(folder: Run, checkpoint_bytes: int, best: bool = False) -> None:
    """Check that the disk has room for all checkpoints of the run."""
    there = sum(file.stat().st_size for file in folder.checkpoints.glob("*.ckpt"))
    needed = (3 + best) * checkpoint_bytes - there
    free = shutil.disk_usage(existing_folder(folder.path)).free
    if free < needed:
        raise UserError(
            f"run folder {folder.path} needs {needed / 1e6:.0f} MB for checkpoints, but its disk "
            f"has {free / 1e6:.0f} MB left; make room or choose another disk"
        )


def check_images(
    folder: Run, config: DataConfig, images: ImageFingerprint, before: str | None
) -> list[str]:
    """Compare a run's recorded images with the current ones; returns notes on differences.

    Args:
        folder: the run folder, with a table of the recorded images.
        config: the run's data settings.
        images: the current images.
        before: the recorded fingerprint.

    Raises:
        UserError: if they differ, and the run may not continue with others.
    """
    if before == images.fingerprint:
        return []
    found = "other images, labels or classes"
    if folder.images_file.exists():
        with contextlib.suppress(UserError):  # a damaged table: digests decide
            found = images.differences(folder.images_file) or found
    changed = f"the images of run folder {folder.path} have changed ({found})"
    if config.on_changed_images == "error":
        if folder.is_finished:
            raise UserError(
                f"run folder {folder.path} has finished on other images ({found}); restore them, "
                f"or use a new folder (--output)"
            )
        raise UserError(
            f"{changed}; restore them, use a new folder (--output), or accept them: "
            f"data.on_changed_images resume"
        )
    return [changed]


def learnt_note(run: Run, splits: DataSplits, images: ImageFingerprint | None = None) -> str:
    """A sentence if a run was trained on some of these validation images; "" for its own.

    Only for files of one image. `images` is their fingerprint, if known.
    """
    files = isinstance(getattr(splits.val, "source", splits.val), FileSource)
    if not files or not run.images_file.exists():
        return ""
    images = images or ImageFingerprint.of(splits)
    own = (run.read_result() or {}).get("images") == images.fingerprint
    count = 0 if own else images.learnt(run.images_file)
    validation = f"these {len(splits.val):,} validation images"
    return f"{run.path} was trained on {count:,} of {validation}" * bool(count)
