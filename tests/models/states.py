"""Tests of states in slots, of which each way to run recurrent layers has a class."""

from itertools import pairwise

import torch

from headstart.models.decoder import DecoderModel
from tests.models.stepper import LENGTH, Part, Stepper, check, expected_logits, random_tokens


class StateTests:
    """States are cut, forked and saved; no answer changes.

    `name` and `model` are fixtures. The oracle is transformers' pass over the whole prompt, without
    a cache.
    """

    def test_prompts_cut_in_two(self, name: str, model: DecoderModel) -> None:
        tokens = random_tokens(LENGTH)
        expected = expected_logits(name, tokens)
        for cut in (1, 2, 3, 4, 8, 9, 15, 23):  # around the lengths of kernels and chunks
            stepper = Stepper(model)
            first = stepper.step({0: Part(tokens[:cut], 0, -1, 3)})
            second = stepper.step({0: Part(tokens[cut:], cut, 3, 5)})
            check(torch.cat((first, second)), expected)

    def test_token_by_token_in_place(self, name: str, model: DecoderModel) -> None:
        tokens, stepper = random_tokens(LENGTH), Stepper(model)
        rows = [
            stepper.step({0: Part(tokens[n : n + 1], n, 2 if n else -1, 2)}) for n in range(LENGTH)
        ]
        check(torch.cat(rows), expected_logits(name, tokens))

    def test_states_across_forks(self, name: str, model: DecoderModel) -> None:
        """A state from which two continuations start is read twice, and does not change."""
        shared, branches = random_tokens(9), [random_tokens(8, seed) for seed in (6, 7)]
        stepper = Stepper(model, sequences=3)
        stepper.step({0: Part(shared, 0, -1, 4)})
        before = stepper.states.rows[4].clone()
        for branch in branches:
            logits = stepper.step({0: Part(branch, 9, 4, 6)})
            check(logits, expected_logits(name, torch.cat((shared, branch)))[9:])
            assert torch.equal(stepper.states.rows[4], before)

    def test_states_saved_within_a_step(self, name: str, model: DecoderModel) -> None:
        tokens, other = random_tokens(LENGTH), random_tokens(10, 6)
        expected, stepper = expected_logits(name, tokens), Stepper(model, sequences=2)
        saves = ((0, 1), (1, 2), (9, 3), (22, 4))
        logits = stepper.step({0: Part(tokens, 0, -1, 0), 1: Part(other, 0, -1, 6)}, saves)
        check(logits[:LENGTH], expected)
        check(logits[LENGTH:], expected_logits(name, other))
        for row, slot in saves:
            later = stepper.step({0: Part(tokens[row + 1 :], row + 1, slot, 7)})
            check(later, expected[row + 1 :])

    def test_batches_of_mixed_lengths(self, name: str, model: DecoderModel) -> None:
        tokens = [random_tokens(LENGTH, seed) for seed in (1, 2, 3)]
        expected = [expected_logits(name, part) for part in tokens]
        stepper = Stepper(model, sequences=3)
        done, slots = [0, 0, 0], [-1, -1, -1]
        for counts in ((9, 0, 1), (1, 13, 3), (1, 1, 1), (3, 3, 3), (10, 7, 16)):
            parts = {}
            for number, count in enumerate(counts):
                if count:
                    start, target = done[number], 2 * number + (slots[number] == 2 * number)
                    rows = tokens[number][start : start + count]
                    parts[number] = Part(rows, start, slots[number], target)
                    done[number], slots[number] = start + count, target
            wanted = [
                expected[number][part.start : part.start + len(part.tokens)]
                for number, part in parts.items()
            ]
            check(stepper.step(parts), torch.cat(wanted))
            if all(part.source >= 0 and part.source != part.target for part in parts.values()):
                check(stepper.step(parts, last=True), torch.stack([rows[-1] for rows in wanted]))
        assert done == [LENGTH] * 3


def run_long_prompt(model: DecoderModel, length: int, cuts: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of a prompt that is computed in pieces between these positions."""
    tokens, stepper = random_tokens(length), Stepper(model, length=length)
    logits = [
        stepper.step({0: Part(tokens[start:end], start, step % 2 if step else -1, 1 - step % 2)})
        for step, (start, end) in enumerate(pairwise(cuts))
    ]
    return torch.cat(logits)
