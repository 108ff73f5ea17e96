"""Untrusted weight files: accepted, refused, never executed."""

import argparse
import os
import pathlib
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from locality.checkpoints import native
from locality.checkpoints.native import ALLOWED_CLASSES, read_state
from locality.errors import UserError

from ..conftest import Calls

STATE = {"weight": torch.arange(1000.0), "steps": torch.tensor(3)}


def assert_same(read: dict) -> None:
    assert read.keys() == STATE.keys()
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_a_malicious_pickle_is_refused_in_one_sentence_and_never_run(tmp_path, kind):
    victim, trap = tmp_path / "hacked", tmp_path / "weights.pth"
    content = {"model": Calls(os.system, f"touch {victim}"), **STATE}
    if kind == "plain":
        trap.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, trap, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UserError) as caught:
        read_state(trap)
    assert not victim.exists()
    assert str(trap) in str(caught.value) and "posix.system" in str(caught.value)


def long(value: int) -> bytes:
    digits = pickle.encode_long(value)
    return b"\x8a" + bytes([len(digits)]) + digits


def test_keys_of_one_hash_do_not_take_for_ever(tmp_path, monkeypatch):
    """Inserting n of them takes n² comparisons; here about a minute."""
    path, names = tmp_path / "weights.pth", range(1, 60_000)
    with zipfile.ZipFile(path, "w") as file:
        keys = b"".join(long(number * (2**61 - 1)) + b"N" for number in names)
        file.writestr("archive/data.pkl", b"\x80\x02}(" + keys + b"u.")
        file.writestr("archive/version", "3\n")
    monkeypatch.setattr(native, "_LOADING_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"weights\.pth .* longer than"):
        read_state(path)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"])
def test_numbers_of_eight_bits_are_named(tmp_path, kind):
    dtype = getattr(torch, kind)
    state = {"weight": torch.zeros(8, dtype=torch.uint8).view(dtype)}
    torch.save(state, tmp_path / "weights.pth")
    save_file(state, tmp_path / "weights.safetensors")
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match=f"{path.name}: weight is stored as torch.{kind}"):
            read_state(path)


def test_a_namespace_with_paths_beside_the_weights_is_allowed_and_it_alone(tmp_path):
    """As written by the authors' submitit script; paths load as pure paths, without file access."""
    classes = {entry[0] if isinstance(entry, tuple) else entry for entry in ALLOWED_CLASSES}
    assert classes == {argparse.Namespace, pathlib.PurePosixPath, pathlib.PureWindowsPath}
    path = tmp_path / "convit_tiny.pth"
    paths = {
        "output_dir": pathlib.Path("/checkpoint/user"),
        "data": pathlib.PureWindowsPath("C:/x"),
    }
    args = argparse.Namespace(lr=1e-3, model="convit_tiny", **paths)
    torch.save({"model": STATE, "args": args}, path)
    assert_same(read_state(path)[0])
    torch.save({"model": STATE, "args": args}, path, _use_new_zipfile_serialization=False)
    written = path.read_bytes()
    path.write_bytes(written.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath"))
    assert path.read_bytes() != written  # as Python 3.13 calls it
    assert_same(read_state(path)[0])
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
    torch.save({"model": STATE, "args": nn.Linear(2, 2)}, path)
    with pytest.raises(UserError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_state(path)


def test_several_state_dicts_are_an_error_until_one_is_named(tmp_path):
    path = tmp_path / "checkpoint.pth"
    other = {name: tensor + 1 for name, tensor in STATE.items()}
    torch.save({"epoch": 3, "model": STATE, "model_ema": other}, path)
    with pytest.raises(UserError, match="model, model_ema"):
        read_state(path)
    assert_same(read_state(path, entry="model")[0])
    assert torch.equal(read_state(path, entry="model_ema")[0]["weight"], other["weight"])
    with pytest.raises(UserError, match="ema"):
        read_state(path, entry="ema")


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("keep", [0.01, 0.99])
def test_truncated_files_are_named_as_such(tmp_path, kind, keep):
    path = tmp_path / "weights"
    if kind == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match="truncated"):
        read_state(path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "truncated"),
        ("größer als 1\n".encode() * 60, "neither"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "download"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git-lfs"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "neither"),
    ],
)
def test_files_that_are_no_weights_say_what_they_are(tmp_path, content, cause):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(UserError, match=cause) as caught:
        read_state(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning", "ignore:.*TorchScript archive")
def test_pickles_of_other_things_say_what_they_are(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save([1, 2, 3], path)
    with pytest.raises(UserError, match="list"):
        read_state(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(UserError, match="epoch"):
        read_state(path)
    program = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    torch.jit.save(torch.jit.trace(program, torch.zeros(1, 2)), path)
    with pytest.raises(UserError, match="TorchScript"):
        read_state(path)
