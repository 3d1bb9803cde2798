"""Images in a prompt's identity, and images that are refused before any work."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from examples.small_models.adapter import write_adapter
from headstart import LLM, RequestError, SamplingParams
from headstart.cache import MultiModalItem, TokenSequence
from headstart.frontend.images.prompt import IMAGE_MARK
from headstart.models.decoder import PlacedImage, ProcessedImage
from headstart.models.transformers_backend.image_encoder import TransformersVision as VisionModel
from tests.engine.internals import encoder_users
from tests.tiny_vision import IDS, make_image, save_tiny_vision

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FREE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("llava", tmp_path_factory.mktemp("llava"))


def make(folder: Path) -> LLM:
    return LLM(folder, num_blocks=FREE, block_size=16, debug=True, max_images=3)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = make(folder)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def refusing(folder: Path) -> Iterator[LLM]:
    """One model for all refused prompts, because refused prompts change nothing."""
    llm = make(folder)
    yield llm
    llm.close()


def ask(text: str, *images: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **more}


def digests(llm: LLM, prompt: dict[str, Any]) -> list[str]:
    params = SamplingParams(max_tokens=1)
    return [image.digest for image in llm.frontend.prepare(prompt, params).images]


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "png")
    return stream.getvalue()


def test_the_worked_example_of_the_reference() -> None:
    """After 8 tokens, 41 placeholders: the image is in the keys of four blocks of 16 tokens."""
    tokens = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[32000] * 41, 4]
    item = MultiModalItem(b"image hash", 8, 41)
    sequence = TokenSequence("example", [*tokens, *range(100, 114)], items=[item])
    keys = sequence.cut(16)
    assert len(keys) == 4
    frames = [key[key.index(b"\xff" * 4) :] for key in keys]
    offsets = [int.from_bytes(frame[4:8], "little") for frame in frames]
    assert offsets == [0, 8, 24, 40]  # of the block's first placeholder in the image
    other = TokenSequence("other", [*tokens, *range(100, 114)], items=[])
    assert all(mine != theirs for mine, theirs in zip(keys, other.cut(16), strict=True))
    assert all(b"image hash" in key for key in keys)


def test_every_source_of_an_image_gives_the_same_image(llm: LLM, tmp_path: Path) -> None:
    image = make_image(1)
    data = png(image)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{__import__('base64').b64encode(data).decode()}"
    for source in (image, data, bytearray(data), path, str(path), url, image.convert("RGBA")):
        assert digests(llm, ask("<image>", source)) == digests(llm, ask("<image>", image))
    alone = {"prompt": "<image>", "multi_modal_data": {"image": image}}
    by_ids = {**alone, "prompt": None, "prompt_token_ids": [IDS["<image>"]]}
    assert digests(llm, alone) == digests(llm, by_ids) == digests(llm, ask("<image>", image))


def test_a_users_id_is_added_to_the_digest(llm: LLM) -> None:
    def named(image: Image.Image, name: str | None) -> str:
        return digests(llm, ask("<image>", image, multi_modal_uuids={"image": [name]}))[0]

    first, second = make_image(1), make_image(2)
    assert named(first, "mine") != named(second, "mine")
    assert named(first, "mine") != named(first, None) == digests(llm, ask("<image>", first))[0]
    assert named(first, "") != named(first, None)
    assert named(first, "mine") == named(first, "mine")


def test_pixels_of_another_size_are_another_image(llm: LLM) -> None:
    """Both images have the same bytes in the same order."""
    pixels = np.arange(24 * 32 * 3, dtype=np.uint8)
    wide = Image.fromarray(pixels.reshape(24, 32, 3))
    high = Image.fromarray(pixels.reshape(32, 24, 3))
    assert wide.tobytes() == high.tobytes()
    assert digests(llm, ask("<image>", wide)) != digests(llm, ask("<image>", high))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # whose weights may be packed
def test_a_digest_depends_on_weights_and_processor(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    def digest(path: Path) -> str:
        llm = LLM(path, num_blocks=8, dtype=dtype)
        [found_digest] = digests(llm, ask("<image>", make_image(1)))
        llm.close()
        return found_digest

    same = save_tiny_vision("llava", tmp_path / "same")
    assert digest(same) == digest(folder)
    settings = same / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("0.48145466", "0.5"))
    assert digest(same) != digest(folder)
    other = save_tiny_vision("llava", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    for name in [name for name in weights if name.endswith("linear_2.weight")]:
        weights[name][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert digest(other) != digest(folder)


def test_another_image_never_hits_beyond_the_first_placeholder(llm: LLM) -> None:
    text = "A text before it: <image> and a text behind it."
    place = text.index("<image>")
    llm.generate(ask(text, make_image(1)), GREEDY)
    for seed in range(2, 6):
        [output] = llm.generate(ask(text, make_image(seed)), GREEDY)
        assert output.num_cached_tokens == place
    [output] = llm.generate(ask(text, make_image(1)), GREEDY)
    assert output.num_cached_tokens == len(output.prompt_token_ids) - 1


def test_an_image_at_another_position_hits_no_blocks(llm: LLM) -> None:
    llm.generate(ask("<image><image>?", make_image(1), make_image(1)), GREEDY)
    [output] = llm.generate(ask("<image><image>?", make_image(1), make_image(2)), GREEDY)
    assert output.num_cached_tokens == 16
    [output] = llm.generate(ask("x<image>?", make_image(1)), GREEDY)
    assert output.num_cached_tokens == 0


SHOWN = {
    "plain": lambda: ask("<image>?", make_image(1)),
    "named": lambda: ask("<image>?", make_image(1), multi_modal_uuids={"image": ["mine"]}),
}


@pytest.mark.parametrize("way", [*SHOWN, "similar", "chat"])
def test_tenants_learn_nothing_of_each_others_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """B's request has the same hits, work and output whether or not A has sent the image.

    Regression: the time to the first token revealed it, as B reused A's embeddings and scaled
    pixels.
    """
    done: list[str] = []
    for name in ("process", "recall", "encode"):
        monkeypatch.setattr(VisionModel, name, noted(done, name))

    def show(llm: LLM, salt: str | None) -> tuple[Any, ...]:
        done.clear()
        params = replace(GREEDY, similar_images=way == "similar")
        if way == "chat":
            parts = [{"type": "image", "image": make_image(1)}, {"type": "text", "text": "?"}]
            messages = [{"role": "user", "content": parts}]
            [output] = llm.chat(messages, params, cache_salt=salt)
        else:
            prompt = SHOWN["plain" if way == "similar" else way]()
            [output] = llm.generate(prompt, params, cache_salt=salt)
        return output.num_cached_tokens, output.why_missed, output.images, output.outputs, [*done]

    alone, shared = (LLM(folder, num_blocks=FREE, block_size=16, debug=True) for _ in range(2))
    for salt in ("a", "c", None):
        show(shared, salt)
        assert done.count("encode") == 1
    first = show(alone, "b")
    assert show(shared, "b") == first
    assert first[-1] == ["process", "encode"]
    assert show(shared, "b") == show(alone, "b")  # and B's own image is known again
    assert "encode" not in done and "process" not in done
    for llm in (alone, shared):
        llm.close()


def noted(done: list[str], name: str) -> Any:
    """Return the method with this name, changed to record each call."""
    method = getattr(VisionModel, name)

    def call(self: VisionModel, *arguments: Any) -> Any:
        done.append(name)
        return method(self, *arguments)

    return call


def test_an_image_that_hits_is_not_processed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    images = llm.frontend.images
    assert images is not None
    [first] = llm.generate(ask("<image>?", make_image(1)), GREEDY)
    calls = 0
    process = VisionModel.process

    def counted(self: VisionModel, image: Any) -> ProcessedImage:
        nonlocal calls
        calls += 1
        return process(self, image)

    monkeypatch.setattr(VisionModel, "process", counted)
    llm.generate(ask("<image>?", make_image(1)), GREEDY)
    assert calls == 0
    images.cache.clear()
    llm.reset_prefix_cache()
    [again] = llm.generate(ask("<image>?", make_image(1)), GREEDY)
    assert calls == 1 and images.cache.num_encoded == 2
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_adapters_share_embeddings_but_no_blocks(llm: LLM, tmp_path: Path) -> None:
    """An adapter changes only the language model, so all adapters share embeddings."""
    for name, seed in (("one", 1), ("two", 2)):
        write_adapter(llm.engine.model, tmp_path / name, (33, 34), seed)
        llm.load_adapter(name, tmp_path / name)
    assert llm.frontend.images is not None
    for cached in (0, 16):
        for name in (None, "one", "two"):
            [output] = llm.generate(ask("<image>", make_image(1)), GREEDY, adapter=name)
            assert output.num_cached_tokens == max(0, cached - 1)
    assert llm.frontend.images.cache.num_encoded == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ask("<image>", b"no image at all"), "cannot be read"),
        (ask("<image>", png(make_image(1))[:-40]), "cannot be read"),
        (ask("<image>", "/no/such/file.png"), "cannot be read: FileNotFoundError"),
        (ask("<image>", "https://x/y.png"), "not fetched"),
        (ask("<image>", 7), "a int; allowed"),
        (ask("<image>", Image.new("RGB", (9000, 4000))), "9000 × 4000 pixels"),
        (ask("<image>" * 4, *[make_image(1)] * 4), "4 images; allowed: up to 3"),
        (ask("<image><image>", make_image(1)), "2 placeholders '<image>' and 1 images"),
        (ask("no placeholder", make_image(1)), "0 placeholders '<image>' and 1 images"),
        ([IDS["<image>"]] * 2, "2 placeholders '<image>' and 0 images"),
        ({"prompt": "x", "multi_modal_data": {"audio": 1}}, "other media are not"),
        (ask("<image>", make_image(1), multi_modal_uuids={"image": ["a", "b"]}), "the uuids of 1"),
        (ask("<image>", make_image(1), multi_modal_uuids={"image": [3]}), "the uuids of 1"),
        (ask("<image> " + "x" * 1010, make_image(1)), "1027 tokens"),
    ],
)
def test_invalid_prompts_are_refused(refusing: LLM, prompt: Any, message: str) -> None:
    assert refusing.frontend.images is not None
    before = refusing.generate(ask("<image>", make_image(9)), GREEDY)
    encoded = refusing.frontend.images.cache.num_encoded
    with pytest.raises(RequestError, match=message):
        refusing.generate([ask("<image>", make_image(1)), prompt], GREEDY)
    assert refusing.engine.manager.num_free_blocks == FREE
    refusing.engine.manager.check()
    refusing.frontend.images.cache.check()
    assert refusing.frontend.images.cache.num_encoded == encoded
    after = refusing.generate(ask("<image>", make_image(9)), GREEDY)
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


def test_an_aborted_request_frees_its_images(llm: LLM) -> None:
    images = llm.frontend.images
    assert images is not None
    stream = llm.stream(ask("<image>?", make_image(1)), SamplingParams(max_tokens=20))
    next(stream)
    stream.close()
    assert not images.cache.fits([]) or images.cache.num_rows == 16
    assert not encoder_users(images.cache)
    images.cache.check()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_tiny_vision("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))
    llm = LLM(folder, num_blocks=FREE)
    yield llm
    llm.close()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)), max_size=4))
def test_positions_match_transformers(qwen: LLM, parts: list[tuple[int, int, int]]) -> None:
    """Positions agree for any text and grids with a token between images, as transformers needs."""
    module: Any = qwen.engine.model.module
    assert qwen.frontend.images is not None
    vision = qwen.frontend.images.vision
    assert isinstance(vision, VisionModel)
    kinds: list[int] = []
    images = []
    for gap, rows, columns in parts:
        kinds += [0] * gap
        images.append(PlacedImage(len(kinds), (1, 2 * rows, 2 * columns)))
        kinds += [1] * (rows * columns)
    kinds += [0] * 3
    table = vision.positions(len(kinds), images)
    expected, delta = module.model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.int64),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor([image.shape for image in images]) if images else None,
    )
    assert table is not None
    assert torch.equal(torch.from_numpy(table), expected[:, 0])
    assert int(table.max()) + 1 - len(kinds) == int(delta)


def test_images_that_touch(qwen: LLM) -> None:
    """Two images without a token between them, which transformers' `get_rope_index` merges."""
    pad = IDS["<|image_pad|>"]
    prompt = {
        "prompt_token_ids": [pad, pad, 65],
        "multi_modal_data": {"image": [make_image(1), make_image(2, 24, 60)]},
    }
    [output] = qwen.generate(prompt, GREEDY)
    first, second = output.images
    assert second.position == first.num_tokens
    [again] = qwen.generate(prompt, GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_no_token_has_the_id_that_marks_images(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id"):
        llm.generate([IMAGE_MARK], GREEDY)
