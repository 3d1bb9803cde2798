"""`headstart cache` with a folder that an engine has filled."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headstart import SamplingParams
from headstart.cache import BlockHash
from headstart.cli.cache import size_of
from headstart.cli.main import main
from headstart.tiers import contents
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import DiskIndex
from headstart.tiers.store import ModelRecord, StoredBlock
from tests.engine.tiny_llm import make_llm, save_smallest

pytestmark = pytest.mark.usefixtures("loads_always")

TEXT = list(range(3, 83))
PARAMS = SamplingParams(temperature=0, max_tokens=1)

Cache = Callable[..., Result]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_smallest(tmp_path / "tiny-model")


def hits(model: Path, folder: Path) -> list[int]:
    """Run two prompts with a common prefix in a new engine; return their loaded tokens."""
    llm = make_llm(model, cache_dir=str(folder))
    prompts = [{"prompt_token_ids": TEXT + [90 + i] * 20} for i in range(2)]
    counts = [
        llm.generate(prompt, PARAMS, use_tqdm=False)[0].num_loaded_tokens for prompt in prompts
    ]
    llm.close()
    return counts


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    assert hits(model, tmp_path / "kept") == [0, 0]
    return tmp_path / "kept"


@pytest.fixture
def cache(folder: Path) -> Cache:
    def run(*arguments: str, status: int = 0) -> Result:
        done = CliRunner().invoke(main, ["cache", *arguments, "--cache-dir", str(folder)])
        assert done.exit_code == status, done.output
        return done

    return run


def test_models_and_prefixes_are_listed(cache: Cache) -> None:
    heading, line = cache("ls").output.splitlines()
    assert heading.split()[:3] == ["model", "fingerprint", "size"]
    assert line.startswith("tiny-model") and " 112 " in line
    _, shared, first, other = cache("ls", "tiny-model").output.splitlines()
    assert "0 to 80" in shared
    assert [line.startswith("  ") and "80 to 96" in line for line in (first, other)] == [True, True]
    assert "... 2 more" in cache("ls", "tiny-model", "--lines", "1").output
    assert "112 tokens in 7 blocks" in cache("stat").output


@pytest.mark.parametrize("names", [["ls"], ["ls", "tiny-model"], ["stat"]])
def test_a_failing_output_is_not_reported_as_an_unreadable_folder(
    names: list[str], cache: Cache, folder: Path
) -> None:
    """Regression: `headstart cache ls | head -1` reported that the folder "cannot be read"."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    call = [sys.executable, "-m", "headstart", "cache", *names, "--cache-dir", str(folder)]
    with full.open("w") as output:
        done = subprocess.run(call, stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("headstart: cannot write the output: ")


def test_dropped_blocks_are_computed_again(cache: Cache, model: Path, folder: Path) -> None:
    name = cache("ls", "tiny-model").output.splitlines()[2].split()[0]
    assert cache("drop", name).output == "1 block dropped\n"
    assert hits(model, folder) in ([80, 16], [96, 0])  # the end of one prompt or of the other
    assert cache("drop", "--all").output == "7 blocks dropped\n"
    assert hits(model, folder) == [0, 0]


def test_blocks_that_a_full_disk_cannot_drop_are_reported(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it reported 0 dropped blocks and exited with status 0."""

    def fail(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        for method in ("remove", "move"):
            patch.setattr(DiskIndex, method, fail)
        assert "some blocks could not be dropped" in cache("drop", "--all", status=2).stderr
    assert "0 blocks" not in cache("drop", "--all").output


def test_an_unknown_name_is_refused_before_any_work(cache: Cache) -> None:
    """Regression: `drop zzzz` printed "0 blocks dropped" and had exit status 0."""
    shared, first, _ = (
        line.split()[0] for line in cache("ls", "tiny-model").output.splitlines()[1:]
    )
    for names in (["0" * 8], [shared, "0" * 8], ["0" * 64]):
        error = cache("drop", *names, status=2).stderr
        assert f"no prefix {names[-1]!r} is stored; headstart cache ls MODEL" in error
    for name in ("zzz", "zzzz", "abc", "tiny-model", "0" * 65, ""):
        error = cache("drop", shared, name, status=2).stderr
        assert f"{name!r} is not a prefix's name; allowed: at least 4 hexadecimal digits" in error
    assert "'zzzz' is not a prefix's name" in cache("export", "zzzz", "nowhere", status=2).stderr
    assert "112 tokens in 7 blocks" in cache("stat").output
    assert cache("drop", shared.upper(), first).output == "7 blocks dropped\n"
    assert "is stored;" in cache("drop", shared, status=2).stderr


def keep(folder: Path, model: ModelRecord, *names: str) -> None:
    """Save a block under each name of hexadecimal digits."""
    payload, root = bytes(model.block_bytes), BlockHash(bytes(32))
    with closing(DiskStore(folder, model, 1 << 30)) as store:
        hashes = [BlockHash(bytes.fromhex(name).ljust(32, b"\0")) for name in names]
        blocks = [StoredBlock(name, root, 0, 1.0, 1.0, payload) for name in hashes]
        assert store.save(blocks) == len(names)


def test_models_of_one_name_are_listed_and_dropped_together(cache: Cache, folder: Path) -> None:
    """Regression: `ls` and `drop --model` used only the largest model of a name."""
    for i, digit in enumerate("abc"):
        keep(folder, ModelRecord(digit * 64, "twin", 16, 1000), f"{i:08x}01", f"{i:08x}02")
    shown = cache("ls", "twin").output.splitlines()
    assert [line for line in shown if line.startswith("twin")] == [
        f"twin  {digit * 12}" for digit in "abc"
    ]
    names = [line.split()[0] for line in cache("ls", "bbbb").output.splitlines()]
    assert names == ["prefix", "000000010100", "000000010200"]
    for nothing in ("", "t", "aaa", "tiny"):
        assert "are stored; allowed: " in cache("drop", "--model", nothing, status=2).stderr
    assert cache("drop", "--model", "aaaa").output == "2 blocks dropped\n"
    assert cache("drop", "--model", "twin").output == "4 blocks dropped\n"
    assert "112 tokens in 7 blocks" in cache("stat").output


def test_a_name_selects_all_kinds_of_a_model(cache: Cache, folder: Path) -> None:
    """Regression: a fingerprint with two block sizes was refused as too short at any length."""
    for i, (kind, size) in enumerate([("float32", 16), ("float32, blocks of 8", 8)]):
        keep(folder, ModelRecord("a" * 64, f"twin ({kind})", size, 1000 + i), f"{i:08x}01")
    keep(folder, ModelRecord("b" * 64, "twins (float32)", 16, 1000), "0000000301")
    for name in ("twin", "aaaa", "a" * 64):
        shown = [line for line in cache("ls", name).output.splitlines() if "twin" in line]
        assert shown == [f"twin (float32{end})  {'a' * 12}" for end in (", blocks of 8", "")]
    assert cache("drop", "--model", "twin (float32, blocks of 8)").output == "1 block dropped\n"
    assert cache("drop", "--model", "aaaa").output == "1 block dropped\n"
    assert cache("drop", "--model", "twins (float32)").output == "1 block dropped\n"
    assert "112 tokens in 7 blocks" in cache("stat").output


def test_a_name_selects_all_stages_of_a_pipeline(cache: Cache, folder: Path) -> None:
    keep(folder, ModelRecord("c" * 64, "pair, talker (float32)", 16, 1000), "0000000401")
    for name in ("pair", "pair, talker"):
        assert "0000000401" in cache("ls", name).output


def test_an_ambiguous_name_is_refused(cache: Cache, folder: Path) -> None:
    """Regression: `drop` dropped all of them, and `export` exported any of them."""
    keep(folder, ModelRecord("a" * 64, "twin", 16, 1000), "12340001", "12340002")
    for arguments in (["drop", "1234"], ["export", "1234", "nowhere"]):
        error = cache(*arguments, status=2).stderr
        assert "2 names begin with '1234'" in error
        assert "123400010000" in error and "123400020000" in error
    assert cache("drop", "12340001").output == "1 block dropped\n"
    assert cache("drop", "1234").output == "1 block dropped\n"


def test_a_prefix_is_moved_to_another_folder(
    cache: Cache, model: Path, folder: Path, tmp_path: Path
) -> None:
    name = cache("ls", "tiny-model").output.splitlines()[1].split()[0]
    moved = str(tmp_path / "moved")
    cache("export", name, moved)
    assert "exists" in cache("export", name, moved, status=2).stderr
    assert cache("import", moved).output == "0 new tokens of tiny-model (float32) are stored\n"
    cache("drop", "--model", "tiny-model")
    assert cache("import", moved).output == "112 new tokens of tiny-model (float32) are stored\n"
    assert hits(model, folder) == [96, 16]


def test_a_file_that_cannot_be_written_is_not_left_behind(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the file stayed, and the next attempt failed because it existed."""
    name = cache("ls", "tiny-model").output.splitlines()[1].split()[0]
    with monkeypatch.context() as patch:
        patch.setattr(contents, "make_header", lambda block: os.write(-1, b""))
        error = cache("export", name, str(tmp_path / "moved"), status=2).stderr
    assert "moved cannot be written: " in error and not (tmp_path / "moved").exists()
    cache("export", name, str(tmp_path / "moved"))


def test_blocks_that_do_not_fit_are_reported(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a full disk stored none, but "0 tokens are new here" implied that it had all."""
    moved = str(tmp_path / "moved")
    cache("export", cache("ls", "tiny-model").output.splitlines()[1].split()[0], moved)
    cache("drop", "--model", "tiny-model")
    with monkeypatch.context() as patch:
        patch.setattr("headstart.tiers.disk._MIN_FREE", 1 << 60)
        error = cache("import", moved, status=2).stderr
    assert "moved has 112 tokens, and " in error and "has space for 0 of them" in error


@pytest.mark.parametrize("harm", ["cut in a block", "cut at a border", "flipped"])
def test_an_incomplete_file_is_reported_and_its_blocks_are_stored(
    cache: Cache, tmp_path: Path, harm: str
) -> None:
    """Regression: it counted as complete."""
    name = cache("ls", "tiny-model").output.splitlines()[1].split()[0]
    moved = tmp_path / "moved"
    cache("export", name, str(moved))
    cache("drop", "--model", "tiny-model")
    data = bytearray(moved.read_bytes())
    length = (len(data) - len(data[: data.index(b"}") + 2]) - 11) // 7  # seven blocks, and the end
    if harm == "flipped":
        data[-11 - length // 2] ^= 1
    else:
        del data[-11 - (length // 2 if harm == "cut in a block" else length) :]
    moved.write_bytes(data)
    error = cache("import", str(moved), status=2).stderr
    assert "is damaged or cut off after 96 tokens; these were imported, 96 of them new" in error
    assert "96 tokens in 6 blocks" in cache("stat").output


def test_a_file_of_another_version_is_refused(cache: Cache, tmp_path: Path) -> None:
    """Regression: its blocks counted as damaged, and 0 tokens as new."""
    moved = tmp_path / "moved"
    cache("export", cache("ls", "tiny-model").output.splitlines()[1].split()[0], str(moved))
    moved.write_bytes(moved.read_bytes().replace(b"blocks 2", b"blocks 1", 1))
    assert "another version of headstart" in cache("import", str(moved), status=2).stderr


def test_blocks_of_an_unknown_model_are_refused(cache: Cache, tmp_path: Path) -> None:
    name = cache("ls", "tiny-model").output.splitlines()[1].split()[0]
    moved, elsewhere = str(tmp_path / "moved"), str(tmp_path / "elsewhere")
    cache("export", name, moved)
    done = CliRunner().invoke(main, ["cache", "import", moved, "--cache-dir", elsewhere])
    assert done.exit_code == 2 and "has not run here" in done.stderr


def test_damage_is_reported_and_repaired(cache: Cache, folder: Path) -> None:
    assert (
        cache("verify").output
        == "tiny-model (float32)  7 intact\nall blocks in the index are intact\n"
    )
    file = max(folder.glob("*.kv"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "1 damaged" in cache("verify", status=1).output
    assert "1 damaged" in cache("verify", "--repair", status=1).output
    assert "6 intact" in cache("verify").output
    cache("drop", "--all")
    assert cache("verify").output == "no blocks are stored\n"


def test_a_file_that_disappears_while_sizes_are_added_counts_zero(folder: Path) -> None:
    """Another process may drop a model's blocks at that time."""
    size = size_of(folder)
    (folder / "dangling.kv").symlink_to(folder / "nowhere")  # listed, but missing
    assert size_of(folder) == size > 0


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["drop", "--all"]])
def test_a_missing_folder_is_refused(command: list[str], tmp_path: Path) -> None:
    """Regression: a mistyped folder was created, and `verify` found no damage in it."""
    missing = tmp_path / "mistyped"
    done = CliRunner().invoke(main, ["cache", *command, "--cache-dir", str(missing)])
    assert done.exit_code == 2 and f"{missing}; allowed: an existing folder" in done.stderr
    assert not missing.exists()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.kv").write_text("mine")
    mode = tmp_path.stat().st_mode
    done = CliRunner().invoke(main, ["cache", "ls", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 2 and "other files, such as thesis.kv" in done.stderr
    assert tmp_path.stat().st_mode == mode and (tmp_path / "thesis.kv").read_text() == "mine"


@pytest.mark.parametrize("arguments", [["drop"], ["drop", "a", "--all"]])
def test_drop_requires_a_selection(cache: Cache, arguments: list[str]) -> None:
    assert "pass names, or --model, or --all" in cache(*arguments, status=2).stderr


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"fingerprint": "a", "title": "b", "block_size": 1}', "HUGE"]
)
def test_a_file_without_its_model_is_refused(cache: Cache, tmp_path: Path, line: str) -> None:
    huge = '{"fingerprint": "a", "title": "b", "block_size": 1, "block_bytes": 1000000000000000}'
    moved = tmp_path / "moved"
    moved.write_text("headstart blocks 2\n" + (huge if line == "HUGE" else line) + "\n")
    assert f"{moved} has " in cache("import", str(moved), status=2).stderr
