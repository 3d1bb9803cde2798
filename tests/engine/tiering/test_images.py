"""Images across a restart: the K/V of their prompts, and their embeddings in other prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headstart import LLM, SamplingParams
from headstart.engine.image_cache import EncoderCache
from tests.tiny_vision import make_image, save_tiny_vision

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(request.param, tmp_path_factory.mktemp("model"))


@contextmanager
def opened(model: Path, folder: Path | None) -> Iterator[tuple[LLM, EncoderCache]]:
    cache_dir = None if folder is None else str(folder)
    llm = LLM(model, num_blocks=128, block_size=4, debug=True, cache_dir=cache_dir)
    assert llm.frontend.images is not None
    try:
        yield llm, llm.frontend.images.cache
    finally:
        llm.close()


def generate(llm: LLM, text: str, *seeds: int, **options: Any) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the prompt's were cached."""
    placeholder = llm.frontend.images.placeholder if llm.frontend.images is not None else ""
    prompt = {
        "prompt": text.replace("<image>", placeholder),
        "multi_modal_data": {"image": [make_image(seed, 56, 56) for seed in seeds]},
    }
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False, **options)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_an_image_is_encoded_by_the_first_process_alone(model: Path, tmp_path: Path) -> None:
    with opened(model, None) as (llm, _):
        alone = [
            generate(llm, "What is <image> here?", 1),
            generate(llm, "Another text: <image>", 1),
        ]
    with opened(model, tmp_path) as (llm, cache):
        generate(llm, "What is <image> here?", 1)
        assert (cache.num_encoded, cache.num_loaded) == (1, 0)
    with opened(model, tmp_path) as (llm, cache):
        answer, cached = generate(llm, "What is <image> here?", 1)
        assert answer == alone[0][0] and cached > 4, "its K/V were stored"
        assert generate(llm, "Another text: <image>", 1)[0] == alone[1][0]
        assert (cache.num_encoded, cache.num_loaded) == (0, 1)
        generate(llm, "Another text: <image>", 2)
        assert cache.num_encoded == 1, "another image is another identity"
        generate(llm, "Another text: <image>", 1, cache_salt="another")
        assert cache.num_encoded == 2, "another tenant's is not hit"


def test_a_prompt_with_a_stored_image_and_a_new_one(model: Path, tmp_path: Path) -> None:
    text = "<image> and <image>"
    with opened(model, None) as (llm, _):
        alone, _ = generate(llm, text, 2, 1)
    with opened(model, tmp_path) as (llm, _):
        generate(llm, "<image>", 1)
    with opened(model, tmp_path) as (llm, cache):
        assert generate(llm, text, 2, 1)[0] == alone
        assert (cache.num_encoded, cache.num_loaded) == (1, 1)


def test_embeddings_of_another_vision_tower_are_not_used(tmp_path: Path) -> None:
    """All models of a folder store their embeddings in one store."""
    model, cache_dir = save_tiny_vision("llava", tmp_path / "model"), tmp_path / "kept"
    counts = []
    for _ in range(2):
        with opened(model, cache_dir) as (llm, cache):
            generate(llm, "Look: <image>", 1)
            counts.append((cache.num_encoded, cache.num_loaded))
        weights = load_file(file := model / "model.safetensors")
        name = max(name for name in weights if "vision_tower" in name)
        weights[name][0] += 1
        save_file(weights, file, {"format": "pt"})
    assert counts == [(1, 0), (1, 0)]


def test_damaged_embeddings_are_encoded_again(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as (llm, cache):
        answer, _ = generate(llm, "What is <image> here?", 1)
    for file in tmp_path.glob("*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 1
        file.write_bytes(data)
    with opened(model, tmp_path) as (llm, cache):
        assert generate(llm, "What is <image> here?", 1)[0] == answer
        assert generate(llm, "Look: <image>", 1)
        assert cache.num_encoded + cache.num_loaded == 1


def test_images_of_requests_that_are_not_stored_are_not_stored(model: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, skip_storing_prefix_cache=True)
    for _ in range(2):
        with opened(model, tmp_path) as (llm, cache):
            placeholder = llm.frontend.images.placeholder if llm.frontend.images is not None else ""
            image = make_image(1, 56, 56)
            llm.generate({"prompt": placeholder, "multi_modal_data": {"image": image}}, params)
            assert (cache.num_encoded, cache.num_loaded) == (1, 0)
