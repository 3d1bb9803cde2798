"""`headstart models` with a hub cache written by tests, and with a local hub."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE as CHUNK

from headstart.cli.main import main
from headstart.cli.opening import NOTES
from headstart.errors import ModelNotFoundError
from headstart.imports import load_module
from headstart.models.files import BUILT_IN, choose_file, find_folder, parse_name

NAME = "someone/small"
COMMIT = "0" * 39 + "1"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write a downloaded model in the layout of huggingface_hub, without its links."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return repo


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["models", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_models_are_listed_with_their_sizes(cache: Path) -> None:
    assert [line.split()[0] for line in call()[1].splitlines()] == [BUILT_IN]
    whole = {path.name: path.read_bytes() for path in find_folder(BUILT_IN).iterdir()}
    put(cache, NAME, whole)
    put(cache, "someone/broken", {"config.json": b"{}", "model.safetensors": b"\0" * 2000})
    built_in, broken, small = call()[1].splitlines()
    assert "comes with the package" in built_in
    assert broken.split(maxsplit=3) == ["someone/broken", "2.0", "KB", broken[-32:]]
    assert small.split()[0] == NAME and "incomplete" not in small and "incomplete" in broken


def test_a_model_is_removed(cache: Path) -> None:
    """Regression: a copy under another name with the same commit could be removed instead."""
    repo = put(cache, NAME, {"config.json": b"{}"})
    other = put(cache, "someone/else", {"config.json": b"{}"})
    assert call("rm", NAME)[0] == 0
    assert (repo.exists(), other.exists()) == (False, True)
    code, _, error = call("rm", NAME)
    assert code == 2 and error.startswith("headstart: 'someone/small' is not downloaded")
    assert "someone/else" in error
    assert call("rm", "someone/else")[0] == 0
    error = call("rm", NAME)[2]
    assert error == "headstart: 'someone/small' is not downloaded; no model is downloaded\n"


class Line:
    """A connection to the hub that is cut once, after `breaks_behind` bytes of the weights.

    ranges: the requested range of each request for the weights.
    """

    def __init__(self, breaks_behind: int | None = None) -> None:
        self.breaks_behind = breaks_behind
        self.ranges: list[str | None] = []
        self.is_cut, self.is_over = threading.Event(), threading.Event()


class Hub(BaseHTTPRequestHandler):
    """A server of the hub's list of files and of their contents."""

    def __init__(self, folder: Path, line: Line, *arguments: object) -> None:
        self.folder = folder
        self.line = line
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/{NAME}"):
            files = list(self.folder.iterdir())
            tree = [
                {"type": "file", "path": path.name, "oid": path.name, "size": path.stat().st_size}
                for path in files
            ]
            about = {
                "id": NAME,
                "sha": COMMIT,
                "siblings": [{"rfilename": path.name} for path in files],
            }
            return self.answer(json.dumps(tree if "/tree/" in self.path else about).encode())
        path = self.folder / self.path.partition("?")[0].rpartition("/")[2]
        return self.answer(path.read_bytes() if path.is_file() else None)

    do_HEAD = do_GET

    def answer(self, body: bytes | None) -> None:
        requested, size = self.headers.get("Range"), len(body or b"")
        start = int(requested.removeprefix("bytes=").partition("-")[0]) if requested else 0
        self.send_response(404 if body is None else 206 if requested else 200)
        self.send_header("Content-Length", str(size - start))
        if requested:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hash(self.path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not body or self.command != "GET":
            return
        line, is_weights = self.line, self.path.endswith("model.safetensors")
        if is_weights:
            line.ranges.append(requested)
        if is_weights and line.breaks_behind is not None and not line.is_cut.is_set():
            self.wfile.write(body[: line.breaks_behind])
            self.wfile.flush()
            line.is_cut.set()
            line.is_over.wait()  # the rest is never sent
            return
        self.wfile.write(body[start:])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(folder: Path, line: Line) -> Iterator[str]:
    """Run a hub with the built-in model, and yield its address."""
    shutil.copytree(find_folder(BUILT_IN), folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, line)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:  # otherwise the thread would spin over a closed socket
            line.is_over.set()
            server.shutdown()


def start(hub: str, home: Path, *arguments: str, patience: str = "2") -> subprocess.Popen[str]:
    """Start `headstart models`.

    patience: seconds without a byte after which a connection counts as broken.
    """
    outside = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(home)}
    outside["HF_HUB_DOWNLOAD_TIMEOUT"] = patience
    return subprocess.Popen(
        [sys.executable, "-m", "headstart", "models", *arguments],
        env=os.environ | outside,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path / "on-the-hub", Line()) as address:
        yield address


def test_an_interrupted_download_is_resumed(tmp_path: Path) -> None:
    line = Line(breaks_behind=CHUNK + 1000)
    with serving(tmp_path / "on-the-hub", line) as address:
        pull = start(address, tmp_path / "home", "pull", NAME)
        _, output = pull.communicate()
        assert pull.returncode == 0, output
    assert line.ranges == [None, f"bytes={CHUNK}-"]
    check_weights(tmp_path / "home")


def has_bytes(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # it is complete and already renamed
        return False


def test_ctrl_c_ends_a_download_at_once(tmp_path: Path) -> None:
    """It ends even if the connection hangs, and removes the partial file."""
    line = Line(breaks_behind=CHUNK + 1000)
    with serving(tmp_path / "on-the-hub", line) as address:
        first = start(address, tmp_path / "home", "pull", NAME, patience="600")
        assert line.is_cut.wait(120)
        blobs = tmp_path / "home" / "hub" / "models--someone--small" / "blobs"
        while not any(map(has_bytes, blobs.glob("*.incomplete"))):
            assert first.poll() is None
        first.send_signal(signal.SIGINT)
        _, output = first.communicate()
        assert first.returncode == 130 and "Traceback" not in output
        assert output.endswith("headstart: interrupted; complete files stay in the cache\n")
        assert not list(blobs.glob("*.incomplete"))
        second = start(address, tmp_path / "home", "pull", NAME)
        _, output = second.communicate()
        assert second.returncode == 0, output
    assert line.ranges == [None, None]
    check_weights(tmp_path / "home")


def test_ctrl_c_without_a_download_does_not_mention_files() -> None:
    """Regression: `models quantize` reported that complete files stay, although there are none."""
    held = "from headstart.cli.opening import exiting_on_interrupt\nwith exiting_on_interrupt():\n "
    program = f"import signal\n{held}signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nheadstart: interrupted\n")


def test_a_gguf_file_is_pulled_listed_used_and_removed(tmp_path: Path) -> None:
    """One file of several is selected by its quantization, as in llama.cpp and Ollama."""
    pytest.importorskip("gguf")
    files = load_module("tests.models.gguf.files")
    folder = tmp_path / "on-the-hub"
    with serving(folder, Line()) as address:
        for file in folder.iterdir():
            file.unlink()
        for kind, quantization in (("Q8_0", "Q8_0"), ("Q4_0", "Q4_K_M")):
            model = files.make_model("llama")
            files.write_gguf(folder / f"small-{quantization}.gguf", "llama", model, kind)
        (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")

        def headstart(*arguments: str) -> tuple[int, str]:
            process = start(address, tmp_path / "home", *arguments)
            out, output = process.communicate()
            return process.returncode, out + output

        code, output = headstart("pull", f"hf.co/{NAME}:q4_k_m")
        assert code == 0 and "small-Q4_K_M.gguf" in output, output
        code, output = headstart("pull", f"{NAME}:Q5_K_M")
        assert code == 2 and output.splitlines()[-1] == (
            f"headstart: {NAME} has no file in Q5_K_M; allowed: {NAME}:Q4_K_M, {NAME}:Q8_0"
        )
        assert headstart("pull", f"{NAME}:Q8_0")[0] == 0
    [_, usual, large] = headstart()[1].splitlines()
    assert usual.split()[0] == f"{NAME}:Q4_K_M" and large.split()[0] == f"{NAME}:Q8_0"
    assert usual.split()[1] < large.split()[1]
    assert headstart("rm", f"{NAME}:Q4_K_M")[0] == 0
    assert [line.split()[0] for line in headstart()[1].splitlines()[1:]] == [f"{NAME}:Q8_0"]
    assert headstart("rm", f"{NAME}:Q8_0")[0] == 0
    assert len(headstart()[1].splitlines()) == 1


def test_a_gguf_file_in_the_cache_is_found_without_the_hub(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    files = load_module("tests.models.gguf.files")
    monkeypatch.setenv("HEADSTART_GGUF_DIR", str(tmp_path / "read"))
    repo = put(cache, NAME, {})
    file = repo / "snapshots" / COMMIT / "small-Q8_0.gguf"
    files.write_gguf(file, "llama", files.make_model("llama"), "Q8_0")
    assert (find_folder(f"{NAME}:Q8_0") / "model.gguf").readlink() == file
    with pytest.raises(ModelNotFoundError, match="the hub cannot be reached"):
        find_folder(f"{NAME}:Q4_0")


def test_list_prints_the_same_as_the_group(cache: Path) -> None:
    assert call("list") == call()


def test_recommended_models_are_listed_with_their_commands() -> None:
    code, out, _ = call("recommend")
    head, *rows = out.splitlines()
    assert code == 0 and len(rows) >= 5 and head.split()[:2] == ["download", "RAM"]
    for row in rows:
        name = parse_name(row.partition("headstart chat --model ")[2])
        assert name is not None and name.quantization is not None


def test_the_embedded_models_note_names_a_chat_model() -> None:
    [*_, text] = NOTES[BUILT_IN].partition("--model ")
    assert parse_name(text.split()[0]) and "headstart models recommend" in text


@pytest.mark.parametrize(
    ("files", "quantization", "chosen"),
    [
        ("a-Q4_K_M.gguf a-Q8_0.gguf", None, "a-Q4_K_M.gguf"),
        ("a.gguf mmproj-a-f16.gguf config.json", None, "a.gguf"),
        ("a-IQ4_XS.gguf a-Q4_K_S.gguf", "iq4_xs", "a-IQ4_XS.gguf"),
        ("a-UD-Q4_K_XL.gguf a-Q4_K_XL.gguf", "UD-Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        ("a.f16.gguf a.Q4_1.gguf", "F16", "a.f16.gguf"),
        ("a-q4_0.gguf", "Q4_0", "a-q4_0.gguf"),
        ("a-Q8_0.gguf a-Q6_K.gguf", None, "several files, none in Q4_K_M; allowed: o/n:Q6_K"),
        ("a-Q8_0-00001-of-00002.gguf a-Q8_0-00002-of-00002.gguf", "Q8_0", "in several files"),
        ("README.md", None, "has no GGUF file"),
    ],
)
def test_a_quantization_selects_a_file(files: str, quantization: str | None, chosen: str) -> None:
    if chosen.endswith(".gguf"):
        assert choose_file("o/n", files.split(), quantization) == chosen
    else:
        with pytest.raises(ModelNotFoundError, match=chosen):
            choose_file("o/n", files.split(), quantization)


def check_weights(home: Path) -> None:
    [weights] = home.rglob("snapshots/*/model.safetensors")
    assert weights.read_bytes() == (find_folder(BUILT_IN) / "model.safetensors").read_bytes()


def test_a_model_is_pulled(hub: str, tmp_path: Path) -> None:
    def headstart(*arguments: str) -> subprocess.CompletedProcess[str]:
        process = start(hub, tmp_path / "home", *arguments)
        streams = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, *streams)

    done = headstart("pull", NAME)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}: " in done.stderr
    assert NAME in headstart().stdout
    missing = headstart("pull", "someone/missing")
    assert missing.returncode == 2
    assert missing.stderr.splitlines()[-1].startswith("headstart: there is no folder")
