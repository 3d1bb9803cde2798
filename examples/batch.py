"""Many prompts as token ids, each with its own sampling parameters and priority."""

from headstart import LLM, SamplingParams, TokensPrompt


def main() -> None:
    llm = LLM(
        model="headstart-tiny",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        scheduling_policy="priority",
        disable_log_stats=True,
    )
    tokenizer = llm.get_tokenizer()
    prompts = [
        TokensPrompt(prompt_token_ids=tokenizer.encode(f"Number {number} is followed by"))
        for number in range(40)
    ]
    sampling_params = [
        SamplingParams(temperature=0.0, max_tokens=1 + number % 5, min_tokens=1, ignore_eos=True)
        for number in range(40)
    ]
    priorities = [number % 3 for number in range(40)]
    outputs = llm.generate(prompts, sampling_params, use_tqdm=True, priority=priorities)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} prompts, {tokens} tokens")


if __name__ == "__main__":
    main()
