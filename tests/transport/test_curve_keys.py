"""Folders of keys: their contents, and the errors for invalid folders."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import rich
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from sglrl.errors import InvalidKeys, UsageError
from sglrl.transport.curve_keys import (
    add_client,
    is_key,
    make_keys,
    read_client_keys,
    read_driver_keys,
)
from sglrl.wire.processes import ActorSpec, PoolEntry, WorkerSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_keys(made)
    return made


def test_the_two_sides_of_a_folder_belong_together(folder: Path) -> None:
    driver, client = read_driver_keys(folder), read_client_keys(folder)
    assert zmq.curve_public(driver.secret.encode()).decode() == client.driver
    assert zmq.curve_public(client.secret.encode()).decode() == client.public
    assert driver.clients == {client.public}
    add_client(folder, "second")
    second = read_client_keys(folder / "second.secret")
    assert second.driver == client.driver
    assert read_driver_keys(folder).clients == {client.public, second.public}
    (folder / "trainer.public").unlink()
    assert read_driver_keys(folder).clients == {second.public}


def test_what_was_copied_to_another_host_is_enough(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for name in ("driver.public", "trainer.secret"):
        (there / name).write_text((folder / name).read_text())
        (there / name).chmod(0o600)
    assert read_client_keys(there) == read_client_keys(folder)
    assert read_client_keys(there / "trainer.secret") == read_client_keys(folder)
    with pytest.raises(InvalidKeys, match=r"driver\.secret is missing"):
        read_driver_keys(there)


def test_keys_do_not_show_their_secret(folder: Path) -> None:
    driver, client = read_driver_keys(folder), read_client_keys(folder)
    body = ActorSpec(target="m:A", code=b"", args=b"", frames=[], window=1)
    spec = WorkerSpec(
        index=0, identity=b"0", address="ipc://x", max_message_bytes=1, body=body, keys=client
    )
    entry = PoolEntry(
        address="tcp://x:1#token",
        keys=client,
        insecure=False,
        heartbeat_timeout=30.0,
        max_message_bytes=1,
    )
    assert repr(entry) == "<PoolEntry>"
    shown = io.StringIO()
    rich.print(driver, client, spec, entry, file=shown)
    assert "token" not in shown.getvalue()
    for text in (
        repr(driver),
        repr(client),
        f"{driver} {client}",
        repr(spec),
        shown.getvalue().replace("\n", ""),
    ):
        assert driver.secret not in text
        assert client.secret not in text
    assert repr(client) == f"ClientKeys(driver={client.driver!r}, public={client.public!r})"
    assert repr(driver) == f"DriverKeys(clients={driver.clients!r})"


def test_which_of_several(folder: Path) -> None:
    add_client(folder, "second")
    with pytest.raises(InvalidKeys, match=r"several .*\(second\.secret, trainer\.secret\); name"):
        read_client_keys(folder)
    for name in ("second", "trainer"):
        (folder / f"{name}.secret").unlink()
    with pytest.raises(InvalidKeys, match="holds no secret key of a client; copy NAME"):
        read_client_keys(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o640), "is open to others; chmod 600 "),
        (lambda path: path.chmod(0o604), "is open to others; chmod 600 "),
        (lambda path: path.write_text(""), "holds no key"),
        (lambda path: path.write_text(path.read_text()[:-2]), "holds no key"),
        (lambda path: path.write_text(path.read_text() + "x"), "holds no key"),
        (lambda path: path.write_text("#" * 40), "holds no key"),
        (lambda path: path.write_bytes(os.urandom(40)), "holds no key"),
        (lambda path: path.unlink(), "is missing; 'sglrl keys' makes it"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
        (lambda path: path.parent.chmod(0o777), "others can put keys into .*; chmod 700 "),
    ],
)
def test_what_is_wrong_with_a_secret(
    folder: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(folder / "driver.secret")
    with pytest.raises(InvalidKeys, match=words):
        read_driver_keys(folder)


def test_what_is_wrong_with_a_public_key(folder: Path) -> None:
    public = folder / "trainer.public"
    public.chmod(0o666)
    with pytest.raises(InvalidKeys, match=r"trainer.public can be changed by others; chmod 644"):
        read_driver_keys(folder)
    public.chmod(0o644)
    public.write_text("nothing")
    with pytest.raises(InvalidKeys, match=r"trainer.public holds no key"):
        read_driver_keys(folder)
    (folder / "driver.public").unlink()
    with pytest.raises(InvalidKeys, match=r"driver.public is missing"):
        read_client_keys(folder)


def test_a_folder_that_others_can_get_into_gets_no_keys(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidKeys, match="is open to others; name a new folder, or chmod 700"):
        make_keys(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "driver", "..", "a/b", "-x", ".x", "a b", "ä"])
def test_no_name_for_a_client(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a client's name"):
        add_client(folder, name)


def test_a_secret_is_never_there_for_others_to_read(folder: Path) -> None:
    """The same holds when the key replaces a file that others could read."""
    (folder / "trainer.secret").chmod(0o644)
    make_keys(folder, force=True)
    assert (folder / "trainer.secret").stat().st_mode & 0o777 == 0o600
    before = os.umask(0)
    try:
        add_client(folder, "second")
    finally:
        os.umask(before)
    assert (folder / "second.secret").stat().st_mode & 0o777 == 0o600


@given(key=st.binary(min_size=32, max_size=32))
def test_every_key_is_one(key: bytes) -> None:
    assert is_key(z85.encode(key).decode())


@given(text=st.text(min_size=40, max_size=40) | st.text(alphabet="0#%@$", max_size=41))
def test_what_zeromq_would_not_take_is_none(text: str) -> None:
    if is_key(text):
        assert z85.encode(z85.decode(text)).decode() == text
    assert not is_key("#" * 40)


def test_what_is_no_secret_of_a_client(folder: Path) -> None:
    for name in ("trainer.public", "driver.secret", "driver.public"):
        with pytest.raises(InvalidKeys, match="not a client's secret key"):
            read_client_keys(folder / name)


@pytest.mark.parametrize("read", [read_driver_keys, read_client_keys, make_keys])
def test_the_home_of_nobody(read: Callable[[str], object]) -> None:
    with pytest.raises(UsageError, match="~nobody-of-that-name/keys"):
        read("~nobody-of-that-name/keys")
    with pytest.raises(UsageError, match="~nobody-of-that-name/keys"):
        add_client("~nobody-of-that-name/keys", "second")
