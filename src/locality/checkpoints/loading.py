"""Read a checkpoint from a path or name.

Sources are run folders, saved folders, weight files of any known format, public weights, timm
models and repositories on the Hugging Face hub.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import snapshot_download

from locality.checkpoints import registry
from locality.checkpoints.foreign_config import PREPROCESSOR, read_config, timm_preprocessing
from locality.checkpoints.key_maps import fit_interface, recognise
from locality.checkpoints.native import CARD, CONFIG, Checkpoint
from locality.checkpoints.registry import FORMAT, HUB_FILES, WEIGHTS, Source
from locality.checkpoints.run_state import load_best_state
from locality.checkpoints.state_dict import State, check_finite, read_state
from locality.data.config import Preprocessing
from locality.errors import UserError, one_line, prefix_errors, wrap_errors
from locality.files import parse_json, read_json
from locality.models.config import TimmConfig, signature_diff
from locality.models.variants import VARIANTS, identify, named
from locality.runs import RunFolder
from locality.settings import from_dict

_log = logging.getLogger("locality")


def read(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    like: Any = None,
) -> Checkpoint:
    """Read a checkpoint from any source.

    Args:
        what: a run folder, a folder or file of weights in any format, the name of public weights,
            "timm/NAME" for a timm model with its weights, or a repository on the Hugging Face hub
            ("user/name").
        variant: the model name, if the weights do not say it; must match them.
        entry: the state dict to read, if the checkpoint has several.
        settings: fields of the model's configuration that override those of the source.
        like: the configuration of the model they are for, instead of `variant`; image size,
            channels and classes may differ.

    Raises:
        FileNotFoundError: if the path `what` does not exist.
        UserError: if it cannot be read, naming it and the cause.
    """
    kind, settings = registry.detect_kind(what, entry), settings or {}
    if kind == "graph":
        raise registry.graph_not_model(Path(what).name)
    if variant is not None:
        like = named(variant, **settings)
    state, held = _OPENERS[kind](str(what), entry)
    with prefix_errors(what):
        config = held.config if held else like or _named_after(Path(what))
        config = config.with_overrides(**settings)
        key_map, state = recognise(state, config)
        if held is None:
            config = fit_interface(state, key_map, config, settings)
            computed = key_map.activation
            if computed and config.activation != computed and "activation" not in settings:
                _log.warning(
                    f"{what} has the tensor names of {key_map.title} code, which computes "
                    f"activation='{computed}'; this model computes '{config.activation}'"
                )
        if like is not None:
            _check_same(config, like)
        state = key_map.to_native(state, config)
        check_finite(state)
        name = config.name if isinstance(config, TimmConfig) else identify(config)[0]
        if held is None:
            return Checkpoint(config, state, name, _timm_preprocessing(config))
        prepared = held.preprocessing
        if prepared is not None and "img_size" in settings:
            prepared = prepared.at(config.img_size)
        name = name if settings else held.name or name
        return replace(held, config=config, state=state, name=name, preprocessing=prepared)


def _check_same(config: Any, like: Any) -> None:
    """Check that weights of `config` are for the model of `like`.

    Raises:
        UserError: if they are not; image size, channels, classes and training settings may differ.
    """
    if type(config) is not type(like):
        raise UserError(f"these weights are of {config.title}, the model is {like.title}")
    for name, (theirs, ours) in signature_diff(config, like).items():
        held = identify(config)[0] or config.title
        raise UserError(
            f"these weights, of {held}, need {name}={theirs!r}, but the model has {name}={ours!r}"
        )


def _named_after(path: Path) -> Any:
    """The configuration of the model that names a file, such as convit_tiny.pth."""
    name = path.name.partition(".")[0]
    if name not in VARIANTS:
        raise UserError(
            "it does not say which model it holds: give --variant NAME (variant= in Python, "
            "--model NAME --weights FILE in training), and --set for settings that differ"
        )
    return VARIANTS[name].config


Opened = tuple[State, Checkpoint | None]
"""What an opener gives: weights with any names, and what the source says of them, if anything."""


def _open_path(what: str, entry: str | None) -> Opened:
    path = registry.weight_file(Path(what))
    description = path.with_name(CONFIG)
    held = None
    if path.name in registry.WEIGHT_FILES and description.exists():
        content = read_json(description)
        with prefix_errors(description), wrap_errors("it is damaged", Exception):
            held = read_config(path.parent, content)
        if held is None:
            _log.warning(f"{description} is ignored: locality, timm or CvT did not write it")
    state, metadata = read_state(path, entry)
    if held is None and FORMAT in metadata:
        content = parse_json(metadata[FORMAT], f"{path}: its description")
        with prefix_errors(path), wrap_errors("its description is damaged", TypeError):
            held = Checkpoint.from_description(content)
    return state, held


def _open_run(what: str, _: object) -> Opened:
    """The best checkpoint of a run, with its preprocessing, class names and result.

    Uses the averaged weights if the run has them, since those are evaluated.
    """
    run = RunFolder(what)
    state = load_best_state(run.path)
    content = run.read_settings({"model": {"name": str}, "input?": dict, "data": dict})
    classes, result = run.classes(), run.read_result()
    with prefix_errors(f"run folder {what}"):
        fields = dict(content["model"])
        name = fields.pop("name")
        config = named(name, **fields, num_classes=len(classes))
        prepared, data = content.get("input") or {}, content["data"]
        prepared |= {"img_size": config.img_size}
        prepared |= {name: data[name] for name in ("exif", "grey_bits") if name in data}
        preprocessing = from_dict(Preprocessing, prepared, "input")
    weights = state["model"] if state["ema"] is None else state["ema"]
    return weights, Checkpoint(config, {}, name, preprocessing, tuple(classes), figures=result)


def _open_public(what: str, _: object) -> Opened:
    row = registry.source(what)
    config = named(row.model, img_size=row.preprocessing.img_size)
    state, _ = read_state(locate_weights(row))
    return state, Checkpoint(config, {}, row.model, row.preprocessing)


def _open_timm(what: str, _: object) -> Opened:
    config = TimmConfig.named(what)
    with wrap_errors(f"timm's weights of {what} could not be loaded", OSError, RuntimeError):
        model = timm.create_model(config.timm_name, pretrained=True)
    return model.state_dict(), Checkpoint(config, {}, config.name, _timm_preprocessing(config))


def _timm_preprocessing(config: Any) -> Preprocessing | None:
    """timm's preprocessing of its own model, if that is for as many channels."""
    if not isinstance(config, TimmConfig) or config.in_chans != TimmConfig.in_chans:
        return None
    return timm_preprocessing(config.data_config())


def _open_hub(what: str, _: object) -> Opened:
    try:
        folder = snapshot_download(what, allow_patterns=[WEIGHTS, CONFIG, PREPROCESSOR, CARD])
    except OSError as error:
        raise FileNotFoundError(
            f"file or folder {what} does not exist, and no model could be downloaded from "
            f"https://huggingface.co/{what}: {one_line(error)}"
        ) from error
    return _open_path(folder, None)


_OPENERS: dict[str, Callable[[str, str | None], Opened]] = {
    "run": _open_run,
    "path": _open_path,
    "public": _open_public,
    "timm": _open_timm,
    "hub": _open_hub,
}


def cache_dir() -> Path:
    """The cache folder: `$LOCALITY_HOME`, else `locality` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("LOCALITY_HOME") or f"{home}/locality").expanduser()


def locate_weights(row: Source) -> Path:
    """The file of public weights: from `cache_dir()`, the hub's cache, or a download.

    Raises:
        UserError: if it is not cached and cannot be downloaded, with the file to fetch and where
            to put it.
    """
    folder = cache_dir() / "weights"
    for suffix in registry.WEIGHT_SUFFIXES:
        if (folder / f"{row.name}{suffix}").exists():
            return folder / f"{row.name}{suffix}"
    reason = f"it has neither {' nor '.join(HUB_FILES)}"
    try:
        for file in HUB_FILES:
            if (path := Path(snapshot_download(row.repo, allow_patterns=file), file)).exists():
                return path
    except OSError as error:
        reason = one_line(error)
    raise UserError(
        f"{row.name} could not be downloaded ({reason}); fetch {WEIGHTS} from "
        f"https://huggingface.co/{row.repo} and put it at {folder / row.name}.safetensors (.pth "
        f"and .bin also work), or give its path as weights"
    )
