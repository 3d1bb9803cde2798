"""Long texts have the same ids as with transformers, although they are encoded differently."""

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.errors import RequestError
from headstart.frontend import text as codec
from headstart.frontend.text import encode_text
from headstart.models.tokenizer import load_tokenizer
from headstart.models.transformers_tools import plain_backend
from tests.tiny_tokenizers import END_OF_TURN, TINY_TOKENIZERS

TEXT = f"there were 12 of them,  für Müller\n{END_OF_TURN} 你好 🙂 hello " * 40


@pytest.fixture(autouse=True)
def _texts_are_long_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of long texts, as transformers needs seconds for texts above it."""
    monkeypatch.setattr(codec, "_LONG", 1000)


def every_tokenizer() -> dict[str, PreTrainedTokenizerBase]:
    built_in = load_tokenizer("headstart-tiny")
    assert built_in is not None
    return {name: make() for name, make in TINY_TOKENIZERS.items()} | {"headstart-tiny": built_in}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_a_long_text_has_the_ids_of_transformers(special: bool, split: bool) -> None:
    assert len(TEXT) > codec._LONG
    for tokenizer in every_tokenizer().values():
        tokenizer.split_special_tokens = split
        for _ in range(2):  # before and after transformers has set its own options
            ids = encode_text(tokenizer, TEXT, add_special_tokens=special)
            assert ids == tokenizer.encode(TEXT, add_special_tokens=special)


def test_a_tokenizer_that_adds_special_tokens_encodes_long_texts_itself() -> None:
    plain = TINY_TOKENIZERS["byte_level"]()
    assert plain_backend(plain) is not None

    class Louder(PreTrainedTokenizerFast):
        def encode(self, text, **options):  # type: ignore[no-untyped-def]
            return super().encode(text.upper(), **options)

    louder = Louder(tokenizer_object=plain.backend_tokenizer)  # type: ignore[attr-defined]
    assert plain_backend(louder) is None
    assert encode_text(louder, TEXT) == plain.encode(TEXT.upper())
    plain.backend_tokenizer.enable_truncation(8)  # type: ignore[attr-defined]
    assert plain_backend(plain) is None
    assert len(encode_text(plain, TEXT)) > 8


def test_a_text_of_too_many_tokens_is_refused() -> None:
    """The error is the same as for a short text, with any tokenizer."""
    for tokenizer in every_tokenizer().values():
        count = len(tokenizer.encode(TEXT))
        assert len(encode_text(tokenizer, TEXT, max_model_len=count + 1)) == count
        with pytest.raises(RequestError, match=f"has {count} tokens.*{count - 1} at most"):
            encode_text(tokenizer, TEXT, max_model_len=count)
