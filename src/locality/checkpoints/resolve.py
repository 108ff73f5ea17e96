"""Read a checkpoint from a path or name.

Sources are run folders, saved folders, weight files of any known format, public weights, timm
models and repositories on the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from torch import Tensor

from locality.checkpoints.beside import PREPROCESSING_KEYS, read_described
from locality.checkpoints.foreign import KEY_MAPS, detect_key_map, find_models
from locality.checkpoints.format import (
    CARD,
    CONFIG,
    FORMAT,
    Checkpoint,
    parse_description,
    read_folder,
)
from locality.checkpoints.key_map import (
    check_keys,
    format_settings,
    meta_state_dict,
    override_config,
)
from locality.checkpoints.registry import (
    HUB_FILES,
    WEIGHT_FILES,
    WEIGHT_SUFFIXES,
    WEIGHTS,
    Source,
    check_no_entry,
    detect_kind,
    read_class_names,
    read_result,
    read_run_settings,
    source,
)
from locality.checkpoints.run_state import load_best_state
from locality.checkpoints.safe_load import read_state, several_entries
from locality.checkpoints.trial import check_graph, session_of
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors, require, some, wrap_errors
from locality.files import open_file, read_json
from locality.models import factory
from locality.models.config import signature_diff
from locality.models.factory import offline_unless_reachable, published
from locality.models.variants import PREFIX, identify
from locality.settings import from_dict

_log = logging.getLogger("locality")

# The limit of Protocol Buffers.
_MAX_GRAPH_BYTES = 2 << 30


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
        raise graph_not_model(read_graph(path)[2])
    like = like if variant is None else factory.named(variant, {})
    settings = settings or {}
    if kind == "run":
        found = _from_run(path)
    elif kind == "path":
        found = _from_weights(path, like, entry, settings)
    elif kind == "public":
        found = _from_public(name)
    elif kind == "timm":
        config, state = published(name)
        found = Checkpoint(config, state, name, _timm_preprocessing(config))
    else:
        found = _from_hub(name)
    if settings:
        with prefix_errors(what):
            config = override_config(found.config, settings)
            found = replace(found, config=config, name=identify(config)[0])
    if variant is None:
        return found
    # timm's statistics are for its own number of channels.
    same = isinstance(like, factory.TimmConfig) and like.in_chans == found.config.in_chans
    if same and found.preprocessing is None:
        found = replace(found, preprocessing=_timm_preprocessing(like))
    return _check_variant(found, variant, what, settings)


def _from_run(folder: Path) -> Checkpoint:
    """The best checkpoint of a run, with its preprocessing, class names and result.

    Uses the averaged weights if the run has them, since those are evaluated.
    """
    wanted = {"model": {"name": str, "overrides?": dict}, "input?": dict}
    state, content = load_best_state(folder), read_run_settings(folder, wanted)
    classes, result = read_class_names(folder), read_result(folder)
    with prefix_errors(f"run folder {folder}"):
        model = content["model"]
        name, others = model["name"], ("name", "weights", "entry")
        fields = {key: value for key, value in model.items() if key not in others}
        fields = {key: value for key, value in fields.items() if value is not None}
        fields |= {"num_classes": len(classes)}
        config = factory.named(name, fields)
        given = (content.get("input") or {}) | {"img_size": config.img_size}
        preprocessing = from_dict(Preprocessing, given, "input")
    weights = state["model"] if state["ema"] is None else state["ema"]
    return Checkpoint(config, weights, name, preprocessing, tuple(classes), figures=result)


def _from_weights(
    path: Path, like: Any, entry: str | None, settings: Mapping[str, Any], alone: bool = False
) -> Checkpoint:
    """Weights from a file or folder, in any format recognised by tensor names.

    Settings that neither the weights nor a config.json specify are assumed as in the published
    models, and logged.

    Args:
        path, like, entry, settings: as in `read`.
        alone: ignore a config.json in the folder.
    """
    folder = path.parent if path.name in WEIGHT_FILES else path
    description, described = folder / CONFIG, None
    if description.exists() and not alone:
        content = read_json(description)
        if content.get("format") == FORMAT:
            check_no_entry(path, entry)
            return read_folder(folder)
        with prefix_errors(description), wrap_errors("it is damaged", Exception):
            described = read_described(folder, content)
        if described is None:
            _log.warning(f"{description} is ignored: it is not of locality, timm or transformers")
    if path.is_dir():
        path = next(path / file for file in WEIGHT_FILES if (path / file).exists())
    state, metadata = read_state(path, entry)
    if FORMAT in metadata:
        check_no_entry(path, entry)
        return parse_description(metadata[FORMAT], state, path)
    state = _unwrap(state, path, like if described is None else described.config)
    if described is not None:
        return _as_described(described, state, path, settings)
    if isinstance(like, factory.TimmConfig):
        return _from_timm_state(state, like)
    shapes = "its tensors have the names of a model, but other shapes"
    wrong = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
    with prefix_errors(path), wrap_errors(shapes, *wrong):
        key_map = detect_key_map(state)
        if "dist_token" in state:
            raise UserError(
                "these are weights of a distilled DeiT, whose distillation token no model here "
                "has; open it as timm's model, such as timm/deit_tiny_distilled_patch16_224"
            )
        config = key_map.configuration(state, like, settings)
        name, config = identify(config) if like is None else (None, config)
        ours = key_map.to_native(state, config)
    assumed = {
        setting: value
        for setting, value in key_map.unspecified(config).items()
        if like is None and setting not in settings
    }
    code = key_map.accepted(config).get("activation", ())
    if like is not None and not alone and code and config.activation not in code:
        _log.warning(
            f"{path} has the tensor names of {key_map.title}, whose code computes "
            f"activation={code[0]!r}; the model keeps its own, {config.activation!r}"
        )
    if assumed:
        _log.warning(
            f"{path} does not specify all settings; assuming {format_settings(assumed)}. "
            f"Override with --set NAME=VALUE, or settings={{...}} in Python"
        )
    return Checkpoint(config, ours, name, key_map=key_map.name, described=False)


def _as_described(
    described: Checkpoint, state: dict[str, Tensor], path: Path, settings: Mapping[str, Any]
) -> Checkpoint:
    """The weights of timm or transformers, with the model of their config.json.

    Raises:
        UserError: if they do not fit this model.
    """
    with prefix_errors(f"{path}, with the model of its {CONFIG}"):
        config = override_config(described.config, settings) if settings else described.config
        if isinstance(config, factory.TimmConfig):
            name: str | None = PREFIX + config.name
            ours = {f"model.{key}": tensor for key, tensor in state.items()}
            check_keys(ours, meta_state_dict(config), "timm's")
        else:
            ours = KEY_MAPS[described.key_map].to_native(state, config)
            name, config = identify(config)
        return replace(described, config=config, state=ours, name=name)


def _unwrap(state: dict[str, Tensor], path: Path, like: Any) -> dict[str, Tensor]:
    """The tensors of the only model in a state dict, without a wrapper's prefix."""
    if isinstance(like, factory.TimmConfig):
        models = find_models(state, [f"{like.stem}.weight".removeprefix("model.")])
    else:
        models = find_models(state)
    if len(models) > 1:
        raise several_entries(path, models)
    ((prefix, model),) = models.items()
    if len(model) < len(state):
        others = [name for name in state if not name.startswith(f"{prefix}.")]
        _log.warning(f"{path}: tensors outside {prefix} are ignored: {some(others, quote='')}")
    return model


def _from_public(name: str) -> Checkpoint:
    row = source(name)
    like = replace(factory.variant(row.model).config, img_size=row.preprocessing.img_size)
    checkpoint = _from_weights(locate_weights(row), like, None, {}, alone=True)
    return replace(checkpoint, name=row.model, preprocessing=row.preprocessing)


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


def _from_timm_state(state: Mapping[str, Any], like: factory.TimmConfig) -> Checkpoint:
    """The checkpoint of a timm state dict for the model `like`."""
    state = {f"model.{name.removeprefix('model.')}": tensor for name, tensor in state.items()}
    ends: dict[str, Any] = {"num_classes": len(state.get(f"{like.classifier}.weight", ()))}
    if (stem := state.get(f"{like.stem}.weight")) is not None:
        ends["in_chans"] = stem.shape[1]
    return Checkpoint(replace(like, gpsa="", **ends), dict(state))


def _timm_preprocessing(config: factory.TimmConfig) -> Preprocessing:
    """The preprocessing that timm has for a model."""
    data = config.data_config()
    fields = {key: data[key] for key in PREPROCESSING_KEYS}
    return Preprocessing(data["input_size"][1:], **fields)


def _check_variant(
    checkpoint: Checkpoint, model: str, what: Path | str, settings: Mapping[str, Any]
) -> Checkpoint:
    """The checkpoint with the name `model`, if it has that architecture."""
    config = factory.named(model, {})
    if type(config) is not type(checkpoint.config):
        raise UserError(f"{what} does not hold {model}, but a model of another family")
    if differing := signature_diff(checkpoint.config, override_config(config, settings)):
        held = identify(checkpoint.config)[0]
        fields = ", ".join(f"{name}={theirs!r}" for name, (theirs, _) in differing.items())
        raise UserError(f"{what} holds {held or f'a model with {fields}'}, not {model}")
    return replace(checkpoint, name=identify(checkpoint.config)[0] if settings else model)


def _from_hub(name: str) -> Checkpoint:
    try:
        with offline_unless_reachable():
            folder = snapshot_download(name, allow_patterns=[WEIGHTS, CONFIG, CARD])
        return read_folder(Path(folder))
    except OSError as error:
        raise FileNotFoundError(
            f"file or folder {name} does not exist, and no model could be downloaded from "
            f"https://huggingface.co/{name}: {str(error).splitlines()[0]}"
        ) from error


def read_graph(path: Path) -> tuple[Any, Checkpoint, str]:
    """A session of an ONNX graph, its description as a checkpoint without weights, and its name.

    Raises:
        UserError: if it was not exported by this library, or ONNX Runtime is not installed.
    """
    open_file(path, _MAX_GRAPH_BYTES).close()
    require("running an ONNX graph", "locality[export]", "onnx", "onnxruntime")
    check_graph(path)
    session = session_of(path)
    described = session.get_modelmeta().custom_metadata_map[FORMAT]
    held = parse_description(described, {}, path)
    return session, held, held.name or path.stem


def graph_not_model(graph: str) -> UserError:
    """The error for a graph where a PyTorch model is needed."""
    return UserError(
        f"{graph} is an exported graph, which can only be run; give the model it was exported from"
    )
