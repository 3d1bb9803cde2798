"""`LLM.chat` over several turns: the next turn computes only its new tokens.

The random model samples only ASCII tokens, which seldom are those that the tokenizer would use
for the same text.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from headstart import LLM, AsyncLLM, RequestOutput, SamplingParams
from headstart.errors import RequestError
from tests.tiny_models import tiny_config
from tests.tiny_tokenizers import END_OF_TURN, TINY_TOKENIZERS

MakeLLM = Callable[..., LLM]
Messages = list[dict[str, str]]
# The twenty likeliest tokens are among those that the model prefers.
PARAMS = SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=30)


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config: Any = tiny_config("llama")
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 2048
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    liked = torch.zeros(len(tokenizer), 1)
    for token_id in range(len(tokenizer)):
        text = str(tokenizer.decode([token_id]))
        liked[token_id] = 40.0 if text.isascii() and text.isprintable() else 0.0
    with torch.no_grad():
        model.lm_head.weight.mul_(liked)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return TINY_TOKENIZERS["byte_level"]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path_factory.mktemp("chat")
    save_model(path, tokenizer)
    return path


@pytest.fixture
def make_llm(folder: Path) -> Iterator[MakeLLM]:
    llms: list[LLM] = []

    def make(**options: Any) -> LLM:
        llms.append(LLM(folder, **({"num_blocks": 200, "debug": True, "num_threads": 1} | options)))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


def ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def go_on(messages: Messages, output: RequestOutput, text: str, index: int = 0) -> Messages:
    """Return the conversation with the answer and the next question."""
    answer = {"role": "assistant", "content": output.outputs[index].text}
    return [*messages, answer, *ask(text)]


def all_ids(output: RequestOutput, index: int = 0) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[index].token_ids]


def tokens(tokenizer: PreTrainedTokenizerBase, output: RequestOutput) -> list[int]:
    """Tokenize the prompt without remembered turns."""
    token_ids: list[int] = tokenizer.encode(output.prompt or "", add_special_tokens=False)
    return token_ids


def spell(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def test_every_turn_hits_all_but_one_token_of_the_last(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The last sampled token misses, because its K/V were not computed."""
    llm = make_llm()
    messages = ask("hello there")
    [output] = llm.chat(messages, PARAMS)
    assert output.num_cached_tokens == 0
    surprises = 0
    for question in ("and then?", "the weather", "日本語", "so"):
        last_ids = all_ids(output)
        messages = go_on(messages, output, question)
        [output] = llm.chat(messages, PARAMS)
        assert output.prompt_token_ids[: len(last_ids)] == last_ids
        assert output.num_cached_tokens == len(last_ids) - 1
        assert spell(tokenizer, output.prompt_token_ids) == output.prompt
        surprises += tokens(tokenizer, output)[: len(last_ids)] != last_ids
    assert surprises == 4  # each of these turns would have missed otherwise


def test_several_conversations_at_once(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    llm = make_llm()
    conversations = [ask(text) for text in ("hello", "the other day", "then", "hello there")]
    outputs = llm.chat(conversations, PARAMS, use_tqdm=False)
    for question in ("so", "and"):
        last_ids = [all_ids(output) for output in outputs]
        conversations = [
            go_on(messages, output, question)
            for messages, output in zip(conversations, outputs, strict=True)
        ]
        outputs = llm.chat(conversations, PARAMS, use_tqdm=False)
        for output, ids in zip(outputs, last_ids, strict=True):
            assert output.num_cached_tokens == len(ids) - 1
            assert tokens(tokenizer, output)[: len(ids)] != ids


def test_a_streamed_answer_is_remembered(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = ask("hello there")
    *_, output = llm.stream_chat(messages, PARAMS)
    assert output.finished
    last_ids = all_ids(output)
    *_, later = llm.stream_chat(go_on(messages, output, "and then?"), PARAMS)
    assert later.num_cached_tokens == len(last_ids) - 1


def test_the_tokens_of_an_aborted_answer_are_remembered(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = ask("hello there")
    stream = llm.stream_chat(messages, PARAMS)
    assert stream.progress() == (len(stream.prompt_token_ids), 0, 0)
    for _ in range(3):
        next(stream)
    stream.abort()
    *_, output = stream
    assert output.finished and output.outputs[0].finish_reason == "abort"
    last_ids = all_ids(output)
    *_, later = llm.stream_chat(go_on(messages, output, "and then?"), PARAMS)
    assert len(output.prompt_token_ids) + 2 <= later.num_cached_tokens <= len(last_ids)


def test_a_stream_may_be_aborted_before_it_starts(make_llm: MakeLLM) -> None:
    stream = make_llm().stream_chat(ask("hello there"), PARAMS)
    stream.abort()
    *_, output = stream
    assert output.outputs[0].finish_reason == "abort"


def test_an_abandoned_stream_stores_no_wrong_ids(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A client may send the partial text as a turn, which is tokenized like any text."""
    llm = make_llm()
    messages = ask("hello there")
    stream: Any = llm.stream_chat(messages, PARAMS)
    output = [next(stream) for _ in range(9)][-1]
    stream.close()
    assert not llm.engine.has_unfinished
    [later] = llm.chat(go_on(messages, output, "and then?"), PARAMS)
    assert later.prompt_token_ids == tokens(tokenizer, later)
    assert later.num_cached_tokens >= len(output.prompt_token_ids)


def test_an_answer_that_ends_with_eos_is_hit_completely(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The last token ends the turn; the template writes this token again, once."""
    llm = make_llm()
    [end] = tokenizer.encode(END_OF_TURN)
    messages = ask("hello there")
    let_end(llm, end, after=11)
    [output] = llm.chat(messages, PARAMS)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == end
    last_ids = all_ids(output)
    assert len(output.outputs[0].token_ids) == 12
    [later] = llm.chat(go_on(messages, output, "and then?"), PARAMS)
    assert later.prompt_token_ids[: len(last_ids)] == last_ids
    assert later.prompt_token_ids.count(end) == 3
    assert later.num_cached_tokens == len(last_ids) - 1


def let_end(llm: LLM, end: int, after: int) -> None:
    """Make the end-of-turn token the likeliest token after `after` tokens."""
    model: Any = llm.engine.model
    forward = model.forward
    steps = iter(range(10**6))

    def forcing(*inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(*inputs).clone()
        if next(steps) == after:
            logits[:, end] = 1e4
        return logits

    model.forward = forcing


def test_an_answer_is_hit_up_to_its_stop_string(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    llm = make_llm()
    messages = ask("hello there")
    [whole] = llm.chat(messages, PARAMS)
    ids = whole.outputs[0].token_ids
    stop = spell(tokenizer, ids[20:22])
    num_characters = len(spell(tokenizer, ids[:22]).partition(stop)[0])
    params = SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=30, stop=stop)
    [output] = llm.chat(messages, params, cache_salt="other")
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].text) == num_characters
    boundaries = [len(spell(tokenizer, ids[:count])) for count in range(len(ids))]
    count = max(count for count, length in enumerate(boundaries) if length <= num_characters)
    [later] = llm.chat(go_on(messages, output, "and then?"), params, cache_salt="other")
    num_hit = len(output.prompt_token_ids) + count
    assert later.prompt_token_ids[:num_hit] == all_ids(output)[:num_hit]
    assert later.num_cached_tokens >= num_hit
    assert spell(tokenizer, later.prompt_token_ids) == later.prompt


def test_any_of_several_answers_can_be_continued(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = ask("hello there")
    params = SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=30, n=3)
    [output] = llm.chat(messages, params)
    assert len({completion.text for completion in output.outputs}) == 3
    for index in range(3):
        [later] = llm.chat(go_on(messages, output, "and then?", index), PARAMS)
        assert later.num_cached_tokens == len(all_ids(output, index)) - 1


def test_salts_share_no_remembered_turns(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """No K/V, ids or token counts depend on another tenant."""
    llm = make_llm()
    messages = ask("hello there")
    [output] = llm.chat(messages, PARAMS, cache_salt="a")
    last_ids = all_ids(output)
    messages = go_on(messages, output, "and then?")
    for salt in ("b", None):
        [stranger] = llm.chat(messages, PARAMS, cache_salt=salt)
        assert stranger.prompt_token_ids == tokens(tokenizer, stranger)
        assert stranger.prompt_token_ids[: len(last_ids)] != last_ids
        assert stranger.num_cached_tokens == 0
    [same] = llm.chat(messages, PARAMS, cache_salt="a")
    assert same.num_cached_tokens == len(last_ids) - 1


def test_answers_with_remembered_turns_match_those_without_cache(make_llm: MakeLLM) -> None:
    """An engine without a cache gives the same answer for the same ids."""
    llm = make_llm()
    greedy = SamplingParams(temperature=0, max_tokens=20)
    messages = ask("hello there")
    [output] = llm.chat(messages, PARAMS)
    [later] = llm.chat(go_on(messages, output, "and then?"), greedy)
    fresh = make_llm(enable_prefix_caching=False)
    [expected] = fresh.generate(later.prompt_token_ids, greedy)
    assert expected.num_cached_tokens == 0
    assert later.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_prompt_is_the_rendered_template(make_llm: MakeLLM) -> None:
    llm = make_llm()
    [output] = llm.chat([{"role": "system", "content": "be kind"}, *ask("hello")], PARAMS)
    assert output.prompt == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [ask("hello"), [{"role": "user"}]],
        [ask("hello"), []],
        [ask("hello"), ask("hello " * 3000)],
    ],
)
def test_an_invalid_conversation_is_refused_before_any_work(
    make_llm: MakeLLM, messages: list[Messages]
) -> None:
    llm = make_llm()
    with pytest.raises(RequestError):
        llm.chat(messages, PARAMS)
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.stats.requests == 0


def test_a_streamed_conversation_must_have_a_message(make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        next(make_llm().stream_chat([], PARAMS))


def test_async_chat_hits_the_last_turn(folder: Path) -> None:
    """Two conversations stream concurrently; each next turn hits the reply of its conversation."""

    async def last(llm: AsyncLLM, messages: Messages) -> RequestOutput:
        return [output async for output in llm.chat(messages, PARAMS)][-1]

    async def two_turns(llm: AsyncLLM, text: str) -> tuple[RequestOutput, RequestOutput]:
        first = await last(llm, ask(text))
        return first, await last(llm, go_on(ask(text), first, "and then?"))

    async def converse(llm: AsyncLLM) -> list[tuple[RequestOutput, RequestOutput]]:
        return await asyncio.gather(two_turns(llm, "hello"), two_turns(llm, "good day"))

    llm = AsyncLLM(folder, num_blocks=200, debug=True)
    conversations = asyncio.run(converse(llm))
    llm.close()
    for first, second in conversations:
        assert second.num_cached_tokens == len(all_ids(first)) - 1
