"""The command line: fast help, and one sentence and code 2 for mistakes."""

import json
import subprocess
import sys

import pytest

import locality
from locality.cli import COMMANDS, main, usage

from .conftest import write_classes

LOCALITY = f"{sys.executable} -m locality"


def shell(script, **options):
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=400, **options
    )


def test_images_are_checked_without_importing_torch(tmp_path):
    folder = write_classes(tmp_path / "photos", {"a": 2, "b": 2})
    without_val = write_classes(tmp_path / "other" / "train", {"a": 2, "b": 2}).parent
    code = f"""
import sys
from locality.cli import main
assert main(['data', 'check', {str(folder)!r}]) == 0
assert main(['train', {str(without_val)!r}]) == 2
assert not {{'torch', 'torchvision', 'timm'}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train but no val" in done.stderr


def test_help_lists_every_command_without_importing_torch():
    code = (
        "import sys; from locality.cli import main; main(['--help']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_help_fits_a_screen_and_names_the_rest(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and f"locality {command}" in text
        assert text.count("\n") <= 60 and max(map(len, text.splitlines())) <= 100, command
    with pytest.raises(SystemExit):
        main(["train", "--help.all"])
    everything = " ".join(capsys.readouterr().out.split())
    assert "--engine.grad_checkpointing" in everything and "auto|fp32|bf16-mixed" in everything


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("--help <&- >&- 2>&-", 0, ""),
        ("--help >/dev/full", 2, "No space left"),
        ("predict --help >/dev/full", 2, "No space left"),
        ("trian 2>/dev/full", 2, ""),
        ("trian 2>&1 >&- | cat", 2, "trian"),
        ("recipes digits 2>&1 | true", 141, ""),
    ],
)
def test_streams_that_are_closed_or_full(command, code, said):
    done = shell(f"unset PYTHONUNBUFFERED; set -o pipefail; {LOCALITY} {command}")
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_terminal_that_is_not_utf8(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = shell(f"{LOCALITY} recipes cvt_300")
    assert done.returncode == 0 and done.stdout.isascii(), done.stderr
    refused = shell(f"{LOCALITY} trian\u00e9")
    assert refused.stderr.startswith("locality: unknown command 'trian\\xe9'")


def test_a_locale_that_is_not_utf8_is_named(tmp_path, class_folders):
    class_folders(tmp_path / "photos", {"Füchse": 2, "cat": 2})
    ascii_ = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    done = shell(f"{ascii_} {LOCALITY} data check photos", cwd=tmp_path)
    assert done.returncode == 2 and "ascii; set PYTHONUTF8=1" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [500_000, 1_000_000, 2_000_000, 3_600_000])
def test_a_small_address_space_gets_a_sentence(kilobytes, tmp_path):
    command = f"ulimit -v {kilobytes}; {LOCALITY} train digits --output run"
    command += " --schedule.steps 2 --schedule.warmup 0 --schedule.eval_every 2"
    done = shell(command, cwd=tmp_path)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    if done.returncode:
        assert done.stderr.splitlines()[-1].startswith("locality: memory ran out (")


def test_no_command_shows_the_help_and_version_the_version(cli):
    assert usage() in cli(code=2).out
    assert cli("--version").out == f"locality {locality.__version__}\n"


def test_models_as_table_and_json(cli):
    assert "convit_tiny_plus" in cli("models", "convit_t*").out
    (row,) = json.loads(cli("models", "nano", "--family", "convit", "--json").out)
    assert row["model"] == "convit_nano" and row["compare with"] == "deit_nano"
    assert json.loads(cli("models", "nothing-like-this", "--json").out) == []


def test_an_option_may_be_written_with_dashes(cli):
    assert cli("train", "--print-config", "--data.val-fraction=0.5").out == (
        cli("train", "--print_config", "--data.val_fraction", "0.5").out
    )
