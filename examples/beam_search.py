"""The likeliest answers to two prompts, by beam search."""

from headstart import LLM
from headstart.sampling_params import BeamSearchParams


def main() -> None:
    llm = LLM(model="headstart-tiny", max_model_len=2048)
    params = BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=1.0)
    outputs = llm.beam_search(
        [{"prompt": "Hello, my name is"}, {"prompt": "The future is"}], params
    )
    for output in outputs:
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:8.3f} {sequence.text!r}")


if __name__ == "__main__":
    main()
