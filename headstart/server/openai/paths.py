"""What becomes of paths that vLLM's server has, and OpenAI's, and this one has not."""

from headstart.frontend.vllm_api.rows import refused
from headstart.validation import in_one_line

__all__ = ["tell_missing"]


def _none(text: str) -> dict[str, tuple[()]]:
    return dict.fromkeys(text.split(), ())


_ROWS = refused(
    {
        "models here generate; for embeddings or scores use transformers or "
        "sentence-transformers": _none(
            "/v1/embeddings /v2/embed /pooling /score /v1/score /rerank /v1/rerank /v2/rerank "
            "/classify /generative_scoring"
        ),
        "a model that speaks hears and answers in `/v1/chat/completions`": _none(
            "/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech"
        ),
        "adapters are given at the start, by `--lora-modules NAME=PATH`": _none(
            "/v1/load_lora_adapter /v1/unload_lora_adapter"
        ),
        "ask `POST /cache/reset`": _none(
            "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache"
        ),
        "ask `GET /health`": _none("/ping"),
        "ask `GET /metrics`": _none("/load"),
        "`GET /openapi.json` has the version": _none("/version /server_info"),
        "`POST /tokenize` and `/detokenize` are there": _none(
            "/tokenizer_info /v1/completions/render /v1/chat/completions/render"
        ),
        "ask `/v1/chat/completions` or `/v1/completions`": _none(
            "/invocations /inference/v1/generate /generate /v1/chat/completions/batch "
            "/v1/engines /chat/completions /completions"
        ),
        "there is no sleep mode: stop the server to free the memory": _none(
            "/sleep /wake_up /is_sleeping /pause /resume"
        ),
        "profile with py-spy": _none("/start_profile /stop_profile"),
    }
)


def tell_missing(path: str) -> str:
    """What to say of a path that is not there."""
    row = _ROWS.get(path.rstrip("/"))
    instead = row.note if row is not None else "GET /docs shows what there is"
    return f"there is no {in_one_line(path)}: {instead}"
