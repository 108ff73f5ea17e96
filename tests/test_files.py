"""Files: reads are bounded, and writes round-trip."""

import errno
import gzip
import os
import string
import time

import numpy as np
import pytest

from locality.errors import UserError, printable
from locality.files import (
    atomic_file,
    csv_text,
    gunzip,
    parse_yaml,
    read_rows,
    read_yaml,
    write_atomic,
)

MERGED = "a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(10)) + "}\n"
MERGED += "".join(f"a{i + 1}: &a{i + 1}\n  <<: [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9))
ONE_HASH = "{" + ", ".join(f"{hex(i * (2**61 - 1))}: 1" for i in range(1, 30_000)) + "}"


@pytest.mark.parametrize(
    "text",
    [
        MERGED,
        ONE_HASH,
        "a: &a [1]\n" + f"b: &a [{', '.join(['*a'] * 9)}]\n" * 6,
        "a: &a [*a]",
        "a: *b",
        "a: " + "[" * 60 + "]" * 60,
        "a: !!python/name:os.system",
        "? {a: 1}\n: 2",
        "a: " + "9" * 5000,
        "a: 2020-13-45",
        "<<: 3",
        "a: \x00",
        *("a: !!int ''", "a: !!int '5'", "a: !!bool foo", "a: !!timestamp foo", "a: !!float ''"),
        *("a: ! x", "!foo [1]", "!!set {a, b}", "%TAG ! tag:yaml.org,2002:\n--- !int '5'"),
        *("a: 1\na: 2", "{b: {a: 1, 'a': 2}}", "<<: {a: 1}\n<<: {b: 1}", "? &a [*a]\n: 1"),
    ],
    ids=range(25),
)  # fmt: skip
def test_yaml_without_end_is_refused_at_once(text, tmp_path):
    (tmp_path / "s.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=r"s\.yaml"):
        read_yaml(tmp_path / "s.yaml")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("0x1F", 31),
        ("-.5e3", -500.0),
        ("1_000", 1000),
        ("08", "08"),
        ("{a: &a {x: 1}, b: {<<: *a, y: 2}}", {"a": {"x": 1}, "b": {"x": 1, "y": 2}}),
        ("{a: &a {x: 1}, b: {<<: *a, x: 2}, c: *a}", {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 1}}),
        ("[&a [1], *a]", [[1], [1]]),
        ("1:" * 100_000 + "1", "1:" * 100_000 + "1"),
    ],
)
def test_yaml_means_what_version_1_2_says(text, value):
    found = parse_yaml(text, "s.yaml")
    assert found == value and type(found) is type(value)


def test_what_a_spreadsheet_would_compute_is_text_and_comes_back(tmp_path):
    names = ["=1+2.png", "@SUM(1)", "+a", "-b", "\tc", "\rd", "'=e", "''@f", "'tis", "-1", "+2.5"]
    names.append("")
    generator = np.random.default_rng(0)
    letters = [*"=+-@\t\r\n',\"", *string.ascii_letters[:4], "1", "\udcff", "é"]
    names += ["".join(generator.choice(letters, 5)) for _ in range(2000)]
    rows = [{"path": name, "=column": name[::-1]} for name in names]
    text = csv_text([list(rows[0]), *(row.values() for row in rows)])
    (tmp_path / "t.csv").write_bytes(text.encode(errors="surrogateescape"))
    assert read_rows(tmp_path / "t.csv") == rows
    for line in text.splitlines()[:7]:
        assert line.strip('"')[0] not in "=@+\t\r", line
    assert "'-b" in text and "\n-1,1-" in text


def test_a_table_of_other_columns_or_cells_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step,value\n1,2\n2\n3,x\n4,5")
    assert [row["step"] for row in read_rows(path, {"step": int})] == ["1", "2", "3"]
    with pytest.raises(UserError, match=r"t\.csv, row 2"):
        read_rows(path, {"value": float})
    path.write_text("step,value\n1,2\n3,x\n")
    with pytest.raises(UserError, match="'x'"):
        read_rows(path, {"value": float})
    path.write_text("")
    assert read_rows(path, {"value": float}) == []


def test_a_gzip_file_inflates_to_a_limit(tmp_path):
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert gunzip(path, "record", 1000) == bytes(1000)
    with pytest.raises(UserError, match=r"t\.gz"):
        gunzip(path, "record", 999)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"t\.gz"):
        gunzip(path, "record", 1000)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_in_torch(*_):
    try:
        full()
    except OSError:
        raise RuntimeError("unexpected pos") from None


@pytest.mark.parametrize("fail", [full, full_in_torch])
def test_a_full_disk_names_the_file(fail, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="page"), atomic_file(tmp_path / "page.html"):
        fail()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="page"):
        write_atomic(tmp_path / "page.html", "x")
    with pytest.raises(OSError, match="nowhere/page"):
        write_atomic(tmp_path / "nowhere/page.html", "x")


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(OSError, match="other"), atomic_file(tmp_path / "page.html"):
        read_yaml(tmp_path / "other.yaml")


def test_only_what_no_language_writes_is_escaped():
    for text in ("خانه\u200cها", "👨\u200d👩\u200d👧", "柴\u3000犬", "10.00\u202fAM"):
        assert printable(text) == text
    assert printable("a\x1b\u202e\n") == r"a\x1b\u202e\n"
