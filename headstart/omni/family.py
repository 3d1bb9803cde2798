"""The base of all families of omni models: loading, prompts and shared stages."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.cache import MultiModalItem
from headstart.engine.params import SamplingParams
from headstart.engine.request import (
    PlacedRows,
    PrecomputedEmbeddings,
    PreparedPrompt,
    PromptExtras,
    RotaryPositions,
)
from headstart.errors import DamagedModelError, RequestError
from headstart.models.dtypes import fast_dtype, find_device, find_dtype
from headstart.models.files import check_files, stamp_files
from headstart.models.tokenizer import load_tokenizer
from headstart.models.transformers_backend.loader import check_speaker, load_config, load_weights
from headstart.models.transformers_tools import silence_transformers
from headstart.omni.engine_stage import EngineStage, Feed, PromptFeed, StagePrompt
from headstart.omni.media import Media, PlacedItem, as_items, as_rgb, read_features
from headstart.omni.output_cache import ContentCache, OutputCache, content_digest
from headstart.omni.params import SpokenPrompt
from headstart.omni.pipeline import Factory, StageNode, stage_config
from headstart.omni.stage import Input, OmniRequest, Stage
from headstart.omni.stage_decoder import StageCheckpoint, StageDecoder


class OmniModel:
    """A checkpoint of an omni model, loaded into transformers' modules.

    Makes the pipeline's stages, and prepares prompts for these stages.

    kind: the model's class in transformers. audio, codes: the outputs with the waveform and the
    codes. placeholder_texts: the text for an item in a prompt, by kind ("audio" or "image"). A
    request's option `voice` for the stage `talker` selects its voice. Embeddings of audio and
    images are cached in `cache`, and in the thinker's tiers if it has any. Raises ConfigError or
    ModelError.
    """

    kind: Any
    graph: str
    audio: Input
    codes: Input
    sound_padding: str | bool
    sample_rate = 24_000
    text_params = SamplingParams(max_tokens=1024, temperature=0.0)
    speech_params: SamplingParams
    placeholder_texts: Mapping[str, str]
    factories: Mapping[str, Factory]

    def __init__(self, folder: Path, dtype: str, device: str, cache: OutputCache) -> None:
        weights_dtype, target_device = find_dtype(dtype), find_device(device)
        check_files(folder)
        self.checkpoint = StageCheckpoint(folder, stamp_files(folder))
        options = {
            "dtype": fast_dtype(weights_dtype, folder, target_device),
            "attn_implementation": "eager",
        }
        with silence_transformers():
            self.config: Any = load_config(folder)
            check_speaker(folder, self.config)
            self.voices = self._load_voices(folder)
            if not self.voices:
                raise DamagedModelError(f"{folder} has no voices")
            # Call `from_pretrained` of the base class. The override in Qwen2.5-Omni's class also
            # reads the voices, and does not return the loading report.
            load = super(self.kind, self.kind).from_pretrained  # type: ignore[misc]
            loaded: Any = load_weights(load, folder, config=self.config, **options)
        self._whole = loaded.to(target_device).eval()
        self._thinker, self._talker = self._whole.thinker, self._whole.talker
        self.talker_config: Any = self._talker.config
        config = self.config.thinker_config
        self.placeholders = {"audio": config.audio_token_id, "image": config.image_token_id}
        merge_size = config.vision_config.spatial_merge_size
        self.media = Media(
            folder, self.placeholders, self._sound_lengths, merge_size, self.sound_padding
        )
        self.tokenizer = load_tokenizer(folder)
        self._cache = cache
        self._encoded = ContentCache(cache, "encoder")

    @property
    def vocab_size(self) -> int:
        """Size of the text vocabulary."""
        return int(self._thinker.get_input_embeddings().weight.shape[0])

    def prepare(
        self, text: PreparedPrompt, inputs: Mapping[str, Any], salt: str | None
    ) -> SpokenPrompt:
        """Return a prompt with placeholders for its audio and images. Raises RequestError.

        inputs: `features` of transformers' processor, or `audio` and `images`. An item that was
        encoded before with the same salt is not encoded again.
        """
        features = read_features(inputs.get("features", {}))
        images = [as_rgb(image) for image in as_items(inputs.get("images", []))]
        sounds = as_items(inputs.get("audio", []))
        for name, extracted in (
            ("audio", self.media.extract_audio(sounds)),
            ("images", self.media.extract_images(images)),
        ):
            if extracted.keys() & features.keys():
                raise RequestError(
                    f"the prompt has {name}, and features of {name}; allowed: one of them"
                )
            features |= extracted
        token_ids, placed_items = self.media.place(text.token_ids, features)
        items, rows = [], []
        for item in placed_items:
            content = (item.content[name] for name in sorted(item.content))
            digest = content_digest(item.kind, *content)
            items.append(MultiModalItem(digest, item.offset, item.length))
            try:
                encoded = self._encoded.recall(digest, partial(self.encode, item), salt)
            except (RuntimeError, ValueError, IndexError) as error:  # features of another model
                raise RequestError(
                    f"the {item.kind} at token {item.offset} cannot be encoded: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if len(encoded) != item.length:
                raise RequestError(
                    f"the {item.kind} at token {item.offset} has {item.length} placeholders, and "
                    f"{len(encoded)} embeddings"
                )
            rows.append(PlacedRows(item.offset, encoded))
        extras = None
        if placed_items:
            positions = self.positions(token_ids, features)
            extras = PromptExtras(tuple(items), PrecomputedEmbeddings(rows), positions)
        return SpokenPrompt(PreparedPrompt(token_ids, text.text, extras), features)

    def make_thinker(self, node: StageNode) -> Stage:
        """Return the stage that generates the text answer."""

        def feed(request: OmniRequest) -> Feed:
            params = request.params.get("thinker", self.text_params)
            return PromptFeed(StagePrompt(request.prompt.prepared, params, request.salt))

        decoder, config = self.thinker(), stage_config(node)
        stage = EngineStage(node.spec, decoder, feed, config, self._cache, self.tokenizer)
        tiers = stage.engine.tiers
        if tiers is not None:
            self._encoded.add_store(tiers.image_loads, stage.engine.manager.hasher.model)
        return stage

    def voice(self, request: OmniRequest) -> str:
        """Return a request's voice, by default the first voice. Raises RequestError."""
        name = request.options.get("talker", {}).get("voice") or next(iter(self.voices))
        if name not in self.voices:
            raise RequestError(f"there is no voice {name!r}; allowed: {', '.join(self.voices)}")
        return str(name)

    def embed_text(self, token_id: int) -> Tensor:
        """Return the thinker's embedding `[hidden]` of a token, in host memory."""
        ids = torch.tensor([token_id], device=self._whole.device)
        with torch.inference_mode():
            row: Tensor = self._thinker.get_input_embeddings()(ids)[0].cpu()
        return row

    def positions(
        self, token_ids: Sequence[int], features: Mapping[str, Tensor], *, of_talker: bool = False
    ) -> RotaryPositions:
        """Return the rotary positions of a prompt and the offset for later tokens."""
        ids = torch.tensor([list(token_ids)])
        mask = features.get("feature_attention_mask")
        table, deltas = self._rope_model(of_talker=of_talker).get_rope_index(
            ids,
            image_grid_thw=features.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
            audio_seqlens=mask.sum(-1) if mask is not None else None,
        )
        return RotaryPositions(table[:, 0].long().numpy(), int(deltas.view(-1)[0]))

    def _on_device(self, content: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self._whole.device) for name, value in content.items()}

    # Defined by each family

    def _load_voices(self, folder: Path) -> dict[str, Any]:
        """Return the voices by name. Raises DamagedModelError."""
        raise NotImplementedError

    def thinker(self) -> StageDecoder:
        """Return a decoder that generates text."""
        raise NotImplementedError

    def encode(self, item: PlacedItem) -> Tensor:
        """Return the rows `[length, width]` that replace an item's placeholders."""
        raise NotImplementedError

    def _sound_lengths(self, counts: Tensor) -> Tensor:
        """Return each sound's number of embeddings. counts: each sound's number of frames."""
        raise NotImplementedError

    def _rope_model(self, *, of_talker: bool) -> Any:
        """Return the module that computes positions."""
        raise NotImplementedError
