"""Convert a training checkpoint to the folder from which `headstart-tiny` is loaded.

    python recipes/headstart_tiny/export.py build/tiny headstart/assets/headstart_tiny

The weights are stored in bfloat16, which most of the training used too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from train import Settings, Trainer
from transformers import GenerationConfig


def export(source: Path, folder: Path) -> None:
    """Write weights, configuration, generation settings and tokenizer of the run in `source`."""
    trainer = Trainer(Settings(out=str(source), compile=0))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, model = trainer.tokenizer, trainer.model
    model.bfloat16()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, temperature=0.0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    export(options.source, options.folder)


if __name__ == "__main__":
    main()
