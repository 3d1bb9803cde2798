"""Attacks of a client on a speaking model, and their defenses."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from PIL import Image

from headstart import SamplingParams
from headstart.errors import RequestError
from headstart.omni.omni import AsyncOmni
from headstart.omni.qwen2_5 import Qwen25Omni
from headstart.server import middleware, speech, stores
from headstart.server.app import create_speech_app
from headstart.server.errors import ApiError
from headstart.server.options import ServerOptions
from headstart.server.speech import read_sound
from headstart.server.stores import Transcripts
from tests.omni.tiny_omni import save_qwen25
from tests.server.running import listening

RATE = 16_000
BODY: dict[str, Any] = {
    "model": "omni",
    "messages": [{"role": "user", "content": "Who?"}],
    "max_tokens": 4,
}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}


def silence(seconds: float) -> str:
    """A FLAC of it: ten minutes are 28 KB."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(seconds * RATE)), RATE, format="FLAC", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode()


def picture(side: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read(parts: list[dict[str, Any]]) -> Any:
    """A conversation of these parts, by a model of which only a prompt's half is needed."""
    omni: Any = SimpleNamespace(
        sound_rate=RATE,
        spelling={"audio": "<a>", "image": "<i>"},
        tokenizer=SimpleNamespace(
            apply_chat_template=lambda flat, **_: flat[0]["content"],
            get_chat_template=lambda *_: "",
        ),
    )
    return speech.read_prompt(omni, [{"role": "user", "content": parts}], str)


def sound(seconds: float) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": silence(seconds), "format": "flac"}}


def image(side: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture(side)}}


@pytest.mark.parametrize(
    ("part", "message"),
    [(sound(0.01), "more than 32 sounds"), (image(8), "more than 32 images")],
)
def test_a_conversation_has_so_many_sounds_and_images(part: Any, message: str) -> None:
    """The features of each are padded to the longest's: gigabytes for a few hundred bytes each."""
    [items] = [value for key, value in read([part] * 32).items() if key != "prompt"]
    assert len(items) == 32
    with pytest.raises(RequestError, match=message):
        read([part] * 33)


def test_sounds_have_a_bound_together() -> None:
    assert len(read([sound(600)] * 2)["audio"]) == 2
    with pytest.raises(RequestError, match="1,201 s together; allowed: 1,200"):
        read([sound(600), sound(600), sound(1)])


def test_images_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "MAX_ALL_PIXELS", 200)
    assert len(read([image(10)] * 2)["images"]) == 2
    with pytest.raises(RequestError, match="300 pixels together; allowed: 200"):
        read([image(10)] * 3)


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2**31 - 1])
def test_a_sound_of_an_absurd_rate_is_not_resampled(rate: int) -> None:
    """2 MB at 2**31 - 1 samples a second took 9 s."""
    data = bytes(2 * 500)
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate, 2, 16) + b"data"
    wav = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + head
    content = wav + struct.pack("<I", len(data)) + data
    with pytest.raises(RequestError, match=r"^a sound has .* second; allowed: 1,000 to 768,000$"):
        read_sound(base64.b64encode(content).decode(), RATE)


def test_an_unreadable_sound_tells_nothing_of_the_server() -> None:
    with pytest.raises(RequestError, match="cannot be read: Format not recognised") as caught:
        read_sound(base64.b64encode(b"RIFF nothing").decode(), RATE)
    assert "object at" not in str(caught.value)


def test_what_was_said_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(stores, "time", SimpleNamespace(time=lambda: now))
    kept = Transcripts()
    kept.add("a", "one", "first")
    now += Transcripts.SECONDS + 1
    kept.add("b", "two", "second")
    assert len(kept) == 1 and kept.find("b", "two") == "second"
    with pytest.raises(ApiError):
        kept.find("a", "one")


def test_who_says_much_takes_away_nothing_that_others_said() -> None:
    kept = Transcripts()
    kept.add("quiet/at home", "one", "mine")
    for at in range(2 * stores.MAX_VALUES):
        kept.add(f"loud/{at % 7}", str(at), "noise")
    assert kept.find("quiet/at home", "one") == "mine"
    assert len(kept) == stores.MAX_VALUES
    with pytest.raises(ApiError):
        kept.find("quiet/elsewhere", "one")
    with pytest.raises(ApiError):
        kept.find("loud/0", "0")


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    folder = save_qwen25(tmp_path_factory.mktemp("qwen2.5"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen25Omni, "speech_params", SamplingParams(temperature=0, max_tokens=9))
        with closing(AsyncOmni(folder, options={"num_blocks": 128})) as omni:
            yield omni


@pytest.fixture(scope="module")
def url(omni: AsyncOmni) -> Iterator[str]:
    with listening(create_speech_app(omni, "omni", ServerOptions(api_keys=False))) as url:
        yield f"{url}/v1/chat/completions"


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", -5), ("add_generation_prompt", False), ("response_format", "json_object")],
)
def test_a_field_without_effect_is_refused(url: str, field: str, value: Any) -> None:
    given = {"type": value} if isinstance(value, str) else value
    answer = httpx.post(url, json={**BODY, field: given}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "logit_bias": {}},
        {"priority": 0, "add_generation_prompt": True},
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(url: str, fields: dict[str, Any]) -> None:
    assert httpx.post(url, json=BODY | fields, timeout=60).status_code == 200


def test_a_role_that_nobody_knows_is_refused(url: str) -> None:
    """It was written into the prompt, where no model knows what it means."""

    def ask(role: str) -> httpx.Response:
        messages = [{"role": role, "content": "Say it."}, *BODY["messages"]]
        return httpx.post(url, json=BODY | {"messages": messages}, timeout=60)

    answer = ask("narrator")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].role")
    assert error["message"].startswith("message 0 has the role 'narrator'; allowed: system")
    assert ask("developer").json()["choices"] == ask("system").json()["choices"]


def test_a_long_speech_is_encoded_outside_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 s of speech kept all other requests waiting for 0.15 s."""
    inside: list[bool] = []

    def encode(samples: Any) -> bytes:
        inside.append(asyncio._get_running_loop() is not None)
        return b"pcm"

    monkeypatch.setattr(speech, "pcm16", encode)
    for long, expected in ((0, False), (2**30, True)):
        monkeypatch.setattr(speech, "_LONG", long)
        answer = httpx.post(url, json=BODY | SPOKEN | {"stream": True}, timeout=60)
        assert answer.text.endswith("[DONE]\n\n")
        assert set(inside) == {expected}
        inside.clear()


def test_reading_the_sounds_is_part_of_a_requests_time(
    omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(middleware, "_GRACE", 1e6)  # only the chat itself can end it
    monkeypatch.setattr(speech, "read_prompt", lambda *_: released.wait(60) and {"prompt": "a"})
    options = ServerOptions(api_keys=False, request_timeout=0.1)
    try:
        with listening(create_speech_app(omni, "omni", options)) as url:
            answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=30)
            assert answer.status_code == 504
            released.set()
    finally:
        released.set()
