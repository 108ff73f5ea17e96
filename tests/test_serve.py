"""`locality serve` in its own process over HTTP, for ordinary and hostile clients."""

import contextlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlparse

import anyio
import psutil
import pytest
import torch
from PIL import Image

import locality
from locality.checkpoints import open_model, save
from locality.cli import main
from locality.data import BadImage, Preprocessing
from locality.data.config import Decoding
from locality.data.sources import TooManyPixels

HTTPException = pytest.importorskip("fastapi").HTTPException
application = pytest.importorskip("locality.serve.application")
decoding = pytest.importorskip("locality.serve.decoding")
pytestmark = pytest.mark.slow

CLASSES = [f"digit <b>{number}</b>" for number in range(10)]


def run_alone(coroutine):
    """Run in a separate thread, since other tests' browsers leave an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, coroutine).result()


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


def form(*contents, filename='; filename="/etc/passwd"'):
    """The body of `curl -F image=@FILE`, with one file per content."""
    start = f'--b\r\nContent-Disposition: form-data; name="image"{filename}\r\n\r\n'.encode()
    return b"".join(start + content + b"\r\n" for content in contents) + b"--b--\r\n"


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PATHS = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/file:///etc/passwd", "/predict/x")
# Method, path, body → status and a word of the error; unusual headers.
HOSTILE = [
    *(("GET", path, None, 404, "not found") for path in (*PATHS, "/docs", "/redoc")),
    ("POST", "/../predict", photo(), 404, "not found"),
    *((method, "/predict", None, 405, "POST an image") for method in ("GET", "PUT", "DELETE")),
    ("POST", "/", bytes(50_000_000), 405, "POST an image"),
    ("POST", "/predict", b"", 422, "the file is empty"),
    ("POST", "/predict", b"/etc/passwd", 422, "not an image"),
    ("POST", "/predict", form(b"x"), 422, "not an image", FORM),
    ("POST", "/predict", form(), 422, "0 files", FORM),
    ("POST", "/predict", form(photo(), filename=""), 422, "0 files", FORM),
    ("POST", "/predict", form(photo(), photo()), 422, "2 files", FORM),
    ("POST", "/predict", form(photo()), 422, "0 files", {"Content-Type": "multipart/form-data"}),
    ("POST", "/predict", b"--b\r\n" * 2_000_000, 422, "0 files", FORM),
    ("GET", "/", None, 400, "unknown host 'evil.example'", {"Host": "evil.example"}),
    ("GET", "/openapi.json", None, 400, "unknown host", {"Host": "127.0.0.1.evil.example:80"}),
    ("POST", "/predict", photo(), 400, "unknown host", {"Host": "evil.example"}),
    ("POST", "/predict", photo(), 403, "http://evil.example", {"Origin": "http://evil.example"}),
    ("POST", "/attention", photo(), 403, "a page of null", {"Origin": "null"}),
    ("POST", "/predict", photo(), 403, "a page of http://[", {"Origin": "http://["}),
    ("POST", "/predict", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not an image"),
    ("POST", "/predict", b"%!PS-Adobe-3.0 EPSF-3.0\n", 422, "not an image"),
    ("POST", "/predict", photo()[:200], 422, "damaged"),
    ("POST", "/predict", lying(), 422, "damaged"),
    ("POST", "/predict", bomb(), 422, "50,000,000"),
    ("POST", "/attention", bomb(), 422, "50,000,000"),
    ("POST", "/attention", b"\x89PNG\r\n\x1a\n", 422, "image"),
    ("POST", "/predict", photo()[:60] + bytes(50_000_000), 413, "larger than 20 MB"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, shaken):
    folder = tmp_path_factory.mktemp("serve") / "saved"
    return save(shaken(locality.create_model("convit_nano")), folder, classes=CLASSES)


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


def checked(headers):
    """Check the headers of every answer."""
    names = {name.lower(): value for name, value in headers}
    assert "default-src 'none'" in names["content-security-policy"] and "server" not in names
    assert names["x-content-type-options"] == "nosniff" and names["x-frame-options"] == "DENY"


def request(address, method, path, body=None, headers=None, check=checked):
    """Send a request; return status and content."""
    place = urlparse(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        check(answer.getheaders())
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
        shares = {each["name"]: each["probability"] for each in json.loads(answer)["classes"]}
        (row,) = classifier([Image.open(io.BytesIO(image)).convert("RGB")])
        assert shares == pytest.approx(classifier.top_classes(row), rel=1e-4)


def test_a_form_is_understood(ask, process):
    origin = {"Origin": process.address}
    for image in (photo(), photo((500, 300), "JPEG")):
        plain = ask("POST", "/predict", image)
        assert plain[0] == 200 and ask("POST", "/predict", form(image), FORM) == plain
        assert ask("POST", "/predict", image, origin) == plain


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
    method, path, body, wanted, word, *headers = hostile
    status, answer = ask(method, path, body, *headers)
    assert (status, word in json.loads(answer)["detail"]) == (wanted, True), (hostile[:2], answer)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda each: f"{each[0]} {each[1]} {each[4]}")
def test_what_is_bad_gets_a_sentence(ask, hostile):
    refused(ask, hostile)


def status_of(connection):
    """Status of the answer on a connection."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status


def connected(process):
    place = urlparse(process.address)
    return socket.create_connection((place.hostname, place.port), timeout=60)


def test_what_is_no_http_is_refused(process):
    with connected(process) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert status_of(connection) == 400


def test_a_body_that_is_not_http(model, tmp_path):
    """Also a file name that is not text."""
    config = model / "config.json"
    other = tmp_path / "saved"
    shutil.copytree(model, other)
    (other / "config.json").write_text(config.read_text().replace("digit <b>0</b>", "\\udc80"))
    words = [sys.executable, "-m", "locality", "serve", str(other), "--port", "0"]
    with open(tmp_path / "log", "w+") as log, answering(words, stderr=log) as started:
        for host in (b"x", b"localhost"):
            for _ in range(5):
                with connected(started) as connection:
                    start = b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: "
                    connection.sendall(start + host + b"\r\n\r\nZZZ\r\n")
                    assert status_of(connection) == 400
        found = [request(started.address, "POST", "/predict", photo((1, n))) for n in (1, 20_000)]
        assert [status for status, _ in found] == [200, 200]
        request_attention = request(started.address, "POST", "/attention", photo((1, 20_000)))
        assert request_attention[0] == 200
        log.seek(0)
        assert "Traceback" not in log.read()


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_header_that_does_not_end(process, ask, before):
    """Others are answered while a hundred are held, and each is closed."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(process)) for _ in range(100)]
        for connection in held:
            connection.sendall(before)
            if before:
                http.client.HTTPResponse(connection).begin()
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        assert ask("POST", "/predict", photo())[0] == 200
        if not before:
            assert [connection.recv(1) for connection in held] == [b""] * 100


def test_bodies_that_do_not_end(process, ask):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(connected(process))
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
            connection.sendall(b"Content-Length: 1000\r\n\r\nx")
        assert ask("POST", "/predict", photo())[0] == 200


def test_weights_that_overflow(tmp_path):
    net = locality.create_model("convit_nano")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1e30)
    words = [sys.executable, "-m", "locality", "serve", str(save(net, tmp_path / "saved"))]
    with answering([*words, "--port", "0"]) as started:
        for path in ("/predict", "/attention"):
            status, answer = request(started.address, "POST", path, photo())
            assert status == 500 and "gives non-finite logits" in json.loads(answer)["detail"]


def test_a_third_hostile_eight_at_a_time(ask, process):
    """500 requests get correct answers, and memory does not grow."""
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
    # Eight of the largest accepted files, with their copies.
    assert max(memory[400:]) - max(memory[:200]) < 100e6


def test_too_many_bytes_at_once(monkeypatch):
    """Refused and answered requests no longer count."""
    monkeypatch.setattr(application, "_MAX_HELD_BYTES", 100)
    held = application.RequestBodies()

    def sent(*pieces):
        async def stream():
            for piece in pieces:
                yield bytes(piece)

        return held.image(SimpleNamespace(headers={}, stream=stream))

    async def ask():
        for _ in range(2):
            async with sent(50, 20) as data:
                assert len(data) == 70
                with pytest.raises(HTTPException, match="too many"):
                    await sent(20, 20).__aenter__()
                async with sent(30):
                    pass

    run_alone(ask)


class TestDecoding:
    """Lifetimes of the decoding processes."""

    @staticmethod
    def run_in_processes(function, *data):
        async def all_of_them():
            processes = anyio.CapacityLimiter(len(data))
            found = {}

            async def one(each):
                try:
                    found[each] = await decoding.in_process(function, each, limiter=processes)
                except Exception as error:
                    found[each] = error

            async with anyio.create_task_group() as tasks:
                for each in data:
                    tasks.start_soon(one, each)
            return found

        return run_alone(all_of_them)

    def test_they_do_not_import_torch(self):
        code = "import sys, locality.serve.decoding; print('torch' in sys.modules)"
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"

    def test_what_takes_too_long_is_refused(self, monkeypatch):
        before = psutil.Process().children()
        monkeypatch.setattr(decoding, "SECONDS", 5)
        found = self.run_in_processes(time.sleep, 0, 1000)
        assert found[0] is None
        assert isinstance(found[1000], BadImage) and "more than 5 seconds" in str(found[1000])
        after = [each for each in psutil.Process().children() if each not in before]
        assert not psutil.wait_procs(after, 30)[1]

    def test_a_process_that_is_killed(self):
        found = self.run_in_processes(signal.raise_signal, signal.SIGKILL)
        assert isinstance(found[signal.SIGKILL], anyio.BrokenWorkerProcess)

    def test_small_images_do_not_wait_for_large_ones(self, monkeypatch):
        monkeypatch.setattr(decoding, "_WAIT_SECONDS", 0.1)
        small, large = photo(), photo((2000, 2000))

        async def ask():
            decoder = decoding.Decoder(Preprocessing(32), "L", Decoding())
            found = await decoder(large)
            assert (found.image.mode, found.image.size) == ("L", (32, 32))
            assert (found.shown.mode, found.shown.size) == ("RGB", (448, 448))
            async with decoder._places[1]:
                assert (await decoder(small)).shown.size == (32, 32)
                with pytest.raises(decoding.Busy, match="too many"):
                    await decoder(large)
            with pytest.raises(TooManyPixels):
                await decoder(bomb())

        run_alone(ask)

    def test_a_runs_own_limit_of_pixels_is_kept(self):
        async def ask():
            decoder = decoding.Decoder(Preprocessing(32), "RGB", Decoding(max_pixels=2400))
            assert (await decoder(photo((60, 40)))).image.size == (32, 32)
            with pytest.raises(TooManyPixels):
                await decoder(photo((60, 41)))

        run_alone(ask)

    def test_a_decoder_that_gets_no_memory_says_so(self):
        async def ask():
            decoder = decoding.Decoder(Preprocessing(32), "RGB", Decoding())
            assert (await decoder(photo((4000, 3000), "WEBP", method=0))).image.size == (32, 32)
            with pytest.raises(BadImage, match="takes more than 420 MB"):
                await decoder(photo((7000, 7000), "WEBP", method=0))
            assert (await decoder(photo())).image.size == (32, 32)

        run_alone(ask)


# Announce each image in a pipe, then never return.
STUCK = """
import runpy, sys
from locality.cli import main
from locality.serve import application, decoding
where, what, *words = sys.argv[1:]
if where == "decoding":
    run = decoding.in_process
    decoding.in_process = lambda _, sent, *__, limiter: run(
        runpy.run_path, bytes(sent), limiter=limiter
    )
else:
    application.explorer_page = lambda *_: runpy.run_path(what)
sys.exit(main(words))
"""


@pytest.mark.parametrize("where", ["decoding", "looking"])
def test_it_ends_while_it_is_busy(where, model, tmp_path):
    pipe, script = tmp_path / "pipe", tmp_path / "stuck.py"
    os.mkfifo(pipe)
    script.write_text(f"import time\nopen({str(pipe)!r}, 'w').close()\ntime.sleep(1000)\n")
    words = [sys.executable, "-c", STUCK, where, str(script)]
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(
            answering([*words, "serve", str(model), "--port", "0"], env=os.environ)
        )
        body = os.fsencode(script) if where == "decoding" else photo()
        for start in (b"", b"POST / HTTP/1.1\r\nContent-Le", None):
            connection = connected(started)
            stack.callback(connection.close)
            if start is None:
                start = b"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                start += b"%d\r\n\r\n" % len(body) + body
            connection.sendall(start)
        pipe.read_bytes()  # until it is busy
        children = psutil.Process(started.pid).children()
    assert not psutil.wait_procs(children, 30)[1]


def test_a_port_that_is_taken(process, model, capsys):
    port = urlparse(process.address).port
    assert main(["serve", str(model), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


WIDE = "document.documentElement.scrollWidth - innerWidth"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(process, browser, width, tmp_path):
    file, none = tmp_path / "photo.png", tmp_path / "notes.txt"
    file.write_bytes(photo((448, 320)))
    none.write_text("no image")
    errors = []
    with browser.new_page(viewport={"width": width, "height": 900}) as page:
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
        assert page.locator("#named").inner_text() == "photo.png"
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


def test_the_camera(process, browser):
    with browser.new_page() as page:
        page.set_default_timeout(120_000)
        page.goto(process.address)
        page.get_by_text("use the camera").click()
        page.get_by_text("take the picture").click()
        page.wait_for_selector("#classes tr:nth-child(5)")
        assert page.locator("#classes tr").count() == 5
