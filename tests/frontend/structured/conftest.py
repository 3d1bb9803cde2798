"""A small model with random weights, whose answers are valid only because of the masks."""

from collections.abc import Iterator

import pytest

from headstart import LLM
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS


@pytest.fixture(scope="package", params=["byte_level", "metaspace"])
def writer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    save_smallest(folder, layers=1, tokenizer=TINY_TOKENIZERS[request.param]())
    llm = make_llm(folder, num_blocks=256)
    yield llm
    llm.close()
