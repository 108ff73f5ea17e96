"""The numbers that the two papers print, each with where it stands. Never a measurement of ours.

ConViT: d'Ascoli et al., "ConViT: Improving Vision Transformers with Soft Convolutional Inductive
Biases", ICML 2021 (arXiv:2103.10697v2). CvT: Wu et al., "CvT: Introducing Convolutions to Vision
Transformers", ICCV 2021 (arXiv:2103.15808v1).

A number is found by the table or figure it stands in, its row, and what it measures:

    value("convit/table-2", "5%", "ConViT-S/top1")  →  Published(…, value=47.8, unit="%", …)

Numbers from running text stand under "text". Where a paper contradicts itself both numbers are
here, and `note` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from locality.errors import unknown

_DEIT = "ImageNet-1k from scratch at 224 px, 300 epochs, DeiT's recipe"


@dataclass(frozen=True)
class Published:
    """One number in a paper.

    Attributes:
        place: "convit/table-2", "cvt/text".
        row: which line of it, in the paper's words.
        metric: what was measured: "top1", "top5", "parameters", "flops", "speed", …
        value: as printed.
        unit: "%" (also for differences in accuracy, in points), "M", "G", "images/s", "".
        protocol: how it was obtained.
        note: what it contradicts, or what else has to be known.
    """

    place: str
    row: str
    metric: str
    value: float
    unit: str
    protocol: str = ""
    note: str = ""


# Everything else is in per cent.
_UNITS = {"parameters": "M", "flops": "G", "speed": "images/s"} | dict.fromkeys(
    ("heads", "embed_dim", "image_size"), ""
)

Rows = Mapping[str, tuple[float | None, ...]]


def _table(
    place: str,
    metrics: str,
    rows: Rows,
    protocol: str,
    notes: Mapping[tuple[str, str], str] | None = None,
) -> Iterator[Published]:
    """One record per number: `metrics` names the columns, None is a cell the paper leaves open."""
    for row, values in rows.items():
        for metric, number in zip(metrics.split(), values, strict=True):
            if number is not None:
                note = (notes or {}).get((row, metric), "")
                unit = _UNITS.get(metric, "%")
                yield Published(place, row, metric, number, unit, protocol, note)


def _convit() -> Iterator[Published]:
    yield from _table(
        "convit/table-1",
        "heads embed_dim parameters flops speed top1 top5",
        {
            "DeiT-Ti": (3, 192, 6, 1, 1442, 72.2, None),
            "ConViT-Ti": (4, 192, 6, 1, 734, 73.1, 91.7),
            "DeiT-Ti+": (4, 256, 10, 2, 1036, 75.9, 93.2),
            "ConViT-Ti+": (4, 256, 10, 2, 625, 76.7, 93.6),
            "DeiT-S": (6, 384, 22, 4.3, 587, 79.8, None),
            "ConViT-S": (9, 432, 27, 5.4, 305, 81.3, 95.7),
            "DeiT-S+": (9, 576, 48, 10, 480, 79.0, 94.4),
            "ConViT-S+": (9, 576, 48, 10, 382, 82.2, 95.9),
            "DeiT-B": (12, 768, 86, 17, 187, 81.8, None),
            "ConViT-B": (16, 768, 86, 17, 141, 82.4, 95.9),
            "DeiT-B+": (16, 1024, 152, 30, 114, 77.5, 93.5),
            "ConViT-B+": (16, 1024, 152, 30, 96, 82.5, 95.9),
        },
        f"{_DEIT}; '+' models: learning rate 4e-4, batch 512; speed: Quadro GP100, batch 128; "
        f"DeiT-Ti, -S and -B quoted from the DeiT paper; FLOPs without the products QKᵀ and AV",
        {
            ("DeiT-S+", "top1"): "Table 3 prints 79.1 for this model",
            ("ConViT-S", "top1"): "Table 2 prints 81.4 for this model",
            ("ConViT-S", "top5"): "Table 2 prints 95.8 for this model",
            ("DeiT-S", "top1"): "Table 2 prints 79.9 for this model",
            ("DeiT-S", "flops"): "CvT's Table 3 prints 4.6 for this model",
            ("DeiT-B", "flops"): "CvT's Table 3 prints 17.6 for this model",
        },
    )
    subsets = "fraction f of each class's images, epochs times 1/f; otherwise " + _DEIT
    yield from _table(
        "convit/table-2",
        "DeiT-S/top1 ConViT-S/top1 gap/top1 DeiT-S/top5 ConViT-S/top5 gap/top5",
        {
            "5%": (34.8, 47.8, 37, 57.8, 70.7, 22),
            "10%": (48.0, 59.6, 24, 71.5, 80.3, 12),
            "30%": (66.1, 73.7, 12, 86.0, 90.7, 5),
            "50%": (74.6, 78.2, 5, 91.8, 93.8, 2),
            "100%": (79.9, 81.4, 2, 95.0, 95.8, 1),
        },
        subsets,
        {
            ("10%", "DeiT-S/top1"): "the text says 46.5",
            ("10%", "ConViT-S/top1"): "the text says 59.5",
        },
    )
    yield from _table(
        "convit/table-3",
        "full 10%",
        {
            "a": (82.2, 59.7),
            "b": (82.0, 57.4),
            "c": (81.4, 56.9),
            "d": (81.6, 54.6),
            "e": (79.1, 47.8),
            "f": (78.6, 54.3),
            "g": (73.7, 44.8),
        },
        "top-1 of ConViT-S+ and its ablations; " + _DEIT,
        {
            ("e", "full"): "Table 1 prints 79.0 for this model (DeiT-S+)",
            ("f", "full"): "the text calls this row [e]",
            ("g", "full"): "the text calls this row [f]",
        },
    )
    yield from _table(
        "convit/table-4",
        "none hard",
        {"DeiT-S": (79.8, 80.9), "DeiT-B": (81.8, 83.0), "ConViT-S+": (82.2, 82.9)},
        "top-1 without and with hard distillation from RegNetY-16GF (84M); " + _DEIT,
    )
    yield from _table(
        "convit/table-5",
        "masked unmasked",
        {"DeiT-Ti": (38.3, 72.2), "ConViT-Ti": (67.1, 73.1)},
        "top-1 with and without the position embedding at test time; " + _DEIT,
    )
    yield from _table(
        "convit/table-6",
        "content position none",
        {"3": (62.3, 63.5, 73.1), "5": (35.0, 53.1, 73.1), "10": (1.3, 46.8, 73.1)},
        "top-1 of ConViT-Ti with content or positional attention masked in the first layers",
    )
    yield from _table(
        "convit/text",
        "top1",
        {
            "DeiT-S 10%": (46.5,),
            "ConViT-S 10%": (59.5,),
            "best of several thousand convolutional nets, 10% (Zhai et al.)": (56.4,),
            "ConViT-Ti+ on CIFAR-100 after 1000 epochs": (82.1,),
        },
        "section 3, and appendix C",
        {
            ("DeiT-S 10%", "top1"): "Table 2 prints 48.0",
            ("ConViT-S 10%", "top1"): "Table 2 prints 59.6",
            (
                "ConViT-Ti+ on CIFAR-100 after 1000 epochs",
                "top1",
            ): "the text says '10M parameters', which only the Ti+ models have",
        },
    )
    yield from _table(
        "convit/text",
        "difference",
        {
            "d over e, full data": (2.5,),
            "b over e, full data": (2.9,),
            "a over e, full data": (3.1,),
            "d over e, 10%": (6.8,),
            "c over d, 10%": (2.3,),
            "b over d, 10%": (2.8,),
            "a over d, 10%": (5.1,),
            "g over e, full data": (-5.4,),
            "f over e, full data": (-0.5,),
            "f over e, 10%": (6.5,),
        },
        "section 4, on Table 3",
    )


def _cvt() -> Iterator[Published]:
    scratch = "ImageNet-1k from scratch, 300 epochs"
    yield from _table(
        "cvt/table-2",
        "parameters flops",
        {"CvT-13": (19.98, 4.53), "CvT-21": (31.54, 7.13), "CvT-W24": (276.7, 60.86)},
        "at 224 px",
        {("CvT-W24", "parameters"): "section 4.1 says 298.3M, which no reading of Table 2 gives"},
    )
    yield from _table(
        "cvt/table-3",
        "parameters image_size flops top1 real v2",
        {
            "ResNet-50": (25, 224, 4.1, 76.2, 82.5, 63.3),
            "ResNet-101": (45, 224, 7.9, 77.4, 83.7, 65.7),
            "ResNet-152": (60, 224, 11, 78.3, 84.1, 67.0),
            "ViT-B/16": (86, 384, 55.5, 77.9, 83.6, None),
            "ViT-L/16": (307, 384, 191.1, 76.5, 82.2, None),
            "DeiT-S": (22, 224, 4.6, 79.8, 85.7, 68.5),
            "DeiT-B": (86, 224, 17.6, 81.8, 86.7, 71.5),
            "PVT-Small": (25, 224, 3.8, 79.8, None, None),
            "PVT-Medium": (44, 224, 6.7, 81.2, None, None),
            "PVT-Large": (61, 224, 9.8, 81.7, None, None),
            "T2T-ViT_t-14": (22, 224, 6.1, 80.7, None, None),
            "T2T-ViT_t-19": (39, 224, 9.8, 81.4, None, None),
            "T2T-ViT_t-24": (64, 224, 15.0, 82.2, None, None),
            "TNT-S": (24, 224, 5.2, 81.3, None, None),
            "TNT-B": (66, 224, 14.1, 82.8, None, None),
            "CvT-13": (20, 224, 4.5, 81.6, 86.7, 70.4),
            "CvT-21": (32, 224, 7.1, 82.5, 87.2, 71.3),
            "CvT-13↑384": (20, 384, 16.3, 83.0, 87.9, 71.9),
            "CvT-21↑384": (32, 384, 24.9, 83.3, 87.7, 71.9),
            "CvT-13-NAS": (18, 224, 4.1, 82.2, 87.5, 71.3),
        },
        scratch,
        {("CvT-13", "top1"): "the text's comparisons with PVT-Small, T2T-14, TNT-S take 81.5"},
    )
    yield from _table(
        "cvt/table-3",
        "parameters image_size flops top1 real v2",
        {
            "BiT-M↑480 22k": (928, 480, 837, 85.4, None, None),
            "ViT-B/16↑384 22k": (86, 384, 55.5, 84.0, 88.4, None),
            "ViT-L/16↑384 22k": (307, 384, 191.1, 85.2, 88.4, None),
            "ViT-H/16↑384 22k": (632, 384, None, 85.1, 88.7, None),
            "CvT-13↑384 22k": (20, 384, 16, 83.3, 88.7, 72.9),
            "CvT-21↑384 22k": (32, 384, 25, 84.9, 89.8, 75.6),
            "CvT-W24↑384 22k": (277, 384, 193.2, 87.7, 90.6, 78.8),
        },
        "pre-trained on ImageNet-22k, fine-tuned on ImageNet-1k",
    )
    yield from _table(
        "cvt/table-4",
        "parameters cifar10 cifar100 pets flowers102",
        {
            "BiT-M": (928, 98.91, 92.17, 94.46, 99.30),
            "ViT-B/16": (86, 98.95, 91.67, 94.43, 99.38),
            "ViT-L/16": (307, 99.16, 93.44, 94.73, 99.61),
            "ViT-H/16": (632, 99.27, 93.82, 94.82, 99.51),
            "CvT-13": (20, 98.83, 91.11, 93.25, 99.50),
            "CvT-21": (32, 99.16, 92.88, 94.03, 99.62),
            "CvT-W24": (277, 99.39, 94.09, 94.73, 99.72),
        },
        "top-1 after pre-training on ImageNet-22k and fine-tuning at 384 px",
    )
    yield from _table(
        "cvt/table-5",
        "parameters top1",
        {
            "a": (22, 79.8),
            "b": (22, 78.0),
            "c": (20, 81.5),
            "d": (20, 81.4),
            "e": (20, 81.4),
            "f": (20, 81.6),
        },
        scratch,
    )
    yield from _table(
        "cvt/table-6",
        "parameters top1",
        {"a": (19.5, 80.7), "b": (19.9, 81.1), "c": (20.3, 81.4), "d": (20.0, 81.6)},
        scratch,
    )
    yield from _table(
        "cvt/table-7",
        "parameters flops top1",
        {"a": (20, 6.55, 82.3), "b": (20, 4.53, 81.6)},
        scratch,
    )
    yield from _table(
        "cvt/table-8",
        "top1",
        {"a": (80.6,), "b": (80.8,), "c": (81.0,), "d": (81.6,)},
        scratch,
        {("d", "top1"): "the text says 81.5"},
    )
    yield from _table(
        "cvt/text",
        "parameters",
        {
            "CvT-W24": (298.3,),
            "smallest of the search space": (13.66,),
            "largest of the search space": (19.88,),
        },
        "sections 4.1 and 4.2",
        {("CvT-W24", "parameters"): "Table 2 prints 276.7"},
    )
    yield from _table(
        "cvt/text",
        "flops",
        {"smallest of the search space": (2.59,), "largest of the search space": (4.03,)},
        "section 4.2",
        {
            (
                "largest of the search space",
                "flops",
            ): "stride 1 in all blocks, which the space contains, costs 6.55 (Table 7)"
        },
    )
    yield from _table(
        "cvt/text",
        "difference",
        {
            "CvT-21 over DeiT-B": (0.5,),
            "CvT-13 over PVT-Small": (1.7,),
            "CvT-13 over T2T-ViT_t-14": (0.8,),
            "CvT-13 over TNT-S": (0.2,),
            "CvT-13 over ResNet-152": (3.2,),
            "CvT-W24↑384 22k over ViT-L/16↑384 22k": (2.5,),
            "table-5 b over a": (-1.8,),
            "table-6 a over d": (-0.8,),
            "table-6 c over b": (0.3,),
            "table-6 c over d": (-0.1,),
            "table-7 b over a": (-0.3,),
        },
        "sections 4.2 and 4.4, on Tables 3 to 7",
        {
            ("CvT-21 over DeiT-B", "difference"): "by Table 3 it is 0.7",
            ("CvT-13 over PVT-Small", "difference"): "by Table 3 it is 1.8",
            ("CvT-13 over T2T-ViT_t-14", "difference"): "by Table 3 it is 0.9",
            ("CvT-13 over TNT-S", "difference"): "by Table 3 it is 0.3",
            ("CvT-13 over ResNet-152", "difference"): "by Table 3 it is 3.3",
            ("table-6 a over d", "difference"): "by Table 6 it is −0.9",
            ("table-6 c over d", "difference"): "by Table 6 it is −0.2",
            ("table-7 b over a", "difference"): "by Table 7 it is −0.7",
        },
    )


COMPUTED = "computed from the table"
"""The note of differences that our tables show and the paper leaves to the reader."""


def _differences(printed: Iterable[Published]) -> Iterator[Published]:
    at = {(item.place, item.row, item.metric): item for item in printed}

    def less(place: str, row: str, metric: str, first: str, second: str, of: str) -> Published:
        one, other = at[place, row, first], at[place, of, second]
        difference = round(one.value - other.value, 2)
        return Published(place, row, metric, difference, "%", one.protocol, COMPUTED)

    for row in "abcdfg":
        for part in ("full", "10%"):
            yield less("convit/table-3", row, f"{part} over e", part, part, of="e")
    for row in ("DeiT-S", "DeiT-B", "ConViT-S+"):
        yield less("convit/table-4", row, "gain", "hard", "none", of=row)
    for row in ("DeiT-Ti", "ConViT-Ti"):
        yield less("convit/table-5", row, "loss", "unmasked", "masked", of=row)


PUBLISHED: tuple[Published, ...] = (*_convit(), *_cvt(), *_differences(_convit()))

MODELS: dict[str, str] = {
    "DeiT-Ti": "deit_tiny",
    "ConViT-Ti": "convit_tiny",
    "DeiT-Ti+": "deit_tiny_plus",
    "ConViT-Ti+": "convit_tiny_plus",
    "DeiT-S": "deit_small",
    "ConViT-S": "convit_small",
    "DeiT-S+": "deit_small_plus",
    "ConViT-S+": "convit_small_plus",
    "DeiT-B": "deit_base",
    "ConViT-B": "convit_base",
    "DeiT-B+": "deit_base_plus",
    "ConViT-B+": "convit_base_plus",
    "CvT-13": "cvt_13",
    "CvT-21": "cvt_21",
    "CvT-W24": "cvt_w24",
    "CvT-13-NAS": "cvt_13_nas",
}
"""The papers' names of models, and ours."""

_INDEX = {(item.place, item.row, item.metric): item for item in PUBLISHED}


def find(place: str, row: str, metric: str) -> Published | None:
    """The number that stands at this place, if the paper prints one."""
    return _INDEX.get((place, row, metric))


def value(place: str, row: str, metric: str) -> Published:
    """The number that stands at this place.

    Raises:
        UserError: if the paper prints none there, with the nearest that it does.
    """
    found = find(place, row, metric)
    if found is None:
        raise unknown("published number", "/".join((place, row, metric)), map("/".join, _INDEX))
    return found


def rows(place: str) -> dict[str, dict[str, Published]]:
    """A whole table: row → metric → number, in the paper's order.

    Raises:
        UserError: if the paper prints no numbers there.
    """
    found: dict[str, dict[str, Published]] = {}
    for item in PUBLISHED:
        if item.place == place:
            found.setdefault(item.row, {})[item.metric] = item
    if not found:
        raise unknown("table of a paper", place, {item.place for item in PUBLISHED})
    return found
