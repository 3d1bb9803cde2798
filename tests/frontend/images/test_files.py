"""Images as files, bytes and URLs: accepted sources, and sources refused before decoding."""

import base64
import io
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from headstart import RequestError
from headstart.frontend.images.decoding import FORMATS, read_data_url, read_source
from headstart.frontend.images.prompt import ImageReader
from headstart.models.decoder import ProcessedImage
from tests.tiny_vision import make_image

MAX_PIXELS = 2**25
MAX_BYTES = 4 * MAX_PIXELS + 2**20


class Vision:
    """A model that stores the image instead of processing it."""

    def fingerprint(self) -> bytes:
        return b"a model"

    def process(self, image: Image.Image) -> ProcessedImage:
        return ProcessedImage(None, (1,), 1, image)

    def recall(self, image: Image.Image, shape: tuple[int, ...]) -> ProcessedImage:
        return ProcessedImage(None, shape, 1, image)


def reader(max_pixels: int = MAX_PIXELS) -> ImageReader:
    vision: Any = Vision()
    return ImageReader(vision, max_pixels)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with these chunks of a name and data."""
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in (*chunks, (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(name + content))
        data += struct.pack(">I", len(content)) + name + content + checksum
    return data


def png_header(width: int, height: int) -> bytes:
    """Return a PNG with a size in its header and almost no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png_of((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_each_format_is_read_as_by_pillow(form: str, mode: str) -> None:
    picture = make_image(1).convert(mode)
    if form == "WEBP" or (form == "JPEG" and mode in "P1"):
        picture = picture.convert("RGB")
    data = encoded(picture, form)
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    assert reader().read(data).image.pixels.tobytes() == expected.tobytes()


def test_the_first_frame_of_an_mpo_is_read() -> None:
    """Pillow calls a camera's JPEG with a second picture MPO."""
    first, second = make_image(1), make_image(2)
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    expected = Image.open(io.BytesIO(encoded(first, "JPEG"))).convert("RGB")
    assert reader().read(data).image.pixels.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", ["GIF", "WEBP", "TIFF", "PNG"])
def test_the_first_frame_counts(form: str) -> None:
    frames = [make_image(seed) for seed in (1, 2, 3)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    alone = encoded(frames[0], form, **options)
    assert reader().read(data).digest == reader().read(alone).digest


def test_an_image_is_rotated_by_its_exif_orientation() -> None:
    picture = make_image(1, 40, 24)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    data = encoded(picture, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    upright = reader().read(data).image.pixels
    assert upright.size == (24, 40)
    assert upright.tobytes() == expected.tobytes()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
OTHERS = {
    "EPS": EPS,
    "PPM": b"P6 2 2 255\n" + bytes(12),
    "ICO": encoded(make_image(1, 16, 16), "ICO"),
    "PCX": encoded(make_image(1), "PCX"),
    "TGA": encoded(make_image(1), "TGA"),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "nothing": b"",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused(name: str) -> None:
    """For an EPS, Pillow ran Ghostscript if it was installed."""
    with pytest.raises(RequestError, match="allowed: PNG, JPEG, WEBP, GIF, BMP, TIFF"):
        reader().read(OTHERS[name])


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (1, 30_000_000, "1 × 30000000 pixels; allowed: the longer side up to 200 times the"),
        (30_000_000, 1, "30000000 × 1 pixels; allowed: the longer side up to 200 times the"),
        (201, 1, "allowed: the longer side up to 200 times the shorter"),
        (6000, 6000, "6000 × 6000 pixels; allowed: 1 to 33,554,432"),
        (
            10_000,
            10_000,
            r"^an image has too many pixels; allowed: 1 to 33,554,432 \(max_image_pixels\)$",
        ),
        (
            60_000,
            60_000,
            r"^an image has too many pixels; allowed: 1 to 33,554,432 \(max_image_pixels\)$",
        ),
        (
            2**31 - 1,
            2**31 - 1,
            r"^an image has too many pixels; allowed: 1 to 33,554,432 \(max_image_pixels\)$",
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_size_is_refused_before_pixels_are_decoded(width: int, height: int, message: str) -> None:
    """Earlier, a strip was decoded, and its scaling failed after seconds."""
    with pytest.raises(RequestError, match=message):
        reader().read(png_header(width, height))


def test_the_longest_strip_is_read() -> None:
    assert reader().read(Image.new("RGB", (200, 1))).image.pixels.size == (200, 1)
    with pytest.raises(RequestError, match="longer side"):
        reader().read(Image.new("RGB", (1, 201)))


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_file_is_refused_or_unchanged(form: str) -> None:
    """A cut after the pixels may change nothing."""
    data = encoded(make_image(1, 40, 40), form)
    whole = reader().read(data).digest
    for count in [*range(0, len(data), max(1, len(data) // 60)), len(data) - 1]:
        try:
            partial = reader().read(data[:count]).digest
        except RequestError as error:
            assert "cannot be read" in str(error)
        else:
            assert partial == whole or form == "GIF"  # of which Pillow fills the rest


@given(st.sampled_from(FORMATS), st.data())
def test_damaged_files_are_read_or_refused(form: str, data: st.DataObject) -> None:
    damaged = bytearray(encoded(make_image(1, 12, 12), form))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        reader(10**4).read(bytes(damaged))
    except RequestError as error:
        str(error).encode()


# Transparency and levels

_SIZE = (40, 24)


def shown(source: Any) -> np.ndarray[Any, Any]:
    """Return the levels `[height, width, 3]` that a model sees, as signed integers."""
    return np.asarray(reader().read(source).image.pixels).astype(int)


def see_through() -> Image.Image:
    """Return a color picture whose transparency increases from left to right."""
    picture = make_image(1, *_SIZE)
    ramp = np.linspace(0, 255, _SIZE[0]).astype(np.uint8)
    picture.putalpha(Image.fromarray(np.tile(ramp, (_SIZE[1], 1))))
    return picture


def over_white(picture: Image.Image) -> np.ndarray[Any, Any]:
    """Return the picture on white, in float64."""
    levels = np.asarray(picture.convert("RGBA")).astype(float)
    share = levels[..., 3:] / 255
    return levels[..., :3] * share + 255 * (1 - share)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_a_transparent_picture_is_shown_on_white(mode: str) -> None:
    """Earlier, black ink on a transparent ground was entirely black."""
    picture = see_through()
    for step in {"PA": ["LA", "PA"], "La": ["LA", "La"]}.get(mode, [mode]):
        picture = picture.convert(step)
    visible = picture.convert("LA") if mode == "La" else picture
    assert abs(shown(picture) - over_white(visible)).max() <= 1


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "GIF"])
def test_a_transparent_file_is_shown_on_white(form: str) -> None:
    data = encoded(see_through(), form, **({"lossless": True} if form == "WEBP" else {}))
    expected = over_white(Image.open(io.BytesIO(data)))
    assert abs(shown(data) - expected).max() <= 1
    assert reader().read(data).digest != reader().read(see_through().convert("RGB")).digest


def test_a_palette_with_transparent_entries_is_shown_on_white() -> None:
    picture = make_image(1, *_SIZE).quantize(8)
    data = encoded(picture, "PNG", transparency=bytes([0, 90, 255]))
    assert abs(shown(data) - over_white(Image.open(io.BytesIO(data)))).max() <= 1


@pytest.mark.parametrize(
    ("mode", "rows", "transparent", "expected"),
    [
        ((1, 0), b"\x50", (0,), [255, 255, 255, 255]),
        ((1, 0), b"\x50", (1,), [0, 255, 0, 255]),
        ((2, 0), b"\x1b", (1,), [0, 255, 170, 255]),
        ((4, 0), b"\x12\x34", (2,), [17, 255, 51, 68]),
        ((8, 0), bytes([1, 2, 3, 4]), (2,), [1, 255, 3, 4]),
        ((16, 0), struct.pack(">4H", 511, 512, 513, 65535), (512,), [1, 255, 2, 255]),
        ((8, 2), bytes([1] * 3 + [2] * 3 + [3] * 3 + [4] * 3), (2, 2, 2), [1, 255, 3, 4]),
        ((16, 2), bytes([1] * 6 + [2] * 6 + [3] * 6 + [4] * 6), (0x202,) * 3, [1, 255, 3, 4]),
    ],
)
def test_one_transparent_level_of_a_png(
    mode: tuple[int, int], rows: bytes, transparent: tuple[int, ...], expected: list[int]
) -> None:
    """The chunk tRNS, with each number of bits of gray and color."""
    head = struct.pack(">IIBBBBB", 4, 1, *mode, 0, 0, 0)
    level = struct.pack(f">{len(transparent)}H", *transparent)
    data = png_of((b"IHDR", head), (b"tRNS", level), (b"IDAT", zlib.compress(b"\0" + rows)))
    assert shown(data).tolist() == [[[level] * 3 for level in expected]]


def deep(kind: str) -> np.ndarray[Any, Any]:
    """Return levels of 16 bits from black to white."""
    return np.linspace(0, 65535, _SIZE[0] * _SIZE[1]).reshape(_SIZE[::-1]).astype(kind)


@pytest.mark.parametrize("source", ["I;16", "I;16B", "I", "F", "PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled(source: str) -> None:
    """Earlier, all levels above 255 were white."""
    mode = {"I;16B": ">u2", "I": "i4", "F": "f4"}.get(source, "u2")
    image: Any = Image.fromarray(deep(mode))
    if source in FORMATS:
        image = encoded(image, source)
    assert np.array_equal(shown(image)[..., 0], deep("u2") >> 8)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (np.array([[0, 0.5, 1]], np.float32), [0, 127, 255]),
        (np.array([[0, 100, 255]], np.float32), [0, 100, 255]),
        (np.array([[0, 100, 255]], np.int32), [0, 100, 255]),
        (np.array([[-2, 0, 2]], np.float32), [0, 127, 255]),
        (np.array([[0, 2**30, 2**31 - 1]], np.int32), [0, 127, 255]),
        (np.array([[-7, -7, -7]], np.int32), [0, 0, 0]),
    ],
)
def test_other_grey_is_scaled_by_its_range(levels: Any, expected: list[int]) -> None:
    assert shown(Image.fromarray(levels))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("level", [np.nan, np.inf, -np.inf])
def test_levels_that_are_not_finite_are_refused(level: float) -> None:
    with pytest.raises(
        RequestError, match="has values that are not finite; allowed: finite values"
    ):
        reader().read(Image.fromarray(np.array([[0, level]], np.float32)))


def test_the_users_image_is_not_modified() -> None:
    picture = see_through()
    before = picture.tobytes(), dict(picture.info)
    assert reader().read(picture).digest == reader().read(picture).digest
    assert (picture.tobytes(), picture.info) == before


def test_pictures_that_differ_only_where_they_are_transparent_are_the_same() -> None:
    black, red = (Image.new("RGBA", _SIZE, colour) for colour in ((0, 0, 0, 0), (255, 0, 0, 0)))
    white = Image.new("RGB", _SIZE, "white")
    assert len({reader().read(picture).digest for picture in (black, red, white)}) == 1


def test_a_processors_error_becomes_a_request_error() -> None:
    class Refusing(Vision):
        def process(self, image: Image.Image) -> ProcessedImage:
            raise OverflowError("too many of them")

    vision: Any = Refusing()
    with pytest.raises(RequestError, match="refuses an image of 32 × 24 pixels: OverflowError: t"):
        ImageReader(vision, MAX_PIXELS).read(Image.new("RGB", (32, 24)))


# Sizes of files


def test_a_url_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier, 150 MB were decoded before their size was checked."""
    monkeypatch.setattr(base64, "b64decode", None)  # calling it would be a TypeError
    with pytest.raises(RequestError, match=r"has 1,500 bytes; allowed: 1,499 at most"):
        read_data_url("data:image/png;base64," + "A" * 2000, 1499)


@given(st.binary(max_size=40))
def test_a_url_has_as_many_bytes_as_it_decodes_to(data: bytes) -> None:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert read_data_url(url, len(data)) == data
    if data:
        with pytest.raises(RequestError, match=f"has {len(data)} bytes"):
            read_data_url(url, len(data) - 1)


@given(
    st.binary(max_size=40),
    st.sampled_from(["data:image/png;base64,", "DATA:image/PNG;BASE64,", "Data:;base64,"]),
    st.sampled_from([base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes]),
    st.booleans(),
    st.sampled_from(["", "\r\n", " "]),
)
def test_each_variant_of_base64_is_read(
    data: bytes, head: str, encode: Any, padded: bool, end: str
) -> None:
    """Clients send line breaks, the URL-safe alphabet, and base64 without padding."""
    digits = encode(data).decode()
    if not padded:
        digits = digits.replace("=", "")
    assert read_data_url(head + digits + end, 40) == data
    assert read_data_url(head + digits.replace("=", "%3D").replace("+", "%2B"), 40) == data


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,",
        "data:image/png;base64",
        "data:image/png,AAAA",
        "data:image/png;base64,A",
        "data:image/png;base64,A===",
        "data:image/png;base64,\ud800AAA",
        "data:image/png;base64,é" + "A" * 7,
        "data:" + "x" * 10**6,
    ],
    ids=lambda url: ascii(url[:30]),
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_data_url(url, 10**7)
    assert len(str(caught.value).encode()) < 500


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_measured(kind: Any) -> None:
    assert read_source(kind(b"abc"), 3) == b"abc"
    with pytest.raises(RequestError, match="has 3 bytes; allowed: 2 at most"):
        read_source(kind(b"abc"), 2)


def test_a_memoryview_is_measured_in_bytes() -> None:
    with pytest.raises(RequestError, match="has 24 bytes"):
        read_source(memoryview(np.zeros(3)), 10)


def test_a_file_is_measured_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(2**40)  # a file of holes
    with pytest.raises(RequestError, match=f"has {2**40:,} bytes; allowed: {MAX_BYTES:,} at most"):
        reader().read(path)


def test_a_file_of_unknown_size_is_read_up_to_the_limit() -> None:
    path = Path("/proc/self/maps")
    if not path.exists():
        pytest.skip("no /proc here")
    with pytest.raises(RequestError, match="has 101 bytes; allowed: 100"):
        read_source(path, 100)


def test_directories_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    """Earlier, a pipe without a writer blocked, and /dev/zero was read endlessly."""
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/tty"), tmp_path, tmp_path / "none.png"):
        for source in (path, str(path)):
            with pytest.raises(RequestError, match=r"not a regular file|cannot be read"):
                reader().read(source)


@pytest.mark.parametrize("source", [None, 3, 2.5, {}, [], object(), "a\0b", "/x" * 4000, "\ud800"])
def test_a_file_that_is_not_an_image_is_refused(source: Any) -> None:
    with pytest.raises(RequestError) as caught:
        reader().read(source)
    str(caught.value).encode()


def test_a_url_that_is_refused_is_not_copied() -> None:
    """The text is not copied; only its length is read."""
    url = "data:image/png;base64," + "A" * (200 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match="allowed: 135,266,304 at most"):
        reader().read(url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
