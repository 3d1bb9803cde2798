"""Finding, downloading and checking the files of a model, before anything is loaded.

The index of a checkpoint lists its shards, and a safetensors header determines the length of its
file, so an incomplete download is detected within milliseconds. GGUF files on the hub are named as
in llama.cpp and Ollama: `OWNER/NAME:Q4_K_M`.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import huggingface_hub as hub  # imports its names at first use, which takes 0.3 s
from safetensors import SafetensorError, safe_open

from headstart.errors import DamagedModelError, ModelError, ModelNotFoundError
from headstart.imports import load_module
from headstart.models.config_values import (
    LAYER_COUNTS,
    WIDTHS,
    check_values,
    find_values,
)
from headstart.validation import describe, shorten

# A name may have the hub's address in front: `hf.co/owner/name:Q4_K_M`.
_NAME = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)?"
    r"(\w[\w.-]*/\w[\w.-]*?)(?::([\w.-]+))?/?"
)
_DEFAULT = "Q4_K_M"
_QUANTIZATION = re.compile(r"(?i)(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|F32|MXFP4\w*))$")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class HubName(NamedTuple):
    """A repository of the hub, and the quantization of a GGUF file in it; None for the default."""

    repository: str
    quantization: str | None


def parse_name(name: str) -> HubName | None:
    """Parse the name of a GGUF file on the hub; return None for any other name.

    A name without a quantization refers to a GGUF file if it contains `gguf`, as the names of most
    repositories with GGUF files do.
    """
    match = _NAME.fullmatch(name)
    if match is None or not (match[2] or "gguf" in match[1].lower()):
        return None
    if match[2] is None and name.endswith(".gguf"):
        return None  # the path of a missing file
    return HubName(match[1], match[2])


def label_files(files: Iterable[str]) -> dict[str, str]:
    """Return a label for each GGUF file: its quantization, or its file name if the name has none.

    Image projectors (`mmproj`) are left out.
    """
    labels = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix == ".gguf" and "mmproj" not in path.name.lower():
            match = _QUANTIZATION.search(_PART.sub("", path.stem))
            labels[file] = match[1].upper() if match else path.name
    return labels


def choose_file(repository: str, files: Iterable[str], quantization: str | None) -> str:
    """Return the GGUF file with this quantization; for None, the Q4_K_M file or the only file.

    Raises `ModelNotFoundError` with the available quantizations.
    """
    labels = label_files(files)
    requested = quantization or _DEFAULT
    matches = [
        file for file, label in labels.items() if requested.lower() in (label.lower(), file.lower())
    ]
    if not matches and quantization is None and len(labels) == 1:
        matches = list(labels)
    if not labels:
        raise ModelNotFoundError(f"{repository} has no GGUF file on the hub")
    if not matches:
        problem = (
            f"no file in {requested}" if quantization else f"several files, none in {requested}"
        )
        raise ModelNotFoundError(
            f"{repository} has {problem}; allowed: "
            + ", ".join(f"{repository}:{label}" for label in sorted(set(labels.values())))
        )
    if _PART.search(Path(matches[0]).stem):
        raise ModelNotFoundError(
            f"{repository} has {requested} in several files ({matches[0]}); download "
            "them and merge them with llama.cpp's llama-gguf-split --merge"
        )
    return min(matches, key=len)


BUILT_IN = "headstart-tiny"
"""The small model in the package. It is trained to look things up in its prompt."""

OMNI_TYPES = ("qwen2_5_omni", "qwen3_omni_moe")
"""The `model_type` of each model that `Omni` runs."""

# Patterns of the files to download. Copies of weights in the formats of Mistral and Meta are not
# needed.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["consolidated*", "original/*"]
# Keys of a quantization_config.
_QUANTIZED = frozenset({"quant_method", "load_in_4bit", "load_in_8bit"})
_INTEGERS = frozenset({"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
_OLLAMA_NAME = re.compile(r"\w[\w.-]*:[\w.-]+")  # `qwen2.5:0.5b`
_POINTER = b"version https://git-lfs"
# Seconds to wait for the hub's first answer.
_HUB_TIMEOUT = 5.0


def find_folder(model: str | Path) -> Path:
    """Return the folder of a model, downloaded if necessary. Raises `ModelNotFoundError`.

    model: a local folder, a GGUF file, a hub name (`owner/name`), a GGUF file on the hub
    (`owner/name:Q4_K_M`), or `headstart-tiny`, the model in the package. A hub name is looked up in
    the download cache first.
    """
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise ModelNotFoundError(
            f"the model is {describe(model)}; allowed: a folder's path or a hub name (owner/name)"
        )
    if model == BUILT_IN:
        folder = Path(__file__).parent.parent / "assets" / BUILT_IN.replace("-", "_")
        if not (folder / "config.json").exists():
            raise ModelNotFoundError(
                f"this installation came without {BUILT_IN} ({folder} has no config.json): install "
                "the package again, or train the model with recipes/headstart_tiny/train.py"
            )
        return folder
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        is_gguf_file = path.suffix == ".gguf" and path.is_file()
        if path.exists() and not is_gguf_file:
            raise ModelNotFoundError(f"{model} is a file; allowed: a folder with a config.json")
    except (OSError, RuntimeError) as error:  # the name is too long, or ~user does not exist
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFoundError(f"there is no folder {shorten(str(model))}: {reason}") from error
    if (file := find_gguf(model)) is not None:
        return Path(load_module("headstart.models.gguf").gguf_folder(file))
    name = str(model)
    if path.suffix == ".gguf":
        raise ModelNotFoundError(f"there is no file {model}")
    if isinstance(model, Path) or name.startswith((".", "/", "~", "\\")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {model}{_hint(name)}")
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True, allow_patterns=_WANTED))
        check_files(folder)
    except (hub.errors.HFValidationError, ModelError, OSError):
        return download_model(name)
    return folder


def find_gguf(model: str | Path) -> Path | None:
    """Return the GGUF file of a path or hub name, downloaded if necessary; None for other names.

    Raises `ModelNotFoundError`.
    """
    path = os.path.expanduser(model)
    if os.path.isfile(path) and path.endswith(".gguf"):
        return Path(path)
    name = None if isinstance(model, Path) or os.path.exists(path) else parse_name(model)
    if name is None:
        return None
    try:
        folder = Path(hub.snapshot_download(name.repository, local_files_only=True))
        files = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
        return folder / choose_file(name.repository, files, name.quantization)
    except (hub.errors.HFValidationError, OSError, ModelNotFoundError):
        return download_gguf(name)


def is_omni(model: str | Path) -> bool:
    """Return True if a model runs in `Omni` and not in `LLM`. Raises `ModelError`.

    GGUF files run in `LLM`, so they are not read.
    """
    if Path(model).suffix == ".gguf":
        return False
    return read_json(find_folder(model) / "config.json").get("model_type") in OMNI_TYPES


def download_model(name: str) -> Path:
    """Download the current version of a hub name; return its folder.

    Skips existing files, and continues an interrupted download. Raises `ModelNotFoundError`.
    """
    patterns: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    with _calling_hub(name):
        return Path(hub.snapshot_download(name, etag_timeout=_HUB_TIMEOUT, **patterns))


def download_gguf(name: HubName) -> Path:
    """Return the current version of a GGUF file; download it if necessary.

    Raises `ModelNotFoundError`.
    """
    with _calling_hub(name.repository):
        files = hub.HfApi().list_repo_files(name.repository)
        file = choose_file(name.repository, files, name.quantization)
        return Path(hub.hf_hub_download(name.repository, file, etag_timeout=_HUB_TIMEOUT))


@contextmanager
def _calling_hub(name: str) -> Iterator[None]:
    """Convert errors of the hub to `ModelNotFoundError`."""
    try:
        yield
    except ModelNotFoundError:
        raise
    except hub.errors.HFValidationError as error:
        raise ModelNotFoundError(
            f"there is no folder {name!r}, and it is not a hub name (owner/name) "
            f"either{_hint(name)}"
        ) from error
    except hub.errors.HfHubHTTPError as error:
        raise ModelNotFoundError(
            f"there is no folder {name!r}, and the hub does not provide a model of this name: "
            f"{_first_line(error)}{_hint(name)}"
        ) from None
    # Without a network this is an OSError or an error of the HTTP library, which differs between
    # versions of huggingface_hub.
    except Exception as error:
        raise ModelNotFoundError(
            f"there is no folder {name!r}, no model of this name was downloaded, and the "
            f"hub cannot be reached: {_first_line(error).removeprefix('Got: ')}{_hint(name)}"
        ) from None  # the library's tracebacks add nothing


def _hint(name: str) -> str:
    """Return a hint for a name that resembles a valid name, or is valid in another program."""
    normalized = re.split(r"[/\\]", name)[-1].lower().replace("_", "-")
    if matches := get_close_matches(normalized, [BUILT_IN], 1, 0.75):
        return f"; did you mean {matches[0]}?"
    if _OLLAMA_NAME.fullmatch(name):
        return (
            "; this is an Ollama name; use a name on the hub, such as Qwen/Qwen2.5-0.5B-Instruct, "
            "or OWNER/NAME:Q4_K_M for a GGUF file"
        )
    match = _NAME.fullmatch(name)
    return f"; did you mean {match[1]}?" if match and match[1] != name else ""


def cache_folder(variable: str, name: str = "") -> Path:
    """Return the folder in `$variable`; by default, folder `name` in headstart's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headstart" / name
    return Path(os.environ.get(variable) or default).expanduser()


def make_folder(folder: Path, variable: str, write: Callable[[Path], None]) -> Path:
    """Return a cache folder that `write` fills atomically if it does not exist.

    Two processes may call it at the same time. variable: the environment variable that sets the
    location, for the error message. Raises `ModelError` if the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            unfinished = Path(temporary) / folder.name
            unfinished.mkdir()  # other users may read it, unlike `temporary`
            write(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # if it exists, another process has written it
                    raise
    except OSError as error:
        raise ModelError(
            f"cannot write to {folder.parent}: {error.strerror}; set {variable} to a folder that "
            "can be written to"
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises `DamagedModelError` with the position of a syntax error."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedModelError(f"{path} is not readable JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise DamagedModelError(f"{path} is a {type(content).__name__}; allowed: a JSON object")
    return content


def check_files(folder: Path) -> None:
    """Check every file that loading needs; raises `ModelNotFoundError`, `DamagedModelError`.

    The numbers of config.json and generation_config.json must be in their ranges. A number of
    layers must not exceed the number of tensors, and a width must not exceed the number of weights.
    Only a quantized model may have integer weights.
    """
    config = folder / "config.json"
    if not config.is_file():
        gguf = min(folder.glob("*.gguf"), default=None)
        hint = f"; to load its GGUF file, name the file: {gguf}" if gguf is not None else ""
        raise ModelNotFoundError(f"{folder} is not a model: it has no config.json{hint}")
    content = read_json(config)
    check_values(config, content)
    generation = folder / "generation_config.json"
    if generation.is_file():
        check_values(generation, read_json(generation))
    headers = _read_headers(folder)
    if not any(find_values(content, _QUANTIZED)):
        for name, (file, shape, dtype) in headers.items():
            # Masks and positions may be integers. A mask may be called "bias"; it has four axes.
            is_weight = name.endswith(".weight") or (name.endswith(".bias") and len(shape) == 1)
            if is_weight and dtype in _INTEGERS:
                raise DamagedModelError(
                    f"{file}: {name} has the integer dtype {dtype}, but config.json has no "
                    "quantization_config that describes it"
                )
    num_weights = sum(math.prod(header.shape) for header in headers.values())
    limits = ((LAYER_COUNTS, len(headers), "tensors"), (WIDTHS, num_weights, "weights"))
    for keys, limit, unit in limits if headers else ():
        for name, value in find_values(content, keys):
            if value > limit:
                raise DamagedModelError(
                    f"{config}: {name} is {value}; the files next to it have {limit} {unit} in all"
                )


class _Header(NamedTuple):
    """A tensor's file, its shape, and safetensors' name of its dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, from the headers of safetensors files.

    The result is empty for weights in PyTorch's format. Raises `DamagedModelError`.
    """
    return {name: header.shape for name, header in _read_headers(folder).items()}


def file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of one safetensors file."""
    return {name: header.shape for name, header in _read_header(file).items()}


def _read_headers(folder: Path) -> dict[str, _Header]:
    files = (file for file in weight_files(folder) if file.suffix == ".safetensors")
    return {name: header for file in files for name, header in _read_header(file).items()}


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights, sorted; raises `DamagedModelError` if one is missing."""
    for stem in ("model.safetensors", "pytorch_model.bin", "model.gguf"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _shards(index)
    raise DamagedModelError(
        f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json"
    )


def is_gguf(folder: Path) -> bool:
    """Return True if the weights in `folder` are a GGUF file. Raises `DamagedModelError`."""
    return weight_files(folder)[0].suffix == ".gguf"


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedModelError(f"{index} has no weight_map")
    for tensor, name in weight_map.items():
        kinds = (PurePosixPath, PureWindowsPath) if isinstance(name, str) and name else ()
        if not kinds or any(kind(name).anchor or ".." in kind(name).parts for kind in kinds):
            raise DamagedModelError(
                f"{index}: {tensor} is in {name!r}; allowed: a file in the folder of the index"
            )
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise DamagedModelError(
            f"{index.parent}: {len(missing)} of {len(files)} weight files are missing: "
            f"{', '.join(missing)}"
        )
    return files


def _read_header(file: Path) -> dict[str, _Header]:
    try:
        with safe_open(file, framework="np") as opened:  # checks the header against the length
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: _Header(file, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        reason = f"truncated or not a safetensors file: {_first_line(error)}"
        with suppress(OSError), file.open("rb") as content:
            if content.read(len(_POINTER)) == _POINTER:
                reason = "a Git LFS pointer instead of weights; git lfs pull downloads them"
        raise DamagedModelError(f"{file} is {reason}") from error


FileStamp = tuple[str, int, int, int, int, int]
"""A file's name, device, inode, size and times. A changed file has another stamp."""


def stamp_files(folder: Path) -> tuple[FileStamp, ...]:
    """Return the stamps of a model's configuration and weight files."""
    stats = {file: file.stat() for file in (folder / "config.json", *weight_files(folder))}
    return tuple(
        (file.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for file, s in stats.items()
    )


def fingerprint_files(folder: Path) -> str:
    """Return the SHA-256 in hex of the length and content of config.json and each weight file."""
    digest = hashlib.sha256()
    for file in (folder / "config.json", *weight_files(folder)):
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
