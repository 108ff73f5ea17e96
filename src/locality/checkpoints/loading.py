"""Read a checkpoint from a path or name.

Sources are run folders, saved folders, weight files of any known format, public weights, timm
models and repositories on the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import constants, hf_hub_download, snapshot_download, utils
from huggingface_hub.errors import RemoteEntryNotFoundError

from locality.checkpoints.foreign_config import (
    PREPROCESSOR,
    read_config,
    timm_preprocessing,
)
from locality.checkpoints.key_maps import KEY_MAPS, OTHER_TIMM, KeyMap
from locality.checkpoints.native import (
    CARD,
    CONFIG,
    WRAPPER,
    Checkpoint,
    meta_state_dict,
)
from locality.checkpoints.registry import (
    FORMAT,
    HUB_FILES,
    WEIGHT_FILES,
    WEIGHT_SUFFIXES,
    WEIGHTS,
    Source,
    check_no_entry,
    detect_kind,
    graph_not_model,
    source,
    weight_file,
)
from locality.checkpoints.run_state import load_best_state
from locality.checkpoints.state_dict import State, read_state, unwrap
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors, some, wrap_errors
from locality.files import parse_json, read_json
from locality.models.config import TimmConfig, ViTConfig, signature_diff
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
    kind = detect_kind(what, entry)
    path, name, settings = Path(what), str(what), settings or {}
    if kind == "graph":
        raise graph_not_model(path.name)
    like = like if variant is None else named(variant)
    if kind == "run":
        checkpoint = _from_run(path)
    elif kind == "path":
        checkpoint = _from_weights(path, like, entry, settings)
    elif kind == "public":
        checkpoint = _from_public(name)
    elif kind == "timm":
        config, state = _from_timm(name)
        checkpoint = Checkpoint(config, state, name, timm_preprocessing(config.data_config()))
    else:
        checkpoint = _from_hub(name, like, settings)
    if settings:
        with prefix_errors(what):
            config = checkpoint.config.with_overrides(**settings)
            checkpoint = replace(checkpoint, config=config, name=identify(config)[0])
        if "img_size" in settings and checkpoint.preprocessing is not None:
            preprocessing = checkpoint.preprocessing.at(config.img_size)
            checkpoint = replace(checkpoint, preprocessing=preprocessing)
    if variant is None:
        return checkpoint
    if type(like) is not type(checkpoint.config):
        raise UserError(f"{what} does not hold {variant}, but a model of another family")
    if differing := signature_diff(checkpoint.config, like.with_overrides(**settings)):
        fields = ", ".join(f"{name}={theirs!r}" for name, (theirs, _) in differing.items())
        held = identify(checkpoint.config)[0] or f"a model with {fields}"
        raise UserError(f"{what} holds {held}, not {variant}")
    # timm's statistics are for its own number of channels.
    same = isinstance(like, TimmConfig) and like.in_chans == checkpoint.config.in_chans
    if same and checkpoint.preprocessing is None:
        known = timm_preprocessing(like.data_config())
        checkpoint = replace(checkpoint, preprocessing=known)
    return checkpoint if settings else replace(checkpoint, name=variant)


def _from_run(folder: Path) -> Checkpoint:
    """The best checkpoint of a run, with its preprocessing, class names and result.

    Uses the averaged weights if the run has them, since those are evaluated.
    """
    wanted = {"model": {"name": str}, "input?": dict, "data": dict}
    run = RunFolder(folder)
    state, content = load_best_state(folder), run.read_settings(wanted)
    classes, result = run.classes(), run.read_result()
    with prefix_errors(f"run folder {folder}"):
        fields = dict(content["model"])
        name = fields.pop("name")
        config = named(name, **fields, num_classes=len(classes))
        prepared, data = content.get("input") or {}, content["data"]
        prepared |= {"img_size": config.img_size}
        prepared |= {name: data[name] for name in ("exif", "grey_bits") if name in data}
        preprocessing = from_dict(Preprocessing, prepared, "input")
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
    description, described, content = path.with_name(CONFIG), None, None
    if path.name in WEIGHT_FILES and description.exists() and not alone:
        content = read_json(description)
        own = content.get("format") == FORMAT
        if own and path.name == WEIGHTS:
            check_no_entry(path, entry)
        if not own:
            with prefix_errors(description), wrap_errors("it is damaged", Exception):
                described = read_config(path.parent, content)
            content = None
            if described is None:
                _log.warning(f"{description} is ignored: locality, timm or CvT did not write it")
    where = path if content is None else description
    state, metadata = read_state(path, entry)
    if content is None and FORMAT in metadata:
        check_no_entry(path, entry)
        content = parse_json(metadata[FORMAT], f"{path}: its description")
    if content is not None:
        state = {name.removeprefix(f"{WRAPPER}."): tensor for name, tensor in state.items()}
        with prefix_errors(where), wrap_errors("its description is damaged", TypeError):
            return Checkpoint.from_description(content, state)
    if described is None:
        return _from_state(state, path, like, settings, alone)
    checkpoint, key_map = described
    with prefix_errors(f"{path}, with the model of its {CONFIG}"):
        config = checkpoint.config.with_overrides(**settings)
        state = unwrap(state, _stems(config), path)
        name = identify(config)[0] or checkpoint.name
        return replace(checkpoint, config=config, state=key_map.to_native(state, config), name=name)


def _from_state(
    state: State, path: Path, like: Any, settings: Mapping[str, Any], alone: bool
) -> Checkpoint:
    """Weights without a description, of the model of `like`, else of the one that names the file.

    Args:
        state: the state dict.
        path, like, settings: as in `read`.
        alone: whether its architecture is known, so that nothing is assumed.
    """
    state = unwrap(state, _stems(like), path)
    with prefix_errors(path), wrap_errors("its tensors have shapes of no model", RuntimeError):
        key_map = detect_key_map(state, like)
        config = fit_interface(state, key_map, like or _named_after(path), settings)
        weights = key_map.to_native(state, config)
    theirs, own = (getattr(side, "activation", None) for side in (key_map, config))
    if theirs not in (None, own) and "activation" not in settings and not alone:
        _log.warning(
            f"{path} has the tensor names of {key_map.title} code, which computes "
            f"activation='{theirs}'; this model computes '{own}'"
        )
    return Checkpoint(config, weights, identify(config)[0], described=False)


def _named_after(path: Path) -> Any:
    """The configuration of the model that names a file, such as convit_tiny.pth."""
    name = path.name.partition(".")[0]
    if name not in VARIANTS:
        raise UserError(
            "it does not say which model it holds: give --variant NAME (variant= in Python, "
            "--model NAME --weights FILE in training), and --set for settings that differ"
        )
    return VARIANTS[name].config


def _stems(config: Any) -> list[str]:
    """Names that a model's first tensor may have in any format."""
    if isinstance(config, TimmConfig):
        return [OTHER_TIMM.rename(next(iter(meta_state_dict(config))))]
    return [stem for key_map in KEY_MAPS.values() for stem in key_map.stems]


def detect_key_map(state: State, like: Any = None) -> KeyMap:
    """The key map whose names these tensors have.

    Args:
        state: the tensors.
        like: the configuration of the model they are for, if known.

    Raises:
        UserError: if none or several match, for a distilled DeiT, or if `like` is of another
            family.
    """
    if isinstance(like, TimmConfig):
        return OTHER_TIMM
    if "dist_token" in state:
        raise UserError(
            "these are weights of a distilled DeiT, whose distillation token no model here has; "
            "open it as timm's model, such as timm/deit_tiny_distilled_patch16_224"
        )
    matching = [row for row in KEY_MAPS.values() if not row.stems.keys().isdisjoint(state)]
    if len(matching) != 1:
        titles = ", ".join(row.title for row in matching or KEY_MAPS.values())
        raise UserError(
            f"these weights are of {'more than one' if matching else 'no known'} format "
            f"({titles}), whose first layers are {', '.join(sorted(_stems(None)))}; their first "
            f"tensors are {some(state, quote='')}; if they are of a timm model, give its name, "
            f"--model timm/NAME in training and --variant timm/NAME elsewhere"
        )
    for stem, family in matching[0].stems.items():
        if stem in state:
            check_family(family, like)
    return matching[0]


def check_family(family: Any, like: Any) -> None:
    """Check that the configuration `like`, if any, is of the weights' family."""
    if like is not None and not isinstance(like, family):
        raise UserError(
            f"these weights do not fit the model: they are of {family.title}, the model is "
            f"{like.title}"
        )


def fit_interface(
    state: State, key_map: KeyMap, like: Any, settings: Mapping[str, Any] = {}
) -> Any:
    """`like`, with the classes, channels and image size of the weights, or those in `settings`.

    Raises:
        UserError: if the position embedding is not of a square image.
    """
    like = like.with_overrides(**settings)
    heads = [state.get(key_map.rename(f"{name}.weight"), ()) for name in like.classifiers]
    fields: dict[str, Any] = {"num_classes": max(map(len, heads), default=like.num_classes)}
    name = f"{like.stem}.weight"
    stem = state.get(key_map.rename(name))
    if stem is not None:
        own = meta_state_dict(like).get(name) if isinstance(like, TimmConfig) else None
        fields["in_chans"] = like.in_chans if isinstance(like, TimmConfig) else stem.shape[1]
        if own is not None and own.dim() == stem.dim() > 1:
            # A stem may take the pixels of a block as channels.
            fields["in_chans"] = stem.shape[1] * like.in_chans // own.shape[1]
    if isinstance(like, ViTConfig) and "pos_embed" in state:
        # Keep the image size of `like` if it has as many patches; else assume square images.
        patches = state["pos_embed"].shape[1] - like.embed_class_token
        side = math.isqrt(patches)
        if math.prod(like.native_grids[0]) != patches:
            if side**2 != patches and "img_size" not in settings:
                raise UserError(
                    f"the position embedding has {patches} patches, not a square number; set "
                    f"img_size to the height and width of the images, such as img_size=[224,448]"
                )
            fields["img_size"] = side * like.patch_size
    return replace(like, **{name: value for name, value in fields.items() if name not in settings})


def _from_public(name: str) -> Checkpoint:
    row = source(name)
    like = named(row.model, img_size=row.preprocessing.img_size)
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
        with contextlib.nullcontext() if offline else _offline_unless_reachable():
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
        with _offline_unless_reachable():
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


def _from_timm(name: str) -> tuple[TimmConfig, State]:
    """timm's published weights of "timm/NAME": configuration and state dict.

    Raises:
        UserError: if timm has no model of this name, or its weights cannot be loaded.
    """
    config = TimmConfig.named(name)
    missing = (
        f"timm's weights of {name} could not be loaded; pass a file of a state dict instead, with "
        f"--variant {name} (variant= in Python)"
    )
    with wrap_errors(missing, OSError, RuntimeError), _offline_unless_reachable():
        model = timm.create_model(config.timm_name, pretrained=True)
    return config, {f"model.{key}": tensor for key, tensor in model.state_dict().items()}


_TIMEOUT = 3  # seconds


@contextlib.contextmanager
def _offline_unless_reachable() -> Iterator[None]:
    """Within the block, use only the Hugging Face cache unless the hub responds within 3 seconds.

    The hub's client retries for half a minute.
    """
    offline = constants.HF_HUB_OFFLINE
    try:
        utils.get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # its type depends on the client's HTTP library
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
