"""Structured outputs: one of several choices, a regular expression, JSON of a schema."""

from headstart import LLM, SamplingParams
from headstart.sampling_params import StructuredOutputsParams

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
forms = {
    "choice": StructuredOutputsParams(choice=["Positive", "Negative"]),
    "regex": StructuredOutputsParams(regex=r"[a-z]{2}@[a-z]{2}\.com"),
    "json": StructuredOutputsParams(json=schema),
}


def main() -> None:
    llm = LLM(model="headstart-tiny", max_model_len=1024)
    for name, form in forms.items():
        sampling_params = SamplingParams(
            temperature=0, max_tokens=60, structured_outputs=form, bad_words=["Positive"]
        )
        [output] = llm.generate("Classify this: headstart is wonderful!", sampling_params)
        print(f"{name}: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
