"""Which runs are of one kind: alike in every setting that a result depends on, but for the seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from locality.training.runs import MAY_CHANGE
from locality.training.settings import flatten

# Where and how a run was computed, which seed it had and how much data: not what kind it is.
INCIDENTAL = MAY_CHANGE | {
    "seed",
    "recipe",
    "data.fraction",
    "data.subset_seed",
    "engine.compile",
    "schedule.eval_every",
    "schedule.save_every",
    "schedule.snapshot_every",
}


def kind_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run the kind it is, by dotted name, from its nested settings."""
    return {name: value for name, value in flatten(config).items() if name not in INCIDENTAL}


def kind(config: Mapping[str, Any]) -> str:
    """A key that runs of one kind share."""
    return repr(sorted(kind_settings(config).items(), key=lambda item: item[0]))


def unlike(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the settings of kind in which these configurations are not all alike."""
    flat = [kind_settings(config) for config in configs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    return [name for name in names if len({repr(settings.get(name)) for settings in flat}) > 1]


def in_words(config: Mapping[str, Any], names: Sequence[str]) -> str:
    """A configuration's values of some settings, three at most: "lr=0.001, drop_rate=0.1"."""
    own = flatten(config)
    parts = [f"{name.rsplit('.', 1)[-1]}={own.get(name, 'default')}" for name in names[:3]]
    return ", ".join(parts) + (", …" if len(names) > 3 else "")
