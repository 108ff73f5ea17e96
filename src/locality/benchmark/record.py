"""What was measured as two files, NAME.json and NAME.md, such as benchmarks/results/ keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locality.benchmark.run import to_table
from locality.files import write_atomic
from locality.machine import commit

Measured = dict[str, list[dict[str, Any]]]
"""Results of `run_benchmark` by the question that they answer."""


def write_record(
    folder: Path,
    measured: Measured,
    name: str | None = None,
    titles: Mapping[str, str] | None = None,
    **also: Any,
) -> Path:
    """Write both files; the path of the one with tables.

    Args:
        folder: where to.
        measured: what was measured.
        name: of the files without ending; device, threads and date unless given.
        titles: of the questions, where they differ from their names.
        also: more to put into the JSON.
    """
    content = {"commit": commit() or "unknown", "measured": measured, **also}
    path = folder / (name or default_name(next(iter(measured.values()))[0]["machine"]))
    write_atomic(path.with_name(f"{path.name}.json"), json.dumps(content, indent=1) + "\n")
    tables = path.with_name(f"{path.name}.md")
    write_atomic(tables, markdown(content, titles or {}))
    return tables


def markdown(content: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """The measurements as tables."""
    machine = next(iter(content["measured"].values()))[0]["machine"]
    lines = [
        f"# {machine['device']}, {machine['date']}",
        "",
        f"{machine['threads']} threads, {machine['instructions']}, torch {machine['torch']}, "
        f"timm {machine['timm']}, commit {content['commit'][:12]}. Contenders take turns in one "
        "process; *ours is* gives the median over rounds of our speed over theirs, with the middle "
        "half of the rounds beside it.",
    ]
    if "matmul_gmacs_per_second" in content:
        rate = content["matmul_gmacs_per_second"]
        lines += ["", f"A large fp32 `F.linear` runs at {rate:.0f} GMAC/s here."]
    for question, results in content["measured"].items():
        lines += ["", f"## {titles.get(question, question)}"]
        for result in results:
            header, cells = to_table(result)
            rows = [header, ["---"] * len(header), *cells]
            lines += ["", f"`{result['model']}`", ""]
            lines += [f"| {' | '.join(row)} |" for row in rows]
            if question == "bf16":
                lines += ["", bf16_gain(result)]
    return "\n".join(lines) + "\n"


def bf16_gain(result: dict[str, Any]) -> str:
    """How much faster our model is under bf16 autocast than in fp32."""
    speed = {
        row["precision"]: row["images_per_second"]
        for row in result["rows"]
        if row["contender"] == "locality"
    }
    return f"bf16 autocast is {speed['bf16'] / speed['fp32']:.2f}× as fast as fp32."


def default_name(machine: dict[str, Any]) -> str:
    """A file name that says device and date."""
    device = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    return f"{device}-{machine['threads']}t-{machine['date']}"
