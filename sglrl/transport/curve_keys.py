"""Folders of CURVE keys, which determine the clients that may connect to a driver over a network.

A key is one line of 40 characters (Z85) in a file. Files come in pairs::

    driver.secret, driver.public    the pair of the process that calls ``launch``
    NAME.secret, NAME.public        the pair of a process that connects to the driver

A driver needs ``driver.secret`` and the ``.public`` files of the clients that it admits. A client
needs ``driver.public`` and its own ``.secret`` file. Only the owner may read secret files (0600).
Other users must not be able to change a folder, because they could then admit their own keys.
"""

from __future__ import annotations

import os
import re
import stat
from os import PathLike
from pathlib import Path
from typing import Any, Final

from ..errors import InvalidKeys, UsageError
from ..wire.processes import ClientKeys
from .base import DriverKeys

DRIVER: Final = "driver"
NODE: Final = "node"
"""Name of the key pair that all listening nodes have."""
FIRST_CLIENT: Final = "trainer"
"""Name of the client whose pair a new folder contains, together with the driver's pair."""

_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_VALUE: Final = {character: value for value, character in enumerate(_Z85)}


def make_keys(folder: str | PathLike[str], *, force: bool = False) -> list[Path]:
    """Create a folder (0700) with the driver's pair and one client's pair. Return the files.

    Raises:
        UsageError: the folder contains keys already (``force`` replaces them), or cannot be
            written.
        InvalidKeys: the folder exists and other users can access it.
    """
    path = _path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}") from None
    if mode & 0o077:
        raise InvalidKeys(f"{path} is open to others; name a new folder, or chmod 700 {path}")
    return _write_pairs(path, [DRIVER, FIRST_CLIENT], force)


def add_client(folder: str | PathLike[str], name: str, *, force: bool = False) -> list[Path]:
    """Add a pair for another client to a driver's folder. Return the files.

    Raises:
        UsageError: the name is taken (``force`` replaces the keys) or is not valid.
        InvalidKeys: the folder is not a driver's folder.
    """
    path = _path(folder)
    if name == DRIVER or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise UsageError(f"{name!r} cannot be a client's name: use letters, digits, '_', '-', '.'")
    read_driver_keys(path)
    return _write_pairs(path, [name], force)


def read_driver_keys(folder: str | PathLike[str]) -> DriverKeys:
    """Return the keys in a driver's folder.

    Raises:
        InvalidKeys: the folder is not a driver's folder, is incomplete, or other users can read
            its secret key or change its files.
    """
    path = _checked_folder(folder)
    secret = _read_key(path / f"{DRIVER}.secret")
    public = [file for file in sorted(path.glob("*.public")) if file.stem != DRIVER]
    return DriverKeys(secret=secret, clients=frozenset(map(_read_key, public)))


def read_client_keys(where: str | PathLike[str]) -> ClientKeys:
    """Return the keys of a client.

    Args:
        where: a folder with exactly one client's secret key, or the file with the key.

    Raises:
        InvalidKeys: ``where`` is neither, or other users can read the secret key or change the
            files.
    """
    from .zmq import public_key

    path = _path(where)
    if path.suffix == ".secret" and not path.exists():
        raise InvalidKeys(
            f"there is no file {path}; copy it from the folder with the driver's keys"
        )
    folder = _checked_folder(path.parent if path.is_file() else path)
    if folder == path:
        own = [file for file in sorted(path.glob("*.secret")) if file.stem != DRIVER]
        if len(own) != 1:
            names = ", ".join(file.name for file in own)
            raise InvalidKeys(
                f"{path} holds several secret keys of clients ({names}); name the file, as in "
                f"keys={str(own[0])!r}"
                if own
                else f"{path} holds no secret key of a client; copy NAME.secret and "
                f"{DRIVER}.public there from the folder that 'sglrl keys' made"
            )
        (path,) = own
    elif path.suffix == ".public" or path.stem == DRIVER:
        raise InvalidKeys(f"{path} is not a client's secret key; those are NAME.secret")
    secret = _read_key(path)
    return ClientKeys(
        driver=_read_key(folder / f"{DRIVER}.public"), public=public_key(secret), secret=secret
    )


def read_keys_to_node(folder: str | PathLike[str]) -> ClientKeys:
    """Return the keys with which a driver connects to nodes that listen.

    These nodes have the pair "node" of the driver's folder.

    Raises:
        InvalidKeys: the folder is not a driver's folder, or has no pair "node".
    """
    from .zmq import public_key

    path = _checked_folder(folder)
    secret = _read_key(path / f"{DRIVER}.secret")
    node = path / f"{NODE}.public"
    if not node.exists():
        raise InvalidKeys(f"{node} is missing; 'sglrl keys {path} --add {NODE}' makes it")
    return ClientKeys(driver=_read_key(node), public=public_key(secret), secret=secret)


def keys_of_listening_node(keys: ClientKeys) -> DriverKeys:
    """Return the keys with which a node listens. With these, only its driver may connect."""
    return DriverKeys(secret=keys.secret, clients=frozenset({keys.driver}))


def is_key(text: str) -> bool:
    """Return whether ``text`` is 32 bytes in Z85 (https://rfc.zeromq.org/spec/32)."""
    if len(text) != 40 or not _VALUE.keys() >= set(text):
        return False
    for at in range(0, 40, 5):
        value = 0
        for character in text[at : at + 5]:
            value = value * 85 + _VALUE[character]
        if value >= 1 << 32:
            return False
    return True


def _path(name: str | PathLike[str]) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{name}: {error}") from None


def _checked_folder(folder: str | PathLike[str]) -> Path:
    path = _path(folder)
    if not path.is_dir():
        raise InvalidKeys(f"there is no folder {path}; 'sglrl keys {path}' makes one with keys")
    if path.stat().st_mode & 0o022:
        raise InvalidKeys(f"others can put keys into {path}; chmod 700 {path}")
    return path


def _read_key(path: Path) -> str:
    secret = path.suffix == ".secret"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1024).decode(errors="replace").strip()
    except FileNotFoundError:
        if path.name == "driver.public":
            where = "copy it from the folder in which 'sglrl keys' has made it"
        else:
            where = "'sglrl keys' makes it"
        raise InvalidKeys(f"{path} is missing; {where}") from None
    except OSError as error:
        raise InvalidKeys(f"{path} cannot be read: {error.strerror}") from None
    if secret and mode & 0o077:
        raise InvalidKeys(f"{path} holds a secret and is open to others; chmod 600 {path}")
    if mode & 0o022:
        raise InvalidKeys(f"{path} can be changed by others; chmod 644 {path}")
    if not is_key(text):
        raise InvalidKeys(
            f"{path} holds no key, which is one line of 40 characters; copy it again, or make new "
            "keys with 'sglrl keys'"
        )
    return text


def _write_pairs(folder: Path, names: list[str], force: bool) -> list[Path]:
    from .zmq import key_pair

    files: dict[Path, Any] = {}
    for name in names:
        public, secret = key_pair()
        files[folder / f"{name}.secret"] = secret
        files[folder / f"{name}.public"] = public
    there = [path.name for path in files if path.exists()]
    if there and not force:
        raise UsageError(f"{folder} holds {', '.join(there)} already; --force replaces them")
    for path, key in files.items():
        new = path.with_suffix(f"{path.suffix}.new")
        mode = 0o600 if path.suffix == ".secret" else 0o644
        try:
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, mode)
                file.write(f"{key}\n")
            new.rename(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    return list(files)
