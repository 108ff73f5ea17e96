"""Run a search: train the supernet, choose a candidate, write the results.

search.yaml       the configuration
supernet/         run folder of the supernet
candidates.csv    all evaluated candidates and their accuracies
chosen.yaml       the best candidate, as settings for `locality train --config`
result.json       written last
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from locality.checkpoints.api import load
from locality.data import BatchLoader, ImageSource, eval_loader, open_data
from locality.errors import UserError
from locality.files import csv_text, read_json, read_text, write_atomic
from locality.settings import differences, from_yaml, replace, to_yaml
from locality.training.cost import Cost, image_counts
from locality.training.devices import create_fabric
from locality.training.engine import train
from locality.training.evaluation import evaluate
from locality.training.model import meta_model
from locality.training.optim import make_plan
from locality_papers.search import supernet
from locality_papers.search.config import SearchConfig
from locality_papers.search.space import OPTIONS, Candidate, Scores, SearchSpace, evolve

_RESULT = "result.json"


def space_of(config: SearchConfig) -> SearchSpace:
    """The search space of a search."""
    run = config.largest
    return SearchSpace(meta_model(run, image_counts(run)[2]).config, config.limits)


def shape(candidate: Candidate) -> str:
    """A candidate as text: stride/ratio of each block."""
    return " ".join(f"{OPTIONS[option][0]}/{OPTIONS[option][1]:g}" for option in candidate)


class Search:
    """A search and its folder. `run` resumes its trainings after an interruption.

    Args:
        config: the search.
        folder: its folder; created if missing.
        quiet: print nothing.
    """

    def __init__(self, config: SearchConfig, folder: Path | str, quiet: bool = False) -> None:
        self.config, self.path, self.space = config, Path(folder), space_of(config)
        fabric = create_fabric(config.run.engine)
        self.device, self.writes = fabric.device, fabric.is_global_zero
        self.wait_for_others = fabric.strategy.barrier
        self.quiet = quiet or not self.writes
        self.known: Scores = {}

    def run(self) -> dict[str, Any]:
        """Run or resume the search; returns the content of result.json.

        Raises:
            UserError: the folder holds another search; see also `train`.
        """
        if self.writes:
            self._prepare_folder()
        self.wait_for_others()
        if (self.path / _RESULT).exists():
            return read_json(self.path / _RESULT)
        train(
            self.config.largest,
            self.path / "supernet",
            quiet=self.quiet,
            components=supernet.SupernetComponents,
        )
        self.load_supernet()
        generator = np.random.default_rng([self.config.run.seed, 0])
        count = self.config.evaluations
        sampled = self.space.random(generator, count)
        if not sampled:
            raise UserError(f"none of the candidates tried is within {self.config.limits}")
        random = self.scores(sampled, "random")
        ask = partial(self.scores, by="evolution")
        evolved = evolve(self.space, ask, count, generator, sampled)
        return self._write_result({"evolution": evolved, "random": random})

    def _prepare_folder(self) -> None:
        """Check the folder and write the configuration."""
        file = self.path / "search.yaml"
        if file.exists():
            before = from_yaml(SearchConfig, read_text(file), str(file))
            if changed := [name for name, *_ in differences(before, self.config)]:
                raise UserError(
                    f"{self.path} holds a search with other settings ({', '.join(changed)}); use "
                    f"the same settings or another folder"
                )
        elif any(self.path.glob("*")):
            raise UserError(f"{self.path} is not a search folder; choose a new or empty folder")
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(file, to_yaml(self.config))

    def load_supernet(self) -> None:
        """Load the trained supernet and the images for evaluating candidates."""
        self.model = load(self.path / "supernet").to(self.device)
        self.splits = open_data(self.config.largest.data, self.config.run.seed)
        self.held_out, train = self._loader(self.splits.val, False), self.splits.train
        count = min(self.config.calibration, len(train))
        evenly = np.linspace(0, len(train) - 1, count).astype(np.int64)
        calibration = self._loader(train.subset(evenly), True)
        self.calibration = [batch.images.to(self.device) for batch in calibration]

    def _loader(self, source: ImageSource, training: bool) -> BatchLoader:
        data, prepared = self.config.run.data, self.config.run.input.at(self.space.base.img_size)
        return eval_loader(source, prepared, batch_size=64, **data.loading(training))

    def scores(self, candidates: Sequence[Candidate], by: str = "") -> Scores:
        """Top-1 and negative loss of candidates on held-out images, each evaluated once."""
        for candidate in tqdm(candidates, by, disable=self.quiet or not sys.stderr.isatty()):
            if candidate not in self.known:
                model = supernet.extract(self.model, self.space, candidate)
                supernet.calibrate(model, self.calibration)
                result = evaluate(model, self.held_out, self.device)
                self.known[candidate] = result["top1"], -result["loss"]
        return {candidate: self.known[candidate] for candidate in candidates}

    def _write_result(self, searched: dict[str, Scores]) -> dict[str, Any]:
        best = max(self.known, key=lambda candidate: self.known[candidate])
        result = {
            "model": self.config.run.model.name,
            "candidate": shape(best),
            **self.space.settings(best),
            "held_out_top1": self.known[best][0],
            "best": {by: max(scores.values())[0] for by, scores in searched.items()},
            "evaluations": {by: len(scores) for by, scores in searched.items()},
            **self.space.cost(best)._asdict(),
        }
        if self.writes:
            run = self.config.run
            model = {f"model.{name}": value for name, value in self.space.settings(best).items()}
            chosen = replace(run, model | {"weights": None, "entry": None})
            write_atomic(self.path / "chosen.yaml", to_yaml(chosen))
            rows = [
                [by, shape(candidate), top1, -loss, *self.space.cost(candidate)]
                for by, scores in searched.items()
                for candidate, (top1, loss) in scores.items()
            ]
            header = ["by", "candidate", "top1", "val_loss", *Cost._fields]
            write_atomic(self.path / "candidates.csv", csv_text([header, *rows]))
            write_atomic(self.path / _RESULT, json.dumps(result, indent=2) + "\n")
        self.wait_for_others()
        return result


def dry_run(config: SearchConfig) -> str:
    """The size of a search; needs no data if the dataset's size is known."""
    space = space_of(config)
    least, most = space.bounds()
    steps = make_plan(config.largest, image_counts(config.largest)[0]).steps
    return (
        f"{len(space):,} candidates of {config.run.model.name} in {space.blocks} blocks, "
        f"{least.parameters:,} to {most.parameters:,} parameters, "
        f"{least.macs:,} to {most.macs:,} MACs per image; limits {config.limits or 'none'}\n"
        f"{steps:,} steps of {2 + supernet.RANDOM_CANDIDATES} candidates, "
        f"{2 * config.evaluations:,} evaluations"
    )
