"""One prompt with and without LoRA adapters, in one batch: lora.py ADAPTER [ADAPTER ...]"""

import sys

from headstart import LLM, SamplingParams
from headstart.lora.request import LoRARequest


def main() -> None:
    llm = LLM(
        model="headstart-tiny",
        max_model_len=2048,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=8,
        max_cpu_loras=4,
    )
    requests = [None] + [
        LoRARequest(f"adapter-{number}", number, path)
        for number, path in enumerate(sys.argv[1:], start=1)
    ]
    prompts = ["The capital of France is"] * len(requests)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    for output in llm.generate(prompts, sampling_params, lora_request=requests):
        name = output.lora_request.lora_name if output.lora_request else "no adapter"
        print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
