"""Windows of a text come from all over it, and begin as the model expects texts to begin."""

import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headstart.models.gptq import cut_windows
from tests.models.gptq.small import TEXT
from tests.tiny_tokenizers import TINY_TOKENIZERS

BEGIN = "<|im_start|>"


def test_windows_are_from_all_over_a_text() -> None:
    tokenizer = TINY_TOKENIZERS["byte_level"]()
    text = " ".join(f"{number} and {number * number}" for number in range(3000))
    every = torch.tensor(tokenizer.encode(text)).unfold(0, 512, 512)
    windows = cut_windows(text, "it", tokenizer, 100_000)
    assert windows.shape == (32, 512) and len(every) > 40
    places = [int((every == window).all(dim=1).nonzero()) for window in windows]
    assert places == sorted(set(places))
    assert places[0] == 0 and places[-1] > 0.9 * len(every)


def test_a_short_context_has_more_windows() -> None:
    tokenizer = TINY_TOKENIZERS["byte_level"]()
    assert cut_windows(TEXT, "it", tokenizer, 100).shape[1] == 100
    assert cut_windows(TEXT * 8, "it", tokenizer, 128).shape == (128, 128)


def test_each_window_begins_as_a_text_does() -> None:
    plain = TINY_TOKENIZERS["byte_level"]()
    backend = plain.backend_tokenizer  # type: ignore[attr-defined]
    begin = backend.token_to_id(BEGIN)
    backend.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    with_begin = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN)
    windows = cut_windows(TEXT * 8, "it", with_begin, 256)
    assert windows.shape[1] == 256 and (windows[:, 0] == begin).all()
    assert not (windows[:, 1:] == begin).any()
