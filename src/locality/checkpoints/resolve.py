"""Read a checkpoint from a path or name.

Sources are run folders, saved folders, weight files of any known format, public weights, timm
models and repositories on the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from torch import Tensor

from locality.checkpoints.beside import PREPROCESSOR, read_described, timm_preprocessing
from locality.checkpoints.foreign import KEY_MAPS, STEMS, TIMM, detect_key_map
from locality.checkpoints.format import CARD, CONFIG, WRAPPER, Checkpoint
from locality.checkpoints.key_map import State, format_settings, meta_state_dict
from locality.checkpoints.registry import (
    FORMAT,
    HUB_FILES,
    WEIGHT_FILES,
    WEIGHT_SUFFIXES,
    WEIGHTS,
    Source,
    check_no_entry,
    detect_kind,
    source,
    weight_file,
)
from locality.checkpoints.run_state import load_best_state
from locality.checkpoints.safe_load import read_state, several_entries
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors, some, wrap_errors
from locality.files import parse_json, read_json
from locality.models.config import signature_diff
from locality.models.factory import TimmConfig, named, offline_unless_reachable, published
from locality.models.variants import identify
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
        variant: the model name, if it cannot be inferred from the weights; must match them.
        entry: the state dict to read, if the checkpoint has several.
        settings: fields of the model's configuration that override those of the source.
        like: the configuration of the model they are for, instead of `variant`; image size,
            channels and classes may differ.

    Raises:
        FileNotFoundError: if the path `what` does not exist.
        UserError: if it cannot be read, naming it and the cause.
    """
    kind = detect_kind(what, entry)
    path, name = Path(what), str(what)
    if kind == "graph":
        raise graph_not_model(path.name)
    like = like if variant is None else named(variant, {})
    settings = settings or {}
    if kind == "run":
        found = _from_run(path)
    elif kind == "path":
        found = _from_weights(path, like, entry, settings)
    elif kind == "public":
        found = _from_public(name)
    elif kind == "timm":
        config, state = published(name)
        found = Checkpoint(config, state, name, timm_preprocessing(config.data_config()))
    else:
        found = _from_hub(name, like, settings)
    if settings:
        with prefix_errors(what):
            config = found.config.with_overrides(**settings)
            found = replace(found, config=config, name=identify(config)[0])
        if "img_size" in settings and found.preprocessing is not None:
            found = replace(found, preprocessing=found.preprocessing.at(config.img_size))
    if variant is None:
        return found
    if type(like) is not type(found.config):
        raise UserError(f"{what} does not hold {variant}, but a model of another family")
    if differing := signature_diff(found.config, like.with_overrides(**settings)):
        fields = ", ".join(f"{name}={theirs!r}" for name, (theirs, _) in differing.items())
        held = identify(found.config)[0] or f"a model with {fields}"
        raise UserError(f"{what} holds {held}, not {variant}")
    # timm's statistics are for its own number of channels.
    same = isinstance(like, TimmConfig) and like.in_chans == found.config.in_chans
    if same and found.preprocessing is None:
        found = replace(found, preprocessing=timm_preprocessing(like.data_config()))
    return found if settings else replace(found, name=variant)


def _from_run(folder: Path) -> Checkpoint:
    """The best checkpoint of a run, with its preprocessing, class names and result.

    Uses the averaged weights if the run has them, since those are evaluated.
    """
    wanted = {"model": {"name": str, "overrides?": dict}, "input?": dict, "data": dict}
    run = RunFolder(folder)
    state, content = load_best_state(folder), run.read_settings(wanted)
    classes, result = run.classes(), run.read_result()
    with prefix_errors(f"run folder {folder}"):
        fields = {key: value for key, value in content["model"].items() if value is not None}
        name = fields.pop("name")
        for other in ("weights", "entry"):
            fields.pop(other, None)
        config = named(name, fields | {"num_classes": len(classes)})
        given, data = content.get("input") or {}, content["data"]
        given |= {"img_size": config.img_size}
        given |= {name: data[name] for name in ("exif", "grey_bits") if name in data}
        preprocessing = from_dict(Preprocessing, given, "input")
    weights = state["model"] if state["ema"] is None else state["ema"]
    return Checkpoint(config, weights, name, preprocessing, tuple(classes), figures=result)


def _from_weights(
    path: Path, like: Any, entry: str | None, settings: Mapping[str, Any], alone: bool = False
) -> Checkpoint:
    """Weights from a file or folder, in any format recognised by tensor names.

    Args:
        path, like, entry, settings: as in `read`.
        alone: ignore a config.json in the folder.
    """
    if path.is_dir():
        path = weight_file(path)
    description, described = path.with_name(CONFIG), None
    content: Any = None
    if path.name in WEIGHT_FILES and description.exists() and not alone:
        content = read_json(description)
    own = content is not None and content.get("format") == FORMAT
    if own and path.name == WEIGHTS:
        check_no_entry(path, entry)
    if content is not None and not own:
        with prefix_errors(description), wrap_errors("it is damaged", Exception):
            described = read_described(path.parent, content)
        if described is None:
            _log.warning(f"{description} is ignored: it is not of locality, timm or transformers")
    state, metadata = read_state(path, entry)
    if own or FORMAT in metadata:
        if not own:
            check_no_entry(path, entry)
        state = {name.removeprefix(f"{WRAPPER}."): tensor for name, tensor in state.items()}
        damage = wrap_errors("its description is damaged", TypeError)
        with prefix_errors(description if own else path), damage:
            if not own:
                content = parse_json(metadata[FORMAT], "its description")
            return Checkpoint.from_description(content, state)
    if described is None:
        return _from_state(_unwrap(state, path, like), path, like, settings, alone)
    state = _unwrap(state, path, described.config)
    with prefix_errors(f"{path}, with the model of its {CONFIG}"):
        config = described.config.with_overrides(**settings)
        key_map = TIMM if isinstance(config, TimmConfig) else KEY_MAPS[described.key_map]
        state = key_map.to_native(state, config)
    name, config = identify(config)
    return replace(described, config=config, state=state, name=name or described.name)


def _from_state(
    state: State, path: Path, like: Any, settings: Mapping[str, Any], alone: bool
) -> Checkpoint:
    """Weights without a description.

    Settings that they do not specify are assumed as in the published models, and logged.
    """
    shapes = "its tensors have the names of a model, but some are missing or have other shapes"
    wrong = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
    with prefix_errors(path), wrap_errors(shapes, *wrong):
        key_map = TIMM if isinstance(like, TimmConfig) else detect_key_map(state)
        config = key_map.configuration(state, like, settings)
        name, config = identify(config) if like is None else (None, config)
        ours = key_map.to_native(state, config)
    if like is None:
        unspecified = key_map.unspecified(config)
        assumed = {key: value for key, value in unspecified.items() if key not in settings}
        if assumed:
            _log.warning(
                f"{path} does not specify all settings; assuming {format_settings(assumed)}. "
                f"Override with --set NAME=VALUE, or settings={{...}} in Python"
            )
    code = key_map.accepted(config).get("activation", ())
    if code and config.activation not in code and "activation" not in settings and not alone:
        _log.warning(
            f"{path} has the tensor names of {key_map.title}, whose code computes "
            f"activation={code[0]!r}; this model computes {config.activation!r}"
        )
    return Checkpoint(config, ours, name, key_map=key_map.name, described=False)


def _unwrap(state: State, path: Path, model: Any) -> dict[str, Tensor]:
    """The tensors of the only model in a state dict, without a wrapper's prefix.

    Prefixes are those of wrappers (`module.`, `_orig_mod.`, `model.`, any attribute of a Lightning
    module), found before the name of the first layer's weight (of a timm model, the first tensor).

    Args:
        state: the state dict.
        path: its file, for messages.
        model: the model's configuration, if known.

    Raises:
        UserError: if there are several models, for example a student and its teacher.
    """
    stems: Collection[str] = STEMS
    if isinstance(model, TimmConfig):
        first = next(iter(meta_state_dict(model)))
        stems = [TIMM.rename(first)]
    prefixes = {
        name.removesuffix(stem)
        for name in state
        for stem in stems
        if f".{name}".endswith(f".{stem}")
    }
    outermost: list[str] = []
    for prefix in sorted(prefixes):  # sorted: longer prefixes follow those they begin with
        if not outermost or not prefix.startswith(outermost[-1]):
            outermost.append(prefix)
    if len(outermost) > 1:
        raise several_entries(path, [prefix.rstrip(".") for prefix in outermost])
    prefix = "".join(outermost)
    if others := [name for name in state if not name.startswith(prefix)]:
        _log.warning(f"{path}: tensors outside {prefix[:-1]} are ignored: {some(others, quote='')}")
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def _from_public(name: str) -> Checkpoint:
    row = source(name)
    like = named(row.model, {"img_size": row.preprocessing.img_size})
    checkpoint = _from_weights(locate_weights(row), like, None, {}, alone=True)
    return replace(checkpoint, name=row.model, preprocessing=row.preprocessing, described=True)


def cache_dir() -> Path:
    """The cache folder: `$LOCALITY_HOME`, else `locality` in the user's cache folder."""
    if "LOCALITY_HOME" in os.environ:
        return Path(os.environ["LOCALITY_HOME"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "locality"


def locate_weights(row: Source) -> Path:
    """The file of public weights: from `cache_dir()`, the hub's cache, or a download.

    Raises:
        UserError: if it is not cached and cannot be downloaded, with the file to fetch and where
            to put it.
    """
    folder = cache_dir() / "weights"
    for suffix in WEIGHT_SUFFIXES:
        if (folder / f"{row.name}{suffix}").exists():
            return folder / f"{row.name}{suffix}"
    causes: list[Exception] = []
    # The hub's cache first, which needs no network.
    for offline in (True, False):
        with contextlib.nullcontext() if offline else offline_unless_reachable():
            for file in HUB_FILES:
                try:
                    return Path(hf_hub_download(row.repo, file, local_files_only=offline))
                except OSError as error:
                    causes.append(error)
                    if not offline and not isinstance(error, RemoteEntryNotFoundError):
                        break  # the other file would fail too
    reason = str(causes[-1]).split("\n")[0].rstrip(". ") or type(causes[-1]).__name__
    raise UserError(
        f"{row.name} could not be downloaded ({reason}); fetch {HUB_FILES[0]} from "
        f"https://huggingface.co/{row.repo} and put it at {folder / row.name}.safetensors (.pth "
        f"and .bin also work), or give its path as weights"
    ) from causes[0]


def _from_hub(name: str, like: Any, settings: Mapping[str, Any]) -> Checkpoint:
    try:
        with offline_unless_reachable():
            folder = snapshot_download(name, allow_patterns=[WEIGHTS, CONFIG, PREPROCESSOR, CARD])
    except OSError as error:
        raise FileNotFoundError(
            f"file or folder {name} does not exist, and no model could be downloaded from "
            f"https://huggingface.co/{name}: {str(error).splitlines()[0]}"
        ) from error
    try:
        return _from_weights(Path(folder), like, None, settings)
    except (FileNotFoundError, UserError) as error:
        raise type(error)(str(error).replace(str(folder), name)) from error


def graph_not_model(graph: str) -> UserError:
    """The error for a graph where a PyTorch model is needed."""
    return UserError(
        f"{graph} is an exported graph, which can only be run; give the model it was exported from"
    )
