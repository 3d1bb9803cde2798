"""The cache library as a distribution without dependencies, in an environment without packages."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.house.source import ROOT

FOLDER = ROOT / "packages" / "headstart-cache"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from headstart.cache import BlockHasher, CacheConfig, KVCacheManager, MultiModalItem, TokenSequence
manager = KVCacheManager(CacheConfig(num_blocks=8, block_size=4, events=True), BlockHasher(4))
for name in ("first", "second"):
    sequence = TokenSequence(name, range(9), items=[MultiModalItem(b"cat", 2, 3)])
    found = manager.get_computed_blocks(sequence)
    manager.allocate_slots(sequence, 9 - found.num_tokens, found)
    manager.commit_step()
    manager.free(sequence)
manager.check()
print(found.num_tokens, all(sys.argv[1] in sys.modules[name].__file__
    for name in sys.modules if name.startswith("headstart")))
try:
    from headstart import LLM
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_cache_alone_needs_no_other_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()  # or the build would leave its files in the repository
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(FOLDER / name, source)
    for name in ("headstart", "LICENSE"):
        assert (FOLDER / name).resolve() == ROOT / name
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, str(source), "-w", str(tmp_path)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("headstart_cache-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        [metadata] = [name for name in archive.namelist() if name.endswith("METADATA")]
        assert "Requires-Dist" not in archive.read(metadata).decode()
        packaged = {name for name in archive.namelist() if name.startswith("headstart/cache/")}
    modules = (ROOT / "headstart" / "cache").rglob("*.py")
    assert packaged == {path.relative_to(ROOT).as_posix() for path in modules}
    isolated = [sys.executable, "-I", "-S", "-c", PROGRAM, str(tmp_path / "installed")]
    done = subprocess.run(isolated, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["8 True", "No module named 'headstart.frontend'"]
