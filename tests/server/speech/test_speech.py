"""Answers of a speaking model to OpenAI's client match those of `Omni`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image

from headstart import Omni, OmniParams, SamplingParams
from headstart.omni.omni import AsyncOmni
from headstart.omni.qwen2_5 import Qwen25Omni
from headstart.omni.qwen3 import Qwen3Omni
from headstart.server.app import create_speech_app
from headstart.server.options import ServerOptions
from headstart.server.speech import SpeechService
from tests.clients import openai
from tests.omni.tiny_omni import save_qwen25
from tests.omni.tiny_qwen3 import save_qwen3
from tests.server.running import listening

RATE = 16_000
SPEECH = SamplingParams(temperature=0, max_tokens=30)
HEAR = "<|audio_bos|><|AUDIO|><|audio_eos|>"
SEE = "<|vision_bos|><|IMAGE|><|vision_eos|>"
BOTH: Any = ["text", "audio"]


class Speaking:
    """A server with its engine and a client."""

    def __init__(self, url: str, kind: str, omni: AsyncOmni, service: SpeechService) -> None:
        self.url, self.kind, self.omni, self.service = url, kind, omni, service
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, content: Any, **options: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        defaults = {"model": "omni", "max_tokens": 8, "temperature": 0, "seed": 3}
        return self.client.chat.completions.create(messages=messages, **{**defaults, **options})


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def speaking(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaking]:
    save = {"qwen2.5": save_qwen25, "qwen3": save_qwen3}[kind]
    folder = save(tmp_path_factory.mktemp(kind))
    with pytest.MonkeyPatch.context() as patch:
        for model in (Qwen25Omni, Qwen3Omni):
            patch.setattr(model, "speech_params", SPEECH)
        omni = AsyncOmni(folder, options={"num_blocks": 128})
        app = create_speech_app(omni, "omni", ServerOptions(api_keys=False))
        with listening(app) as url:
            speaking = Speaking(url, kind, omni, app.state.service)
            with speaking.client:
                yield speaking
        omni.close()


def oracle(speaking: Speaking, prompt: Any, *, audio: bool = True) -> Any:
    """Return the pipeline's output for a prompt, without the server."""
    speech = SPEECH.clone()
    speech.seed = 3
    params = OmniParams(
        text=SamplingParams(temperature=0, max_tokens=8, seed=3), speech=speech, audio=audio, seed=3
    )
    omni: Omni = speaking.omni.omni
    [output] = omni.generate(prompt, params)
    return output


def rendered(speaking: Speaking, text: str) -> str:
    roles = {"qwen2.5": ("user", "assistant"), "qwen3": ("<|user|>", "<|assistant|>")}
    user, assistant = roles[speaking.kind]
    return f"<|im_start|>{user}\n{text}<|im_end|>\n<|im_start|>{assistant}\n"


def test_a_spoken_answer_matches_the_pipeline(speaking: Speaking) -> None:
    answer = speaking.ask("Who was there?", modalities=BOTH, audio={"format": "wav"})
    expected = oracle(speaking, rendered(speaking, "Who was there?"))
    [choice] = answer.choices
    assert choice.message.content is None
    assert choice.message.audio.transcript == expected.text
    assert base64.b64decode(choice.message.audio.data) == expected.wav()
    assert len(expected.audio) > 100
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens_details.audio_tokens == len(expected.codes)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_min_tokens_is_compared_with_the_requests_max_tokens(
    speaking: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `min_tokens` was refused if it exceeded the model's default `max_tokens`."""
    short = SamplingParams(temperature=0, max_tokens=4)
    monkeypatch.setattr(type(speaking.omni.omni._model), "text_params", short)
    answer = speaking.ask("Who was there?", max_tokens=8, extra_body={"min_tokens": 6})
    assert answer.usage.completion_tokens >= 6


def test_a_text_is_answered_without_speech(speaking: Speaking) -> None:
    answer = speaking.ask("What was said?")
    assert answer.choices[0].message.audio is None
    expected = oracle(speaking, rendered(speaking, "What was said?"), audio=False)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens_details.audio_tokens == 0


def test_a_stream_has_the_same_words_and_samples(speaking: Speaking, kind: str) -> None:
    expected = oracle(speaking, rendered(speaking, "Go on."))
    options = {"audio": {"format": "pcm16"}, "stream_options": {"include_usage": True}}
    chunks = list(speaking.ask("Go on.", stream=True, modalities=BOTH, **options))
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids) + len(expected.codes)
    deltas = [chunk.choices[0].delta.to_dict().get("audio", {}) for chunk in chunks[:-1]]
    assert "".join(delta.get("transcript", "") for delta in deltas) == expected.text
    sounds = [base64.b64decode(delta["data"]) for delta in deltas if "data" in delta]
    assert b"".join(sounds) == expected.pcm16()
    assert len(sounds) > 1 or kind == "qwen2.5"  # whose vocoder returns one waveform
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == expected.finish_reason and set(reasons[:-1]) == {None}
    assert {delta["id"] for delta in deltas if delta} == {deltas[-1]["id"]}


def test_a_prefix_is_cached_over_requests(speaking: Speaking) -> None:
    before = "The minutes of the meeting are these, as far as they were written down. " * 3
    first, second = (speaking.ask(before + end) for end in ("Who?", "Why?"))
    assert first.usage.prompt_tokens_details.cached_tokens < 32
    assert second.usage.prompt_tokens_details.cached_tokens > 150
    other = speaking.ask(before + "Why?", extra_body={"cache_salt": "another"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def waves(seconds: float, rate: int) -> NDArray[np.float32]:
    """Return two tones far below the Nyquist frequency of every rate used here."""
    times = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 220 * times) + 0.2 * np.sin(2 * np.pi * 550 * times)).astype(
        "f4"
    )


def as_file(samples: NDArray[Any], rate: int, form: str = "WAV", kind: str = "FLOAT") -> str:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=kind)
    return base64.b64encode(file.getvalue()).decode()


def with_sound(data: str, form: str = "wav") -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "Listen: "},
        {"type": "input_audio", "input_audio": {"data": data, "format": form}},
        {"type": "text", "text": " What is it?"},
    ]


@pytest.mark.parametrize("kind", ["qwen2.5"], indirect=True)
class TestMedia:
    """Sounds and images reach the model as with `Omni`."""

    def test_a_sound_of_the_models_rate(self, speaking: Speaking) -> None:
        data = as_file(waves(1, RATE), RATE)
        answer = speaking.ask(with_sound(base64.encodebytes(base64.b64decode(data)).decode()))
        prompt = {
            "prompt": rendered(speaking, f"Listen: {HEAR} What is it?"),
            "audio": [waves(1, RATE)],
        }
        assert answer.choices[0].message.content == oracle(speaking, prompt, audio=False).text
        assert speaking.ask(with_sound(data)).usage == answer.usage.model_copy(
            update={
                "prompt_tokens_details": answer.usage.prompt_tokens_details.model_copy(
                    update={"cached_tokens": (answer.usage.prompt_tokens - 1) // 16 * 16}
                )
            }
        )

    @pytest.mark.parametrize("rate", [8_000, 44_100])
    def test_a_sound_of_another_rate_and_two_channels(self, speaking: Speaking, rate: int) -> None:
        """The resampled sound has the same duration and nearly the same samples."""
        from headstart.server.speech import read_sound

        stereo = np.stack([waves(1, rate)] * 2, axis=1)
        samples = read_sound(as_file(stereo, rate), RATE)
        assert samples.shape == (RATE,) and samples.dtype == np.float32
        inner = slice(800, -800)  # the ends have no neighbors
        assert np.abs(samples - waves(1, RATE))[inner].max() < 1e-3
        assert speaking.ask(with_sound(as_file(stereo, rate))).usage.prompt_tokens > 20

    @pytest.mark.parametrize("form", ["flac", "mp3", "opus"])
    def test_speech_in_other_files(self, speaking: Speaking, form: str) -> None:
        answer = speaking.ask("Speak.", modalities=BOTH, audio={"format": form})
        expected = oracle(speaking, rendered(speaking, "Speak."))
        data = base64.b64decode(answer.choices[0].message.audio.data)
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        assert rate == expected.sample_rate
        assert abs(len(samples) - len(expected.audio)) <= 2400  # the codec's padding
        if form == "flac":
            assert np.abs(samples - expected.audio.numpy()).max() < 1e-4

    def test_an_image(self, speaking: Speaking) -> None:
        picture = Image.fromarray(np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3))
        file = io.BytesIO()
        picture.save(file, "PNG")
        url = "DATA:image/png;BASE64," + base64.urlsafe_b64encode(file.getvalue()).decode()
        answer = speaking.ask([{"type": "image_url", "image_url": {"url": url}}])
        prompt = {"prompt": rendered(speaking, SEE), "images": [picture]}
        assert answer.choices[0].message.content == oracle(speaking, prompt, audio=False).text

    def test_an_earlier_answer_by_its_id(self, speaking: Speaking) -> None:
        first = speaking.ask("Begin.", modalities=BOTH)
        audio = first.choices[0].message.audio
        turns = [{"role": "user", "content": "Begin."}]
        more = {"role": "user", "content": "And then?"}
        options = {"model": "omni", "max_tokens": 8, "temperature": 0, "seed": 3}
        create: Any = speaking.client.chat.completions.create
        by_id = create(
            messages=[*turns, {"role": "assistant", "audio": {"id": audio.id}}, more], **options
        )
        by_text = create(
            messages=[*turns, {"role": "assistant", "content": audio.transcript}, more], **options
        )
        assert by_id.choices[0].message.content == by_text.choices[0].message.content
        assert by_id.usage.prompt_tokens == by_text.usage.prompt_tokens
        with pytest.raises(openai.NotFoundError, match="there is no spoken answer"):
            create(
                messages=[*turns, {"role": "assistant", "audio": {"id": audio.id}}, more],
                extra_body={"cache_salt": "a stranger's"},
                **options,
            )

    def test_the_error_of_an_unknown_voice_names_the_field(self, speaking: Speaking) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            speaking.ask("a", modalities=BOTH, audio={"voice": "Zoe"})
        assert raised.value.param == "audio.voice"

    @pytest.mark.parametrize(
        ("content", "options", "message"),
        [
            ("a", {"modalities": BOTH, "audio": {"voice": "Zoe"}}, "there is no voice 'Zoe'"),
            ("a", {"audio": {"format": "wav"}}, "allowed with modalities"),
            ("a", {"modalities": BOTH, "stream": True}, "allowed with stream: pcm16"),
            ("a", {"modalities": BOTH, "audio": {"format": "aac"}}, "audio.format"),
            ("a", {"n": 2}, "allowed: 1 for a spoken"),
            ("a", {"logprobs": True}, "which a model with speech output does not support"),
            (
                "a",
                {"tools": [{"type": "function", "function": {"name": "f"}}]},
                "which a model with speech output does not support",
            ),
            ("a", {"max_tokens": 0}, "max_tokens"),
            ("a" * 40_000, {}, "max_model_len"),
            ([], {}, "a string or a list"),
            ([{"type": "video_url", "video_url": {"url": "x"}}], {}, "cannot be read"),
            ([{"type": "input_audio", "input_audio": None}], {}, "cannot be read"),
            ([{"type": "input_audio", "input_audio": "x"}], {}, "cannot be read"),
            (["text"], {}, "cannot be read"),
            (with_sound("!!"), {}, "base64 of a sound is broken"),
            (with_sound(base64.b64encode(b"RIFF nothing").decode()), {}, "a sound cannot be read"),
            (with_sound(as_file(np.zeros((0, 1)), RATE)), {}, "a sound has 0 s"),
            (with_sound(as_file(np.zeros(8000 * 601), 8000, "FLAC", "PCM_16")), {}, "up to 600 s"),
            (with_sound(as_file(waves(1, RATE) * 1e30, RATE)), {}, "allowed: -1 to 1"),
            (with_sound(as_file(np.full(RATE, np.nan), RATE)), {}, "samples that are not finite"),
            (with_sound(as_file(np.full(RATE, np.inf), RATE)), {}, "samples that are not finite"),
            ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], {}, "data:image/"),
            (f"hear {HEAR}", {}, "1 audio placeholders"),
        ],
    )
    def test_invalid_requests_are_refused_in_one_sentence(
        self, speaking: Speaking, content: Any, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            speaking.ask(content, **options)
        assert not speaking.omni.omni.pipeline.has_unfinished
        for _ in range(1000):  # a slot is released after its answer was sent
            if speaking.service.calls.num_slots == 0:
                break
            httpx.get(f"{speaking.url}/ready")
        else:
            pytest.fail("the slot was not released")


def test_concurrent_answers_match_single_ones(speaking: Speaking) -> None:
    questions = [f"Question {number}, of many?" for number in range(6)]
    expected = [oracle(speaking, rendered(speaking, question)) for question in questions]
    answers: dict[str, Any] = {}

    def ask(question: str) -> None:
        answers[question] = speaking.ask(question, modalities=BOTH)

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for question, alone in zip(questions, expected, strict=True):
        message = answers[question].choices[0].message
        assert message.audio.transcript == alone.text
        samples = np.frombuffer(base64.b64decode(message.audio.data)[44:], "<i2").astype(int)
        wanted = np.frombuffer(alone.pcm16(), "<i2").astype(int)
        assert np.abs(samples - wanted).max() <= 2  # products of several rows round differently


def test_a_disconnected_client_ends_its_request(speaking: Speaking) -> None:
    body = {"model": "omni", "messages": [{"role": "user", "content": "a"}], "stream": True}
    body |= {"modalities": BOTH, "audio": {"format": "pcm16"}, "temperature": 0}
    with httpx.stream("POST", f"{speaking.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
    for _ in range(10_000):  # each call is an iteration of the pipeline's thread
        if not asyncio.run(speaking.omni.call(lambda: speaking.omni.omni.pipeline.has_unfinished)):
            break
    else:
        pytest.fail("the request still runs")


def test_a_failed_stage_ends_only_the_running_requests(
    speaking: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = speaking.omni.omni.pipeline

    def fail() -> Any:
        raise RuntimeError("a stage broke")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.stages["talker"], "step", fail)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            speaking.ask("Now.", modalities=BOTH)
    metrics = httpx.get(f"{speaking.url}/metrics").text
    assert 'request_success_total{finished_reason="error",model_name="omni"} 1.0' in metrics
    again = speaking.ask("Now.", modalities=BOTH)
    assert (
        again.choices[0].message.audio.transcript
        == oracle(speaking, rendered(speaking, "Now.")).text
    )


def test_models_health_metrics_and_docs(speaking: Speaking) -> None:
    speaking.ask("Count me.", modalities=BOTH)
    [model] = speaking.client.models.list().data
    assert model.id == "omni"
    assert httpx.get(f"{speaking.url}/health").status_code == 200
    assert httpx.get(f"{speaking.url}/ready").status_code == 200
    metrics = httpx.get(f"{speaking.url}/metrics").text
    assert 'headstart:stage_tokens_total{model_name="omni",stage="talker"}' in metrics
    assert 'request_success_total{finished_reason="length",model_name="omni"}' in metrics
    assert "/v1/chat/completions" in httpx.get(f"{speaking.url}/docs").text
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        speaking.ask("a", model="another")
