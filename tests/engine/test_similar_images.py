"""Images that look alike: only where asked for, only in one tenant and one grid, and said so."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headstart import LLM, RequestError, RequestOutput, SamplingParams
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
    """Squares of colours: finer noise would not survive JPEG."""
    return make_image(seed, 16, 16).resize((size, size), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "jpeg", quality=97, subsampling=0)
    return Image.open(stream).convert("RGB")


def ask(llm: LLM, image: Any, params: SamplingParams = ASKED, **more: Any) -> RequestOutput:
    assert llm.engine.images is not None
    prompt = {
        "prompt": f"What is {llm.engine.images.placeholder}?",
        "multi_modal_data": {"image": image},
    }
    salt = more.pop("cache_salt", None)
    [output] = llm.generate({**prompt, **more}, params, cache_salt=salt)
    return output


def test_a_copy_is_replaced_whole_and_the_reply_says_so(llm: LLM) -> None:
    first = ask(llm, spots(1))
    second = ask(llm, as_jpeg(spots(1)))
    assert second.images[0].digest == first.images[0].digest
    assert (first.images[0].is_similar, second.images[0].is_similar) == (False, True)
    assert second.num_cached_tokens == len(second.prompt_token_ids) - 1
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.engine.images is not None and llm.engine.images.cache.num_encoded == 1
    assert not ask(llm, spots(2)).images[0].is_similar


def test_in_a_chat(llm: LLM) -> None:
    def chat(image: Image.Image) -> RequestOutput:
        content = [{"type": "image", "image": image}, {"type": "text", "text": "?"}]
        [output] = llm.chat([{"role": "user", "content": content}], ASKED)
        return output

    first, second = chat(spots(1)), chat(as_jpeg(spots(1)))
    assert second.images[0].is_similar
    assert second.prompt_token_ids == first.prompt_token_ids


def test_nobody_is_touched_who_did_not_ask(llm: LLM) -> None:
    ask(llm, spots(1), NOT_ASKED)
    assert not ask(llm, as_jpeg(spots(1)), ASKED).images[0].is_similar
    third = ask(llm, spots(1), NOT_ASKED)
    assert not third.images[0].is_similar
    assert third.images[0].digest == ask(llm, spots(1), NOT_ASKED).images[0].digest


def test_tenants_do_not_see_one_another(llm: LLM) -> None:
    ask(llm, spots(1), cache_salt="a")
    assert not ask(llm, as_jpeg(spots(1)), cache_salt="b").images[0].is_similar
    assert not ask(llm, as_jpeg(spots(1))).images[0].is_similar
    assert ask(llm, as_jpeg(as_jpeg(spots(1))), cache_salt="a").images[0].is_similar


def test_another_grid_is_another_image(llm: LLM) -> None:
    ask(llm, spots(1))
    larger = ask(llm, spots(1, size=30))
    grids_follow_sizes = llm.engine.model.config.model_type == "qwen2_5_vl"
    assert larger.images[0].is_similar != grids_follow_sizes


def test_an_image_with_an_id_of_its_own_stays_itself(llm: LLM) -> None:
    ask(llm, spots(1))
    named = ask(llm, as_jpeg(spots(1)), multi_modal_uuids={"image": "mine"})
    assert not named.images[0].is_similar


def test_what_is_no_longer_cached_takes_no_place(folder: Path) -> None:
    rows = len(ask(LLM(folder, num_blocks=64), spots(1)).prompt_token_ids)
    llm = LLM(folder, num_blocks=64, encoder_cache_rows=rows, debug=True)
    ask(llm, spots(1))
    ask(llm, spots(2))
    assert not ask(llm, as_jpeg(spots(1))).images[0].is_similar
    llm.close()


def test_without_the_library_the_error_says_what_to_install(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imagehash", None)
    with pytest.raises(RequestError, match=r"pip install 'headstart\[vision\]'"):
        ask(llm, spots(1))
    assert ask(llm, spots(1), NOT_ASKED).images
