"""Class names: their order, and differences between datasets and models.

Classes are sorted as text, by code point ("1", "10", "2"), as torchvision, Keras and `datasets`
number class folders; runs and saved models record their own order. Labels and outputs are always
matched by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from locality.errors import some


def sort_classes(names: Iterable[str]) -> list[str]:
    """Unique class names, sorted."""
    return sorted(set(names))


def joinable(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """`names`, if classes can be matched by them; None without names or with duplicates."""
    return names if names is not None and len(set(names)) == len(names) else None


def class_difference(parts: Mapping[str, Iterable[str]]) -> str:
    """The classes that some splits lack, in words; empty if they agree."""
    classes = {part: set(names) for part, names in parts.items()}
    shared = set.intersection(*classes.values())
    only = {part: sort_classes(names - shared) for part, names in classes.items()}
    return "; ".join(f"only {part} has {some(names)}" for part, names in only.items() if names)


_FEW, _RATIO = 10, 10


def imbalance(counts: Mapping[str, int]) -> str:
    """Advice on classes of very different size; "" otherwise.

    Args:
        counts: images per class.
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
        f"rare classes hardly change top-1: look at each class's accuracy, add images, or "
        f"train with --objective.class_weights true"
    )


def class_notes(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Notes on classes without images, and on uneven ones.

    Args:
        counts: images per class of each part, "training" first.
    """
    notes = []
    for part, by_class in counts.items():
        if empty := [name for name, count in by_class.items() if not count]:
            notes.append(
                f"{len(empty)} of {len(by_class):,} classes have no {part} images: {some(empty)}"
            )
    uneven = imbalance(next(iter(counts.values())))
    return [*notes, uneven] if uneven else notes


def numbered(names: Sequence[str]) -> str:
    """The first three classes with their numbers, in words."""
    shown = [f"{number} is '{name}'" for number, name in enumerate(names[:3])]
    return ", ".join([*shown, *(["…"] if len(names) > 3 else [])])
