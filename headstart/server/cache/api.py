"""`/cache`: the state of the pool, explanations of misses, advice, prewarming and resets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.cache import ComputedBlocks, MissExplanation, MissReason
from headstart.server.bodies import Body, CacheFields, Flag, Many, Whole, refusals
from headstart.server.chats import prepare_chat
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.openai.schema import ChatCompletionRequest, CompletionRequest, PromptFields
from headstart.server.service import Service, cancel_on_disconnect, service_of
from headstart.server.sse import EventStream, frame
from headstart.server.tenants import tenant_of

if TYPE_CHECKING:
    from headstart.cache import BlockHash
    from headstart.engine.request import RequestGroup


class CachePromptRequest(CacheFields, PromptFields):
    """A prompt: a string, token ids or messages.

    The whole body of a completion or chat is accepted. Fields that only change the answer have no
    effect. `add_generation_prompt` adds the beginning of the model's reply to messages. Its default
    is true for `explain`, and false for `prewarm`.
    """

    accepted = frozenset({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})
    refused = refusals({"use a chat's `messages`": "input instructions system"})
    prompt: str | Many[Whole] | None = None


class CacheResetRequest(Body):
    """Options of a reset. reset_running_requests: preempt and recompute running requests.

    reset_tiers: also remove the model's blocks from disk and from other machines.
    """

    reset_running_requests: Flag = False
    reset_tiers: Flag = False


router = APIRouter(prefix="/cache")

MAX_WATCHERS = 64  # open streams of /cache/live


@router.get("")
async def show_cache(request: Request) -> Response:
    """Show the blocks by state and owner, the hit rate and the largest prefixes."""
    snapshot = await service_of(request).live.show(is_now=True)
    overview = snapshot["engine"] | snapshot["pool"] | {"prefixes": snapshot["prefixes"]}
    return JsonResponse(overview)


@router.post("/explain")
async def explain_prompt(body: CachePromptRequest, request: Request) -> Response:
    """Return how many tokens of a prompt would hit, and the reason why no further tokens would.

    The prompt is not run.
    """
    service = service_of(request)
    prepared = await prepare(service, body, request, begins_reply=True)
    sequence = prepared.requests[0].sequence
    manager = service.llm.manager

    def look_up() -> tuple[int, MissExplanation, list[BlockHash], ComputedBlocks | None]:
        if not prepared.requests[0].reads_cache:
            return 0, MissExplanation(MissReason.NOT_READ, 0), [], None
        computed = manager.get_computed_blocks(sequence)
        hashes = manager.block_hashes(sequence)[len(computed.blocks) :]
        missed = manager.explain(sequence, across_salts=tenant_of(request).is_admin)
        return computed.num_tokens, missed, hashes, computed

    num_cached, missed, uncached, computed = await service.llm.call(look_up)
    answer: dict[str, Any] = {
        "prompt_tokens": len(prepared.prompt_token_ids),
        "cached_tokens": num_cached,
    }
    if service.llm.tiers is not None:
        stored = await asyncio.to_thread(service.llm.tiers.count_stored, uncached, computed)
        answer["stored_tokens"] = sum(stored.values())
        answer["stored_tokens_by_tier"] = stored
    explain = service.watch.explain
    tokens = prepared.prompt_token_ids
    return JsonResponse(
        answer | await asyncio.to_thread(explain, sequence.namespace, tokens, missed)
    )


@router.post("/prewarm")
async def prewarm_prompt(body: CachePromptRequest, request: Request) -> Response:
    """Compute and cache a prompt for later requests that begin with it."""
    service = service_of(request)
    prepared = await prepare(service, body, request, begins_reply=False)
    if body.retention:
        prepared.retain(len(prepared.prompt_token_ids), body.retention)
    output = await cancel_on_disconnect(request.receive, service.answer(prepared))
    return JsonResponse(
        {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "computed_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        }
    )


@router.post("/reset")
async def reset_cache(request: Request, body: CacheResetRequest | None = None) -> Response:
    """Empty the cache. Status 409 while requests run, unless `reset_running_requests` is set."""
    service = service_of(request)
    options = body or CacheResetRequest()
    is_empty = True  # stays True if a tier raises: the pool is empty by then
    try:
        is_empty = await service.llm.reset_prefix_cache(
            reset_running_requests=options.reset_running_requests,
            reset_connector=options.reset_tiers,
        )
    finally:
        if is_empty:
            await service.llm.forget_inputs()
            await asyncio.to_thread(service.watch.clear)
    if not is_empty:
        raise ApiError(
            409, "requests are running; wait, or set reset_running_requests to compute them again"
        )
    return JsonResponse({"reset": True})


@router.get("/advice")
async def show_advice(request: Request) -> Response:
    """Show the changes that would have saved the most tokens of the recent prompts.

    With an administrator's key the advice covers the prompts of all tenants. With any other key it
    covers the prompts of the key's tenant, and `memory` is null, since evictions depend on other
    tenants.
    """
    return JsonResponse(await read_advice(request))


async def read_advice(request: Request) -> dict[str, Any]:
    """Return the advice that the caller may see. Raises ApiError (429) for a busy tenant."""
    service, tenant = service_of(request), tenant_of(request)
    # Count this as a request of the tenant, so that the tenant's limit applies.
    with nullcontext() if tenant.is_admin else service.calls.call(tenant):
        return await asyncio.to_thread(service.watch.advise, tenant)


@router.get("/live")
async def stream_live(request: Request) -> Response:
    """Stream snapshots of the pool and the recent requests, about one event a second.

    Status 429 if 64 streams are open, since each may buffer an event of about 200 KB.
    """
    service = service_of(request)
    live = service.live
    if live.num_watchers >= MAX_WATCHERS:
        raise ApiError(429, f"{MAX_WATCHERS} streams of /cache/live are open; close one of them")

    async def events() -> AsyncGenerator[bytes]:
        live.num_watchers += 1
        try:
            while not service.is_draining:
                yield frame(await live.show())
                await asyncio.sleep(live.pause)
        finally:
            live.num_watchers -= 1

    return EventStream(events())


@router.get("/blocks/{block_id}")
async def show_block(block_id: int, request: Request) -> Response:
    """Return the text in a block; status 404 for an unknown block id."""
    service = service_of(request)
    count = service.llm.num_blocks
    if not 0 <= block_id < count:
        raise ApiError(404, f"there is no block {block_id}; allowed: 0 to {count - 1}")
    return JsonResponse(await service.live.block_text(block_id))


async def prepare(
    service: Service, body: CachePromptRequest, request: Request, *, begins_reply: bool
) -> RequestGroup:
    """Return a request for a body's prompt. begins_reply: default of `add_generation_prompt`."""
    sampling = {"max_tokens": 1, "temperature": 0} | body.cache_sampling
    salt = service.salt(request, body.salt)
    name = service.new_id("prompt")
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "prompt and messages are both set or both missing; allowed: one of them"
        )
    if body.prompt is not None:
        params, adapter = service.params(sampling, stream=False), service.adapter(body.model)
        return await service.prepare(body.prompt, params, name, adapter=adapter, cache_salt=salt)
    call = body.as_call(salt, sampling, add_generation_prompt=begins_reply)
    return (await prepare_chat(service, call, name, stream=False)).request
