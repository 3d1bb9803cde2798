"""Stream the answers to several prompts concurrently."""

import asyncio

from headstart import SamplingParams
from headstart.engine.arg_utils import AsyncEngineArgs
from headstart.sampling_params import RequestOutputKind
from headstart.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    sampling_params = SamplingParams(
        max_tokens=24,
        temperature=0.8,
        top_p=0.95,
        seed=42,
        output_kind=RequestOutputKind.DELTA,
    )
    text = ""
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            print(f"{request_id}: {text!r}")
            break
    return text


async def main() -> None:
    engine_args = AsyncEngineArgs(model="headstart-tiny", enforce_eager=True, max_model_len=2048)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["The future of AI is", "In a galaxy far away", "The key to happiness is"]
        await asyncio.gather(
            *(
                stream_response(engine, prompt, f"stream-example-{number}")
                for number, prompt in enumerate(prompts, 1)
            )
        )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
