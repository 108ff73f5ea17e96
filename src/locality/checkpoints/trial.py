"""Try an ONNX graph on one image, in a process with limited time and memory.

A graph is a program. Graphs with control flow, functions or external files are refused without
running them; others take the same time for every image. The process does not import torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from locality.checkpoints.registry import FORMAT
from locality.errors import UserError, one_line

INPUT, OUTPUT = "images", "logits"
"""Names of a graph's input and output."""

SECONDS, BYTES = 8, 1_500_000_000
"""Limits on a graph's CPU time and memory, raised for large files."""
_LARGE = 100_000_000  # 2 s more for each of this many bytes
_ERRORS = 3  # ONNX Runtime's severity


def session_of(graph: Path | str | bytes, threads: int = 0) -> Any:
    """A quiet ONNX Runtime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def check_graph(path: Path) -> None:
    """Check that a graph runs on an image within the limits.

    Raises:
        UserError: if it does not, naming the file and the cause.
    """
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute())]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=environment)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise UserError(f"{path} was refused: it takes more than {SECONDS} s for one image")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        cause = said[-1] if said and done.returncode > 0 else "ONNX Runtime crashes"
        raise UserError(f"{path} is not a valid ONNX graph: {cause}")


def _try(path: Path) -> None:
    import numpy as np
    import onnx

    proto = onnx.load(path, load_external_data=False)
    if proto.functions:
        raise UserError("it defines functions, which graphs exported by this library do not")
    tensors = [*proto.graph.initializer]
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise UserError(f"it has control flow ({node.op_type}), which is not supported")
            tensors += [attribute.t, *attribute.tensors]
    outside = [each for each in tensors if each.external_data or each.data_location]
    if outside or proto.graph.sparse_initializer:
        raise UserError("its weights are external or sparse, which is not supported")
    about = {entry.key: entry.value for entry in proto.metadata_props}
    if FORMAT not in about:
        raise UserError("it has no preprocessing; it was not exported by this library")
    described = json.loads(about[FORMAT])
    model = described["architecture"]
    size = (described["input"] or model)["img_size"]
    sides = (size, size) if isinstance(size, int) else size
    session = session_of(str(path), threads=1)
    if [output.name for output in session.get_outputs()] != [OUTPUT]:
        raise UserError(f"its only output must be '{OUTPUT}'")
    rng = np.random.default_rng(0)
    images = rng.standard_normal((1, model.get("in_chans", 3), *sides), np.float32)
    (logits,) = session.run([OUTPUT], {INPUT: images})
    wanted = (1, model["num_classes"])
    if logits.shape != wanted:
        raise UserError(f"its output for one image has shape {logits.shape}, not {wanted}")


def _main() -> None:
    path = Path(sys.argv[1])
    size = path.stat().st_size
    for limit, most in (
        (resource.RLIMIT_DATA, BYTES + 4 * size),
        (resource.RLIMIT_CPU, SECONDS + 2 * size // _LARGE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    try:
        _try(path)
    # Arbitrary input may raise anything in onnx and ONNX Runtime.
    except Exception as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    _main()
