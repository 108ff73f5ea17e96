"""`locality serve` in its own process over HTTP, for ordinary and hostile clients."""

import contextlib
import http.client
import io
import json
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
import torch
from PIL import Image

import locality
from locality.checkpoints import Classifier, open_model, save
from locality.cli import main
from locality.errors import UserError

pytest.importorskip("fastapi")
from locality.serve import application

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
    """Announces nine megapixels but has a few thousand."""
    whole = photo()
    header = b"IHDR" + 2 * (3000).to_bytes(4, "big") + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]


# Method, path, body → status and a word of the error; unusual headers.
REFUSED = [
    *(("GET", path, None, 404, "Not Found") for path in ("/../../etc/passwd", "/docs", "/redoc")),
    *((method, "/predict", None, 405, "Not Allowed") for method in ("GET", "PUT", "DELETE")),
    ("POST", "/predict", b"", 422, "the file is empty"),
    ("POST", "/predict", b"/etc/passwd", 422, "not an image"),
    ("POST", "/predict", b"x", 415, "--data-binary", {"Content-Type": "Multipart/form-data"}),
    ("GET", "/", None, 400, "host", {"Host": "evil.example"}),
    ("POST", "/predict", photo(), 400, "host", {"Host": "127.0.0.1.evil.example:80"}),
    ("POST", "/predict", photo(), 403, "http://evil.example", {"Origin": "http://evil.example"}),
    ("POST", "/attention", photo(), 403, "null", {"Origin": "null"}),
    ("POST", "/predict", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not an image"),
    ("POST", "/predict", photo()[:200], 422, "damaged"),
    ("POST", "/predict", lying(), 422, "damaged"),
    ("POST", "/predict", bomb(), 422, "50,000,000"),
    ("POST", "/attention", bomb(), 422, "50,000,000"),
    ("POST", "/predict", photo()[:60] + bytes(50_000_000), 413, "larger than 20 MB"),
]


IPV6 = socket.has_ipv6 and any(
    own.address == "::1" for listed in psutil.net_if_addrs().values() for own in listed
)


@pytest.fixture(scope="module")
def model(tmp_path_factory, shaken):
    folder = tmp_path_factory.mktemp("serve") / "saved"
    model = shaken(locality.create_model("convit_nano"))
    model.temperature = 2.5
    return save(model, folder, classes=CLASSES)


@contextlib.contextmanager
def answering(words, **options):
    """A serving process and its address, until the block ends."""
    started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
    try:
        started.address = started.stdout.readline().strip()
        yield started
        assert started.poll() is None  # still running
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


def request(address, method, path, body=None, headers=None):
    """Send a request; return status and content."""
    url = urlparse(address)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def connected(process):
    url = urlparse(process.address)
    return socket.create_connection((url.hostname, url.port), timeout=60)


@pytest.fixture
def ask(process):
    return partial(request, process.address)


def test_a_model_that_cannot_answer_is_not_served():
    for fields, named in (({"num_classes": 0}, "no classifier"), ({"in_chans": 5}, "5 channels")):
        subject = Classifier.of(locality.create_model("convit_nano", **fields))
        with pytest.raises(UserError, match=named):
            application(subject)


def test_it_is_reached_from_this_machine_alone(process):
    (listening,) = psutil.Process(process.pid).net_connections("tcp")[:1]
    assert process.address == f"http://127.0.0.1:{listening.laddr.port}"
    assert listening.laddr.ip == "127.0.0.1"
    assert request(process.address, "HEAD", "/") == (200, b"")


def test_it_predicts_what_the_model_does(ask, process, model):
    classifier = open_model(model)
    for image in (photo(), photo((500, 300), "JPEG"), photo((8, 8), "GIF"), photo((1, 20_000))):
        status, content = ask("POST", "/predict", image, {"Origin": process.address})
        assert status == 200
        shares = {row["name"]: row["probability"] for row in json.loads(content)["classes"]}
        (row,) = classifier([Image.open(io.BytesIO(image)).convert("RGB")])
        assert shares == pytest.approx(classifier.top_classes(row), rel=1e-4)
    (logits,) = classifier.logits(
        classifier.prepare([Image.open(io.BytesIO(image)).convert("RGB")])
    )
    calibrated = (logits / 2.5).softmax(dim=0).max().item()
    assert max(shares.values()) == pytest.approx(calibrated, rel=1e-4)


def test_photographs_are_turned_as_they_were_held(ask):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = Image.open(io.BytesIO(photo())).crop((0, 0, 40, 40))
    plain, held = io.BytesIO(), io.BytesIO()
    turned.rotate(-90).save(plain, format="PNG")
    turned.save(held, format="PNG", exif=exif)
    assert ask("POST", "/predict", held.getvalue()) == ask("POST", "/predict", plain.getvalue())


def refused(ask, method, path, body, wanted, word, *headers):
    status, content = ask(method, path, body, *headers)
    assert (status, word in content.decode()) == (wanted, True), (method, path, content)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: f"{bad[0]} {bad[1]} {bad[4]}")
def test_what_is_bad_gets_a_sentence(ask, bad):
    refused(ask, *bad)


def test_good_requests_beside_bombs(ask, process):
    """Within 2 GB, also while bodies do not end."""
    good = [photo(), photo((1200, 900), "JPEG")]

    def one(number):
        if number % 3 == 0:
            refused(ask, *REFUSED[number // 3 % len(REFUSED)])
        else:
            path = "/attention" if number % 10 == 0 else "/predict"
            assert ask("POST", path, good[number % 2])[0] == 200
        return psutil.Process(process.pid).memory_info().rss

    with contextlib.ExitStack() as stack:
        for _ in range(30):
            connection = stack.enter_context(connected(process))
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
            connection.sendall(b"Content-Length: 1000\r\n\r\nx")
        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(one, range(200))) < 2e9


def test_weights_that_overflow_and_names_that_are_no_text(tmp_path):
    """And bodies that are no HTTP: without a traceback."""
    net = locality.create_model("convit_nano")
    words = [sys.executable, "-m", "locality", "serve", "--port", "0"]
    for scale, wanted, word in ((1, 200, "udc80"), (1e30, 500, "non-finite logits")):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(scale)
        folder = save(net, tmp_path / str(scale), classes=CLASSES)
        config = (folder / "config.json").read_text().replace("<b>", "\\udc80")
        (folder / "config.json").write_text(config)
        with (
            open(tmp_path / "log", "w+") as log,
            answering([*words, str(folder)], stderr=log) as started,
        ):
            for host in (b"x", b"localhost"):
                with connected(started) as connection:
                    start = b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: "
                    connection.sendall(start + host + b"\r\n\r\nZZZ\r\n")
                    assert b" 400 " in connection.recv(100)
            refused(partial(request, started.address), "POST", "/predict", photo(), wanted, word)
            log.seek(0)
            assert "Traceback" not in log.read()


def test_a_port_that_is_taken(process, model, capsys):
    port = urlparse(process.address).port
    assert main(["serve", str(model), "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


WIDE = "document.documentElement.scrollWidth - innerWidth"


def test_the_page_in_a_browser(process, browser, tmp_path):
    """On a phone, with a script in a file's name."""
    file, none = tmp_path / "<img src=x onerror=throw(1)>.png", tmp_path / "notes.txt"
    file.write_bytes(photo((448, 320)))
    none.write_text("no image")
    errors = []
    with browser.new_page(viewport={"width": 390, "height": 900}) as page:
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: errors.append(error))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
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
        # The frame is as high as its content; nothing overflows the window.
        page.wait_for_function("document.querySelector('#maps').offsetHeight > 800")
        assert frame.evaluate("document.documentElement.scrollHeight - innerHeight") <= 1
        assert page.evaluate(WIDE) <= 0 and frame.evaluate(WIDE) <= 0
        assert page.locator("#busy").is_hidden() and page.locator("#chosen img").count() == 0
        assert not errors
        # The whole photograph is beside its crop.
        whole, crop = (page.locator(name) for name in ("#whole", "#crop"))
        assert page.locator("#named").inner_text() == file.name
        assert whole.evaluate("(node) => [node.naturalWidth, node.naturalHeight]") == [448, 320]
        assert crop.evaluate("(node) => node.naturalWidth === node.naturalHeight")
        # Each of several images can be explored.
        page.set_input_files("#file", [file, none])
        images = page.locator("#chosen button")
        assert page.locator("#busy").is_visible() and images.count() == 2
        page.wait_for_selector("#classes tr:nth-child(5)")
        best = page.locator("#classes td").first.inner_text()
        images.nth(1).get_by_text("–").wait_for()  # each shows its class
        assert images.nth(0).inner_text() == best
        images.nth(1).click()
        page.get_by_text(re.compile("notes.txt: .*not an image")).wait_for()
        assert whole.is_hidden() and images.nth(1).locator("img").count() == 0
        assert images.nth(1).get_attribute("aria-pressed") == "true"
        assert page.locator("#busy").is_hidden()
        page.get_by_role("button", name="copy").press("Enter")
        page.get_by_role("button", name=re.compile("copied|selected")).wait_for()
        page.set_input_files("#file", none)
        page.get_by_text("not an image").wait_for()
        assert page.locator("#classes tr").count() == 0 and page.locator("#maps").is_hidden()


@pytest.mark.skipif(not IPV6, reason="this machine has no IPv6")
def test_an_ipv6_address_can_be_opened(model):
    words = [sys.executable, "-m", "locality", "serve", str(model), "--port", "0", "--host", "::1"]
    with answering(words) as started:
        assert started.address.startswith("http://[::1]:")
        assert request(started.address, "GET", "/")[0] == 200
        assert request(started.address, "POST", "/predict", photo())[0] == 200
        evil = {"Host": "evil.example"}
        assert request(started.address, "POST", "/predict", photo(), evil)[0] == 400
