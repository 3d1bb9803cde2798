"""API keys on disk, on the command line, and in requests to a running server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from starlette.routing import Route

from headstart.cli.main import main
from headstart.errors import ConfigError
from headstart.server.errors import ApiError
from headstart.server.keys import ApiKey, KeyFolder, KeyRing
from headstart.server.options import ServerOptions
from headstart.server.tenants import Tenants, open_tenants
from tests.clients import openai
from tests.server.running import Running, running
from tests.small_demos import shallow_built_in

BODY = {"model": "tiny", "prompt": "one two three", "max_tokens": 1}


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def test_only_a_hash_is_stored_and_only_its_owner_may_read_it(folder: KeyFolder) -> None:
    before = os.umask(0)
    try:
        key = folder.add("alice", group="team", weight=2, admin=True)
    finally:
        os.umask(before)
    files = list(folder.folder.iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert folder.folder.stat().st_mode & 0o077 == 0
    assert all(key not in file.read_text() and key[3:] not in file.read_text() for file in files)
    [entry] = folder.read()
    assert (entry.name, entry.group, entry.weight, entry.admin) == ("alice", "team", 2, True)


def test_a_key_that_is_removed_during_its_lookup_has_its_weight(folder: KeyFolder) -> None:
    """Regression: its tenant had the invalid weight 0, so the status was 500."""

    class Ring(KeyRing):
        def find(self, key: bytes) -> ApiKey | None:
            entry = super().find(key)
            folder.remove("alice")
            return entry

    key = folder.add("alice", weight=2)
    ring = Ring(folder, lambda error: None)
    assert Tenants(ring, b"secret").of({b"x-api-key": key.encode()}).weight == 2


def test_a_write_that_fails_leaves_the_keys_as_they_were(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.add("alice")
    before = sorted(file.read_bytes() for file in folder.folder.iterdir())

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        folder.add("bob")
    assert sorted(file.read_bytes() for file in folder.folder.iterdir()) == before


def test_keys_can_be_added_concurrently(folder: KeyFolder) -> None:
    names = [f"user-{number}" for number in range(16)]
    threads = [threading.Thread(target=folder.add, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in folder.read()) == sorted(names)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("", {}, "name is ''"),
        ("a b", {}, "1 to 64 letters"),
        ("x" * 65, {}, "1 to 64 letters"),
        ("\udcff", {}, "1 to 64 letters"),
        ("alice", {}, "already"),
        ("bob", {"group": "a/b"}, "group is 'a/b'"),
        ("bob", {"weight": 0}, "weight is 0"),
        ("bob", {"weight": float("nan")}, "weight is nan"),
    ],
)
def test_an_invalid_key_is_not_added(
    folder: KeyFolder, name: str, options: dict[str, object], says: str
) -> None:
    folder.add("alice")
    with pytest.raises(ConfigError, match=says):
        folder.add(name, **options)  # type: ignore[arg-type]
    assert [key.name for key in folder.read()] == ["alice"]


DAMAGED = ["{", "[]", "7", '{"keys": 7}', '{"keys": [{}]}', '{"keys": [{"name": 1}]}', "[" * 10**5]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_refuses_every_key(folder: KeyFolder, text: str) -> None:
    key = folder.add("alice").encode()
    errors: list[ConfigError] = []
    ring = KeyRing(folder, errors.append)
    assert ring.find(key) is not None
    whole = folder.file.read_text()
    folder.file.write_text(text)
    assert ring.find(key) is None
    assert ring.find(key) is None and len(errors) == 1 and "damaged" in str(errors[0])
    folder.file.write_text(whole)
    assert ring.find(key) is not None
    folder.file.unlink()
    assert ring.find(key) is None
    folder.file.write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        KeyRing(folder, errors.append)


# On the command line


def call(folder: KeyFolder, *words: str) -> Result:
    where = {"HEADSTART_KEYS_FOLDER": str(folder.folder)}
    result = CliRunner().invoke(main, ["keys", *words], env=where)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_keys_are_added_listed_and_removed(folder: KeyFolder) -> None:
    assert "no keys" in call(folder, "list").stderr
    added = call(folder, "add", "alice", "--group", "team", "--weight", "2", "--admin")
    entry = KeyRing(folder, print).find(added.stdout.strip().encode())
    assert entry is not None and (entry.name, entry.group, entry.admin) == ("alice", "team", True)
    assert call(folder, "list").stdout.split()[:4] == ["alice", "team", "weight", "2"]
    assert call(folder, "rm", "bob").exit_code == 2
    assert call(folder, "rm", "alice").exit_code == 0 and folder.read() == []


@pytest.mark.parametrize("keys", [(), ("--no-api-keys",)])
def test_other_machines_cannot_connect_without_keys(
    folder: KeyFolder, keys: tuple[str, ...]
) -> None:
    """The command fails before it looks for the model, which does not exist."""
    where = ["--port", "0", "--keys-folder", str(folder.folder)]
    open_to_all = ["serve", "--model", "/no/such/model", "--host", "0.0.0.0", *where, *keys]
    result = CliRunner().invoke(main, open_to_all)
    assert result.exit_code == 2 and "other machines can reach host '0.0.0.0'" in result.stderr


@pytest.mark.parametrize(
    ("api_keys", "address", "has_key", "requires_keys"),
    [
        (None, "127.0.0.1", False, False),
        (None, "::1", False, False),
        (None, "127.0.0.1", True, True),
        (False, "127.0.0.1", True, False),
        (True, "127.0.0.1", True, True),
        (None, "0.0.0.0", True, True),
        (None, "::", True, True),
        (None, "fe80::1%eth0", True, True),
    ],
)
def test_when_keys_are_required(
    folder: KeyFolder, api_keys: bool | None, address: str, has_key: bool, requires_keys: bool
) -> None:
    if has_key:
        folder.add("alice")
    options = ServerOptions(api_keys=api_keys, keys_folder=str(folder.folder))
    assert open_tenants(options, address).requires_keys is requires_keys


def test_keys_of_the_command_line_are_one_administrator(folder: KeyFolder) -> None:
    """Several `--api-key` are one tenant, as in vLLM, and are not stored."""
    listed = folder.add("alice")
    options = ServerOptions(api_key=("one", "two"), keys_folder=str(folder.folder))
    tenants = open_tenants(options, "0.0.0.0")
    first, second, alice = (tenants.of({b"x-api-key": k.encode()}) for k in ("one", "two", listed))
    assert first == second and first.is_admin and not alice.is_admin
    assert len({first.salt, alice.salt, None}) == 3
    with pytest.raises(ApiError, match="the API key is unknown"):
        tenants.of({b"x-api-key": b"three"})
    assert all("one" not in file.read_text() for file in folder.folder.iterdir())


@pytest.mark.parametrize("group", [None, "api-key", "operator"])
def test_keys_of_the_folder_are_not_in_the_operators_tenant(
    folder: KeyFolder, group: str | None
) -> None:
    """Regression: a group named api-key shared the salt and the weight of --api-key."""
    guest = folder.add("api-key", group=group)
    tenants = open_tenants(ServerOptions(api_key=("a",), keys_folder=str(folder.folder)))
    mine, other = (tenants.of({b"x-api-key": key.encode()}) for key in ("a", guest))
    assert mine.salt != other.salt and mine.key != other.key
    assert (mine.weight, other.weight, other.is_admin) == (1, 1, False)


@pytest.mark.parametrize("key", ["", " lead", "trail ", "\n", "key\r\n"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    """White space around a header's value is stripped, so such a key could not be used."""
    with pytest.raises(ConfigError, match=r"^api_key is empty or has white space") as error:
        ServerOptions(api_key=("good", key))
    assert "trail" not in str(error.value) and "lead" not in str(error.value)


@pytest.mark.parametrize("name", ["api_key", "model_alias", "public_prefix"])
def test_a_string_is_not_a_tuple_of_strings(name: str) -> None:
    """Regression: each character of the string was accepted as a key."""
    with pytest.raises(ConfigError, match=f"^{name} is a string; allowed: a tuple of strings$"):
        ServerOptions(**{name: "secret"})


def test_the_folder_of_keys_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KeyFolder("~/keys").folder == tmp_path / "keys"


# At a running server


@pytest.fixture(scope="module")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    return KeyFolder(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def key(key_folder: KeyFolder) -> str:
    return key_folder.add("alice")


@pytest.fixture(scope="module")
def server(key_folder: KeyFolder, key: str) -> Iterator[Running]:
    with running(api_keys=None, keys_folder=str(key_folder.folder)) as server:
        yield server


def ask(server: Running, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=60)


def test_clients_with_a_key_are_answered(server: Running, key: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(**BODY).choices  # type: ignore[call-overload]
    assert ask(server, **{"x-api-key": key}).status_code == 200
    assert ask(server, Authorization=f"bEARER {key}").status_code == 200


@pytest.mark.parametrize("credentials", ["", "Bearer", "Bearer x", "Basic {}", "Bearer {}x"])
def test_without_a_valid_key_the_body_is_not_read(
    server: Running, key: str, credentials: str
) -> None:
    headers = {"Authorization": credentials.format(key)} if credentials else {}
    answer = ask(server, **headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert key not in answer.text and answer.headers["x-request-id"]
    claude = httpx.post(f"{server.url}/v1/messages", content=b"{", headers=headers)
    assert claude.status_code == 401
    assert claude.json()["error"]["type"] == "authentication_error"


OPEN = {"/", "/docs", "/health", "/openapi.json", "/ready"}
OF_A_TENANT = {"/cache/advice", "/cache/explain", "/cache/prewarm"}


def test_paths_without_a_key_and_those_for_administrators(
    server: Running, key_folder: KeyFolder, key: str
) -> None:
    own = {route.path for route in server.app.routes if isinstance(route, Route)}
    paths = own | set(server.app.openapi()["paths"])
    assert {"/v1/models", "/v1/completions", "/metrics", "/cache", "/cache/reset"} <= paths
    answers = {path: httpx.get(server.url + path).status_code for path in paths}
    assert {path for path, status in answers.items() if status != 401} == OPEN
    for path in ("/cache/", "/cache/explain/", "/cache/explain%0a", "/cache/../cache"):
        assert httpx.get(server.url + path).status_code == 401
    across = {path for path in paths if path.startswith(("/cache", "/metrics"))} - OF_A_TENANT
    admin = {"x-api-key": key_folder.add("monitor", admin=True)}
    for path in across - {"/cache/live"}:  # which never ends
        response = httpx.get(server.url + path, headers={"x-api-key": key})
        assert (
            response.status_code == 403 and response.json()["error"]["type"] == "permission_error"
        )
        assert httpx.get(server.url + path, headers=admin).status_code not in (401, 403)
    assert httpx.get(f"{server.url}/cache/live", headers={"x-api-key": key}).status_code == 403
    assert httpx.get(f"{server.url}/cache/advice", headers={"x-api-key": key}).status_code == 200
    for path in OF_A_TENANT - {"/cache/advice"}:
        response = httpx.post(server.url + path, json={"prompt": "x"}, headers={"x-api-key": key})
        assert response.status_code == 200


@pytest.mark.parametrize("path", ["/cache%0A", "/metrics%0A", "/cache/reset%0A", "/cache/live%0A"])
def test_a_line_feed_after_a_path_is_refused(server: Running, key: str, path: str) -> None:
    """Regression: `$` of a route matches before a line feed, so tenants could read all prompts."""
    response = httpx.get(server.url + path, headers={"x-api-key": key})
    assert response.status_code == 403 and response.json()["error"]["type"] == "permission_error"


def test_changes_apply_without_a_restart(server: Running, key_folder: KeyFolder) -> None:
    key = key_folder.add("bob")
    assert ask(server, **{"x-api-key": key}).status_code == 200
    key_folder.remove("bob")
    assert ask(server, **{"x-api-key": key}).status_code == 401


def test_only_administrators_may_raise_the_priority(
    server: Running, key_folder: KeyFolder, key: str
) -> None:
    url = f"{server.url}/v1/completions"
    urgent = BODY | {"priority": -1}
    response = httpx.post(url, json=urgent, headers={"x-api-key": key}, timeout=60)
    assert response.status_code == 403 and response.json()["error"]["param"] == "priority"
    later = httpx.post(url, json=BODY | {"priority": 1}, headers={"x-api-key": key}, timeout=60)
    assert later.status_code == 200
    admin = {"x-api-key": key_folder.add("chief", admin=True)}
    assert httpx.post(url, json=urgent, headers=admin, timeout=60).status_code == 200


# Salts


def test_salts_are_separate_per_tenant_and_stable(folder: KeyFolder) -> None:
    keys = {
        "alice": folder.add("alice"),
        "team": folder.add("team"),
        "bob": folder.add("bob", group="team", weight=2),
        "carl": folder.add("carl", group="team", weight=3),
    }
    options = ServerOptions(keys_folder=str(folder.folder))
    tenants, later = open_tenants(options), open_tenants(options)
    owners = {name: tenants.of({b"x-api-key": key.encode()}) for name, key in keys.items()}
    assert owners["bob"] == owners["carl"] and owners["bob"].weight == 5
    salts = {
        tenants.salt(owners[name], requested)
        for name in ("alice", "team", "bob")
        for requested in (None, "x", "team", "key", owners["alice"].salt)
    }
    assert len(salts) == 15 and None not in salts
    for name, key in keys.items():
        again = later.of({b"x-api-key": key.encode()})
        assert again == owners[name] and later.salt(again, "x") == tenants.salt(owners[name], "x")
    secret = json.loads(folder.file.read_text())
    assert not any(salt in json.dumps(secret) for salt in salts if salt)


def test_without_keys_the_bodys_salt_is_used_unchanged() -> None:
    tenants = Tenants()
    everybody = tenants.of({})
    assert [tenants.salt(everybody, salt) for salt in (None, "x")] == [None, "x"]
    assert everybody.is_admin


# Owners of blocks


def test_administrators_see_the_owners_of_blocks_by_key_names(tmp_path: Path) -> None:
    """Regression: `/cache` showed parts of salts, which operators cannot recognize."""
    key_folder = KeyFolder(tmp_path)
    keys = {
        "alice": key_folder.add("alice"),
        "bob": key_folder.add("bob", group="team"),
        "removed": key_folder.add("removed"),
        "monitor": key_folder.add("monitor", admin=True),
    }
    options = {"api_keys": True, "keys_folder": str(tmp_path), "api_key": ["secret"]}
    with running(shallow_built_in(), **options) as server:
        assert server.llm.publish(list(range(40, 72))) == 2
        url = f"{server.url}/v1/completions"
        for key in (*keys.values(), "secret"):
            for salt in (None, "x"):
                body = BODY | {"prompt": list(range(40, 120)), "cache_salt": salt}
                answer = httpx.post(url, json=body, headers={"x-api-key": key}, timeout=60)
                assert answer.status_code == 200
        tenants = server.service.tenants
        owners = [tenants.of({b"x-api-key": key.encode()}) for key in (*keys.values(), "secret")]
        salts = "/".join(tenants.salt(tenant, "x") or "" for tenant in owners).split("/")
        key_folder.remove("removed")
        response = httpx.get(f"{server.url}/cache", headers={"x-api-key": keys["monitor"]})
    pool = response.json()
    assert len(set(salts)) == 10 and not any(salt[:8] in response.text for salt in salts)
    names = {(owner["kind"], owner["tenant"]) for owner in pool["owners"]}
    expected = {("key", "alice"), ("group", "team"), ("key", "removed"), ("key", "monitor")}
    assert names == {*expected, ("operator", "api-key"), ("public", None)}
    assert len(pool["owners"]) == len(names), "a tenant whose requests narrow their salt is one"
    assert {(owner["kind"], owner["tenant"]) for owner in pool["prefixes"]} == names
    assert {owner["salt"] for owner in (*pool["owners"], *pool["prefixes"])} == {None}
