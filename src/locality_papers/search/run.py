"""Run a search: train the supernet, choose a candidate, write the results.

search.yaml       the configuration
warm-up/          run folder of the largest candidate, whose losses rank images by difficulty
start/            its weights, hidden units sorted by importance
round-1/ …        run folders of the supernet, one per share of the images
difficulty.npy    loss of each training image after the warm-up
candidates.csv    all evaluated candidates and their accuracies
chosen.yaml       the best candidate, as settings for `locality train --config`
chosen/           its weights from the supernet
page.html         a report
result.json       written last
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from locality import checks, settings
from locality.checkpoints import save
from locality.checkpoints.api import load
from locality.checkpoints.format import WEIGHTS
from locality.data import (
    BatchLoader,
    DataSplits,
    ImageSource,
    Preprocessing,
    eval_loader,
    open_data,
)
from locality.data.sampling import class_fraction
from locality.errors import UserError
from locality.figures import charts, style
from locality.files import CsvTable, atomic_file, write_atomic
from locality.models import ImageClassifier, variant
from locality.settings import replace
from locality.templates import render
from locality.training import RunFolder, train
from locality.training.cost import format_duration, image_counts, training_speed
from locality.training.devices import create_fabric
from locality.training.engine import launch
from locality.training.evaluation import evaluate
from locality.training.model import meta_model
from locality.training.optim import make_plan
from locality_papers.search import supernet
from locality_papers.search.config import ROUNDS, SEARCH_FILE, SearchConfig, read_search
from locality_papers.search.space import Candidates, Score, Scores, SearchSpace, evolve, prune

# Between rounds, da_nas drops this share of the options, judged by this many candidates.
_DROPPED, _PRUNING = 0.25, 64
_AXES = {"parameters": "parameters", "macs": "multiply-accumulates per image"}
_CHUNK_SIZE = 8  # candidates evaluated between writes
_COLUMNS = ("step", "round", "by", "number", "shape", "top1", "val_loss", *_AXES)


def space_of(config: SearchConfig) -> SearchSpace:
    """The search space of a search."""
    run = config.largest
    return SearchSpace(meta_model(run, image_counts(run)[2]).config)


class Search:
    """A search and its folder. `run` resumes after any interruption.

    Args:
        config: the search.
        folder: its folder; created if missing.
        quiet: print nothing.
    """

    def __init__(self, config: SearchConfig, folder: Path | str, quiet: bool = False) -> None:
        self.config, self.place = config, RunFolder(folder)
        self.path = self.place.path
        self.space = space_of(config)
        self.candidates = Candidates(self.space, None, config.limits)
        fabric = create_fabric(config.run.engine)
        self.device, self.writes = fabric.device, fabric.is_global_zero
        self.wait_for_others = fabric.strategy.barrier
        self.quiet = quiet or not self.writes
        self.table = CsvTable(self.path / "candidates.csv", _COLUMNS, ("by", "shape"))
        self.known: dict[tuple[int, int], Score] = {}

    def run(self) -> dict[str, Any]:
        """Run or resume the search; returns the content of result.json.

        Raises:
            UserError: the folder holds another search; see also `train`.
        """
        if (result := self.place.read_result()) is not None:
            checks.shaped(str(self.place.result_file), result, {"best": dict, "candidate": int})
            return result
        try:
            if self.writes:
                self._prepare_folder()
            warm_up, *rounds = self.config.rounds()
            train(warm_up, self.path / "warm-up", quiet=self.quiet)
            self.begin()
            weights = self._after_warm_up()
            candidates = self.candidates
            for number, run in enumerate(rounds, 1):
                run = replace(run, {"model.weights": str(weights), "model.entry": None})
                weights = self.path / f"round-{number}"
                training = supernet.SupernetTraining(
                    run,
                    RunFolder(weights),
                    self.quiet,
                    splits=self.easiest(run.data.fraction),
                    options=candidates.options,
                )
                launch(training)
                self.load_supernet(number)
                if number < len(rounds):
                    candidates = self._pruned(candidates)
            return self._write_result(self._searched(candidates))
        finally:
            self.place.lock.release()

    def _prepare_folder(self) -> None:
        """Lock the folder and write the configuration."""
        file = self.path / SEARCH_FILE
        if not file.exists() and any(entry.name != "lock" for entry in self.path.glob("*")):
            raise UserError(f"{self.path} is not a search folder; choose a new or empty folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self.place.lock.acquire()
        if file.exists():
            found = settings.differences(read_search(self.path), self.config)
            how = settings.with_role(SearchConfig, "how")
            changed = [name for name, *_ in found if name not in how]
            if changed:
                raise UserError(
                    f"{self.path} holds a search with other settings ({', '.join(changed)}); use "
                    f"the same settings, --resume {self.path}, or another folder"
                )
        write_atomic(file, settings.to_yaml(self.config))
        run = self.config.run
        start = {
            "step": 0,
            "workers": run.data.workers,
            "device": str(self.device),
            "precision": run.engine.precision,
        }
        self.place.record_start(run.seed, **start)

    def begin(self) -> None:
        """Open the data and load earlier scores."""
        self.splits = open_data(self.config.largest.data, self.config.run.seed)
        self.held_out, train = self._loader(self.splits.val, False), self.splits.train
        count = min(self.config.calibration, len(train))
        evenly = np.linspace(0, len(train) - 1, count).astype(np.int64)
        calibrating = self._loader(train.subset(evenly), True)
        self.calibration = [batch.images.to(self.device) for batch in calibrating]
        if self.writes:
            self.table.cut(2**62)
        self.wait_for_others()
        for row in self.table.rows(2**62):
            score = float(row["top1"]), -float(row["val_loss"])
            self.known[int(row["round"]), int(row["number"])] = score

    def _loader(self, source: ImageSource, training: bool) -> BatchLoader:
        data, prepared = self.config.run.data, self.config.run.input.at(self.space.base.img_size)
        return eval_loader(
            source,
            prepared,
            batch_size=64,
            on_bad_image=data.on_bad(training),
            max_bad_images=data.max_bad_images,
            workers=data.workers,
        )

    @torch.no_grad()
    def _after_warm_up(self) -> Path:
        """Record the loss of each image if needed; return the supernet's initial weights."""
        model, start = load(self.path / "warm-up").to(self.device), self.path / "start"
        file, train = self.path / "difficulty.npy", self.splits.train
        if min(ROUNDS[self.config.method]) < 1 and not file.exists():
            losses = np.full(len(train), np.inf, np.float32)  # unreadable images are the hardest
            for batch in self._loader(train, True):
                logits = model(batch.images.to(self.device)).float().cpu()
                found = F.cross_entropy(logits, batch.targets, reduction="none")
                losses[batch.indices] = found.numpy()
            if self.writes:
                with atomic_file(file) as opened:
                    np.save(opened, losses)
        if self.writes and not (start / WEIGHTS).exists():  # written last by `save`
            supernet.order_hidden_units(model)
            save(model, start)
        self.wait_for_others()
        return start

    def easiest(self, fraction: float) -> DataSplits:
        """The splits with the fraction of each class's training images with the lowest loss."""
        if fraction == 1:
            return self.splits
        train = self.splits.train
        order = np.argsort(np.load(self.path / "difficulty.npy"), kind="stable")
        kept = order[class_fraction(train.labels[order], fraction, seed=None)]
        return dataclasses.replace(self.splits, train=train.subset(np.sort(kept)))

    def load_supernet(self, number: int) -> None:
        """Load the supernet of a round, for evaluating candidates."""
        self.round, self.model = number, load(self.path / f"round-{number}").to(self.device)

    def scores(self, numbers: Sequence[int], by: str) -> Scores:
        """Evaluate candidates, each only once; `by` is recorded for new ones."""
        new = [number for number in numbers if (self.round, number) not in self.known]
        chunks = range(0, len(new), _CHUNK_SIZE)
        for start in tqdm(chunks, by, disable=self.quiet or not sys.stderr.isatty()):
            found = _map_over_ranks(new[start : start + _CHUNK_SIZE], self.score)
            for number, (top1, loss) in found.items():
                self.known[self.round, number] = top1, loss
                row = {"round": self.round, "by": by, "number": number, "top1": top1}
                choices = (f"{stride}/{ratio:g}" for stride, ratio in self.space.choices(number))
                row |= {"step": len(self.known), "val_loss": -loss, "shape": " ".join(choices)}
                if self.writes:
                    self.table.append(row | self.space.cost(number)._asdict())
        return {number: self.known[self.round, number] for number in numbers}

    def score(self, number: int) -> Score:
        """A candidate's accuracy and loss on held-out images, with calibrated BatchNorm."""
        found = evaluate(self._calibrated(number), self.held_out, self.device)
        return found["top1"], -found["loss"]

    def _calibrated(self, number: int) -> ImageClassifier:
        candidate = supernet.extract(self.model, self.space, number)
        supernet.calibrate(candidate, self.calibration)
        return candidate

    def _pruned(self, candidates: Candidates) -> Candidates:
        """The candidates without the worst options, judged by the current weights."""
        generator = np.random.default_rng([self.config.run.seed, self.round])
        scores = self.scores(candidates.random(generator, _PRUNING), "pruning")
        count = round(_DROPPED * self.space.blocks * len(self.space.options))
        return Candidates(self.space, prune(candidates, scores, count), self.config.limits)

    def _searched(self, candidates: Candidates) -> dict[str, Scores]:
        """The scores of evolution and of random search, with equal budgets."""
        generator = np.random.default_rng([self.config.run.seed, 0])
        sampled = candidates.random(generator, self.config.evaluations)
        by_chance = self.scores(sampled, "random")
        ask = partial(self.scores, by="evolution")
        evolved = evolve(candidates, ask, self.config.evaluations, generator, sampled)
        return {"evolution": evolved, "random": by_chance}

    def _write_result(self, searched: Mapping[str, Scores]) -> dict[str, Any]:
        """Write the result."""
        seen = searched["evolution"] | searched["random"]
        number = max(seen, key=lambda each: seen[each])
        found = self.space.settings(number)
        result = {
            "model": self.config.run.model.name,
            "candidate": number,
            **{name.rpartition(".")[2]: value for name, value in found.items()},
            "held_out_top1": seen[number][0],
            "best": {by: max(scores.values())[0] for by, scores in searched.items()},
            "evaluations": {by: len(scores) for by, scores in searched.items()},
            **self.space.cost(number)._asdict(),
        }
        if self.writes:
            config = self.config.run
            chosen = replace(config, found | {"model.weights": None, "model.entry": None})
            write_atomic(self.path / "chosen.yaml", settings.to_yaml(chosen))
            prepared = Preprocessing(
                **vars(config.input.at(self.space.base.img_size)),
                exif=config.data.exif,
                grey_bits=config.data.grey_bits,
            )
            model, classes = self._calibrated(number), self.splits.classes
            save(model, self.path / "chosen", preprocessing=prepared, classes=classes)
            write_atomic(self.path / "page.html", self._page(result))
            self.place.write_json(self.place.result_file, result)
        self.wait_for_others()
        return result

    def _page(self, result: Mapping[str, Any]) -> str:
        rows = [row for row in self.table.rows(2**62) if int(row["round"]) == self.round]
        panels = [
            style.inline_svg(drawn, name)
            for name in _AXES
            if (drawn := charts.chart(_draw_candidates, rows, name, _AXES[name]))
        ]
        paper = SearchSpace(variant("cvt_13").config)
        theirs = paper.choices(paper.index(variant("cvt_13_nas").config))
        return render(
            "locality_papers.search",
            "search.html",
            result=result,
            config=self.config,
            folder=self.path,
            panels=panels,
            shapes={
                "CvT-13-NAS, as the paper describes it": theirs,
                "found here": self.space.choices(result["candidate"]),
            },
            size=len(self.space),
            images=len(self.splits.val),
        )


def _draw_candidates(axes: Any, rows: Sequence[Mapping[str, str]], cost: str, title: str) -> None:
    """Candidates of a search by cost and accuracy, with the Pareto front.

    Args:
        axes: axes to draw on.
        rows: rows of `candidates.csv`: "by", "top1" and the costs.
        cost: column of the cost.
        title: label of its axis.
    """
    points = sorted({(float(row[cost]), float(row["top1"])) for row in rows})
    for by, colour in (("random", style.FAINT), ("evolution", style.family_colour("cvt"))):
        own = [(float(row[cost]), float(row["top1"])) for row in rows if row["by"] == by]
        axes.plot(*np.reshape(own, (-1, 2)).T, ".", color=colour, alpha=0.6, label=by)
    front = np.maximum.accumulate([top1 for _, top1 in points])
    look: dict[str, Any] = {"color": style.INK, "linewidth": 1.2, "drawstyle": "steps-post"}
    axes.plot([at for at, _ in points], front, label="Pareto front", **look)
    axes.locator_params(axis="x", nbins=4)
    charts.label_axes(axes, title, "top-1 on held-out images (%)")


def _map_over_ranks(numbers: Sequence[int], work: Callable[[int], Score]) -> Scores:
    """The results of `work` on each number, computed by all ranks together."""
    if not dist.is_initialized():
        return {number: work(number) for number in numbers}
    parts: list[Any] = [None] * dist.get_world_size()
    own = numbers[dist.get_rank() :: len(parts)]
    dist.all_gather_object(parts, {number: work(number) for number in own})
    merged = {number: score for part in parts for number, score in part.items()}
    return {number: merged[number] for number in numbers}


# Operations per second of vision transformers on an H100 in bf16.
_H100 = 2e14


def dry_run(config: SearchConfig) -> str:
    """The cost of a search; needs no data if the dataset's size is known."""
    space, runs = space_of(config), config.rounds()
    fitting = Candidates(space, None, config.limits)
    digits = space.digits(np.random.default_rng(0).integers(0, len(space), 2**14))
    inside = space.fits(digits, fitting.limits).mean()
    mean = space.total_cost("macs", digits).mean()
    least, most = space.bounds()
    plans = [make_plan(run, image_counts(run)[0]) for run in runs]
    step = most.macs + least.macs + supernet.RANDOM_CANDIDATES * mean  # of one image
    held_out = round(plans[0].epoch_images * config.held_out / (1 - config.held_out))
    asked = 2 * config.evaluations + _PRUNING * (len(plans) - 2)
    macs = 3 * (plans[0].images * most.macs + step * sum(plan.images for plan in plans[1:]))
    macs += asked * (config.calibration + held_out) * mean
    speed = training_speed(config.largest, image_counts(config.largest)[2], torch.get_num_threads())
    names = ["warm-up", *(f"round {n}" for n in range(1, len(runs)))]
    rows = {
        "space": f"{len(space):,} candidates of {config.run.model.name}, {space.blocks} blocks",
        "parameters": f"{least.parameters:,} to {most.parameters:,}",
        "MACs per image": f"{least.macs:,} to {most.macs:,}",
        "limits": f"{config.limits or 'none'}; {100 * inside:.3g}% of the candidates satisfy them",
        **{
            name: f"{plan.steps:,} steps of {plan.batch_size:,} of {run.data.fraction:.0%} images"
            for name, run, plan in zip(names, runs, plans, strict=True)
        },
        "evaluations": f"{asked:,} candidates, each on {held_out:,} held-out training images",
        "arithmetic": f"{2 * macs:.3g} operations",
        "time": f"about {format_duration(macs / speed)} with one process "
        f"here, or {2 * macs / _H100 / 3600:.3g} GPU hours at {_H100:.0e} operations per second",
    }
    return "\n".join(f"{name:<14}  {value}" for name, value in rows.items())
