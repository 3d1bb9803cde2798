"""Complete a few prompts."""

from headstart import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)


def main() -> None:
    llm = LLM(model="headstart-tiny", max_model_len=2048, gpu_memory_utilization=0.5)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt:    {output.prompt!r}")
        print(f"Output:    {output.outputs[0].text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
