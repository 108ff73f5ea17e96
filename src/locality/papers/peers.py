"""ImageNet's other yardsticks, and other people's models with their public weights."""

from __future__ import annotations

import json
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache

from locality.data import AugmentConfig, DataConfig, open_data
from locality.errors import UserError
from locality.files import write_atomic
from locality.papers.quantities import Absent, Computed, Measure, Quantity
from locality.papers.scales import Scale
from locality.runner.runs import Run
from locality.training.evaluation_of_runs import evaluate_on, evaluate_run

PEERS: dict[str, str | None] = {
    "ResNet-50": "resnet50.tv_in1k",
    "ResNet-101": "resnet101.tv_in1k",
    "ResNet-152": "resnet152.tv_in1k",
    "ViT-B/16": None,
    "ViT-L/16": None,
    "PVT-Small": None,
    "PVT-Medium": None,
    "PVT-Large": None,
    "T2T-ViT_t-14": None,
    "T2T-ViT_t-19": None,
    "T2T-ViT_t-24": None,
    "TNT-S": "tnt_s_legacy_patch16_224.in1k",
    "TNT-B": "tnt_b_patch16_224.in1k",
    "BiT-M↑480 22k": "resnetv2_152x4_bit.goog_in21k_ft_in1k",
    "ViT-B/16↑384 22k": "vit_base_patch16_384.orig_in21k_ft_in1k",
    "ViT-L/16↑384 22k": None,
    "ViT-H/16↑384 22k": None,
}
"""The comparison rows of CvT's Table 3 → timm's name of their public weights, where it has them."""


def labelled(s: Scale, dataset: str) -> DataConfig:
    """One of ImageNet's sets to be judged by.

    Raises:
        UserError: if its files were not named.
    """
    needed = {"imagenet_real": ("imagenet", "imagenet_real")}.get(dataset, (dataset,))
    for name in needed:
        if s.data.get(name) is None:
            raise UserError(f"needs {_WHAT[name]}; say where with --data.{name} PATH")
    labels = s.data["imagenet_real"] if dataset == "imagenet_real" else None
    return DataConfig(dataset=dataset, root=s.data[needed[0]], real_labels=labels)


_WHAT = {
    "imagenet": "the folder of ImageNet-1k",
    "imagenet_v2": "the folder of ImageNet-V2",
    "imagenet_real": "the file of the ReaL labels (real.json)",
}


def top1_on(s: Scale, dataset: str) -> Measure:
    """Top-1 of a run's model on ReaL or V2."""

    def judge(run: Run) -> float:
        if not s.comparable:
            raise UserError(f"{dataset} has the classes of ImageNet-1k, which scale '{s.name}' "
                            f"does not train on")  # fmt: skip
        return float(evaluate_run(run.folder, labelled(s, dataset))["top1"])

    return Measure(f"top1 on {dataset}", judge)


def peer_top1(s: Scale, row: str, dataset: str) -> Quantity:
    """Top-1 of other people's model with public weights that lie on this machine.

    Nothing is downloaded for it: the reason says what to fetch.
    """
    name = PEERS[row]
    if name is None:
        return Absent("timm does not have these weights")
    return Computed(lambda: _peer_top1(s, name, dataset))


def _peer_top1(s: Scale, name: str, dataset: str) -> float:
    data = labelled(s, dataset)
    kept = s.root / "peers.json"
    known: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    key = f"{name} on {dataset}"
    if key not in known:
        _require_weights(name)
        known[key] = _judge(name, data)
        s.root.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps(known, indent=2) + "\n")
    return known[key]


def _require_weights(name: str) -> None:
    published = timm.get_pretrained_cfg(name)
    repository = (published and published.hf_hub_id) or f"timm/{name}"
    files = ("model.safetensors", "pytorch_model.bin")
    if not any(isinstance(try_to_load_from_cache(repository, file), str) for file in files):
        raise UserError(
            f"needs the public weights {repository}, which are not on this machine; "
            f"`hf download {repository}` fetches them"
        )


def _judge(name: str, data: DataConfig) -> float:
    model = timm.create_model(name, pretrained=True).eval()
    wanted: dict[str, Any] = timm.data.resolve_model_data_config(model)
    augment = AugmentConfig(
        mean=wanted["mean"],
        std=wanted["std"],
        crop_pct=wanted["crop_pct"],
        interpolation=wanted["interpolation"],
    )
    splits = open_data(data, 0)
    size = (wanted["input_size"][-1],) * 2
    return float(evaluate_on(model, splits, data, augment, size, batch_size=64)["top1"])


def missing_data(s: Scale, run: Run) -> str | None:
    """Why a run's data cannot be had, known before anything starts; None if it may be."""
    data = run.config.data
    if data.dataset == "digits" or data.root is not None:
        return None
    name = "imagenet" if data.dataset == "imagenet100" else data.dataset
    name = "imagenet22k" if run.config.recipe == "cvt_22k" else name
    return f"needs the folder of {name}; say where with --data.{name} PATH"
