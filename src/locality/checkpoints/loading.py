"""Read a checkpoint from a path or name, load its weights into a model, or convert it.

Sources are run folders, saved folders, weight files of any known format, public weights, timm
models and repositories on the Hugging Face hub.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save as to_safetensors
from timm.models import adapt_input_conv
from torch import Tensor

from locality.checkpoints import formats, native, registry
from locality.checkpoints.formats import KEY_MAPS, PREPROCESSING_KEYS, PREPROCESSOR
from locality.checkpoints.native import CONFIG, Checkpoint, State, contiguous_copies
from locality.checkpoints.registry import FORMAT, HUB_FILES, WEIGHTS
from locality.checkpoints.run_state import load_best_state
from locality.data.config import Preprocessing
from locality.data.sources import class_difference, joinable, numbered
from locality.errors import UserError, counted, one_line, prefix_errors, some, wrap_errors
from locality.files import atomic_file, parse_json, read_json, write_atomic
from locality.models.base import ImageClassifier
from locality.models.config import TimmConfig, signature_diff
from locality.models.transformer import position_embedding
from locality.models.variants import VARIANTS, identify, named, nearest
from locality.runs import Run
from locality.settings import from_dict

Weights = dict[str, Tensor]

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
        key_map, state = formats.recognise(state, config)
        if held is None:
            config = formats.fit_interface(state, key_map, config, settings)
            computed = key_map.activation
            if computed and config.activation != computed and "activation" not in settings:
                _log.warning(
                    f"{what} has the tensor names of {key_map.title} code, which computes "
                    f"activation='{computed}'; this model computes '{config.activation}'"
                )
        if like is not None:
            _check_same(config, like)
        state = key_map.to_native(state, config)
        native.check_finite(state)
        name = config.name if isinstance(config, TimmConfig) else identify(config)[0]
        if held is None:
            return Checkpoint(config, state, name, timms_preprocessing(config))
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
            held = formats.read_config(path.parent, content)
        if held is None:
            _log.warning(f"{description} is ignored: locality, timm or CvT did not write it")
    state, metadata = native.read_state(path, entry)
    if held is None and FORMAT in metadata:
        content = parse_json(metadata[FORMAT], f"{path}: its description")
        with prefix_errors(path), wrap_errors("its description is damaged", TypeError):
            held = Checkpoint.from_description(content)
    return state, held


def _open_run(what: str, _: object) -> Opened:
    """The best checkpoint of a run, with its preprocessing, class names and result.

    Uses the averaged weights if the run has them, since those are evaluated.
    """
    run = Run(what)
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
    about = name, preprocessing, tuple(classes), None, result, run.temperature
    return weights, Checkpoint(config, {}, *about)


def _open_public(what: str, _: object) -> Opened:
    row = registry.source(what)
    if row.file is not None:
        return _open_path(str(row.file), None)
    config = named(row.model, img_size=row.preprocessing.img_size)
    state, _ = native.read_state(public_file(row))
    return state, Checkpoint(config, {}, row.model, row.preprocessing)


def public_file(row: registry.Source) -> Path:
    """The file of public weights: in this package, or in the hub's cache, downloaded if needed.

    Raises:
        UserError: if it cannot be downloaded, naming the page to fetch it from.
    """
    if row.file is not None:
        return row.file
    page = f"https://huggingface.co/{row.repo}"
    advice = f"fetch {WEIGHTS} from {page} and give its path (--weights, --from or weights=)"
    with wrap_errors(f"{row.name} could not be downloaded; {advice}", OSError):
        return registry.weight_file(_download(row.repo))


def _open_timm(what: str, _: object) -> Opened:
    config = TimmConfig.named(what)
    known = timm.models.get_pretrained_cfg(config.timm_name)
    page = f"https://huggingface.co/{known.hf_hub_id}" if known and known.hf_hub_id else "its page"
    advice = f"fetch them from {page} and give them as --model {what} --from FILE"
    with wrap_errors(
        f"timm's weights of {what} could not be loaded; {advice}", OSError, RuntimeError
    ):
        model = timm.create_model(config.timm_name, pretrained=True)
    return model.state_dict(), Checkpoint(config, {}, config.name, timms_preprocessing(config))


def timms_preprocessing(config: Any) -> Preprocessing | None:
    """timm's preprocessing of its own model; None of others, or if it is not supported."""
    if not isinstance(config, TimmConfig):
        return None
    try:
        known = formats.timm_preprocessing(config.data_config())
    except UserError as error:
        _log.warning(f"timm's preprocessing of {config.name} is not used: {error}")
        return None
    return known and known.with_channels(config.in_chans)


def _open_hub(what: str, _: object) -> Opened:
    try:
        folder = _download(what)
    except OSError as error:
        raise FileNotFoundError(
            f"file or folder {what} does not exist, and no model could be downloaded from "
            f"https://huggingface.co/{what}: {one_line(error)}"
        ) from error
    return _open_path(str(folder), None)


def _download(repo: str) -> Path:
    """The folder of a repository in the hub's cache; its weights are downloaded if needed."""
    for file in HUB_FILES:
        folder = Path(snapshot_download(repo, allow_patterns=[file, CONFIG, PREPROCESSOR]))
        if (folder / file).exists():
            return folder
    raise FileNotFoundError(f"{folder} has neither {' nor '.join(HUB_FILES)}")


_OPENERS: dict[str, Callable[[str, str | None], Opened]] = {
    "run": _open_run,
    "path": _open_path,
    "public": _open_public,
    "timm": _open_timm,
    "hub": _open_hub,
}


# -- into a model of another image size, channels or classes ---------------------------------------


def load_weights(
    model: ImageClassifier,
    what: Path | str,
    entry: str | None = None,
    classes: Sequence[str] | None = None,
) -> list[str]:
    """Load weights into a model of another image size, with other channels or classes.

    Position embeddings are resampled bicubically to the model's image size. The first convolution
    is adapted to another number of channels as in timm: summed over the channels for one, repeated
    and rescaled for more. The classifier is kept if the classes are the same (reordered if need
    be) or others have joined them, else it stays newly initialised. All other weights must fit
    exactly, and nothing is assigned before everything is checked. Settings that shapes do not
    determine (heads, strides, attention scale) must agree with those in the file. Each change is
    logged.

    Args:
        model: the model; unchanged if the weights do not fit.
        what, entry: as in `locality.load`.
        classes: names of the model's classes; without them, the model takes those of the weights,
            with their temperature, if it has as many.

    Returns:
        the changes made, as sentences.

    Raises:
        FileNotFoundError: if `what` does not exist.
        UserError: if the weights are damaged or do not fit, naming `what` and the cause.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    target = model.config
    checkpoint = read(what, entry=entry, like=target)
    with prefix_errors(what):
        fresh = model.state_dict()
        # Weights may be stored in fp16.
        state = {
            name: tensor.to(fresh[name].dtype) if name in fresh else tensor
            for name, tensor in checkpoint.state.items()
        }
        changes = _classifier(state, checkpoint, target, fresh, classes)
        for adapt in (_channels, resample_pos_embeds):
            changes += adapt(state, checkpoint.config, target, fresh)
        native.check_keys(state, fresh, "locality's")
    model.load_state_dict(state, strict=True)
    model.forget_classifier()
    if (names := joinable(checkpoint.classes)) and set(names) <= set(classes or ()):
        model.inherited = [list(classes or ()).index(name) for name in names]
    if classes is not None:
        model.classes = tuple(classes)
    elif checkpoint.config.num_classes == target.num_classes:
        for name in ("classes", "problem_type", "temperature"):
            setattr(model, name, getattr(checkpoint, name))
    if (prepared := checkpoint.preprocessing) is not None:
        model.preprocessing = prepared.at(model.img_size).with_channels(target.in_chans)
        set_data_config(model, model.preprocessing)
    for change in changes:
        _log.info(change)
    return changes


def set_data_config(model: ImageClassifier, preprocessing: Preprocessing) -> None:
    """Set the parts of `pretrained_cfg` that timm's `resolve_model_data_config` and `save_for_hf`
    read."""
    shared = {name: getattr(preprocessing, name) for name in PREPROCESSING_KEYS}
    size = {"input_size": (model.in_chans, *preprocessing.size)}
    name, _ = identify(model.config)
    own = {"architecture": formats.REGISTERED + name} if name else {}
    model.pretrained_cfg = (getattr(model, "pretrained_cfg", None) or {}) | own | size | shared


def _classifier(
    state: Weights, source: Checkpoint, target: Any, fresh: State, classes: Sequence[str] | None
) -> list[str]:
    count, names = source.config.num_classes, joinable(source.classes)
    prefixes = tuple(f"{name}." for name in target.classifiers)
    own = [name for name in state if name.startswith(prefixes)]
    why = f"the weights have {counted(count, 'class')}, the model {target.num_classes}"
    if count == target.num_classes:
        if classes is None or tuple(classes) == names:
            return []
        if names is None:
            return [
                f"the weights have no class names: the classifier's outputs are assigned in order, "
                f"{numbered(classes)}"
            ]
        why = class_difference({"the checkpoint": names, "the data": classes})
        if not why:
            order = list(map(names.index, classes))
            state |= {name: state[name][order] for name in own}
            return ["the classifier's outputs are reordered to match the data's classes"]
    elif names is not None and set(names) < set(classes or ()):
        rows = [list(classes or ()).index(name) for name in names]
        for name in own:
            state[name] = fresh[name].clone().index_copy_(0, torch.tensor(rows), state[name])
        new = [name for name in classes or () if name not in names]
        return [f"the classifier keeps its {count} classes; new: {some(new)}"]
    for name in own:
        del state[name]
    state |= {name: tensor for name, tensor in fresh.items() if name.startswith(prefixes)}
    if target.num_classes == 0:
        return [f"the classifier of {counted(count, 'class')} is not loaded"]
    return [f"the classifier is new: {why}"]


def _channels(state: Weights, source: Any, target: Any, fresh: State) -> list[str]:
    channels, wanted = source.in_chans, target.in_chans
    if channels == wanted:
        return []
    name = f"{target.stem}.weight"
    if name in state:
        if channels != 3 or state[name].shape[1] != 3:
            raise UserError(
                f"these weights take {channels} channels, the model {wanted}; only weights for 3 "
                f"channels can be adapted"
            )
        state[name] = adapt_input_conv(wanted, state[name])
    return [f"the first convolution is adapted from {channels} to {wanted} channels"]


def resample_pos_embeds(state: Weights, source: Any, target: Any, fresh: State) -> list[str]:
    """Resample, in place, every position embedding of `state` whose grid differs.

    Args:
        state: weights in the native format.
        source, target: configurations of the weights and of the model.
        fresh: the model's state dict.

    Returns:
        the changes made, as sentences.
    """
    # Here instead of in each forward pass, so that training continues from the new embedding.
    changes = []
    before, after = source.embeddings(), target.embeddings()
    for name in before.keys() & after.keys() & state.keys() & fresh.keys():
        if before[name] == after[name]:
            continue
        prefix = state[name].shape[1] - before[name][0] * before[name][1]
        state[name] = position_embedding(state[name], before[name], after[name], prefix)
        changes.append(
            f"the position embedding {name} is resampled from {before[name][0]}×{before[name][1]} "
            f"to {after[name][0]}×{after[name][1]} patches"
        )
    return changes


def _how_to_read(config: Any) -> str:
    """The options with which weights alone are read as the model of `config`."""
    name, settings = nearest(config), dict[str, Any]()
    for _ in range(2):  # a default may depend on another setting
        other = signature_diff(named(name, **settings), config)
        settings |= {setting: own for setting, (_, own) in other.items()}
    if isinstance(config.img_size, tuple):  # weights tell the side of a square alone
        settings["img_size"] = config.img_size
    values = {n: json.dumps(value, separators=(",", ":")) for n, value in settings.items()}
    return " ".join([f"--variant {name}", *(f"--set {n}={value}" for n, value in values.items())])


def convert(
    source: Path | str,
    target: Path | str,
    to: str = "locality",
    model: str | None = None,
    entry: str | None = None,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    half: bool = False,
    classes: Sequence[str] | None = None,
) -> str:
    """Read a model from any source and write it in the format `to`.

    Args:
        source: as in `locality.load`.
        target: a folder (only for the native format) if it has no suffix, else a `.safetensors` or
            PyTorch file (`.pth`, `.pt`, `.bin`).
        to: the format to write, one of `KEY_MAPS`.
        model: the model name, if the weights do not say it; must match them.
        entry: the state dict to read, if the checkpoint has several.
        overwrite: replace an existing `target`.
        settings: fields of the model's configuration that override those of the source.
        half: write fp16, half the size; reading gives fp32 again.
        classes: the class names of the outputs, in order, if the source has none; only the native
            format has any.

    Returns:
        a summary.

    Raises:
        FileNotFoundError: if `source` does not exist.
        UserError: if it cannot be read, the format cannot hold the model, or `target` exists;
            nothing is written then.
    """
    target = Path(target)
    registry.check_target(target, to, overwrite)
    checkpoint = read(source, model, entry, settings)
    if classes is not None:
        checkpoint = native.with_classes(checkpoint, checkpoint.config.num_classes, classes)
    if half:
        state = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in checkpoint.state.items()
        }
        native.check_finite(state)
        checkpoint = replace(checkpoint, state=state)
    notes = ""
    if to != FORMAT:
        state = contiguous_copies(KEY_MAPS[to].from_native(checkpoint.state, checkpoint.config))
        if target.suffix == ".safetensors":
            write_atomic(target, to_safetensors(state, {"format": "pt"}))
        else:
            with atomic_file(target) as file:
                torch.save(state, file)
        notes = (
            f"\nthe format keeps tensors alone: no heads, strides, padding, pooling, activation, "
            f"preprocessing or class names; read it with {_how_to_read(checkpoint.config)}"
        )
    elif target.suffix:
        native.write_file(checkpoint, target)
    else:
        native.write_folder(checkpoint, target)
    size = sum(tensor.numel() for tensor in checkpoint.state.values())
    return (
        f"{source} → {target} ({to}): "
        f"{checkpoint.name or 'a model without a name'}, {size:,} numbers{notes}"
    )
