"""GGUF files on the Hugging Face hub, named `OWNER/NAME:Q4_K_M` as for llama.cpp and Ollama."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import huggingface_hub as hub  # its names are imported when they are used, which takes 0.3 s

from headstart.errors import ModelNotFoundError

__all__ = ["HubName", "choose_file", "label_files", "parse_name"]

# Also as an address: `hf.co/owner/name:Q4_K_M`.
_NAME = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)?"
    r"(\w[\w.-]*/\w[\w.-]*?)(?::([\w.-]+))?/?"
)
_USUAL = "Q4_K_M"
_QUANTIZATION = re.compile(r"(?i)(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|F32|MXFP4\w*))$")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class HubName(NamedTuple):
    """A repository of the hub with GGUF files, and which of them: None for the usual one."""

    repository: str
    quantization: str | None

    def local_file(self) -> Path | None:
        """Return the file in the hub's cache; None if it was not downloaded."""
        try:
            folder = Path(hub.snapshot_download(self.repository, local_files_only=True))
        except (hub.errors.HFValidationError, OSError):
            return None
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        try:
            return folder / choose_file(self.repository, names, self.quantization)
        except ModelNotFoundError:
            return None

    def download(self, timeout: float) -> Path:
        """Return the file as the hub has it now; a whole file in the cache is not fetched again.

        Raises `ModelNotFoundError` where the repository has no such file, and the hub's errors.
        """
        files = hub.HfApi().list_repo_files(self.repository)
        name = choose_file(self.repository, files, self.quantization)
        return Path(hub.hf_hub_download(self.repository, name, etag_timeout=timeout))


def parse_name(name: str) -> HubName | None:
    """Return what a name says; None for one that names no GGUF file on the hub.

    A name without a quantization counts if it has `gguf` in it, as such repositories have.
    """
    match = _NAME.fullmatch(name)
    if match is None or not (match[2] or "gguf" in match[1].lower()):
        return None
    if match[2] is None and name.endswith(".gguf"):
        return None  # the path of a file that is not there
    return HubName(match[1], match[2])


def label_files(files: Iterable[str]) -> dict[str, str]:
    """Return the quantization of each GGUF file that holds a model, or its name without one.

    Projectors of images (`mmproj`) hold none.
    """
    found = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix == ".gguf" and "mmproj" not in path.name.lower():
            match = _QUANTIZATION.search(_PART.sub("", path.stem))
            found[file] = match[1].upper() if match else path.name
    return found


def choose_file(repository: str, files: Iterable[str], quantization: str | None) -> str:
    """Return the file of a quantization, or by default that in Q4_K_M, or the only one.

    Raises `ModelNotFoundError` with the quantizations that are there.
    """
    labels = label_files(files)
    wanted = (quantization or _USUAL).lower()
    found = [file for file, label in labels.items() if wanted in (label.lower(), file.lower())]
    if not found and quantization is None and len(labels) == 1:
        found = list(labels)
    if not labels:
        raise ModelNotFoundError(f"{repository} has no GGUF file on the hub")
    if not found:
        named = f"no file in {quantization}" if quantization else f"several files, none in {_USUAL}"
        raise ModelNotFoundError(
            f"{repository} has {named}; allowed: "
            + ", ".join(f"{repository}:{label}" for label in sorted(set(labels.values())))
        )
    if _PART.search(Path(found[0]).stem):
        raise ModelNotFoundError(
            f"{repository} has {quantization or _USUAL} in several files ({found[0]}); download "
            "them and merge them with llama.cpp's llama-gguf-split --merge"
        )
    return min(found, key=len)
