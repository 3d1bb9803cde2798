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
    """Return silence as FLAC; ten minutes have 28 KB."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(seconds * RATE)), RATE, format="FLAC", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode()


def picture(side: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read(parts: list[dict[str, Any]]) -> Any:
    """Read the prompt of a conversation, with a stub of a model."""
    omni: Any = SimpleNamespace(
        sound_rate=RATE,
        placeholder_texts={"audio": "<a>", "image": "<i>"},
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
def test_the_number_of_sounds_and_images_is_bounded(part: Any, message: str) -> None:
    """Features are padded to the longest, so a few hundred bytes each could need gigabytes."""
    [items] = [value for key, value in read([part] * 32).items() if key != "prompt"]
    assert len(items) == 32
    with pytest.raises(RequestError, match=message):
        read([part] * 33)


def test_the_total_length_of_sounds_is_bounded() -> None:
    assert len(read([sound(600)] * 2)["audio"]) == 2
    with pytest.raises(RequestError, match="1,201 s together; allowed: 1,200"):
        read([sound(600), sound(600), sound(1)])


def test_the_total_size_of_images_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "MAX_ALL_PIXELS", 200)
    assert len(read([image(10)] * 2)["images"]) == 2
    with pytest.raises(RequestError, match="300 pixels together; allowed: 200"):
        read([image(10)] * 3)


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2**31 - 1])
def test_a_sound_of_an_absurd_rate_is_not_resampled(rate: int) -> None:
    """Regression: 2 MB at 2**31 - 1 samples per second took 9 s."""
    data = bytes(2 * 500)
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate, 2, 16) + b"data"
    wav = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + head
    content = wav + struct.pack("<I", len(data)) + data
    with pytest.raises(RequestError, match=r"^a sound has .* second; allowed: 1,000 to 768,000$"):
        read_sound(base64.b64encode(content).decode(), RATE)


def test_the_error_of_an_unreadable_sound_hides_internals() -> None:
    with pytest.raises(RequestError, match="cannot be read: Format not recognised") as caught:
        read_sound(base64.b64encode(b"RIFF nothing").decode(), RATE)
    assert "object at" not in str(caught.value)


def test_transcripts_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(stores, "time", SimpleNamespace(time=lambda: now))
    transcripts = Transcripts()
    transcripts.add("a", "one", "first")
    now += Transcripts.SECONDS + 1
    transcripts.add("b", "two", "second")
    assert len(transcripts) == 1 and transcripts.find("b", "two") == "second"
    with pytest.raises(ApiError):
        transcripts.find("a", "one")


def test_a_tenants_transcripts_do_not_evict_those_of_others() -> None:
    transcripts = Transcripts()
    transcripts.add("quiet/at home", "one", "mine")
    for i in range(2 * stores.MAX_VALUES):
        transcripts.add(f"loud/{i % 7}", str(i), "noise")
    assert transcripts.find("quiet/at home", "one") == "mine"
    assert len(transcripts) == stores.MAX_VALUES
    with pytest.raises(ApiError):
        transcripts.find("quiet/elsewhere", "one")
    with pytest.raises(ApiError):
        transcripts.find("loud/0", "0")


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
    content = {"type": value} if isinstance(value, str) else value
    answer = httpx.post(url, json={**BODY, field: content}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "logit_bias": {}},
        {"priority": 0, "add_generation_prompt": True},
    ],
)
def test_a_field_with_a_neutral_value_is_accepted(url: str, fields: dict[str, Any]) -> None:
    assert httpx.post(url, json=BODY | fields, timeout=60).status_code == 200


def test_an_unknown_role_is_refused(url: str) -> None:
    """Regression: it was rendered into the prompt, although no model knows it."""

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
    """Regression: 80 s of speech delayed all other requests by 0.15 s."""
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


def test_the_timeout_includes_reading_the_sounds(
    omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(middleware, "_GRACE", 1e6)  # only the chat can end it
    monkeypatch.setattr(speech, "read_prompt", lambda *_: released.wait(60) and {"prompt": "a"})
    options = ServerOptions(api_keys=False, request_timeout=0.1)
    try:
        with listening(create_speech_app(omni, "omni", options)) as url:
            answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=30)
            assert answer.status_code == 504
            released.set()
    finally:
        released.set()
