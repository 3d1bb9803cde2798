"""llama.cpp as an engine of `peer.py`; needs llama-cpp-python.

    PYTHON bench/beside/llama.py FILE.gguf THREADS SAVED

For `tiers.py`: reads {"document": ids, "question": ids, "other": ids} and prints the seconds to the
first token of the document and a question. If the file SAVED does not exist, the document is
computed and saved there. Otherwise it is restored from the file; then another question hits it in
memory.
"""

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from time import perf_counter

CELLS = 65_536  # tokens whose K and V fit
SEQUENCES = 64
MIN_CHECKPOINT = 64  # tokens worth a checkpoint of a recurrent state

Ids = list[int]


class LlamaCpp:
    """llama.cpp by its C interface, which batches the tokens of several sequences.

    A prompt reuses the prefix of it that a sequence has, like a slot of llama.cpp's server. If
    several prompts have the same prefix, they share its cells.
    A recurrent state cannot be cut, so a prompt continues a sequence that it begins with. If it
    only shares tokens with a sequence, those are computed into a checkpoint for the next prompts.
    """

    def __init__(self, folder: str, threads: int, weights: str) -> None:
        self.api = importlib.import_module("llama_cpp")
        self.numpy = importlib.import_module("numpy")
        self.model = self.api.llama_model_load_from_file(
            folder.encode(), self.api.llama_model_default_params()
        )
        options = self.api.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = CELLS, SEQUENCES, True
        options.n_threads = options.n_threads_batch = threads
        self.context = self.api.llama_init_from_model(self.model, options)
        self.memory = self.api.llama_get_memory(self.context)
        self.most = options.n_batch
        self.batch = self.api.llama_batch_init(self.most, 0, 1)
        vocab = self.api.llama_model_get_vocab(self.model)
        self.num_tokens = self.api.llama_vocab_n_tokens(vocab)
        self.held: list[Ids] = [[] for _ in range(SEQUENCES)]  # by sequence
        self.is_recurrent = self.api.llama_model_is_hybrid(self.model)
        self.checkpoints: list[int] = []  # the last sequences

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        return (row[0] for row in self._steps([prompt], count))

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        return [list(tokens) for tokens in zip(*self._steps(prompts, count), strict=True)]

    def _steps(self, prompts: list[Ids], count: int) -> Iterator[Ids]:
        sequences = self._resume(prompts) if self.is_recurrent else self._share(prompts)
        asked = zip(sequences, prompts, strict=True)
        new = [(at, prompt[len(self.held[at]) :]) for at, prompt in asked]
        for _ in range(count):
            tokens = self._decode(new)
            yield tokens
            new = [(at, [token]) for at, token in zip(sequences, tokens, strict=True)]

    def _resume(self, prompts: list[Ids]) -> list[int]:
        """Return a sequence for each prompt that holds tokens from its beginning on, or none."""
        sequences: list[int] = []
        for prompt in prompts:
            shared = [count_shared(held, prompt[:-1]) for held in self.held]
            whole = [i for i, held in enumerate(self.held) if len(held) == shared[i]]
            source = max(whole, key=shared.__getitem__) if whole else self._clear(sequences)
            if max(shared) > shared[source] + MIN_CHECKPOINT:
                source = self._copy(source, sequences)
                self.checkpoints.append(source)
                self._decode([(source, prompt[len(self.held[source]) : max(shared)])])
            if source in self.checkpoints or source in sequences:
                source = self._copy(source, sequences)
            sequences.append(source)
        return sequences

    def _copy(self, source: int, used: list[int]) -> int:
        """Copy a sequence into another one; return its number."""
        target = self._clear([source, *used])
        self.api.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        self.held[target] = self.held[source]
        return target

    def _clear(self, used: list[int]) -> int:
        """Clear the shortest sequence that is not in use; return its number."""
        unused = set(range(SEQUENCES)) - {*used, *self.checkpoints[-SEQUENCES // 4 :]}
        target = min(unused, key=lambda i: len(self.held[i]))
        self.checkpoints = [i for i in self.checkpoints if i != target]
        self.api.llama_memory_seq_rm(self.memory, target, -1, -1)
        self.held[target] = []
        return target

    def _share(self, prompts: list[Ids]) -> list[int]:
        """Return a sequence for each prompt, with the longest prefix that any sequence has."""
        found = []
        for prompt in prompts:
            shared = [count_shared(held, prompt[:-1]) for held in self.held]
            source = max(range(SEQUENCES), key=shared.__getitem__)
            found.append((shared[source], source))
        owner = {source: at for at, (_, source) in sorted(enumerate(found), key=lambda one: one[1])}
        free = sorted(set(range(SEQUENCES)) - owner.keys(), key=lambda at: len(self.held[at]))
        sequences = []
        for at, (known, source) in enumerate(found):
            sequence = source if owner[source] == at else free.pop(0)
            if sequence != source:
                self.api.llama_memory_seq_rm(self.memory, sequence, -1, -1)
                self.api.llama_memory_seq_cp(self.memory, source, sequence, 0, known)
                self.held[sequence] = self.held[source][:known]
            sequences.append(sequence)
        for sequence, (known, _) in zip(sequences, found, strict=True):
            self.api.llama_memory_seq_rm(self.memory, sequence, known, -1)
            del self.held[sequence][known:]
        needed = sum(len(prompt) + 256 for prompt in prompts)
        for sequence in free:
            if needed + sum(map(len, self.held)) > CELLS:
                self.api.llama_memory_seq_rm(self.memory, sequence, -1, -1)
                self.held[sequence] = []
        return sequences

    def _decode(self, new: list[tuple[int, Ids]]) -> Ids:
        """Compute new tokens of sequences; return the next token of each."""
        rows = [
            (sequence, token, len(self.held[sequence]) + at, at == len(tokens) - 1)
            for sequence, tokens in new
            for at, token in enumerate(tokens)
        ]
        found = []
        for start in range(0, len(rows), self.most):
            part = rows[start : start + self.most]
            self.batch.n_tokens = len(part)
            for at, (sequence, token, position, is_last) in enumerate(part):
                self.batch.token[at], self.batch.pos[at] = token, position
                self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, sequence
                self.batch.logits[at] = is_last
            require(self.api.llama_decode(self.context, self.batch) == 0)
            found += [self._largest(at) for at, row in enumerate(part) if row[-1]]
        for sequence, tokens in new:
            self.held[sequence] = self.held[sequence] + tokens
        return found

    def _largest(self, at: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, at)
        return int(self.numpy.ctypeslib.as_array(logits, (self.num_tokens,)).argmax())

    def keep(self, path: str, prompt: Ids) -> None:
        """Compute the prompt if necessary, and save its sequence to a file."""
        list(self._steps([prompt], 1))
        at = self.held.index(prompt)
        tokens = (self.api.llama_token * len(prompt))(*prompt)
        require(
            self.api.llama_state_seq_save_file(self.context, path.encode(), at, tokens, len(prompt))
        )

    def restore(self, path: str) -> None:
        """Restore a sequence from a file."""
        tokens, count = (self.api.llama_token * CELLS)(), ctypes.c_size_t()
        require(
            self.api.llama_state_seq_load_file(
                self.context, path.encode(), 0, tokens, CELLS, ctypes.byref(count)
            )
        )
        self.held[0] = list(tokens[: count.value])


def require(is_done: object) -> None:
    """Raise RuntimeError if a call of llama.cpp failed."""
    if not is_done:
        raise RuntimeError("a call of llama.cpp failed; its error is above")


def count_shared(one: Ids, other: Ids) -> int:
    """Count the tokens of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of llama.cpp goes to stderr
    model, threads, kept = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    asked = json.load(sys.stdin)
    document = asked["document"]
    engine = LlamaCpp(model, int(threads), "")
    list(engine.stream([5] * 40, 1))  # warm up
    is_kept, seconds = Path(kept).exists(), {}
    begun = perf_counter()
    if is_kept:
        engine.restore(kept)
    list(engine.stream(document + asked["question"], 1))
    seconds["disk" if is_kept else "computed"] = perf_counter() - begun
    if is_kept:
        begun = perf_counter()
        list(engine.stream(document + asked["other"], 1))
        seconds["memory"] = perf_counter() - begun
    else:
        engine.keep(kept, document)
    print(json.dumps(seconds), file=out)


if __name__ == "__main__":
    main()
