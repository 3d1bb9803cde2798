"""Ask a vision model about images: vision_language.py MODEL IMAGE [IMAGE ...]"""

import sys

from PIL import Image

from headstart import LLM, SamplingParams


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, *paths = sys.argv[1:]
    llm = LLM(model=model, limit_mm_per_prompt={"image": len(paths)}, max_num_seqs=4)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
    images = [Image.open(path).convert("RGB") for path in paths]

    content = [{"type": "image_pil", "image_pil": image} for image in images]
    content += [{"type": "text", "text": "What is in these images?"}]
    [output] = llm.chat([{"role": "user", "content": content}], sampling_params)
    print("Chat:", output.outputs[0].text)

    prompt = {"prompt_token_ids": output.prompt_token_ids[:1], "cache_salt": "mine"}
    [output] = llm.generate(prompt, sampling_params)
    print("Prompt:", output.outputs[0].text)


if __name__ == "__main__":
    main()
