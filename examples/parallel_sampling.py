"""Several answers to one prompt, with a seed and a stop string; then without detokenization."""

from headstart import LLM, SamplingParams


def main() -> None:
    llm = LLM(model="headstart-tiny", seed=0, swap_space=4, trust_remote_code=False)
    sampling_params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12, stop=["."])
    [output] = llm.generate("Once upon a time", sampling_params)
    for completion in output.outputs:
        print(completion.index, completion.finish_reason, repr(completion.text))

    raw = sampling_params.clone()
    raw.stop = None
    raw.detokenize = False
    [output] = llm.generate("Once upon a time", raw)
    print([len(completion.token_ids) for completion in output.outputs])


if __name__ == "__main__":
    main()
