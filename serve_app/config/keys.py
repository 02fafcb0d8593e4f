"""API keys: from files, which may change, or the environment; kept as digests, told in no message and no log.

A file has one key per line, `name:key` or the key alone; empty lines and those that begin with `#` do not
count. The variables have the same with commas. Log lines and messages show a key's name; without one, the
file and line it came from. Keys must be long and random, so a plain SHA-256 of them is enough.
"""

import hmac
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator

from serve_app.config.errors import ConfigError, Problem
from serve_app.config.errors import Key as YamlKey

API_KEYS_VARIABLE = "SLEEPSERVE_API_KEYS"
ADMIN_KEYS_VARIABLE = "SLEEPSERVE_ADMIN_KEYS"
ADMIN_KEY_VARIABLE = "SLEEPSERVE_ADMIN_KEY"  # the one that our commands send

# Characters; also what tells a key from the word EMPTY, which clients send without one.
_MIN_LENGTH = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what a bearer token is made of (RFC 6750, 2.1)
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group may read: that is how Kubernetes mounts secrets
_MAKE_ONE = "`openssl rand -hex 32` makes one"


# What our commands add where a server refuses their key, by HTTP status.
REMEDIES: Mapping[int, str] = {
    401: f"; give an admin key with {ADMIN_KEY_VARIABLE} or --api-key",
    403: f"; that of {ADMIN_KEY_VARIABLE} or --api-key is one for inference",
}


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class Access(IntEnum):
    """What a route asks for, and what a key is good for; a higher one includes the lower ones."""

    PUBLIC = 0
    INFERENCE = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, of which only the SHA-256 digest is kept."""

    name: str
    access: Access
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _KeyFile:
    """A file with keys.

    Attributes:
        setting: of `http`, which names it.
        stamp: its state just before it was read; None: there was no such file.
    """

    access: Access
    setting: str
    path: Path
    stamp: tuple[int, ...] | None

    @classmethod
    def find(cls, access: Access, setting: str, path: Path) -> Self:
        return cls(access, setting, path, _stamp(path))

    @property
    def changed(self) -> bool:
        return _stamp(self.path) != self.stamp


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of a server; without any, everything is open.

    Attributes:
        files: where some of them came from.
    """

    keys: tuple[ApiKey, ...] = ()
    files: tuple[_KeyFile, ...] = field(default=(), repr=False, compare=False)
    from_environment: tuple[ApiKey, ...] = field(default=(), repr=False, compare=False)

    def current(self) -> "KeyRing":
        """These keys, or what the files have now.

        What is guarded stays the same: a file without a key is refused.

        Raises:
            ConfigError: a file has changed, and `read_keys` would not take it.
        """
        if not any(file.changed for file in self.files):
            return self
        files = (_KeyFile.find(each.access, each.setting, each.path) for each in self.files)
        return _ring(tuple(files), self.from_environment, [])

    def guards(self, access: Access) -> bool:
        """Whether routes of that access need a key.

        Those for operators do as soon as there is any key, be it that nobody has the right one; those for
        inference only if there are keys for inference.
        """
        if access is Access.ADMIN:
            return bool(self.keys)
        return access is Access.INFERENCE and self.has(Access.INFERENCE)

    def has(self, access: Access) -> bool:
        return any(key.access is access for key in self.keys)

    def find(self, token: str) -> ApiKey | None:
        """The key that `token` is. Takes as long for one that is not there."""
        digest = _digest(token)
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def read_keys(
    api_keys_file: str | None, admin_keys_file: str | None, environ: Mapping[str, str]
) -> KeyRing:
    """The keys of both files and both variables.

    Raises:
        ConfigError: a file cannot be read, is readable by everybody, or has no key; a variable is empty; a
            key is too short, or is one for inference and for operators.
    """
    problems: list[Problem] = []
    files: list[_KeyFile] = []
    from_environment: list[ApiKey] = []
    sources = (
        (Access.INFERENCE, "api_keys_file", api_keys_file, API_KEYS_VARIABLE),
        (Access.ADMIN, "admin_keys_file", admin_keys_file, ADMIN_KEYS_VARIABLE),
    )
    for access, setting, file, variable in sources:
        if file is not None:
            files.append(_KeyFile.find(access, setting, Path(file)))
        try:
            if variable in environ:
                from_environment += _parse(environ[variable].split(","), access, f"${variable}")
        except ConfigError as error:
            problems += error.problems
    return _ring(tuple(files), tuple(from_environment), problems)


def _ring(
    files: tuple[_KeyFile, ...], from_environment: tuple[ApiKey, ...], problems: list[Problem]
) -> KeyRing:
    keys = list(from_environment)
    for file in files:
        try:
            keys += _from_file(file.path, file.access)
        except ConfigError as error:
            problems += error.inside(("http", file.setting)).problems
    admins = {key.digest: key.name for key in keys if key.access is Access.ADMIN}
    for key in keys:
        if key.access is Access.INFERENCE and key.digest in admins:
            text = f"the same key is {admins[key.digest]} for operators; give them one of their own"
            problems.append(Problem(f"{key.name}: {text}"))
    if problems:
        raise ConfigError(problems)
    return KeyRing(tuple(keys), files, from_environment)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Another one after every write, chmod or rename."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _from_file(path: Path, access: Access) -> list[ApiKey]:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError([Problem(f"{path} cannot be read: {why}")]) from None
    if mode & _OTHERS:
        told = f"{path} may be read by everybody, or changed by its group (mode {mode & 0o777:o})"
        raise ConfigError([Problem(f"{told}; chmod 600 {path}")])
    return _parse(text.splitlines(), access, str(path))


def _parse(entries: Iterable[str], access: Access, origin: str) -> list[ApiKey]:
    found: list[ApiKey] = []
    problems: list[Problem] = []
    for number, entry in enumerate(entries, 1):
        if not (entry := entry.strip()) or entry.startswith("#"):
            continue
        here = f"{origin}:{number}"
        name, colon, token = entry.rpartition(":")
        name, token = name.strip(), token.strip()
        if colon and not _NAME.fullmatch(name):
            problems.append(Problem(f"{here}: a name has letters, digits and _.@- only"))
        elif len(token) < _MIN_LENGTH or not _TOKEN.fullmatch(token):
            text = f"a key has {_MIN_LENGTH} characters or more, letters, digits and ._~+/-="
            problems.append(Problem(f"{here}: {text}; {_MAKE_ONE}"))
        else:
            found.append(ApiKey(name or here, access, _digest(token)))
    if not found and not problems:
        # Whoever meant to have keys must not get an open server.
        problems.append(Problem(f"{origin} has no key; {_MAKE_ONE}, or take the setting away"))
    if problems:
        raise ConfigError(problems)
    return found


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


# --- nothing of this in YAML ---


def _is_path(value: str) -> str:
    if _KEY_LIKE.fullmatch(value):  # which is not shown: it would stand in a log
        raise ValueError(f"looks like a key, not like the path of a file; {_REMEDY}")
    return value


# What begins as keys do; a name and a key; a long word with digits and no dot or slash.
_KEY_LIKE = re.compile(r"(sk-|Bearer ).*|[\w.@-]+:.*|(?=.*\d)[A-Za-z0-9_+=,~-]{20,}")

KeysFile = Annotated[str, AfterValidator(_is_path)]

_REMEDY = (
    "write keys into a file (chmod 600), one per line, and name it in http.api_keys_file or "
    f"http.admin_keys_file, or set {API_KEYS_VARIABLE} or {ADMIN_KEYS_VARIABLE} where Ray is started"
)


def refuse_keys(fields: object) -> object:
    """For a `model_validator`: raises ConfigError if somebody wrote keys in place of a file's name."""
    if isinstance(fields, Mapping):
        names = ("api_key", "api_keys", "admin_key", "admin_keys")
        if found := [name for name in names if name in fields]:
            raise ConfigError(Problem(f"no keys in YAML; {_REMEDY}", (name,)) for name in found)
    return fields


def variables_in(data: object, at: YamlKey = ()) -> Iterator[Problem]:
    """Our two variables anywhere in a YAML file, as in `runtime_env`."""
    pairs = (
        data.items()
        if isinstance(data, Mapping)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in pairs:
        if key in (API_KEYS_VARIABLE, ADMIN_KEYS_VARIABLE):
            yield Problem(f"no keys in YAML; {_REMEDY}", (*at, key))
        else:
            yield from variables_in(value, (*at, key))
