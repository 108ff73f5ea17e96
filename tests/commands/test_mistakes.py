"""Common mistakes end with one sentence and code 2, before torch is imported.

Every option of every command has an effect or is refused, in each mode of the command.
"""

import json
import subprocess
import sys

import pytest
from PIL import Image

from locality.cli import COMMANDS
from locality.commands.train import SHORT
from locality.settings import to_yaml
from locality.training import recipe

from ..conftest import parser_of

# Command line, and words of the error: what was given or the suggestion.
MISTAKES = [
    ("trian", "train"),
    ("train digitz", "digits"),
    ("train ./photo", "photos"),
    ("train --device cuda", "--engine.accelerator"),
    ("train --optim.learning_rate 0.1", "--optim.lr"),
    ("train --quiet=1", "--quiet"),
    ("train --model convit_nan", "convit_nano"),
    ("train --model resnet18", "timm/resnet18"),
    ("predict photos --output no/pred.csv --model runs/photos", "folder no"),
    ("train --model.img_size 9", "9×9"),
    ("train --weights nope.pth", "nope.pth"),
    ("train --weights runs/photo", "runs/photos"),
    ("train --model.depth", "--model.depth"),
    ("train --model cvt_nano --model.gating_init 1", "model.gating_init"),
    ("train --data folder --data.root nowhere", "nowhere"),
    ("train deit_300", "data.root"),
    ("train --config missing.yaml", "missing.yaml"),
    ("train photos --minutes 0", "minutes is"),
    ("train --output photos", "photos"),
    ("train --output /proc/foo", "/proc/foo"),
    ("train --resume runs/photo", "runs/photos"),
    ("train digits --resume runs/photos", "digits"),
    ("train --resume runs/photos --schedule.steps 90", "schedule.steps"),
    ("train --resume runs/photos --epochs 3", "schedule.epochs"),
    ("train photos --output runs/photos --model cvt_nano", "is a run of convit_nano"),
    ("search digits --model.name convit_nano", "model.name"),
    ("compare photos --steps 3 --minutes 2", "--minutes"),
    ("compare photos --fractions half", "fractions"),
    ("predict photos", "--model"),
    ("predict x.png --model runs/photos", "x.png"),
    ("predict photos --model convit_tiny", "weights"),
    ("predict photos --model a.pth --top 0", "top is 0"),
    ("eval runs/photos --data imagenet", "data.root"),
    ("eval runs/photos --fraction 0.1", "--data.fraction"),
    ("eval runs/photos --overwrite", "needs --predictions"),
    ("predict photos --model runs/photos --overwrite", "needs --output"),
    ("report nowhere", "nowhere"),
    ("explore runs/photos --images nope.jpg", "nope.jpg"),
    ("convert runs/photos out.pth --to microsft", "microsoft"),
    ("export runs/photos out.onxx", ".onnx"),
    ("data chek photos", "check"),
    ("reproduce", "--list"),
    ("reproduce convit/tabel-2", "convit/table-2"),
]

# Modes of a command, and the options refused there; all others have an effect.
WAYS = {
    "models": "",
    "models --pretrained": "",
    "train": "entry",
    "train photos": "config entry",
    "train --dry_run": "quiet entry",
    "train --resume runs/photos": "output config minutes seed weights entry",
    "eval runs/photos": "entry",
    "predict photos --model runs/photos": "entry",
    "predict photos --model runs/photos --output out.csv": "top json entry",
    "predict photos --model graph.onnx": "entry variant set",
    "report runs/photos": "",
    "compare photos": "",
    "compare photos --pretrained": "img_size",
    "compare photos --steps 2 --folds 2": "minutes seeds",
    "explore runs/photos": "entry",
    "explore runs/photos --live": "entry npz img_size",
    "serve runs/photos": "entry",
    "convert runs/photos out": "entry",
    "export runs/photos out.onnx": "entry",
    "data check photos": "",
    "reproduce all": "list",
    "reproduce all --finished": "list dry_run jobs threads",
    "reproduce all --dry_run": "list finished recorded",
    "reproduce --list": (
        "scale runs dry_run finished output seeds jobs threads data recorded quiet"
    ),
    "demo": "",
    "recipes": "",
}
NOT_TRIED = {"model", "print_config", "resume"}
VALUES = {
    "variant": "convit_nano", "entry": "model", "set": "drop_rate=0", "output": "made", "top": "2",
    "to": "locality", "img_size": "8", "batch_size": "2", "precision": "fp32",
    "predictions": "out.csv", "images": "photos/cat", "count": "3",
    "hosts": "me.example", "title": "mine",
    "family": "cvt", "scale": "digits", "runs": "made",
    "seeds": "1", "jobs": "1", "threads": "1", "data": "{}",
    "dataset": "folder", "grey_bits": "12",
    "steps": "4",
    "weights": "runs/photos", "config": "runs/photos/config.yaml", "resume": "",
    "seed": "1", "minutes": "1",
    "models": "convit_nano,deit_nano", "folds": "2", "fractions": "1",
    "host": "127.0.0.1", "port": "0",
    "recorded": "made.jsonl.gz", "class_map": "classes.txt",
    "threshold": "0.5", "tta": "flip",
}  # fmt: skip

CHILD = """
import contextlib, io, json, socket, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "timm", "huggingface_hub"):
            raise AssertionError("torch is imported")

def refuse(*arguments):
    raise AssertionError("the network is asked")

sys.meta_path.insert(0, NoTorch())
socket.socket.connect = socket.getaddrinfo = refuse
from locality.cli import main

answers = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except AssertionError as error:
            code = str(error)
        except SystemExit as stop:
            code = f"exit {stop.code}"
    answers.append((code, said.getvalue()))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Command → exit code (or exception) and error; in a process without torch."""
    root = tmp_path_factory.mktemp("mistakes")
    run = root / "runs" / "photos"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(recipe("digits", {"schedule.steps": 60})))
    (run / "result.json").write_text("{}")
    (root / "photos" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(root / "photos" / "cat" / "a.png")
    (root / "classes.txt").write_text("cat\ndog\n")
    for name in ("a.pth", "graph.onnx"):
        (root / name).write_bytes(b"weights")

    def answers(commands):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], cwd=root, input=json.dumps(commands), text=True,
            capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return answers


@pytest.fixture(scope="module")
def mistakes(ask):
    return dict(zip(MISTAKES, ask([words.split() for words, _ in MISTAKES]), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_a_mistake_gets_one_sentence(mistake, mistakes):
    code, said = mistakes[mistake]
    assert code == 2, (code, said)
    assert mistake[1] in said
    assert said.startswith("locality: ") and said.count("\n") == 1, said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_text(command):
    for action in parser_of(command)._actions:
        assert action.help.partition(" (")[0], action.dest  # more than its default


@pytest.mark.slow
def test_every_option_acts_or_is_refused(ask):
    # `search` imports torch first; its settings are those of `train`, like finetune's.
    assert {way.split()[0] for way in WAYS} == set(COMMANDS) - {"search", "finetune"}
    asked, expected = [], []
    for way, refused in WAYS.items():
        words = way.split()
        for flag, action in parser_of(words[0]).options.items():
            name, short = flag[2:], words[0] in ("train", "eval") and flag in SHORT.values()
            if "." in name or short or flag in words or name in NOT_TRIED:
                continue
            value = [VALUES[name]] if action.nargs != 0 else []
            if name == "overwrite" or (words[0] == "models" and name == "json"):
                continue
            asked.append([*words, flag, *value])
            expected.append((name, name in refused.split()))
    wrong = []
    for words, (name, refused), (code, said) in zip(asked, expected, ask(asked), strict=True):
        # Accepted commands reach the torch import, or finish.
        names_it = name in said or words[-1] in said
        if not (code == 2 and names_it if refused else code in (0, "torch is imported")):
            wrong.append((" ".join(words), code, said))
    assert not wrong, wrong
