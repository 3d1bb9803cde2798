"""Files that another user puts into the folder of a disk store are neither written nor read."""

import json
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from headstart.errors import ConfigError
from headstart.tiers.files import open_file, replace_file
from headstart.tiers.index import INDEX, make_folder, slot_path
from tests.tiers.stores import MODEL, blocks, disk, held

MINE = b"nothing of a cache" * 1000

Plant = Callable[[Path, Path], None]


def symbolic(link: Path, target: Path) -> None:
    link.symlink_to(target)


def hard(link: Path, target: Path) -> None:
    link.hardlink_to(target)


def dangling(link: Path, target: Path) -> None:
    link.symlink_to(target.with_name("missing"))


def names_of_files(folder: Path) -> list[str]:
    """Return the files that a store writes; temporary names are those of this process."""
    records = slot_path(folder, MODEL).name
    description = slot_path(folder, MODEL).with_suffix(f".{os.getpid()}.tmp").name
    return [
        records,
        records.replace(".kv", ".json"),
        description,
        INDEX,
        f"{INDEX}-journal",
        f"{INDEX}.tmp",
        "lock",
    ]


@pytest.mark.parametrize("plant", [symbolic, hard, dangling])
@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("has_blocks", [False, True])
def test_no_file_is_written_through_a_link(
    tmp_path: Path, plant: Plant, number: int, has_blocks: bool
) -> None:
    """Regression: records overwrote the target of a link with their file's name."""
    folder, target = tmp_path / "kept", tmp_path / "mine"
    target.write_bytes(MINE)
    make_folder(folder)
    if has_blocks:
        with closing(disk(folder)) as store:
            store.save(blocks(range(9)))
    link = folder / names_of_files(folder)[number]
    link.unlink(missing_ok=True)
    plant(link, target)
    with closing(disk(folder)) as store:
        for _ in range(2):  # the first call may only find the damage
            store.save(blocks(range(100, 120)))
        assert held(store, range(100, 120)) == 20
    assert target.read_bytes() == MINE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "mine"]


@pytest.mark.parametrize("plant", [symbolic, hard])
def test_an_open_store_detects_a_link(tmp_path: Path, plant: Plant) -> None:
    folder, target = tmp_path / "kept", tmp_path / "mine"
    target.write_bytes(MINE)
    with closing(disk(folder)) as store:
        store.save(blocks(range(9)))
        for name in (slot_path(folder, MODEL).name, INDEX):
            (folder / name).unlink()
            plant(folder / name, target)
            for _ in range(2):
                store.save(blocks(range(100, 120)))
            assert held(store, range(100, 120)) == 20
    assert target.read_bytes() == MINE


def test_a_fingerprint_is_not_written_through_a_link(tmp_path: Path) -> None:
    target, path = tmp_path / "mine", tmp_path / "fingerprints.json"
    target.write_bytes(MINE)
    for link in (path, path.with_suffix(f".{os.getpid()}.tmp")):
        link.symlink_to(target)
    replace_file(path, b"{}")
    assert path.read_bytes() == b"{}" and not path.is_symlink()
    assert target.read_bytes() == MINE


@pytest.mark.parametrize("plant", [symbolic, hard, dangling])
def test_links_are_detected_where_the_system_cannot_refuse_them(
    tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has no O_NOFOLLOW."""
    monkeypatch.setattr("headstart.tiers.files._FLAGS", 0)
    target, path = tmp_path / "mine", tmp_path / "file"
    target.write_bytes(MINE)
    plant(path, target)
    with pytest.raises(OSError, match="is a link"):
        open_file(path, os.O_RDWR)
    os.close(open_file(path, os.O_RDWR, create=True))
    assert path.read_bytes() == b"" and target.read_bytes() == MINE
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(9)))
    os.chown(slot_path(tmp_path, MODEL), 65534, 65534)
    with closing(disk(tmp_path)) as store:
        assert held(store, range(9)) == 0
        store.save(blocks(range(9)))
        assert held(store, range(9)) == 9
    assert slot_path(tmp_path, MODEL).stat().st_uid == 0


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_blocks_that_others_could_write_are_not_used(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        "headstart.tiers.index._LOG.warning", lambda text, *_: warnings.append(text)
    )
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(9)))
    (tmp_path / "fingerprints.json").write_text(json.dumps({"model": "other weights"}))
    tmp_path.chmod(mode)
    with closing(disk(tmp_path)) as store:
        assert held(store, range(9)) == 0
        assert store.save(blocks(range(9))) == 9
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert not (tmp_path / "fingerprints.json").exists()
    assert warnings == ["%s was writable by other users, so it is emptied"]


def test_a_folder_that_others_can_write_and_we_cannot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ConfigError, match="has mode 0777; allowed: a folder that only its owner"):
        make_folder(tmp_path)
