"""`headstart cache` as a person uses it, over a folder that an engine has filled."""

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
    """Ask two prompts that begin alike in a new process; how much of each was loaded."""
    llm = make_llm(model, cache_dir=str(folder))
    prompts = [{"prompt_token_ids": TEXT + [90 + at] * 20} for at in range(2)]
    found = [llm.generate(one, PARAMS, use_tqdm=False)[0].num_loaded_tokens for one in prompts]
    llm.close()
    return found


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
    _, shared, one, other = cache("ls", "tiny-model").output.splitlines()
    assert "0 to 80" in shared
    assert [line.startswith("  ") and "80 to 96" in line for line in (one, other)] == [True, True]
    assert "... 2 more" in cache("ls", "tiny-model", "--lines", "1").output
    assert "112 tokens in 7 blocks" in cache("stat").output


@pytest.mark.parametrize("names", [["ls"], ["ls", "tiny-model"], ["stat"]])
def test_an_output_that_fails_is_no_fault_of_the_folder(
    names: list[str], cache: Cache, folder: Path
) -> None:
    """`headstart cache ls | head -1` reported that the folder "cannot be read"."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    call = [sys.executable, "-m", "headstart", "cache", *names, "--cache-dir", str(folder)]
    with full.open("w") as output:
        done = subprocess.run(call, stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("headstart: cannot write the output: ")


def test_what_is_dropped_is_computed_again(cache: Cache, model: Path, folder: Path) -> None:
    name = cache("ls", "tiny-model").output.splitlines()[2].split()[0]
    assert cache("drop", name).output == "1 block dropped\n"
    assert hits(model, folder) in ([80, 16], [96, 0])  # the end of one prompt or of the other
    assert cache("drop", "--all").output == "7 blocks dropped\n"
    assert hits(model, folder) == [0, 0]


def test_what_a_full_disk_keeps_from_being_dropped_is_told(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reported 0 dropped blocks and exited with status 0."""

    def fail(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        for method in ("remove", "move"):
            patch.setattr(DiskIndex, method, fail)
        assert "some blocks could not be dropped" in cache("drop", "--all", status=2).stderr
    assert "0 blocks" not in cache("drop", "--all").output


def test_a_name_that_nothing_has_is_an_error_before_any_work(cache: Cache) -> None:
    """`drop zzzz` printed "0 blocks dropped" and had exit status 0."""
    shared, one, _ = (line.split()[0] for line in cache("ls", "tiny-model").output.splitlines()[1:])
    for names in (["0" * 8], [shared, "0" * 8], ["0" * 64]):
        said = cache("drop", *names, status=2).stderr
        assert f"no prefix {names[-1]!r} is stored; headstart cache ls MODEL" in said
    for name in ("zzz", "zzzz", "abc", "tiny-model", "0" * 65, ""):
        said = cache("drop", shared, name, status=2).stderr
        assert f"{name!r} is not a prefix's name; allowed: at least 4 hexadecimal digits" in said
    assert "'zzzz' is not a prefix's name" in cache("export", "zzzz", "nowhere", status=2).stderr
    assert "112 tokens in 7 blocks" in cache("stat").output
    assert cache("drop", shared.upper(), one).output == "7 blocks dropped\n"
    assert "is stored;" in cache("drop", shared, status=2).stderr


def keep(folder: Path, model: ModelRecord, *names: str) -> None:
    """Save a block under each name, given in digits."""
    payload, root = bytes(model.block_bytes), BlockHash(bytes(32))
    with closing(DiskStore(folder, model, 1 << 30)) as store:
        found = [BlockHash(bytes.fromhex(name).ljust(32, b"\0")) for name in names]
        blocks = [StoredBlock(name, root, 0, 1.0, 1.0, payload) for name in found]
        assert store.save(blocks) == len(names)


def test_models_of_one_name_are_listed_and_dropped_together(cache: Cache, folder: Path) -> None:
    """`ls` showed the largest and `drop --model` dropped it; with an empty name any model's."""
    for at, digit in enumerate("abc"):
        keep(folder, ModelRecord(digit * 64, "twin", 16, 1000), f"{at:08x}01", f"{at:08x}02")
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


def test_a_name_stands_for_all_kinds_of_a_model(cache: Cache, folder: Path) -> None:
    """A fingerprint with two block sizes was refused as too short with any number of digits."""
    for at, (kind, size) in enumerate([("float32", 16), ("float32, blocks of 8", 8)]):
        keep(folder, ModelRecord("a" * 64, f"twin ({kind})", size, 1000 + at), f"{at:08x}01")
    keep(folder, ModelRecord("b" * 64, "twins (float32)", 16, 1000), "0000000301")
    for name in ("twin", "aaaa", "a" * 64):
        shown = [line for line in cache("ls", name).output.splitlines() if "twin" in line]
        assert shown == [f"twin (float32{end})  {'a' * 12}" for end in (", blocks of 8", "")]
    assert cache("drop", "--model", "twin (float32, blocks of 8)").output == "1 block dropped\n"
    assert cache("drop", "--model", "aaaa").output == "1 block dropped\n"
    assert cache("drop", "--model", "twins (float32)").output == "1 block dropped\n"
    assert "112 tokens in 7 blocks" in cache("stat").output


def test_a_name_stands_for_the_stages_of_a_pipeline(cache: Cache, folder: Path) -> None:
    keep(folder, ModelRecord("c" * 64, "pair, talker (float32)", 16, 1000), "0000000401")
    for name in ("pair", "pair, talker"):
        assert "0000000401" in cache("ls", name).output


def test_a_name_that_several_prefixes_have_is_an_error(cache: Cache, folder: Path) -> None:
    """`drop` dropped them all, and `export` took any of them."""
    keep(folder, ModelRecord("a" * 64, "twin", 16, 1000), "12340001", "12340002")
    for arguments in (["drop", "1234"], ["export", "1234", "nowhere"]):
        said = cache(*arguments, status=2).stderr
        assert "2 names begin with '1234'" in said
        assert "123400010000" in said and "123400020000" in said
    assert cache("drop", "12340001").output == "1 block dropped\n"
    assert cache("drop", "1234").output == "1 block dropped\n"


def test_a_prefix_goes_to_another_folder(
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
    """The file stayed, and the next try failed because it existed."""
    name = cache("ls", "tiny-model").output.splitlines()[1].split()[0]
    with monkeypatch.context() as patch:
        patch.setattr(contents, "make_header", lambda block: os.write(-1, b""))
        said = cache("export", name, str(tmp_path / "moved"), status=2).stderr
    assert "moved cannot be written: " in said and not (tmp_path / "moved").exists()
    cache("export", name, str(tmp_path / "moved"))


def test_blocks_without_room_are_told(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full kept none, and "0 tokens are new here" sounded as if it had them all."""
    moved = str(tmp_path / "moved")
    cache("export", cache("ls", "tiny-model").output.splitlines()[1].split()[0], moved)
    cache("drop", "--model", "tiny-model")
    with monkeypatch.context() as patch:
        patch.setattr("headstart.tiers.disk._LEAST_FREE", 1 << 60)
        said = cache("import", moved, status=2).stderr
    assert "moved has 112 tokens, and " in said and "has space for 0 of them" in said


@pytest.mark.parametrize("harm", ["cut in a block", "cut at a border", "flipped"])
def test_a_file_that_lacks_blocks_is_told_and_the_others_are_kept(
    cache: Cache, tmp_path: Path, harm: str
) -> None:
    """It was taken for the whole."""
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
    said = cache("import", str(moved), status=2).stderr
    assert "is damaged or cut off after 96 tokens; these were imported, 96 of them new" in said
    assert "96 tokens in 6 blocks" in cache("stat").output


def test_a_file_of_another_version_is_refused(cache: Cache, tmp_path: Path) -> None:
    """Its blocks seemed to be damaged, and 0 tokens to be new."""
    moved = tmp_path / "moved"
    cache("export", cache("ls", "tiny-model").output.splitlines()[1].split()[0], str(moved))
    moved.write_bytes(moved.read_bytes().replace(b"blocks 2", b"blocks 1", 1))
    assert "another version of headstart" in cache("import", str(moved), status=2).stderr


def test_blocks_of_a_model_that_never_ran_here_are_refused(cache: Cache, tmp_path: Path) -> None:
    name = cache("ls", "tiny-model").output.splitlines()[1].split()[0]
    moved, elsewhere = str(tmp_path / "moved"), str(tmp_path / "elsewhere")
    cache("export", name, moved)
    done = CliRunner().invoke(main, ["cache", "import", moved, "--cache-dir", elsewhere])
    assert done.exit_code == 2 and "has not run here" in done.stderr


def test_damage_is_told_and_repaired(cache: Cache, folder: Path) -> None:
    assert (
        cache("verify").output == "tiny-model (float32)  7 intact\nall listed blocks are intact\n"
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


def test_a_file_that_goes_while_sizes_are_added_up_counts_nothing(folder: Path) -> None:
    """Another process may drop a model's blocks just then."""
    size = size_of(folder)
    (folder / "gone.kv").symlink_to(folder / "nowhere")  # listed, and not there
    assert size_of(folder) == size > 0


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["drop", "--all"]])
def test_a_folder_that_is_not_there_is_an_error(command: list[str], tmp_path: Path) -> None:
    """A mistyped one was made, and `verify` found every block in it whole."""
    missing = tmp_path / "mistyped"
    done = CliRunner().invoke(main, ["cache", *command, "--cache-dir", str(missing)])
    assert done.exit_code == 2 and f"{missing}; allowed: an existing folder" in done.stderr
    assert not missing.exists()


def test_a_folder_with_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.kv").write_text("mine")
    mode = tmp_path.stat().st_mode
    done = CliRunner().invoke(main, ["cache", "ls", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 2 and "other files, such as thesis.kv" in done.stderr
    assert tmp_path.stat().st_mode == mode and (tmp_path / "thesis.kv").read_text() == "mine"


@pytest.mark.parametrize("arguments", [["drop"], ["drop", "a", "--all"]])
def test_what_to_drop_must_be_said(cache: Cache, arguments: list[str]) -> None:
    assert "pass names, or --model, or --all" in cache(*arguments, status=2).stderr


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"fingerprint": "a", "title": "b", "block_size": 1}', "HUGE"]
)
def test_a_file_that_does_not_tell_its_model_is_refused(
    cache: Cache, tmp_path: Path, line: str
) -> None:
    huge = '{"fingerprint": "a", "title": "b", "block_size": 1, "block_bytes": 1000000000000000}'
    moved = tmp_path / "moved"
    moved.write_text("headstart blocks 2\n" + (huge if line == "HUGE" else line) + "\n")
    assert "tell" in cache("import", str(moved), status=2).stderr
