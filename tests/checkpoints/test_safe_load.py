"""Untrusted weight files: accepted, refused, never executed."""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle
import time
import zipfile
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from locality.checkpoints.safe_load import ALLOWED_CLASSES, read_state
from locality.errors import UserError

STATE = {"weight": torch.arange(1000.0), "steps": torch.tensor(3)}


class Malicious:
    """Unpickling an instance runs a shell command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def assert_same(read: dict) -> None:
    assert read.keys() == STATE.keys()
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_a_malicious_pickle_is_refused_in_one_sentence_and_never_run(tmp_path, kind):
    victim, trap = tmp_path / "hacked", tmp_path / "weights.pth"
    content = {"model": Malicious(f"touch {victim}"), **STATE}
    if kind == "plain":
        trap.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, trap, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UserError) as caught:
        read_state(trap)
    assert not victim.exists()
    assert str(trap) in str(caught.value) and "posix.system" in str(caught.value)


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
        (b"", "empty"),
        ("größer als 1\n".encode() * 60, "text"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
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


def test_an_archive_that_inflates_to_more_than_itself_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(UserError, match="larger than the file"):
        read_state(tmp_path / "a.pth")


def long1(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


PRIME = 2**61 - 1  # Python hashes integers modulo this
COUNT = 20_000
KEYS = [long1(PRIME * k) for k in range(1, COUNT)]
TUPLES = [b"K\x01" + key + b"\x86" for key in KEYS]
COLLIDING = {
    "a dictionary": b"}(" + b"".join(key + b"N" for key in KEYS) + b"u",
    "one by one": b"}" + b"".join(key + b"Ns" for key in KEYS),
    "tuples": b"}(" + b"".join(key + b"N" for key in TUPLES) + b"u",
    "a set": b"cbuiltins\nset\n](" + b"".join(KEYS) + b"e\x85R",
    "a counter": b"ccollections\nCounter\n](" + b"".join(KEYS) + b"e\x85R",
    "pairs": b"ccollections\nOrderedDict\n](" + b"".join(k + b"N\x86" for k in KEYS) + b"e\x85R",
    "remembered": b"}q\x00(" + b"".join(key + b"q\x01N" for key in KEYS) + b"u",
}


@pytest.mark.parametrize("kind", COLLIDING)
def test_keys_of_one_hash_are_refused_before_they_are_hashed(kind, tmp_path):
    program = b"\x80\x02" + COLLIDING[kind] + b"."
    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    (tmp_path / "plain.pth").write_bytes(program)
    for file in ("zip.pth", "plain.pth"):
        began = time.process_time()
        with pytest.raises(UserError, match="not text"):
            read_state(tmp_path / file)
        assert time.process_time() - began < 5


@pytest.mark.parametrize("legacy", [False, True])
def test_keys_that_are_numbers_are_read_where_they_are_few(tmp_path, legacy):
    moments = {number: {"step": 3, "exp_avg": torch.ones(2)} for number in range(2000)}
    content = {"model": STATE, "milestones": Counter({3: 1}), "seen": {1, 2}, "state": moments}
    content["rng"] = (3, tuple(2**31 + number for number in range(625)), None)
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    assert_same(read_state(tmp_path / "a.pth")[0])


def test_tensors_that_share_memory_are_bounded_by_the_file(tmp_path):
    whole = torch.zeros(1000, 1000)
    torch.save({f"{name}.weight": whole for name in range(4)}, tmp_path / "tied.pth")
    assert len(read_state(tmp_path / "tied.pth")[0]) == 4
    torch.save({f"{name}.weight": whole for name in range(100)}, tmp_path / "many.pth")
    with pytest.raises(UserError, match="400 MB"):
        read_state(tmp_path / "many.pth")


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.float8_e5m2), torch.ones([1] * 30)])
def test_kinds_of_tensors_that_no_model_has_are_refused(tensor, tmp_path):
    save_file({"norm.weight": tensor}, tmp_path / "a.safetensors")
    torch.save({"norm.weight": tensor}, tmp_path / "a.pth")
    for file in ("a.safetensors", "a.pth"):
        with pytest.raises(UserError, match=r"norm\.weight has .* axes of torch\.float"):
            read_state(tmp_path / file)
