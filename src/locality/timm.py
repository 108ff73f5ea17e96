"""Registers the models in timm: `import locality.timm`.

Each model `NAME` is registered as `locality_NAME`, which shadows no timm model:
`timm.create_model("locality_convit_tiny", pretrained=True)`. timm's training and validation scripts
and `features_only=True` work too. Public weights keep their tags: `locality_convit_tiny.fb_in1k`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor

from locality.checkpoints.formats import PREPROCESSING_KEYS, REGISTERED, fit_interface, recognise
from locality.checkpoints.loading import public_file, resample_pos_embeds
from locality.checkpoints.registry import SOURCES, Source, source
from locality.data.config import Preprocessing
from locality.models.base import ImageClassifier
from locality.models.config import CvTConfig
from locality.models.factory import build
from locality.models.variants import VARIANTS, Variant

__all__: list[str] = []  # timm adds the names it registers


def adapt_weights(state: dict[str, Tensor], model: ImageClassifier) -> dict[str, Tensor]:
    """Convert weights of any format to native ones, and resample position embeddings.

    timm itself adapts the classifier and the first convolution.

    Raises:
        UserError: for weights of unknown format or another architecture.
    """
    key_map, theirs = recognise(state, model.config)
    config = fit_interface(theirs, key_map, model.config)
    ours = key_map.to_native(theirs, config)
    resample_pos_embeds(ours, config, model.config, model.state_dict())
    return ours


def _make(
    name: str,
    img_size: int | tuple[int, int] | None = None,
    device: Any = None,
    dtype: Any = None,
    **fields: Any,
) -> ImageClassifier:
    if isinstance(img_size, (list, tuple)) and img_size[0] == img_size[1]:
        img_size = img_size[0]  # timm always gives both sides
    return build(name, img_size=img_size, **fields).to(device=device, dtype=dtype)


def _entrypoint(name: str) -> Callable[..., Any]:
    """timm's entry point for the model `name`."""

    def entrypoint(pretrained: bool = False, pretrained_cfg: Any = None, **kwargs: Any) -> Any:
        tag = f".{pretrained_cfg}" if isinstance(pretrained_cfg, str) else ""
        named = (tag or pretrained_cfg is None) and not kwargs.get("pretrained_cfg_overlay")
        if pretrained and named and name in _public:
            # Without a network, timm would try for three quarters of a minute.
            file = public_file(source(name + tag))
            kwargs["pretrained_cfg_overlay"] = {"file": str(file)}
        return build_model_with_cfg(
            partial(_make, name),
            REGISTERED + name,
            pretrained,
            pretrained_filter_fn=adapt_weights,
            pretrained_cfg=pretrained_cfg,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            **kwargs,
        )

    entrypoint.__name__ = entrypoint.__qualname__ = REGISTERED + name
    entrypoint.__doc__ = f"`{name}` ({VARIANTS[name].source})."
    return entrypoint


def _cfg(row: Variant, weights: Source | None = None) -> dict[str, Any]:
    """timm's pretrained configuration of a model and its weights."""
    config = row.config
    hierarchical = isinstance(config, CvTConfig)
    given = weights.preprocessing if weights else Preprocessing(img_size=config.img_size)
    cfg = {
        "input_size": (config.in_chans, *given.size),
        "num_classes": config.num_classes,
        "pool_size": config.grids(given.size)[-1],
        **{name: getattr(given, name) for name in PREPROCESSING_KEYS},
        "fixed_input_size": not hierarchical,
        "first_conv": config.stem,
        "classifier": config.classifiers[0],
    }
    if hierarchical:
        cfg["min_input_size"] = (config.in_chans, config.minimum_size, config.minimum_size)
    if weights is not None:
        where = {"file": str(weights.file)} if weights.file else {"hf_hub_id": weights.repo}
        cfg |= where | {"license": weights.licence}
    return cfg


_public = {row.model for row in SOURCES.values()}
_cfgs: Any = {REGISTERED + name: _cfg(row) for name, row in VARIANTS.items() if name not in _public}
_cfgs |= {REGISTERED + row.name: _cfg(VARIANTS[row.model], row) for row in SOURCES.values()}
default_cfgs = generate_default_cfgs(_cfgs)

for _name in VARIANTS:
    globals()[REGISTERED + _name] = register_model(_entrypoint(_name))
