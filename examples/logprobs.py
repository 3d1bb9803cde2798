"""The likeliest tokens at each position of an answer and of its prompt."""

from headstart import LLM, SamplingParams


def main() -> None:
    llm = LLM(model="headstart-tiny", dtype="float", max_model_len=2048)
    sampling_params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1)
    [output] = llm.generate("The capital of France is", sampling_params)
    completion = output.outputs[0]
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        likeliest = ", ".join(
            f"{entry.decoded_token!r} {entry.logprob:.2f} (rank {entry.rank})"
            for entry in logprobs.values()
        )
        print(f"{token_id}: {likeliest}")
    print("sum:", round(completion.cumulative_logprob, 3))
    print("prompt:", output.prompt_logprobs[0], "then", len(output.prompt_logprobs) - 1, "dicts")


if __name__ == "__main__":
    main()
