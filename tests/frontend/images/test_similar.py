"""Similar images: only copies replace an image, only on request and within a tenant."""

import hashlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from headstart import LLM, RequestOutput, SamplingParams
from headstart.engine.image_cache import EncoderKey
from headstart.frontend.images.prompt import LoadedImage
from headstart.frontend.images.similar import ENTRY_BYTES, SimilarImages, thumbnail_of
from headstart.models.decoder import ProcessedImage
from tests.tiny_vision import make_image, save_tiny_vision

ASKED = SamplingParams(temperature=0, max_tokens=4, similar_images=True)
NOT_ASKED = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, num_blocks=64, debug=True)
    yield llm
    llm.close()


def spots(seed: int, size: int = 60) -> Image.Image:
    """Return an image of coarse colored squares, which JPEG preserves."""
    return make_image(seed, 16, 16).resize((size, size), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "jpeg", quality=97, subsampling=0)
    return Image.open(stream).convert("RGB")


def ask(llm: LLM, image: Any, params: SamplingParams = ASKED, **more: Any) -> RequestOutput:
    assert llm.frontend.images is not None
    prompt = {
        "prompt": f"What is {llm.frontend.images.placeholder}?",
        "multi_modal_data": {"image": image},
    }
    salt = more.pop("cache_salt", None)
    [output] = llm.generate({**prompt, **more}, params, cache_salt=salt)
    return output


def test_a_copy_is_replaced_and_the_output_reports_it(llm: LLM) -> None:
    first = ask(llm, spots(1))
    second = ask(llm, as_jpeg(spots(1)))
    assert second.images[0].digest == first.images[0].digest
    assert (first.images[0].is_similar, second.images[0].is_similar) == (False, True)
    assert second.num_cached_tokens == len(second.prompt_token_ids) - 1
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.frontend.images is not None and llm.frontend.images.cache.num_encoded == 1
    assert not ask(llm, spots(2)).images[0].is_similar


def test_in_a_chat(llm: LLM) -> None:
    def chat(image: Image.Image) -> RequestOutput:
        content = [{"type": "image", "image": image}, {"type": "text", "text": "?"}]
        [output] = llm.chat([{"role": "user", "content": content}], ASKED)
        return output

    first, second = chat(spots(1)), chat(as_jpeg(spots(1)))
    assert second.images[0].is_similar
    assert second.prompt_token_ids == first.prompt_token_ids


def test_requests_without_the_option_are_unaffected(llm: LLM) -> None:
    ask(llm, spots(1), NOT_ASKED)
    assert not ask(llm, as_jpeg(spots(1)), ASKED).images[0].is_similar
    third = ask(llm, spots(1), NOT_ASKED)
    assert not third.images[0].is_similar
    assert third.images[0].digest == ask(llm, spots(1), NOT_ASKED).images[0].digest


def test_copies_are_not_replaced_across_tenants(llm: LLM) -> None:
    ask(llm, spots(1), cache_salt="a")
    assert not ask(llm, as_jpeg(spots(1)), cache_salt="b").images[0].is_similar
    assert not ask(llm, as_jpeg(spots(1))).images[0].is_similar
    assert ask(llm, as_jpeg(spots(1)), cache_salt="a").images[0].is_similar


def test_a_slightly_scaled_copy_is_replaced_with_any_grid(llm: LLM) -> None:
    large = spots(1, size=120)
    first = ask(llm, large)
    copy = ask(llm, large.resize((122, 118), Image.Resampling.LANCZOS))
    assert copy.images[0].is_similar
    assert copy.prompt_token_ids == first.prompt_token_ids
    assert not ask(llm, large.resize((112, 112))).images[0].is_similar


def test_a_digit_is_not_overlooked(llm: LLM) -> None:
    def label(dose: int) -> Image.Image:
        image = Image.new("RGB", (128, 64), "white")
        font = ImageFont.load_default(12)
        ImageDraw.Draw(image).text((8, 20), f"Dose: {dose} mg", fill="black", font=font)
        return image

    first = ask(llm, label(10))
    other = ask(llm, label(90))
    assert not other.images[0].is_similar
    assert other.images[0].digest != first.images[0].digest
    assert ask(llm, as_jpeg(label(90))).images[0].digest == other.images[0].digest


def test_files_with_the_same_picture_are_copies(llm: LLM) -> None:
    """Rotation by EXIF, a palette and an opaque alpha channel do not matter."""
    image = spots(1, size=64).quantize(64).convert("RGB")
    first = ask(llm, image)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees clockwise
    opaque = image.copy()
    opaque.putalpha(255)
    clear = image.copy()
    clear.putalpha(128)
    assert ask(llm, clear).images[0].digest != first.images[0].digest
    for file, options in (
        (image.rotate(90), {"exif": turned}),
        (image.quantize(64), {}),
        (opaque, {}),
    ):
        stream = io.BytesIO()
        file.save(stream, "png", **options)
        assert ask(llm, stream.getvalue()).images[0].digest == first.images[0].digest


def test_an_image_with_a_users_id_is_not_replaced(llm: LLM) -> None:
    ask(llm, spots(1))
    named = ask(llm, as_jpeg(spots(1)), multi_modal_uuids={"image": "mine"})
    assert not named.images[0].is_similar


def test_images_without_embeddings_are_dropped(folder: Path) -> None:
    rows = len(ask(LLM(folder, num_blocks=64), spots(1)).prompt_token_ids)
    llm = LLM(folder, num_blocks=64, encoder_cache_rows=rows, debug=True)
    ask(llm, spots(1))
    ask(llm, spots(2))
    assert not ask(llm, as_jpeg(spots(1))).images[0].is_similar
    llm.close()


def test_images_prepared_together_replace_later_copies(llm: LLM) -> None:
    """No image is encoded yet when the next image is compared with it."""
    assert llm.frontend.images is not None
    text = f"What is {llm.frontend.images.placeholder}?"
    batches = [
        [{"prompt": text, "multi_modal_data": {"image": image}} for image in images]
        for images in ([spots(seed) for seed in (1, 2, 3)], [as_jpeg(spots(n)) for n in (1, 2, 3)])
    ]
    for batch, expected in zip(batches, (False, True), strict=True):
        outputs = llm.generate(batch, ASKED, use_tqdm=False)
        assert [output.images[0].is_similar for output in outputs] == [expected] * 3


class Everything:
    """An encoder cache that has embeddings of all images."""

    def __contains__(self, digest: bytes) -> bool:
        return True


def loaded(image: Image.Image) -> LoadedImage:
    digest = hashlib.sha256(image.tobytes()).digest()
    return LoadedImage(digest, ProcessedImage({}, (1, 1, 1), 4, image), picture=image)


def test_the_memory_of_pixels_is_bounded() -> None:
    pixels = zlib.compress(spots(1).tobytes(), 1)
    room = 2 * (len(pixels) + thumbnail_of(spots(1)).nbytes + ENTRY_BYTES) + 500
    similar = SimilarImages(Everything(), capacity=room)  # type: ignore[arg-type]
    for seed in (1, 2, 3, 2, 4):
        similar.find_or_add(loaded(spots(seed)), None)
        assert 0 < similar.num_bytes <= room
    results = [similar.find_or_add(loaded(as_jpeg(spots(seed))), None) for seed in (2, 4)]
    assert [result.is_similar for result in results] == [True, True]
    assert not similar.find_or_add(loaded(as_jpeg(spots(1))), None).is_similar


def test_an_image_larger_than_the_limit_is_not_stored() -> None:
    similar = SimilarImages(Everything(), capacity=100)  # type: ignore[arg-type]
    assert not similar.find_or_add(loaded(spots(1)), None).is_similar
    assert similar.num_bytes == 0
    assert not similar.find_or_add(loaded(as_jpeg(spots(1))), None).is_similar


def test_the_image_that_replaces_a_copy_keeps_its_pixels() -> None:
    """If its embeddings are evicted before they are used, they are computed again."""
    similar = SimilarImages(Everything())  # type: ignore[arg-type]
    similar.find_or_add(loaded(spots(1)), None)
    image = similar.find_or_add(loaded(as_jpeg(spots(1))), None).image
    assert image.inputs is None
    assert image.pixels.tobytes() == spots(1).tobytes()


class Some(set[EncoderKey]):
    """An encoder cache with embeddings of these images, and a count of lookups."""

    num_lookups = 0

    def __contains__(self, key: object) -> bool:
        self.num_lookups += 1
        return super().__contains__(key)


def key_of(seed: int, salt: str | None = None) -> EncoderKey:
    return EncoderKey(salt, loaded(spots(seed)).digest)


def test_an_image_is_dropped_with_its_embeddings() -> None:
    cache = Some()
    similar = SimilarImages(cache)  # type: ignore[arg-type]
    for seed in (1, 2, 3):
        similar.find_or_add(loaded(spots(seed)), None)
        cache.add(key_of(seed))
    similar.find_or_add(loaded(spots(4)), None)
    before = similar.num_bytes
    cache -= {key_of(1), key_of(2)}
    similar.find_or_add(loaded(spots(5)), "another tenant")
    assert len(similar) == 5
    similar.find_or_add(loaded(spots(6)), None)
    assert len(similar) == 4, "3 has embeddings, 4 may get some, 5 and 6 are new"
    assert similar.num_bytes < before
    cache.clear()
    similar.find_or_add(loaded(spots(7)), None)
    assert len(similar) == 4, "3 was dropped, and 7 is new"


def test_an_image_that_is_shown_again_waits_for_its_embeddings() -> None:
    cache = Some()
    similar = SimilarImages(cache)  # type: ignore[arg-type]
    for seed in (1, 2, 3):
        similar.find_or_add(loaded(spots(seed)), None)
        cache.add(key_of(seed))
    assert similar.find_or_add(loaded(as_jpeg(spots(2))), None).is_similar
    similar.find_or_add(loaded(spots(1)), None)
    cache.clear()  # before either is encoded
    similar.find_or_add(loaded(spots(4)), None)
    cache.update((key_of(1), key_of(2)))
    results = [similar.find_or_add(loaded(as_jpeg(spots(seed))), None) for seed in (1, 2)]
    assert [result.is_similar for result in results] == [True, True]


def test_the_number_of_images_is_bounded() -> None:
    cache = Some()
    similar = SimilarImages(cache, max_images=3)  # type: ignore[arg-type]
    for seed, salt in ((1, "a"), (2, "b"), (3, "a"), (1, "a"), (4, None)):
        similar.find_or_add(loaded(spots(seed)), salt)
        cache.add(key_of(seed, salt))
        assert len(similar) <= 3
    copies = [(1, "a"), (3, "a"), (4, None), (2, "b")]
    results = [similar.find_or_add(loaded(as_jpeg(spots(seed))), salt) for seed, salt in copies]
    assert [result.is_similar for result in results] == [True, True, True, False]


class Salt(str):
    """Counts how often salts are compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Salt.num_compared += 1
        return str.__eq__(self, other)


def test_the_cost_of_an_image_does_not_grow_with_other_tenants() -> None:
    cache = Some()
    similar = SimilarImages(cache)  # type: ignore[arg-type]
    for seed in range(20):
        similar.find_or_add(loaded(spots(seed)), Salt(f"tenant {seed % 10}"))
    cache.num_lookups = Salt.num_compared = 0
    similar.find_or_add(loaded(spots(20)), Salt("tenant 0"))
    assert cache.num_lookups == 2
    assert Salt.num_compared < 10


def test_the_overhead_of_tiny_images_is_counted() -> None:
    similar = SimilarImages(Everything(), capacity=20_000)  # type: ignore[arg-type]
    for grey in range(0, 240, 40):
        similar.find_or_add(loaded(Image.new("RGB", (4, 4), (grey, grey, grey))), None)
    assert len(similar) == 5
    assert 5 * (ENTRY_BYTES + 1536) < similar.num_bytes <= 20_000
