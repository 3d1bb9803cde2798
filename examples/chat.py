"""A conversation about a document, then several conversations in one batch, and a tool."""

from headstart import LLM

document = (
    "# Table\n| ID | Name | Age |\n|---|---|---|\n| 1 | Ann Lee | 31 |\n| 2 | Bob Ray | 44 |\n"
)
weather = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


def main() -> None:
    llm = LLM(model="headstart-tiny", max_model_len=2048, tensor_parallel_size=1)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.temperature = 0
    sampling_params.max_tokens = 24

    conversation = [
        {"role": "user", "content": document + "What is the age of Bob Ray?"},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print("Answer:", outputs[0].outputs[0].text)

    conversation += [
        {"role": "assistant", "content": outputs[0].outputs[0].text},
        {"role": "user", "content": "What is the age of Ann Lee?"},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print("Answer:", outputs[0].outputs[0].text)
    print("Cached:", outputs[0].num_cached_tokens)

    outputs = llm.chat([conversation for _ in range(4)], sampling_params, use_tqdm=True)
    print("Answers:", len(outputs))

    tooled = [
        {"role": "user", "content": "Is it raining?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "content": "It rains.", "tool_call_id": "call-1"},
    ]
    outputs = llm.chat(tooled, sampling_params, tools=[weather])
    print("With a tool:", outputs[0].finished)


if __name__ == "__main__":
    main()
