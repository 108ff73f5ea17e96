"""Beyond the papers: models compared with a CNN and with baselines on pixels."""

from sklearn.metrics.pairwise import rbf_kernel
from sklearn.svm import SVC

from locality.analysis.baselines import (
    read_baselines,
    record_baselines,
    split_pixels,
    unsized,
)
from locality.analysis.runs import percent
from locality.data import open_data
from locality.data.config import DATASETS
from locality.runner.runs import Request
from locality.training.cost import image_counts
from locality_papers.experiment import Column, Effect, Experiment, experiment, largest, line
from locality_papers.measures import TOP1
from locality_papers.runs import Scale
from locality_papers.table import Measure

_MODELS = {"ConViT": "ConViT-S", "DeiT": "DeiT-S", "CvT": "CvT-13", "CNN": "CNN"}


def _baseline(name: str) -> Measure:
    def take(run: Request) -> float:
        record_baselines([run.folder])
        known = read_baselines(run.folder)
        return next(top1 for label, top1 in known.items() if unsized(label) == name)

    return Measure(f"{name} on pixels", take=take, accuracy=True)


def _support_vectors(run: Request) -> float:
    """Top-1 of scikit-learn's support vector machine with its default Gaussian kernel."""
    config, data = run.config, run.config.data
    splits, preprocessing = open_data(data, config.seed), config.input.at(config.model.img_size)
    train, labels, val, targets = split_pixels(splits, preprocessing, data.workers)
    # The kernel by matrix products: minutes less than by libsvm's loops.
    gamma = 1 / (train.shape[1] * train.var())  # SVC's
    model = SVC(kernel="precomputed").fit(rbf_kernel(train, gamma=gamma), labels)
    return float(100 * model.score(rbf_kernel(val, train, gamma=gamma), targets))


_SVM = "support vector machine"
PIXELS = {
    name: _baseline(name) for name in ("chance", "nearest neighbour", "logistic regression")
} | {_SVM: Measure(f"{_SVM} on pixels", take=_support_vectors, accuracy=True)}
"""Baselines on the pixels of a run's training and validation images."""


@experiment("beyond/baselines", "Models, a CNN, and baselines on pixels, on the same images")
def baselines(t: Experiment, s: Scale) -> None:
    """Top-1 of each model family and of pixel baselines, on fractions of the data."""
    schedules = {label: s.base(role).schedule for label, role in _MODELS.items()}
    steps = {label: f"{of.length:g} {of.unit}" for label, of in schedules.items()}
    same = "" if len(set(steps.values())) == 1 else f" (the CNN: {steps['CNN']})"
    t.about = (
        f"Not in the papers. Top-1 on fractions of the training images, after {steps['ConViT']}"
        f"{same}. The baselines on pixels use the same images at no more than 32 pixels and "
        "are not tuned. Bands are 95% intervals over a point's seeds. Whether two models are "
        "equally good is not tested."
    )
    t.columns = {percent(fraction): Column(percent(fraction)) for fraction in s.fractions}
    for part, fraction in zip(t.columns, s.fractions, strict=True):
        for label, role in _MODELS.items():
            t.run(label, part, TOP1, role, fraction=fraction)
        for label, measure in PIXELS.items():
            t.run(label, part, measure, _MODELS["ConViT"], fraction=fraction)
        for label in ("ConViT", "DeiT", "CvT"):
            text = f"With {part} of the images, is {label} above"
            t.ask(f"{text} all baselines on pixels?", _above_all(label, part))
            t.ask(f"{text} the CNN?", (label, part), ("CNN", part))
    colours = {"ConViT": "convit", "DeiT": "deit", "CvT": "cvt", "CNN": "other"}
    colours |= {"nearest neighbour": "ink", "logistic regression": "", _SVM: "depth:0.5"}
    trained = [s.runs(_MODELS["ConViT"], fraction=f, seeds=(0,))[0].config for f in s.fractions]
    counts = dict(zip((image_counts(of)[0] for of in trained), t.columns, strict=True))
    lines = (
        line(label, {n: (label, part) for n, part in counts.items()}, colour, label in PIXELS,
             label in _MODELS)
        for label, colour in colours.items()
    )  # fmt: skip
    title = DATASETS[s.dataset].title or s.dataset
    t.panel(title, "training images", "top-1, %", *lines, log_x=True)


def _above_all(row: str, part: str) -> Effect:
    return lambda v: v[row, part] - largest(*(v[name, part] for name in PIXELS))


@experiment("beyond/trials", "Choosing each model's recipe, on images of their own")
def trials(t: Experiment, s: Scale) -> None:
    """The scale's `trials` for each model, one seed; no image is among those of other runs."""
    t.about = (
        "Not in the papers. Top-1 of one run each on half of the training images that no other run "
        "sees, evaluated on the rest of those. Each model's best recipe is that of its other runs."
    )
    t.columns = {role: Column(role) for role in _MODELS.values()}
    for row, settings in s.trials.items():
        for role in _MODELS.values():
            chosen = {name.replace(".", "__"): value for name, value in settings.items()}
            chosen |= {"data__train_part": (0.9, 0.945), "data__val_part": (0.945, 1.0)}
            t.run(row, role, TOP1, role, fraction=1.0, seeds=s.seeds[:1], label=row, **chosen)
