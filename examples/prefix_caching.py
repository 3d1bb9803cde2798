"""Two questions about one long text: the second finds the text in the cache."""

from headstart import LLM, SamplingParams

prefix = (
    "You are an expert school principal, skilled in effectively managing "
    "faculty and staff. Draft 10-15 questions for a potential first grade "
    "Head Teacher for my K-12, all-girls', independent school that emphasizes "
    "community, joyful discovery, and life-long learning. The candidate is "
    "coming in for a first-round panel interview for a 8th grade Math "
    "teaching role. They have 5 years of previous teaching experience "
    "as an assistant teacher at a co-ed, public school with experience "
    "in middle school math teaching. Based on these information, fulfill "
    "the following paragraph: "
)
questions = ["Hello, my name is", "The capital of France is"]


def main() -> None:
    sampling_params = SamplingParams(temperature=0.0)
    prompts = [prefix + question for question in questions]

    regular_llm = LLM(model="headstart-tiny", max_model_len=2048, enable_prefix_caching=False)
    regular = [output.outputs[0].text for output in regular_llm.generate(prompts, sampling_params)]
    del regular_llm

    llm = LLM(model="headstart-tiny", max_model_len=2048, enable_prefix_caching=True)
    llm.generate(prompts[0], sampling_params)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were cached")
    same = all(
        output.outputs[0].text == text for output, text in zip(outputs, regular, strict=True)
    )
    print(f"Generated answers are the same: {same}")

    metrics = {metric.name: metric for metric in llm.get_metrics()}
    print("hits:", metrics["vllm:prefix_cache_hits"].value)
    llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
