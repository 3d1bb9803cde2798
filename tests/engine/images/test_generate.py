"""Prompts with images, cached, cut and batched, compared with transformers' `generate`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from headstart import LLM, SamplingParams
from tests.engine.test_deterministic import record, same_bits
from tests.engine.tiny_llm import draft_always
from tests.tiny_vision import make_image, save_tiny_vision

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm")
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = {"qwen2_vl": _QWEN, "qwen2_5_vl": _QWEN}


class Oracle:
    """The model, processor and tokenizer of transformers over the same files."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.placeholder = PLACEHOLDERS.get(name, "<image>")
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.token = self.model.config.image_token_id
        self._answers: dict[tuple[object, ...], list[int]] = {}

    def inputs(self, images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        """Return the inputs of the vision tower, and the text of each image's placeholders."""
        if self.name in ("idefics3", "smolvlm"):
            features = self.processor([images], return_tensors="pt", return_row_col_info=True)
            grids = zip(features.pop("rows")[0], features.pop("cols")[0], strict=True)
            return dict(features), [self.tiles(rows, columns) for rows, columns in grids]
        features = dict(self.processor(images, return_tensors="pt"))
        if self.name == "llava":
            return features, ["<image>" * 16] * len(images)
        counts = (features["image_grid_thw"].prod(dim=1) // 4).tolist()
        return features, ["<|image_pad|>" * count for count in counts]

    @staticmethod
    def tiles(rows: int, columns: int) -> str:
        tile = "<image>" * 4
        lines = [
            "".join(
                f"<fake_token_around_image><row_{row}_col_{column}>{tile}"
                for column in range(1, columns + 1)
            )
            + "\n"
            for row in range(1, rows + 1)
        ]
        end = f"<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
        return "".join(lines) + ("\n" if rows else "") + end

    def answer(self, text: str, images: list[Image.Image]) -> list[int]:
        """Return greedy tokens, computed once for each prompt."""
        prompt = (text, *((image.size, image.tobytes()) for image in images))
        if prompt not in self._answers:
            self._answers[prompt] = self._generate(text, images)
        return self._answers[prompt]

    def _generate(self, text: str, images: list[Image.Image]) -> list[int]:
        inputs, expansions = self.inputs(images) if images else ({}, [])
        token = self.tokenizer.convert_ids_to_tokens(self.token)
        first, *others = text.split(token)
        for expansion, other in zip(expansions, others, strict=True):
            first += expansion + other
        ids = self.tokenizer(first, return_tensors="pt")
        if self.name in PLACEHOLDERS:
            ids["mm_token_type_ids"] = (ids["input_ids"] == self.token).int()
        with torch.inference_mode():
            full = self.model.generate(
                **ids,
                **inputs,
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
            )
        answer: list[int] = full[0, ids["input_ids"].shape[1] :].tolist()
        return answer


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = save_tiny_vision(request.param, tmp_path_factory.mktemp(request.param))
    return Oracle(request.param, folder)


@pytest.fixture
def engines(oracle: Oracle) -> Iterator[Any]:
    llms: list[LLM] = []

    def make(**options: Any) -> LLM:
        llms.append(LLM(oracle.folder, **({"num_blocks": 80, "debug": True} | options)))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


def prompt(oracle: Oracle, text: str, *images: Image.Image) -> dict[str, Any]:
    text = text.replace("IMG", oracle.placeholder)
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def mixed(oracle: Oracle) -> list[dict[str, Any]]:
    """Return prompts with images at the start, in the middle, twice, several, none."""
    red, green = make_image(1), make_image(2)
    wide = make_image(3, 90, 30)
    return [
        prompt(oracle, "IMGWhat is this picture of?", red),
        prompt(oracle, "Look at this: IMG. And at this: IMG. Same?", red, green),
        prompt(oracle, "A text without any picture, of some length."),
        prompt(oracle, "Look at this: IMG. And at this: IMG. Same?", wide, wide),
        prompt(oracle, "Look at this: IMG. And at this: IMG. Same?", red, wide),
    ]


def check(oracle: Oracle, llm: LLM, prompts: list[dict[str, Any]]) -> list[int]:
    """Compare with transformers; return how many tokens of each prompt were cached."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for entry, output in zip(prompts, outputs, strict=True):
        expected = oracle.answer(entry["prompt"], entry["multi_modal_data"]["image"])
        assert output.outputs[0].token_ids == expected
    return [output.num_cached_tokens for output in outputs]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uncached": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 11},
    "preempted": {"num_blocks": 22, "block_size": 8},
    "small encoder cache": {"encoder_cache_rows": 48, "max_num_batched_tokens": 50},
    "deterministic": {"deterministic": True, "block_size": 16},
}
# Qwen2-VL differs from Qwen2.5-VL in its tower alone, SmolVLM from Idefics3 in its settings.
# Qwen has special positions, Idefics3 splits an image into several; LLaVA's are those of text.
CASES = [
    (name, option)
    for name in FAMILIES
    for option in OPTIONS
    if name in ("qwen2_5_vl", "idefics3") or option in ("plain", "chunked")
]


# With the scope, since otherwise pytest creates the oracle again for every option.
@pytest.mark.parametrize(("oracle", "option"), CASES, indirect=["oracle"], scope="module")
def test_greedy_equals_generate(oracle: Oracle, engines: Any, option: str) -> None:
    options = OPTIONS[option]
    llm = engines(**options)
    prompts = mixed(oracle)
    check(oracle, llm, prompts)
    cached = check(oracle, llm, prompts)
    assert any(cached) == options.get("enable_prefix_caching", True)
    assert (llm.engine.num_preemptions > 0) == ("num_blocks" in options)


@pytest.mark.parametrize("oracle", ["qwen2_5_vl"], indirect=True)
def test_drafts_do_not_change_answers_about_images(oracle: Oracle, engines: Any) -> None:
    llm = draft_always(engines(speculation=15))
    for _ in range(2):  # the second time all tokens are drafted
        check(oracle, llm, mixed(oracle))
    assert llm.engine.drafting.num_accepted >= 5 * (NEW_TOKENS - 2)


@pytest.mark.parametrize("oracle", FAMILIES, indirect=True)
def test_the_content_of_an_image_changes_the_answer(oracle: Oracle) -> None:
    """Otherwise the comparison above would prove nothing about images."""
    text = f"{oracle.placeholder}What is this picture of?"
    answers = {tuple(oracle.answer(text, [make_image(seed)])) for seed in range(4)}
    assert len(answers) > 2


@pytest.mark.parametrize("oracle", ["llava", "qwen2_5_vl"], indirect=True)
def test_logits_are_bitwise_equal_in_deterministic_mode(oracle: Oracle, engines: Any) -> None:
    """Cached or not, in chunks, alone or with others, with little or much space for embeddings."""
    prompts = [
        {**entry, "prompt": f"{number}. {entry['prompt']}"}  # so that no two have the same tokens
        for number, entry in enumerate(mixed(oracle))
    ]
    recordings = []
    for options in (
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 24, "encoder_cache_rows": 60},
    ):
        llm = engines(deterministic=True, dtype="bfloat16", speculation="off", **options)
        recordings.append(record(llm))
        for entry in prompts:
            llm.generate(entry, GREEDY)
        if options:
            assert llm.reset_prefix_cache()
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert same_bits(recordings[0], recordings[1])
    assert same_bits(recordings[0], recordings[2])
