"""Adapters on models with vision: the text part is adapted, images are encoded once for all."""

from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from headstart import LLM, SamplingParams
from headstart.errors import UnsupportedAdapterError
from tests.engine.images.test_generate import NEW_TOKENS
from tests.engine.images.test_generate import Oracle as ImageOracle
from tests.tiny_adapters import attach_adapter, make_adapter
from tests.tiny_vision import make_image, save_tiny_vision

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
TEXT_PART = r".*(language_model|text_model).*\.(q_proj|v_proj|up_proj)"


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_one_image_with_two_adapters_and_none(family: str, tmp_path: Path) -> None:
    base = save_tiny_vision(family, tmp_path / "base")
    paths = {
        name: make_adapter(
            base,
            tmp_path / name,
            seed,
            kind=AutoModelForImageTextToText,
            r=6,
            target_modules=TEXT_PART,
        )
        for seed, name in enumerate(("one", "two"))
    }
    image = make_image(1)
    llm = LLM(base, num_blocks=64, block_size=8, debug=True)
    for name, path in paths.items():
        llm.load_adapter(name, path)
    names = ["one", None, "two"]
    text = f"look: {ImageOracle(family, base).placeholder} and tell"
    prompts = [{"prompt": text, "multi_modal_data": {"image": image}}] * len(names)
    for warm in (False, True):
        outputs = llm.generate(prompts, GREEDY, adapter=names, use_tqdm=False)
        for name, output in zip(names, outputs, strict=True):
            oracle = ImageOracle(family, base)
            if name is not None:
                oracle.model = attach_adapter(oracle.model, paths[name])
            assert output.outputs[0].token_ids == oracle.answer(text, [image])
            assert (output.num_cached_tokens > 0) == warm
    assert llm.frontend.images is not None
    assert llm.frontend.images.cache.num_encoded == 1  # for all three
    llm.close()


def test_an_adapter_of_the_vision_tower_is_refused(tmp_path: Path) -> None:
    """PEFT adapts it too if a name occurs in both parts, but its rows are not tokens."""
    base = save_tiny_vision("llava", tmp_path / "base")
    path = make_adapter(base, tmp_path / "one", kind=AutoModelForImageTextToText)
    llm = LLM(base, num_blocks=64)
    with pytest.raises(UnsupportedAdapterError, match=r"vision_tower.* is not a linear layer"):
        llm.load_adapter("one", path)
    llm.close()
