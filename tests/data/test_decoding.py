"""Every kind of image file decodes to the right RGB image, or gives an error with a reason."""

import errno
import io
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from locality.data import BadImage, Decoding
from locality.data.decoding import decode, read_bytes


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bits, colour, rows, extra=b"", interlaced=0):
    """A hand-written PNG, for kinds that Pillow cannot write."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    signature = b"\x89PNG\r\n\x1a\n"
    parts = (chunk(b"IHDR", header), extra, chunk(b"IDAT", body), chunk(b"IEND", b""))
    return signature + b"".join(parts)


def pixels(data, **settings):
    image = decode(data, Decoding(**settings))
    assert image.mode == "RGB"
    return np.asarray(image)


RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
VALUES = [0, 128, 256, 32768, 65535]
HIGH_BYTES = [0, 0, 1, 128, 255]


def test_colour_is_untouched():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(pixels(encoded(Image.fromarray(image))), image)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF"])
def test_grey_is_repeated(kind):
    result = pixels(encoded(Image.fromarray(RAMP), kind))
    assert np.array_equal(result, np.repeat(RAMP[..., None], 3, axis=2))


def test_palettes_and_first_frames():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert pixels(encoded(image)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert pixels(encoded(image, transparency=0)).tolist() == [[[255] * 3, [0, 0, 255]]]
    frames = encoded(image, "GIF", save_all=True, append_images=[Image.new("P", (2, 1))])
    assert pixels(frames).tolist() == [[[255, 0, 0], [0, 0, 255]]]


def test_a_colour_or_grey_that_the_file_names_transparent_is_white():
    extra = chunk(b"tRNS", struct.pack(">3H", 9, 9, 9))
    colour = png(2, 1, 8, 2, [bytes([9, 9, 9, 1, 2, 3])], extra)
    assert pixels(colour).tolist() == [[[255] * 3, [1, 2, 3]]]
    extra = chunk(b"tRNS", struct.pack(">H", 32768))
    grey = png(5, 1, 16, 0, [struct.pack(">5H", *VALUES)], extra)
    assert pixels(grey)[0, :, 0].tolist() == [0, 0, 1, 255, 255]


@pytest.mark.parametrize(
    ("mode", "pixel", "expected"),
    [
        ("RGBA", (200, 100, 0, 255), [200, 100, 0]),
        ("RGBA", (200, 100, 0, 0), [255, 255, 255]),
        ("RGBA", (0, 0, 0, 51), [204, 204, 204]),
        ("LA", (10, 255), [10, 10, 10]),
        ("LA", (10, 0), [255, 255, 255]),
    ],
)
def test_alpha_is_shown_on_white(mode, pixel, expected):
    assert pixels(encoded(Image.new(mode, (3, 2), pixel)))[1, 2].tolist() == expected


@pytest.mark.parametrize(
    ("ink", "expected"), [((0, 0, 0, 0), 255), ((0, 0, 0, 255), 0), ((255, 255, 255, 0), 0)]
)
def test_cmyk_photograph(ink, expected):
    # Inverted, as Adobe's programs and Pillow write it.
    data = encoded(Image.new("CMYK", (8, 8), ink), "JPEG", quality=100)
    assert np.abs(pixels(data).astype(int) - expected).max() <= 2


WITH_ALPHA = [value for grey in VALUES for value in (grey, 65535)]
SIXTEEN_BITS = {
    "grey": png(5, 1, 16, 0, [struct.pack(">5H", *VALUES)]),
    "grey with alpha": png(5, 1, 16, 4, [struct.pack(">10H", *WITH_ALPHA)]),
    "colour": png(5, 1, 16, 2, [struct.pack(">15H", *np.repeat(VALUES, 3))]),
    "TIFF": encoded(Image.fromarray(np.array([VALUES], dtype=np.uint16)), "TIFF"),
    "PPM": b"P5 5 1 65535\n" + struct.pack(">5H", *VALUES),
}


@pytest.mark.parametrize("kind", SIXTEEN_BITS)
def test_16_bits_are_scaled_not_clipped(kind):
    assert pixels(SIXTEEN_BITS[kind])[0].tolist() == [[value] * 3 for value in HIGH_BYTES]


@pytest.mark.parametrize("dtype", ["<u2", "u1"])
@pytest.mark.parametrize("compression", ["raw", "tiff_adobe_deflate"])
def test_tiff_whose_zero_is_white(dtype, compression):
    grey = (RAMP.astype(int) * (257 if "2" in dtype else 1)).astype(dtype)
    data = encoded(Image.fromarray(grey), "TIFF", compression=compression)
    order = "<" if data.startswith(b"II") else ">"
    black, white = (struct.pack(order + "HHLH", 262, 3, 1, value) for value in (1, 0))
    assert data.count(black) == 1
    assert np.array_equal(pixels(data)[..., 0], RAMP)
    assert np.array_equal(pixels(data.replace(black, white))[..., 0], 255 - RAMP)


def grey_tiff(content, width, bits, sign=1):
    fields = [(256, 3, 1, width), (257, 3, 1, 1), (258, 3, 1, bits), (262, 3, 1, 1)]
    fields += [(273, 4, 1, 8), (277, 3, 1, 1), (279, 4, 1, len(content)), (339, 3, 1, sign)]
    head = b"II*\0" + struct.pack("<L", 8 + len(content)) + content
    return head + directory(fields, len(head))


def test_signed_tiff():
    # Negative values are black, as in skimage.util.img_as_ubyte.
    data = grey_tiff(struct.pack("<5h", -32768, -1, 128, 16384, 32767), 5, 16, sign=2)
    assert pixels(data)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    with pytest.raises(BadImage, match="signed"):
        decode(grey_tiff(bytes(4), 4, 8, sign=2))


def test_greys_of_fewer_bits():
    # The first is packed, 0x012 and 0xFED; its header says that 4095 is white.
    assert pixels(grey_tiff(b"\x01\x2f\xed", 2, 12))[0, :, 0].tolist() == [0x01, 0xFE]
    data = png(4, 1, 16, 0, [struct.pack(">4H", 0, 0x12, 0xFED, 0x1000)])
    assert pixels(data, grey_bits=12)[0, :, 0].tolist() == [0, 0x01, 0xFE, 255]
    assert pixels(data, grey_bits=8)[0, :, 0].tolist() == [0, 0x12, 255, 255]
    assert pixels(data)[0, :, 0].tolist() == [0, 0, 0x0F, 0x10]
    # So does the header of this one.
    ppm = b"P5 2 1 4095\n" + struct.pack(">2H", 0x12, 0xFFF)
    assert pixels(ppm, grey_bits=12)[0, :, 0].tolist() == [1, 255]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_grey_is_refused(dtype):
    data = encoded(Image.fromarray(np.array([[0, 1]], dtype=dtype)), "TIFF")
    with pytest.raises(BadImage, match="32 bits"):
        decode(data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_an_option(orientation):
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(image), "PNG", exif=exif)
    assert np.array_equal(pixels(data)[..., 0], image)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels(data, exif=True)[..., 0], np.asarray(turned))


def test_whatever_pillow_raises_while_converting_is_the_images_fault(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(Image.Image, "transpose", fail)
    with pytest.raises(BadImage, match="ZeroDivisionError"):
        decode(encoded(NOISE, exif=b"Exif\0\0" + tiff_block([TURNED])), Decoding(exif=True))


def directory(fields, start):
    """A TIFF directory at `start`, followed by its values.

    A field is tag, type, count and value, or an offset instead of the value.
    """
    place, entries, values = start + 2 + 12 * len(fields) + 4, b"", b""
    for tag, kind, count, value in fields:
        if isinstance(value, int):
            value = struct.pack("<L", value)
        elif len(value) > 4:
            value, values = struct.pack("<L", place + len(values)), values + value
        entries += struct.pack("<HHL", tag, kind, count) + value.ljust(4, b"\0")
    return struct.pack("<H", len(fields)) + entries + bytes(4) + values


def tiff_block(fields):
    return b"II*\0" + struct.pack("<L", 8) + directory(fields, 8)


TURNED = (0x112, 3, 1, struct.pack("<H", 6))
ODD = [  # read by Pillow, but not written back
    *((0x8298, 5, 1, struct.pack("<II", 1, 1)), (0x13B, 12, 1, struct.pack("<d", 1.0))),
    *((0x11A, 12, 1, struct.pack("<d", float("nan"))), (0x8769, 9, 1, struct.pack("<i", -1))),
    *((0x10F, 11, 1, struct.pack("<f", 1.0)), (0x11A, 10, 1, struct.pack("<ii", -1, 0))),
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_exif_fields_change_nothing(odd):
    record = b"Exif\0\0" + tiff_block(sorted([odd, TURNED]))
    data = encoded(NOISE, exif=record)
    assert np.array_equal(pixels(data, exif=True), np.rot90(np.asarray(NOISE), -1))


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


KINDS = [kind for kind in ("JPEG2000", "AVIF") if kind in Image.SAVE]
KINDS += ["JPEG", "MPO", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.99])
def test_truncated(kind, share):
    data = encoded(NOISE, kind)
    decode(data)
    for least in (None, 8):
        with pytest.raises(BadImage):
            decode(data[: int(len(data) * share)], Decoding(least=least))


def taller(data):
    """A PNG or JPEG file whose header promises a hundred rows more than it has."""
    if data.startswith(b"\x89PNG"):
        header = data[12:20] + struct.pack(">I", 164) + data[24:29]
        return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    place = next(data.index(start) for start in (b"\xff\xc0", b"\xff\xc2") if start in data)
    return data[: place + 5] + struct.pack(">H", 164) + data[place + 7 :]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"subsampling": 0})],
)
def test_missing_rows_are_not_filled(kind, options, mode):
    whole = encoded(NOISE.convert(mode), kind, **options)
    for least in (None, 8):
        with pytest.raises(BadImage, match="is damaged"):
            decode(taller(whole), Decoding(least=least))
    for colour in (0, 255):  # what missing rows would be filled with
        flat = NOISE.convert(mode)
        flat.paste((colour,) * len(mode), (0, 20, 64, 64))
        decode(encoded(flat, kind, **options))
    if kind == "JPEG" and not options:
        with pytest.raises(BadImage, match="is damaged"):
            decode(whole[: len(whole) // 2] + b"\xff\xd9")
        decode(whole + b"a trailer \xff\xd9")


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_missing_scans_are_not_left_out(mode):
    whole = encoded(NOISE.convert(mode), "JPEG", progressive=True)
    decode(whole)
    for place in [found.start() for found in re.finditer(rb"\xff\xda", whole)][1:]:
        for least in (None, 8):
            with pytest.raises(BadImage, match="its last scans are missing"):
                decode(whole[:place] + b"\xff\xd9", Decoding(least=least))


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (9, 4), (17, 8)])
@pytest.mark.parametrize(("bits", "colour"), [(1, 0), (4, 3), (8, 2), (8, 4), (16, 6)])
def test_an_interlaced_png_is_complete_or_refused(size, bits, colour):
    (width, height), channels = size, {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    rows = [  # Adam7
        bytes(1 - (-(-((x - width) // dx) * bits * channels) // 8))
        for x, y, dx, dy in (
            *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
            *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
        )
        for _ in range(y, height if x < width else 0, dy)
    ]
    palette = chunk(b"PLTE", bytes(48)) if colour == 3 else b""
    for count in (len(rows), len(rows) - 1):
        data = [row[1:] for row in rows[:count]]
        content = png(width, height, bits, colour, data, palette, interlaced=1)
        if count == len(rows):
            decode(content)
        else:
            with pytest.raises(BadImage, match="is damaged"):
                decode(content)


def test_a_flipped_bit_in_the_middle():
    data = bytearray(encoded(NOISE))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(BadImage, match="damaged"):
        decode(bytes(data))


@pytest.mark.parametrize("data", [b"", b"hello, world", b"\0" * 1000, b"GIF89a"])
def test_not_an_image(data):
    with pytest.raises(BadImage):
        decode(data)


def test_pixel_limit():
    data = encoded(Image.new("L", (100, 50)))
    assert decode(data, Decoding(max_pixels=5000)).size == (100, 50)
    with pytest.raises(BadImage, match="4,999"):
        decode(data, Decoding(max_pixels=4999))


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_decompression_bomb(side):
    # A few bytes that would decode to 100 and 400 million pixels.
    data = png(side, side, 8, 0, [b""])
    assert len(data) < 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadImage, match="pixels"):
            decode(data)


def test_what_cannot_be_read_is_the_files_fault_unless_the_machine_has_no_more(
    tmp_path, monkeypatch
):
    for place in (tmp_path / "gone.jpg", tmp_path):
        with pytest.raises(BadImage, match="cannot be read"):
            read_bytes(place)

    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        read_bytes(tmp_path / "fine.jpg")


def with_scans(count, **options):
    """A JPEG file with its last scan repeated `count` times."""
    data = encoded(Image.fromarray(RAMP).resize((64, 64)).convert("RGB"), "JPEG", **options)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * (count - 1) + data[-2:]


def test_scans_are_counted_where_all_are_decoded():
    once, often = (with_scans(count, progressive=True) for count in (1, 100))
    assert decode(once).size == (64, 64)
    with pytest.raises(BadImage, match="109 scans"):
        decode(often)


def test_the_video_of_a_motion_photo_has_no_scans():
    photo = with_scans(1)
    assert decode(photo + b"\xff\xda" * 100).tobytes() == decode(photo).tobytes()
