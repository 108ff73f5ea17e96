"""`locality serve` as a person and as a hostile program meet it: its own process, over HTTP."""

import contextlib
import http.client
import importlib.metadata
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlparse

import psutil
import pytest
import yaml
from PIL import Image

import locality
from locality.checkpoints import open_model, save
from locality.cli import main

pytest.importorskip("fastapi")
pytestmark = pytest.mark.slow

CLASSES = [f"digit <b>{number}</b>" for number in range(10)]


def photo(size=(60, 40), form="PNG", **options):
    buffer = io.BytesIO()
    pixels = Image.radial_gradient("L").resize(size).convert("RGB")
    pixels.save(buffer, format=form, **options)
    return buffer.getvalue()


def bomb():
    """100 megapixels in 12 kB."""
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, format="PNG")
    return buffer.getvalue()


def lying():
    """Announces nine megapixels, and holds a few thousand."""
    whole = photo()
    header = b"IHDR" + 2 * (3000).to_bytes(4, "big") + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="/etc/passwd"\r\n\r\nx\r\n--b--\r\n'
)
PATHS = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/file:///etc/passwd", "/predict/x")
# Method, path, body → status, and a word of the sentence.
HOSTILE = [
    *(("GET", path, None, 404, "nothing here") for path in (*PATHS, "/docs", "/redoc")),
    ("POST", "/../predict", photo(), 404, "nothing here"),
    *((method, "/predict", None, 405, "POST an image") for method in ("GET", "PUT", "DELETE")),
    ("POST", "/", bytes(50_000_000), 405, "POST an image"),
    ("POST", "/predict", b"", 422, "the file is empty"),
    ("POST", "/predict", b"/etc/passwd", 422, "not an image"),
    ("POST", "/predict", FORM, 422, "not an image"),
    ("POST", "/predict", json.dumps({"path": "/etc/passwd"}).encode(), 422, "not an image"),
    ("POST", "/predict", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not an image"),
    ("POST", "/predict", b"%!PS-Adobe-3.0 EPSF-3.0\n", 422, "not an image"),
    ("POST", "/predict", photo()[:200], 422, "damaged"),
    ("POST", "/predict", lying(), 422, "damaged"),
    ("POST", "/predict", bomb(), 422, "50,000,000"),
    ("POST", "/attention", bomb(), 422, "50,000,000"),
    ("POST", "/attention", b"\x89PNG\r\n\x1a\n", 422, "image"),
    ("POST", "/predict", photo()[:60] + bytes(50_000_000), 413, "more than 20 MB"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, shaken):
    folder = tmp_path_factory.mktemp("serve") / "saved"
    return save(shaken(locality.create_model("convit_nano")), folder, classes=CLASSES)


@contextlib.contextmanager
def answering(words, **options):
    """A process that serves, with its address, until the block ends."""
    started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
    try:
        started.address = started.stdout.readline().strip()
        yield started
        assert started.poll() is None  # nothing has ended it
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130
    finally:
        started.kill()


@pytest.fixture(scope="module")
def process(model, tmp_path_factory):
    here = tmp_path_factory.mktemp("empty")
    words = [sys.executable, "-m", "locality", "serve", str(model), "--port", "0"]
    with answering(words, cwd=here) as started:
        yield started
        assert not list(here.iterdir())  # nothing was written


def request(address, method, path, body=None):
    """Method, path and body of a request → status, the answer's content."""
    place = urlparse(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def ask(process):
    return partial(request, process.address)


def test_it_is_reached_from_this_machine_alone(process):
    (listening,) = psutil.Process(process.pid).net_connections("tcp")[:1]
    assert listening.laddr.ip == "127.0.0.1"
    assert process.address == f"http://127.0.0.1:{listening.laddr.port}"


def test_it_predicts_what_the_model_does(ask, model):
    classifier = open_model(model)
    for image in (photo(), photo((500, 300), "JPEG"), photo((8, 8), "GIF")):
        status, answer = ask("POST", "/predict", image)
        assert status == 200
        told = {each["name"]: each["probability"] for each in json.loads(answer)["classes"]}
        (row,) = classifier([Image.open(io.BytesIO(image)).convert("RGB")])
        assert told == pytest.approx(classifier.most_likely(row), rel=1e-4)


def test_photographs_are_turned_as_they_were_held(ask):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = Image.open(io.BytesIO(photo())).crop((0, 0, 40, 40))
    plain, held = io.BytesIO(), io.BytesIO()
    turned.rotate(-90).save(plain, format="PNG")
    turned.save(held, format="PNG", exif=exif)
    assert ask("POST", "/predict", held.getvalue()) == ask("POST", "/predict", plain.getvalue())


def test_the_description_names_what_is_answered(ask):
    described = json.loads(ask("GET", "/openapi.json")[1])
    assert set(described["paths"]) == {"/predict", "/attention"}
    for path in described["paths"].values():
        assert "image/*" in path["post"]["requestBody"]["content"]
        assert {"200", "413", "422"} <= set(path["post"]["responses"])


def refused(ask, hostile):
    method, path, body, wanted, word = hostile
    status, answer = ask(method, path, body)
    assert (status, word in json.loads(answer)["detail"]) == (wanted, True), (hostile[:2], answer)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda each: f"{each[0]} {each[1]} {each[4]}")
def test_what_is_bad_gets_a_sentence(ask, hostile):
    refused(ask, hostile)


def test_what_is_no_http_is_refused(process):
    place = urlparse(process.address)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in connection.recv(1000)


def test_a_third_hostile_eight_at_a_time(ask, process):
    """500 requests: every one is answered as it should be, and memory stays."""
    good = [photo(), photo((400, 300), "JPEG"), photo((1200, 900), "JPEG")]

    def one(number):
        if number % 3 == 0:
            refused(ask, HOSTILE[number // 3 % len(HOSTILE)])
        else:
            where = "/attention" if number % 10 == 0 else "/predict"
            assert ask("POST", where, good[number % len(good)])[0] == 200
        return psutil.Process(process.pid).memory_info().rss

    with ThreadPoolExecutor(8) as pool:
        memory = list(pool.map(one, range(500)))
    print(f"{memory[100] / 1e6:.0f} MB after 100 requests, {memory[-1] / 1e6:.0f} after 500")
    # Eight of the largest files that are taken, with what they are copied to on their way.
    assert max(memory[400:]) - max(memory[:200]) < 100e6


def test_a_port_that_is_taken(process, model, capsys):
    port = urlparse(process.address).port
    assert main(["serve", str(model), "--port", str(port)]) == 2
    assert f"port {port}, cannot be listened at" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.metadata.version("locality") != locality.__version__,
    reason="the version that is installed is another one, and a Space is of what is installed",
)
class TestSpace:
    def test_it_answers_from_its_own_folder(self, model, tmp_path, capsys):
        image, folder = tmp_path / "photo.png", tmp_path / "space"
        image.write_bytes(photo())
        folder.mkdir()
        assert main(["predict", str(image), "--model", str(model), "--json"]) == 0
        (wanted,) = json.loads(capsys.readouterr().out)
        assert main(["serve", str(model), "--export-space", str(folder)]) == 0
        assert capsys.readouterr().out == f"{folder}\n"
        there = {"README.md", "Dockerfile", "requirements.txt", "model", "locality"}
        assert {entry.name for entry in folder.iterdir()} == there
        head = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
        assert head == {"title": model.name, "sdk": "docker", "app_port": 7860}
        pinned = (folder / "requirements.txt").read_text().splitlines()[2:]
        versions = dict(line.split("==") for line in pinned)
        assert {
            "torch",
            "timm",
            "jsonargparse[signatures]",
            "fastapi",
            "uvicorn",
        } <= versions.keys()
        assert not {"onnx", "pytest"} & versions.keys()
        for name, version in versions.items():
            installed = importlib.metadata.version(name.partition("[")[0])
            assert installed.partition("+")[0] == version

        said = re.search(r"^CMD (.*)$", (folder / "Dockerfile").read_text(), re.MULTILINE)
        python, *words, port = json.loads(said[1])
        assert (python, port) == ("python", str(head["app_port"]))
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        options = {"cwd": folder, "env": alone}
        which = [sys.executable, "-c", "import locality; print(locality.__file__)"]
        used = subprocess.run(which, capture_output=True, text=True, **options).stdout
        assert used == f"{folder / 'locality' / '__init__.py'}\n"
        with answering([sys.executable, *words, "0"], **options) as started:
            assert started.address.startswith("http://0.0.0.0:")
            assert b"Drop an image" in request(started.address, "GET", "/")[1]
            status, answer = request(started.address, "POST", "/predict", image.read_bytes())
        told = {each["name"]: each["probability"] for each in json.loads(answer)["classes"]}
        assert status == 200 and told == pytest.approx(wanted["classes"], rel=1e-5)

    def test_it_is_written_whole_or_not_at_all(self, tmp_path, capsys):
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(b"no weights")
        assert main(["serve", str(bad), "--export-space", str(tmp_path / "space")]) == 2
        assert "bad.safetensors" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [bad]


WIDE = "document.documentElement.scrollWidth - innerWidth"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(process, browser, width, tmp_path):
    file, none = tmp_path / "photo.png", tmp_path / "notes.txt"
    file.write_bytes(photo((448, 320)))
    none.write_text("no image")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(120_000)
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    try:
        page.goto(process.address)
        page.set_input_files("#file", file)
        page.wait_for_selector("#classes tr:nth-child(5)")
        assert all(
            "<b>" in name for name in page.locator("#classes td:first-child").all_inner_texts()
        )
        maps = page.frame_locator("#maps")
        maps.locator("html[data-ready]").wait_for(state="attached")
        frame = page.frames[1]
        maps.locator("#grid").click(position={"x": 5, "y": 5})
        assert "row 1, column 1" in maps.locator("#where").inner_text()
        assert maps.locator(".gate").count() > 0
        # The frame is as high as its content, and nothing is wider than the window.
        page.wait_for_function("document.querySelector('#maps').offsetHeight > 800")
        assert frame.evaluate("document.documentElement.scrollHeight - innerHeight") <= 1
        assert page.evaluate(WIDE) <= 0 and frame.evaluate(WIDE) <= 0
        assert not errors
        page.set_input_files("#file", none)
        page.get_by_text("not an image").wait_for()
        assert page.locator("#classes tr").count() == 0 and page.locator("#maps").is_hidden()
    finally:
        page.close()


def test_the_camera(process, browser):
    page = browser.new_page()
    page.set_default_timeout(120_000)
    try:
        page.goto(process.address)
        page.get_by_text("use the camera").click()
        page.get_by_text("take the picture").click()
        page.wait_for_selector("#classes tr:nth-child(5)")
        assert page.locator("#classes tr").count() == 5
    finally:
        page.close()
