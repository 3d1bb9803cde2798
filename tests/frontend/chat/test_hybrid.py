"""Chats of a model with recurrent layers, whose states cannot return to an earlier token."""

from pathlib import Path

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from headstart import LLM, SamplingParams
from tests.tiny_tokenizers import TINY_TOKENIZERS

# Like templates of reasoning models: earlier turns lose the start of the generation prompt.
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> <think> {% endif %}"
)


def test_a_turn_resumes_before_the_generation_prompt_of_the_last(tmp_path: Path) -> None:
    tokenizer = TINY_TOKENIZERS["byte_level"]()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        block_multiple_of=8,
        max_position_embeddings=4096,
    )
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32", num_blocks=200, num_states=50, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    question = {"role": "user", "content": "one two three four " * 20}
    [first] = llm.chat([question], params, use_tqdm=False)
    prompt = first.prompt_token_ids
    turn = [
        question,
        {"role": "assistant", "content": "five"},
        {"role": "user", "content": "six"},
    ]
    [second] = llm.chat(turn, params, use_tqdm=False)
    shared = 0
    while prompt[shared] == second.prompt_token_ids[shared]:
        shared += 1
    generation = len(tokenizer.encode("<assistant> <think> ", add_special_tokens=False))
    assert shared < len(prompt) - 1, "the generation prompt stays"
    assert second.num_cached_tokens == len(prompt) - generation
    llm.close()
