"""`locality benchmark`: speed and memory beside a peer with equal weights."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locality.commands.parsing import MODEL, Parser, add_model_options, table
from locality.errors import UserError
from locality.files import write_atomic


def main(arguments: Sequence[str]) -> None:
    """Measure each model in a process of its own and print (and write) the results."""
    from locality.benchmark import BenchmarkConfig, run_benchmark, to_table
    from locality.models.variants import VARIANTS

    parser = Parser(
        "benchmark",
        "Images per second of inference and of a training step, peak memory and what the backward "
        "pass keeps, beside a peer with equal weights; contenders take turns in one process.",
    )
    parser.add_argument("models", nargs="+", help=f"name of an architecture, or {MODEL}")
    add_model_options(parser)
    parser.add_class_arguments(BenchmarkConfig, None)
    parser.add_argument("--output", type=str | None, default=None, help="write JSON here as well")
    options = parser.read(arguments)
    settings = {key: value for key, value in vars(options).items() if key not in _OWN}
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    config = BenchmarkConfig(**settings)
    opened = {}
    for name in options.models:
        if name not in VARIANTS:
            from locality.commands.opening import open_given

            opened[name] = open_given(name, options).module()
    if options.output and not Path(options.output).resolve().parent.is_dir():
        raise UserError(f"the folder of --output {options.output} does not exist; create it first")

    if len(options.models) == 1:
        name = options.models[0]
        results = [run_benchmark(name, config, opened.get(name))]
    else:
        rest = [word for word in arguments if word not in options.models]
        results = [_in_own_process(name, rest) for name in options.models]
    for result in results:
        header, cells = to_table(result)
        print(f"\n{result['model']} on {_describe(result['machine'])}\n")
        print(table(cells, header))
    if options.output:
        write_atomic(options.output, json.dumps(results, indent=2) + "\n")


_OWN = ("models", "output", "variant", "entry", "set")


def _in_own_process(name: str, options: list[str]) -> dict[str, Any]:
    """One model in a fresh process, so that no model inherits another's memory or caches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "locality", "benchmark", name, *_without_output(options)]
        done = subprocess.run([*command, "--output", str(path)], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"measuring {name} failed: {done.stderr.strip()[-500:]}")
        return json.loads(path.read_text())[0]


def _without_output(options: list[str]) -> list[str]:
    kept, skip = [], False
    for word in options:
        if skip:
            skip = False
        elif word == "--output":
            skip = True
        elif not word.startswith("--output="):
            kept.append(word)
    return kept


def _describe(machine: dict[str, Any]) -> str:
    return (
        f"{machine['device']} ({machine['threads']} threads, {machine['instructions']}), "
        f"torch {machine['torch']}, timm {machine['timm']}, {machine['date']}"
    )
