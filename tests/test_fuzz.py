"""Files and command lines made by hypothesis: an answer or one sentence, never a traceback.

`FUZZ=300 pytest tests/test_fuzz.py` tries 300 of each kind.
"""

import json
import math
import os
import shutil
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import locality
from locality.checkpoints.run_state import LAST, PREVIOUS, read_checkpoint, write_checkpoint
from locality.cli import COMMANDS, main
from locality.settings import flatten, settings_of, to_dict
from locality.training import recipe

from .conftest import parser_of

SECONDS = 20  # of one processor
TRAIN = [
    *("train", "digits", "--schedule.steps=2", "--schedule.warmup=1", "--schedule.eval_every=1"),
    *("--engine.batch_size=8", "--data.part=[0,0.1]", "--quiet", "--output=run"),
]
fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ", "12")),
    suppress_health_check=list(HealthCheck),
    deadline=None,
)

numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([-(10**400), 10**400, 2**31, 2**62, 2**63, 2**64, 10**9, -1, 0, 1e-9, 2e-4]),
    st.floats(),
)
scalars = st.one_of(numbers, st.none(), st.booleans(), st.text(max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def words(value: Any) -> str:
    """A value as YAML on a line; numbers as Python writes them, nothing quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {words(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(words, value)) + "]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a saved model, a photograph, a table, and a run of two steps."""
    folder, before = tmp_path_factory.mktemp("fuzz"), os.getcwd()
    os.chdir(folder)
    torch.manual_seed(0)
    locality.save(locality.create_model("convit_nano", num_classes=3), "saved")
    Image.effect_noise((9, 8), 50).convert("RGB").save("photo.png")
    assert main(TRAIN) == 0
    shutil.copytree("run", "ended")
    os.remove("run/result.json")
    shutil.copytree("run", "begun")
    yield folder
    os.chdir(before)


def answered(command: list[str], capsys) -> int:
    """The exit code of a command, which says why if it is not 0."""
    began = time.process_time()
    capsys.readouterr()
    try:
        code: Any = main(command)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code in (0, 1, 2), command
    assert code != 2 or error.splitlines()[-1].startswith("locality: "), error
    assert "Traceback" not in error and time.process_time() - began < SECONDS, command
    return code


SETTINGS = sorted(settings_of(recipe("digits")))
tagged = st.sampled_from(
    ["", "", "", "!!int ", "!!float ", "!!python/name:os.system ", "&a ", "*a"]
)
lines = st.lists(
    st.tuples(st.sampled_from(SETTINGS), tagged, values).map(
        lambda line: "{}: {}{}".format(line[0].rpartition(".")[2], line[1], words(line[2]))
    ),
    max_size=3,
)
texts = st.one_of(st.text(max_size=60), lines.map("\n".join))
groups = sorted({name.partition(".")[0] for name in SETTINGS if "." in name})


@fuzzed
@given(st.one_of(texts, st.tuples(st.sampled_from(groups), lines)))
def test_yaml(place, capsys, content):
    if isinstance(content, tuple):
        content = content[0] + ":\n" + "".join(f"  {line}\n" for line in content[1])
    (place / "settings.yaml").write_text(content, encoding="utf-8", errors="surrogatepass")
    answered(["train", "--config", "settings.yaml", "--print_config"], capsys)


@fuzzed
@given(st.lists(st.tuples(st.sampled_from(SETTINGS), values), min_size=1, max_size=3))
def test_configurations(place, capsys, changes):
    """A whole configuration with other values, as far as the start of the run."""
    content = flatten(to_dict(recipe("digits", {"data.part": (0, 0.1)}))) | dict(changes)
    nested: dict[str, Any] = {}
    for name, value in content.items():
        group, _, last = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[last] = value
    (place / "settings.yaml").write_text(words(nested), errors="surrogatepass")
    answered(["train", "--config", "settings.yaml", "--print_config"], capsys)


def mutated(content: Any, draw: Any) -> None:
    """Change one entry of nested content."""
    while True:
        names = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not names:
            return
        name = draw(st.sampled_from(names))
        inner = content[name]
        if isinstance(inner, (dict, list)) and inner and draw(st.booleans()):
            content = inner
        elif isinstance(content, dict) and draw(st.integers(0, 5)) == 0:
            del content[name]
            return
        else:
            content[name] = draw(values)
            return


@fuzzed
@given(st.data())
def test_config_json(place, capsys, data):
    path = place / "saved" / "config.json"
    before = path.read_text()
    content = json.loads(before)
    for _ in range(data.draw(st.integers(1, 3))):
        mutated(content, data.draw)
    path.write_text(json.dumps(content), errors="surrogatepass")
    try:
        answered(["predict", "photo.png", "--model", "saved"], capsys)
    finally:
        path.write_text(before)


tensors = st.one_of(
    st.lists(st.integers(0, 3), max_size=3).map(torch.zeros),
    st.just(torch.tensor(math.nan)),
    st.just(torch.zeros(2, dtype=torch.int64)),
)


@fuzzed
@given(st.data())
def test_checkpoints(place, capsys, data):
    shutil.rmtree(place / "run")
    shutil.copytree(place / "begun", place / "run")
    path = place / "run" / "checkpoints" / LAST
    content = read_checkpoint(path)
    for _ in range(data.draw(st.integers(1, 2))):
        group = data.draw(st.sampled_from(sorted(content)))
        if isinstance(content[group], dict) and content[group] and data.draw(st.booleans()):
            if group in ("model", "optimizer") and data.draw(st.booleans()):
                inner = content["model"] if group == "model" else content["optimizer"]["state"][0]
                inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(tensors)
            else:
                mutated(content[group], data.draw)
        else:
            content[group] = data.draw(values)
    write_checkpoint(path, content)
    path.with_name(PREVIOUS).unlink(missing_ok=True)
    answered(TRAIN, capsys)


# The others train, wait, or count every model's operations.
CALLED = sorted(COMMANDS.keys() - {"demo", "serve", "search", "models"})


def options_of(command: str) -> list[str]:
    """The options of a command that do not write elsewhere."""
    written = {"--output", "--predictions", "--record", "--runs", "--overwrite"}
    return sorted(parser_of(command).options.keys() - written)


OPTIONS = {command: options_of(command) for command in CALLED}
LAST_WORDS = {"train": ["--dry_run", "--print_config"], "finetune": ["--print_config"]}
LAST_WORDS |= {"compare": ["--dry_run"], "reproduce": ["--dry_run"]}
arguments = st.one_of(
    st.sampled_from(["photo.png", "saved", "ended", "settings.yaml", ".", "digits", "check"]),
    values.map(words),
)


@fuzzed
@given(st.data())
def test_command_lines(place, capsys, data):
    command = data.draw(st.sampled_from(CALLED))
    line = [command, *data.draw(st.lists(arguments, max_size=2))]
    for option in data.draw(st.lists(st.sampled_from(OPTIONS[command] or ["--x"]), max_size=3)):
        line += [option, *data.draw(st.lists(arguments, max_size=1))]
    line = [word.replace("\0", "") for word in line]
    answered([*line, *LAST_WORDS.get(command, [])[-1:]], capsys)
