"""Class names: their order, and how those of images and of a model differ.

Classes are sorted as text, by code point ("1", "10", "2"), as torchvision, Keras and `datasets`
number the folders of a data set; runs and saved models record their own order. Whatever the order,
names are what joins labels and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from locality.errors import some


def sort_classes(names: Iterable[str]) -> list[str]:
    """Class names in the order in which they are numbered, each once."""
    return sorted(set(names))


def joinable(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Names that classes can be joined by: None without names, or if one is of several classes."""
    return names if names is not None and len(set(names)) == len(names) else None


def class_difference(parts: Mapping[str, Iterable[str]]) -> str:
    """Which classes not all parts have, in words; empty when they agree."""
    classes = {part: set(names) for part, names in parts.items()}
    shared = set.intersection(*classes.values())
    only = {part: sort_classes(names - shared) for part, names in classes.items()}
    return "; ".join(f"only {part} has {some(names)}" for part, names in only.items() if names)


_FEW, _RATIO = 10, 10


def imbalance(counts: Mapping[str, int]) -> str:
    """What to do about classes of very different size; "" about others.

    Args:
        counts: class → how many images it has.
    """
    held = {name: count for name, count in counts.items() if count}
    if not held:
        return ""
    least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
    if held[most] < _RATIO * held[least]:
        return ""
    few = [f"{name} ({count})" for name, count in held.items() if count < _FEW]
    named = f"; fewer than {_FEW}: {some(few, quote='')}" if few else ""
    return (
        f"classes have from {held[least]:,} ({least}) to {held[most]:,} images ({most}){named}; "
        f"look at every class, since a rare one hardly changes top-1, give it more images, or "
        f"train with --objective.class_weights true"
    )


def numbered(names: Sequence[str]) -> str:
    """The first three classes with their numbers, in words."""
    shown = [f"{number} is '{name}'" for number, name in enumerate(names[:3])]
    return ", ".join([*shown, *(["…"] if len(names) > 3 else [])])
