"""Weight files: any PyTorch or safetensors file is read without running code; models are saved.

PyTorch files are pickles, which are programs; they are read with `weights_only=True`, torch's
unpickler for tensors and containers. A saved model is a folder with `model.safetensors`,
`config.json` and a model card. The safetensors file also holds the description, so that it can be
loaded by itself.
"""

import argparse
import dataclasses
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from locality import __version__, checks
from locality.checkpoints.registry import FORMAT, WEIGHTS
from locality.data.config import Preprocessing
from locality.errors import UserError, lookup, one_line, prefix_errors, some, wrap_errors
from locality.files import open_file, write_atomic
from locality.machine import limited
from locality.models.base import ImageClassifier
from locality.models.factory import MODELS, build
from locality.models.variants import VARIANTS, identify
from locality.settings import from_dict
from locality.templates import render

State = Mapping[str, Tensor]

# The ConViT authors' files hold their command line and paths, which are read as pure ones.
ALLOWED_CLASSES: tuple[Any, ...] = (
    argparse.Namespace,
    *(
        (path_class, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")  # Python 3.13 writes the second
        for path_class in (PurePosixPath, PureWindowsPath)
        for name in (path_class.__name__, path_class.__name__.removeprefix("Pure"))
    ),
)
"""Classes that a pickle may name besides torch's tensors and containers, with their name in the
pickle if it differs."""

# Time to read a file; bytes per second of a slow network's disk.
_LOADING_SECONDS, _SLOWEST = 15.0, 5e6


def check_keys(state: State, expected: State, owner: str) -> None:
    """Check the names and shapes of a state dict.

    Args:
        state: the state dict to check.
        expected: the required names, with their shapes and whether they are floating-point.
        owner: whose names these are, for the message.

    Raises:
        UserError: naming missing and unknown tensors, and those of another shape or dtype.
    """

    def form(tensor: Tensor) -> str:
        kind = "numbers" if tensor.is_floating_point() else "integers"
        return f"{tuple(tensor.shape)} of {kind}"

    forms = {name: (form(state[name]), form(expected[name])) for name in state if name in expected}
    other = [f"{n} is {own} instead of {want}" for n, (own, want) in forms.items() if own != want]
    faults = {
        "missing": [name for name in expected if name not in state],
        "unknown": [name for name in state if name not in expected],
        "of another shape": sorted(other),
    }
    if any(faults.values()):
        said = [f"{what}: {some(names, quote='')}" for what, names in faults.items() if names]
        raise UserError(f"these weights do not fit the model ({owner} names); {'; '.join(said)}")


def check_finite(state: State) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: naming the tensors that contain NaN or infinity.
    """
    if broken := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
        raise UserError(f"these weights contain NaN or infinity, in {some(broken, quote='')}")


def read_state(
    path: Path | str, entry: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a state dict from a safetensors or PyTorch file, on the CPU.

    Args:
        path: the file; its format is detected from the content.
        entry: the state dict to read from a checkpoint with several ("model", "model_ema"), or the
            prefix of the tensors to read ("student"); not needed if there is only one.

    Returns:
        the state dict, and the text fields in the header of a safetensors file.

    Raises:
        OSError: if the file does not exist.
        UserError: if it is not a weight file, is damaged, would run code, or does not hold exactly
            one state dict and `entry` is not given; naming the file and the cause.
    """
    path, metadata = Path(path), dict[str, str]()
    with open_file(path) as file:
        start = file.read(9)
        file.seek(0)
        if start[8:] != b"{":
            content = unpickle(file, path)
        else:
            damaged = f"{path} is damaged or truncated"
            with wrap_errors(damaged, Exception), safe_open(str(path), framework="pt") as opened:
                content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
    state = _select_state_dict(content, entry, path)
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.element_size() < 2:
            raise UserError(
                f"{path}: {name} is stored as {tensor.dtype}, without its scale; convert the "
                f"weights to float16 or float32"
            )
        # Views may claim any number of values.
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: the file does not hold all numbers of the tensor {name}")
    return state, metadata


def unpickle(file: IO[bytes], path: Path | str) -> Any:
    """The content of a PyTorch file, on the CPU.

    Args:
        file: the open file, positioned after any header. (torch looks at a path's suffix.)
        path: its path, for messages.

    Raises:
        UserError: if it is not a PyTorch file, is damaged, would run code, or takes too long.
    """
    seconds = _LOADING_SECONDS + os.fstat(file.fileno()).st_size / _SLOWEST
    try:
        with torch.serialization.safe_globals([*ALLOWED_CLASSES]):
            load = partial(torch.load, file, map_location="cpu", weights_only=True)
            return limited(load, seconds)  # keys of one hash would take hours
    except Exception as error:  # arbitrary input may raise anything
        what = f"is damaged, truncated or not a file of tensors: {one_line(error)}"
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            what = f"was refused, and nothing in it was run: it would call {named[1]}"
        elif isinstance(error, pickle.UnpicklingError):
            what = "is neither a safetensors nor a PyTorch file; a failed download, or git-lfs?"
        raise UserError(f"{path} {what}") from error


def _select_state_dict(content: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The selected, or only, state dict in a file's content."""
    if _is_state_dict(content):
        states = {"": content}
    else:
        entries = content if isinstance(content, Mapping) else {}
        states = {str(name): value for name, value in entries.items() if _is_state_dict(value)}
        if not states:
            held = some(map(str, entries), quote="") or f"a {type(content).__name__}"
            raise UserError(f"{path} holds no state dict, but {held}")
    if entry in states:
        return {str(name): tensor for name, tensor in states[entry].items()}
    # Without an entry, or with the prefix of some tensors as one, there is only one.
    state, prefix = next(iter(states.values())), f"{entry}." if entry else ""
    inside = {str(n).removeprefix(prefix): state[n] for n in state if str(n).startswith(prefix)}
    if len(states) > 1 or not inside:
        raise several_entries(path, states)
    return inside


def several_entries(path: Path | str, entries: Iterable[str]) -> UserError:
    """The error for a file with several state dicts and no valid `entry`."""
    names = some(filter(None, entries), 10, quote="") or "one without a name; omit the entry"
    return UserError(
        f"choose a state dict of {path} with --entry NAME (entry= in Python); it has: {names}"
    )


def _is_state_dict(value: Any) -> bool:
    tensors = value.values() if isinstance(value, Mapping) else ()
    return bool(tensors) and all(isinstance(tensor, Tensor) for tensor in tensors)


# -- saved models ----------------------------------------------------------------------------------

FORMAT_VERSION = 1
CONFIG = "config.json"
CARD = "README.md"
WRAPPER = "locality"
"""Prefix of the tensors in models of `locality.transformers`."""

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What a head's numbers mean, in transformers' words."""


def _as_built(tensor: Tensor, expected: Tensor) -> Tensor:
    """A copy in the dtype and the memory format (timm's: channels-last) of the built model."""
    return torch.empty_like(expected, device="cpu").copy_(tensor)


def with_classes(model: Any, outputs: int, names: Sequence[str]) -> Any:
    """A `Checkpoint` or `Classifier` with the names of its outputs, in order.

    Raises:
        UserError: if it has `classes`, or another number of outputs.
    """
    if model.classes is not None:
        raise UserError(f"{model.name or 'the model'} has class names; omit the class map")
    if len(names) != outputs or len(set(names)) < len(names):
        raise UserError(
            f"the class map has {len(set(names))} different names on {len(names)} lines, but "
            f"{model.name or 'the model'} has {outputs} outputs"
        )
    return dataclasses.replace(model, classes=tuple(names))


def meta_state_dict(config: Any) -> dict[str, Tensor]:
    """The state dict of the model of `config` on the meta device: names and shapes."""
    with torch.device("meta"):
        return build(config).state_dict()


@dataclass(frozen=True)
class Checkpoint:
    """A saved model: its architecture, weights, preprocessing and class names.

    Attributes:
        config: the complete architecture.
        state: the weights, with native names.
        name: name of the variant, or None.
        preprocessing: preprocessing of the images, or None if unknown; gets the model's image size
            if it has none.
        classes: class names in the order of the logits, or None.
        problem_type: what the logits mean, as in transformers; also an attribute of the model.
        figures: results for the model card, for example a run's `result.json`.
        temperature: what the logits are divided by for probabilities (`locality eval --calibrate`);
            also an attribute of the model.
    """

    config: Any
    state: State
    name: str | None = None
    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] | None = None
    problem_type: ProblemType | None = None
    figures: Mapping[str, Any] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.preprocessing is not None:
            sized = self.preprocessing.with_default_size(self.config.img_size)
            object.__setattr__(self, "preprocessing", sized)
        names, count = self.classes, self.config.num_classes
        if names is not None and len(names) != count:
            raise UserError(f"{len(names)} class names given for {count} classes")
        checks.typed("problem_type", self.problem_type, ProblemType | None)
        checks.typed("temperature", self.temperature, checks.Positive)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> "Checkpoint":
        """The checkpoint of a model; its weights are copied to the CPU.

        Preprocessing and class names are by default those it was loaded with.

        Raises:
            UserError: if it is not a model of this library, its tensors do not match its
                configuration, or its weights are not finite.
        """
        inner: Any = getattr(model, "_orig_mod", model)  # torch.compile's
        known = inner
        if isinstance(getattr(inner, WRAPPER, None), ImageClassifier):
            known, inner = inner.config.checkpoint(), inner.locality
        if not isinstance(inner, ImageClassifier):
            raise UserError(f"a model of this library is needed, not a {type(inner).__name__}")
        state = contiguous_copies(
            {name: tensor.detach().cpu() for name, tensor in inner.state_dict().items()}
        )
        expected = meta_state_dict(inner.config)
        if inner.fused:
            raise UserError("a fused model is not stored; give the model it was fused from")
        with prefix_errors("a model pruned without its norm, or changed otherwise, is not stored"):
            check_keys(state, expected, "locality's")
        check_finite(state)
        names = known.classes if classes is None else tuple(classes)
        about = inner.variant, preprocessing or known.preprocessing, names, known.problem_type
        return cls(inner.config, state, *about, figures, known.temperature)

    def build(self) -> ImageClassifier:
        """Build the model, in evaluation mode, on the CPU in fp32.

        Raises:
            UserError: if the model is invalid.
        """
        with torch.device("meta"):
            model: Any = build(self.config)
        expected = model.state_dict()
        # Assigning the tensors avoids an initialisation, and leaves the random generator alone.
        state = {name: _as_built(tensor, expected[name]) for name, tensor in self.state.items()}
        model.load_state_dict(state, strict=True, assign=True)
        if any(buffer.is_meta for buffer in model.buffers()):  # tables of timm's, in no file
            with torch.random.fork_rng(devices=[]):
                model = build(self.config)
            model.load_state_dict(state, strict=True)
        model.variant = self.name
        for name in ("preprocessing", "classes", "problem_type", "temperature"):
            setattr(model, name, getattr(self, name))
        return model.eval()

    def describe(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "written_by": f"locality {__version__}",
            "name": self.name,
            "architecture": {"family": self.config.family, **dataclasses.asdict(self.config)},
            "input": None if self.preprocessing is None else dataclasses.asdict(self.preprocessing),
            "labels": None if self.classes is None else list(self.classes),
            "problem_type": self.problem_type,
            "temperature": self.temperature,
        }

    @classmethod
    def from_description(cls, content: Any) -> "Checkpoint":
        """The checkpoint of the content of `config.json`, without weights.

        Missing settings get their defaults, so that older files can be read.

        Raises:
            UserError: if the description is not of this format, of a newer version, or invalid.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError("it does not describe a model of this library")
        if content.get("version") != FORMAT_VERSION:
            raise UserError(
                f"it has format version {content.get('version')}, but locality {__version__} "
                f"reads version {FORMAT_VERSION}; upgrade locality"
            )
        shape = {"architecture": dict, "labels?": [str], "name?": str}
        checks.shaped("its description", content, shape)
        fields = dict(content["architecture"])
        families = {config.family: config for config in MODELS}
        family = lookup("family of models", str(fields.pop("family", None)), families)
        # Of earlier files: how weights started, and a CvT's settings by stage.
        fields.pop("init", None)
        if stages := fields.pop("stages", None):
            fields |= {name: [stage[name] for stage in stages] for name in stages[0]}
        prepared, labels = content.get("input"), content.get("labels")
        return cls(
            from_dict(family, fields, "architecture"),
            {},
            content.get("name"),
            None if prepared is None else from_dict(Preprocessing, prepared, "input"),
            None if labels is None else tuple(labels),
            content.get("problem_type"),
            temperature=content.get("temperature", 1.0),
        )


def model_card(checkpoint: Checkpoint) -> str:
    """A model card in Markdown, with the hub's metadata and any known figures."""
    name = checkpoint.name or type(checkpoint.config).__name__.removesuffix("Config")
    other = f"{name} with other settings" if name in VARIANTS else name
    title = identify(checkpoint.config)[0] or other
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    sizes = {name: tensor.numel() for name, tensor in checkpoint.state.items()}
    card = render(
        "locality.checkpoints",
        "card.md",
        title=title,
        family=title.partition("_")[0],
        parameters=sum(size for name, size in sizes.items() if not name.endswith(statistics)),
        num_classes=checkpoint.config.num_classes,
        figures=checkpoint.figures or {},
        input=checkpoint.preprocessing,
    )
    return card + "\n"


def save(
    model: nn.Module,
    folder: Path | str,
    *,
    card: Mapping[str, Any] | None = None,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] | None = None,
) -> Path:
    """Save a model: weights, configuration and model card. Existing files are replaced.

    Args:
        model: any model of this library.
        folder: target folder; created if needed.
        card: figures for the model card, for example the content of a run's `result.json`.
        preprocessing: preprocessing of the images; default that of the file it was loaded from.
        classes: class names in the order of the logits; the default as well.

    Returns:
        the folder.

    Raises:
        UserError: if it is not a model of this library, its weights are not finite, or the number
            of names is not the number of classes.
    """
    return write_folder(Checkpoint.of(model, preprocessing, classes, card), folder)


def write_folder(checkpoint: Checkpoint, folder: Path | str) -> Path:
    """Write a checkpoint as a folder, see `save`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A folder without a description cannot be loaded. It is removed first and written last, so that
    # an interruption cannot leave the weights of one model with the description of another.
    (folder / CONFIG).unlink(missing_ok=True)
    write_file(checkpoint, folder / WEIGHTS)
    write_atomic(folder / CARD, model_card(checkpoint))
    write_atomic(folder / CONFIG, json.dumps(checkpoint.describe(), indent=2) + "\n")
    return folder


def write_file(checkpoint: Checkpoint, path: Path | str) -> None:
    """Write a checkpoint as one safetensors file with its description."""
    # One metadata entry: the order of several is random, and equal models must give equal files.
    metadata = {FORMAT: json.dumps(checkpoint.describe())}
    write_atomic(path, to_safetensors(contiguous_copies(checkpoint.state), metadata))


def contiguous_copies(state: State) -> dict[str, Tensor]:
    """Contiguous copies of the tensors, which share no memory (required by safetensors)."""
    form = torch.contiguous_format
    return {name: tensor.clone(memory_format=form) for name, tensor in state.items()}
