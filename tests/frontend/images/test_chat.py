"""Conversations with images, in several turns, compared with transformers' `generate`."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headstart import LLM, RequestError, SamplingParams
from headstart.engine.sampling import SampledToken
from tests.engine.images.test_generate import NEW_TOKENS, Oracle
from tests.engine.internals import scheduler_of
from tests.tiny_models import save_tiny
from tests.tiny_tokenizers import TINY_TOKENIZERS
from tests.tiny_vision import make_image, save_tiny_vision

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "idefics3"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = save_tiny_vision(request.param, tmp_path_factory.mktemp(request.param))
    return Oracle(request.param, folder)


@pytest.fixture
def llm(oracle: Oracle) -> Iterator[LLM]:
    # Without drafts, because a test appends one token after each step.
    llm = LLM(oracle.folder, num_blocks=80, debug=True, speculation="off")
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def refusing(oracle: Oracle) -> Iterator[LLM]:
    """One model for all refused messages, because refused messages change nothing."""
    llm = LLM(oracle.folder, num_blocks=80, debug=True)
    yield llm
    llm.close()


def data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def test_turns_with_images_hit_all_earlier_turns(oracle: Oracle, llm: LLM) -> None:
    red, green = make_image(1), make_image(2, 60, 60)
    messages: list[dict[str, Any]] = [user("What is ", red, "?")]
    [first] = llm.chat(messages, GREEDY)
    shown = oracle.placeholder
    text = f"<s>user: What is {shown}?</s>\n<s>assistant: "
    assert first.prompt == text
    assert first.outputs[0].token_ids == oracle.answer(text, [red])
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        user(green, "And this?", red),
    ]
    [second] = llm.chat(messages, GREEDY)
    assert second.num_cached_tokens >= len(first.prompt_token_ids)
    assert len(second.images) == 3
    assert second.images[0] == first.images[0]
    assert second.images[2].digest == first.images[0].digest
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    llm.reset_prefix_cache()
    [anew] = llm.chat(messages, GREEDY)
    assert anew.outputs[0].token_ids == second.outputs[0].token_ids


def test_another_image_in_an_earlier_turn_is_another_conversation(oracle: Oracle, llm: LLM) -> None:
    [first] = llm.chat([user("What is ", make_image(1), "?")], GREEDY)
    reply = {"role": "assistant", "content": first.outputs[0].text}
    again = [user("What is ", make_image(3), "?"), reply, user("And now?")]
    [other] = llm.chat(again, GREEDY)
    assert other.num_cached_tokens == first.images[0].position
    assert len(other.images) == 1


def test_a_placeholder_in_a_text_is_text(oracle: Oracle, llm: LLM) -> None:
    token = llm.get_tokenizer().convert_ids_to_tokens(oracle.token)  # type: ignore[union-attr]
    red = make_image(1)
    [output] = llm.chat([user(f"Is {token} a word? ", red, token)], GREEDY)
    [image] = output.images
    ids = output.prompt_token_ids
    assert ids.count(oracle.token) == image.num_tokens
    assert oracle.tokenizer.decode(ids).count(token) == image.num_tokens + 2
    [plain] = llm.generate(f"Is {token} a word?", GREEDY)
    assert oracle.token not in plain.prompt_token_ids
    assert oracle.tokenizer.decode(plain.prompt_token_ids) == f"Is {token} a word?"


@pytest.mark.parametrize("as_token", [False, True], ids=["by letters", "as the token"])
def test_a_reply_with_the_placeholder_keeps_its_ids(
    oracle: Oracle, llm: LLM, as_token: bool
) -> None:
    """The next turn has the sampled ids, and none of them stands for an image."""
    token = oracle.tokenizer.convert_ids_to_tokens(oracle.token)
    letters = oracle.tokenizer.encode(token, split_special_tokens=True)
    reply = [*b"It says ", *([oracle.token] if as_token else letters)]
    params = SamplingParams(temperature=0, max_tokens=len(reply), skip_special_tokens=False)
    group = llm.chats.prepare([user("What is ", make_image(1), "?")], params)
    llm.engine.submit(group)
    for token_id in reply:  # what the model would have chosen
        scheduler_of(llm.engine).schedule()
        llm.engine.manager.commit_step()
        group.requests[0].append(SampledToken(token_id, None, ()), 0.0)
    output = group.output()
    assert output.outputs[0].text == f"It says {token}"
    llm.chats.remember(group, output)
    llm.engine.abort(group.request_id)
    following = [
        user("What is ", make_image(1), "?"),
        {"role": "assistant", "content": output.outputs[0].text},
        user("Really?"),
    ]
    [second] = llm.chat(following, GREEDY)
    assert (
        output.prompt_token_ids + reply
        == second.prompt_token_ids[: len(output.prompt_token_ids) + len(reply)]
    )
    assert len(second.images) == 1
    assert "\ufdd0" not in f"{second.prompt}" and f"It says {token}" in f"{second.prompt}"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "allowed: a data: URL"),
        ({"type": "image", "image": "/etc/passwd"}, "allowed: a data: URL"),
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "is 'http://x/y.png'; all"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,xx"}}, "base64,"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,!"}}, "is broken"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}, "cannot be read"),
        ({"type": "video"}, "type 'video'"),
        ({"type": "text", "text": "\ufdd0x\ufdd1"}, "U\\+FDD0"),
        ({"type": "image"}, "an image that is None;"),
    ],
)
def test_invalid_parts_are_refused(refusing: LLM, part: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        refusing.chat([{"role": "user", "content": [part]}], GREEDY)
    assert refusing.engine.manager.num_free_blocks == 80


def test_a_template_of_plain_texts_gets_the_placeholder_in_the_text(tmp_path: Path) -> None:
    folder = save_tiny_vision("llava", tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content + '\\n' }}{% endfor %}"
    )
    llm = LLM(folder, num_blocks=40)
    [output] = llm.chat([user("What is ", make_image(1), "?")], GREEDY)
    assert output.prompt == "user: What is \n<image>\n?\n"
    assert len(output.images) == 1
    llm.close()


def test_an_image_for_a_text_model_is_refused(tmp_path: Path) -> None:
    TINY_TOKENIZERS["byte_level"]().save_pretrained(save_tiny("llama", tmp_path))
    llm = LLM(tmp_path, num_blocks=20)
    with pytest.raises(RequestError, match="the model takes only text"):
        llm.chat([user("What is ", make_image(1), "?")], GREEDY)
    with pytest.raises(RequestError, match="the model takes only text"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": make_image(1)}}, GREEDY)
    llm.close()
