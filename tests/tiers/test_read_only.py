"""A folder without write permission: its blocks are loaded, and nothing in it changes."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from headstart.cli.main import main
from headstart.errors import ConfigError
from headstart.tiers.contents import Counts, verify
from headstart.tiers.index import INDEX, DiskIndex, slot_path
from tests.tiers.stores import MODEL, blocks, disk, held, names

_USER = 65534


def as_user(work: Callable[[], None]) -> None:
    """Do the work in a process that permissions bind, though root runs the tests."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(_USER, _USER, _USER)
                os.setresuid(_USER, _USER, _USER)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return nine blocks in a folder that its owner may only read."""
    root = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    with closing(disk(root)) as store:
        store.save(blocks(range(9)))
    for path in (*root.iterdir(), root):
        if os.geteuid() == 0:
            os.chown(path, _USER, _USER)
        path.chmod(0o500 if path.is_dir() else 0o400)
    yield root
    root.chmod(0o700)
    shutil.rmtree(root)


def content(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return every file with its bytes, time and mode."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in folder.iterdir()
    }


def test_blocks_are_loaded_and_none_is_saved(folder: Path) -> None:
    def work() -> None:
        before = content(folder)
        with closing(disk(folder)) as store:
            assert (store.num_stored, store.block_seconds) == (9, 0.5)
            assert store.find(names(range(20))) == held(store, range(20)) == 9
            store.touch(names(range(9)))
            assert store.save(blocks(range(9, 12))) == 0 and store.faults.num_unsaved == 3
            assert not store.clear()
            assert not store.faults.counts
        assert content(folder) == before

    as_user(work)


def test_commands_that_read_work(folder: Path) -> None:
    def work() -> None:
        before = content(folder)

        def run(*arguments: str) -> tuple[int, str]:
            done = CliRunner().invoke(main, ["cache", *arguments, "--cache-dir", str(folder)])
            return done.exit_code, done.output + done.stderr

        assert "a model" in run("ls")[1] and "0 to 144" in run("ls", "a model")[1]
        assert "144 tokens in 9 blocks" in run("stat")[1]
        assert run("verify") == (0, "a model  9 intact\nall blocks in the index are intact\n")
        for arguments in (["drop", "--all"], ["verify", "--repair"]):
            status, output = run(*arguments)
            assert status == 2 and "cannot be written" in output
        assert content(folder) == before

    as_user(work)


@pytest.mark.parametrize("lost", [INDEX, slot_path(Path(), MODEL).name, None])
def test_a_folder_without_its_files_is_a_miss(folder: Path, lost: str | None) -> None:
    folder.chmod(0o700)
    for path in folder.iterdir():
        if lost in (path.name, None):
            path.unlink()
    folder.chmod(0o500)

    def work() -> None:
        with closing(disk(folder)) as store:
            assert held(store, range(9)) == 0
            assert store.save(blocks(range(9))) == 0
        listed = CliRunner().invoke(main, ["cache", "ls", "--cache-dir", str(folder)])
        assert listed.exit_code == 0
        expected = Counts(lost=9) if lost and lost.endswith(".kv") else Counts(unlisted=9)
        assert verify(folder).total == (expected if lost else Counts())

    as_user(work)


def test_a_damaged_block_is_a_miss_and_stays(folder: Path) -> None:
    path = slot_path(folder, MODEL)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(3 * 2560 + 500)
        file.write(b"damage")
    path.chmod(0o400)

    def work() -> None:
        before = content(folder)
        with closing(disk(folder)) as store:
            assert held(store, range(9)) == 3 and held(store, range(4, 9)) == 5
        assert verify(folder).total == Counts(intact=8, damaged=1)
        with pytest.raises(ConfigError, match="not writable"):
            verify(folder, repair=True)
        assert content(folder) == before

    as_user(work)


def test_a_damaged_index_is_a_miss_and_stays(folder: Path) -> None:
    (folder / INDEX).chmod(0o600)
    (folder / INDEX).write_bytes(b"nothing of it" * 1000)
    (folder / INDEX).chmod(0o400)

    def work() -> None:
        before = content(folder)
        with closing(disk(folder)) as store:
            assert held(store, range(9)) == 0
            assert "the index is damaged" in store.faults.counts
        assert content(folder) == before

    as_user(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can keep a folder from its user")
def test_a_folder_of_root_is_read(folder: Path) -> None:
    """Containers mount images whose files belong to root."""
    for path in (*folder.iterdir(), folder):
        os.chown(path, 0, 0)
        path.chmod(0o755 if path.is_dir() else 0o644)

    def work() -> None:
        with closing(disk(folder)) as store:
            assert held(store, range(9)) == 9

    as_user(work)


def test_a_folder_that_others_write_is_read_at_the_same_time(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(9)))
        with closing(DiskIndex(tmp_path / INDEX, read_only=True)) as index:
            store.save(blocks(range(9, 12)))
            assert len(index.find(names(range(12)))) == 12
