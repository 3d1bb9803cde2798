"""`headstart keys`: the API keys of a server; keys of one group share a cache."""

from __future__ import annotations

import time
from functools import partial

import click

from headstart.cli.streams import note
from headstart.server.keys import KeyFolder

_folder = partial(
    click.option,
    "--keys-folder",
    "folder",
    envvar="HEADSTART_KEYS_FOLDER",
    show_envvar=True,
    help="Folder of the keys; default: below your data folder.",
)


@click.group()
def keys() -> None:
    """API keys of a server: add, list, remove. A running server knows of changes at once."""


@keys.command()
@click.argument("name")
@click.option("--group", help="Keys of one group are one tenant, and share what is cached.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="Share when it is full.")
@click.option("--admin", is_flag=True, help="It may also manage the server.")
@_folder()
def add(name: str, group: str | None, weight: float, admin: bool, folder: str | None) -> None:
    """Make a key. It is shown once: only its hash is kept."""
    keys = KeyFolder(folder)
    key = keys.add(name, group=group, weight=weight, admin=admin)
    note(f"{name} may ask with this key; it is shown once, and {keys.file} has only its hash:")
    click.echo(key)


@keys.command(name="list")
@_folder()
def list_keys(folder: str | None) -> None:
    """List the keys."""
    rows = KeyFolder(folder).read()
    if not rows:
        note("there are no keys; headstart keys add NAME makes one")
        return
    width = max(len(key.name) for key in rows)
    groups = max(len(key.group or "-") for key in rows)
    for key in rows:
        made = time.strftime("%Y-%m-%d", time.localtime(key.created))
        line = f"{key.name:<{width}}  {key.group or '-':<{groups}}  weight {key.weight:g}  {made}"
        click.echo(f"{line}  admin" if key.admin else line)


@keys.command()
@click.argument("name")
@_folder()
def rm(name: str, folder: str | None) -> None:
    """Remove a key: a running server refuses it from now on."""
    KeyFolder(folder).remove(name)
    note(f"{name} is removed")
