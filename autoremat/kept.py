"""What was found on this machine before, in SQLite files that processes share.

Enters: dataclasses of numbers, texts and lists of them, by a text each. Leaves: those stored for
such texts. Guarantees: many processes may read and write at once, the first that is stored for a
key stays unless a writer says otherwise; a damaged file is thrown away and begun anew; a place that
cannot be written is replaced by memory, which lasts as long as the process, with one warning.
Nothing raises. Torch is not imported.
"""

from __future__ import annotations

import functools
import json
import sqlite3
import warnings
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import platformdirs

from autoremat.call_stack import users_level

_TABLE = (
    "CREATE TABLE IF NOT EXISTS found (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
)

Found = TypeVar("Found")
"""A dataclass of numbers, texts, None and lists of them."""


class Kept:
    """An open file of what was found; use it as a context manager.

    Attributes:
        FILE: its name.
        FORMAT: a file of another one is begun anew.
        WHAT: what is in it, for people.
    """

    FILE: ClassVar[str]
    FORMAT: ClassVar[int]
    WHAT: ClassVar[str]

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Take over an open connection whose table exists; see `open`."""
        self._connection = connection

    @classmethod
    def default_path(cls) -> Path:
        """The file used when the caller names none."""
        return platformdirs.user_cache_path("autoremat", appauthor=False) / cls.FILE

    @classmethod
    def open(cls, path: Path | None = None) -> Self:
        """Open the file, create it, replace it if damaged, or fall back to memory."""
        path = Path(path) if path is not None else cls.default_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return cls(cls._connect(path))
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                cls.remove(path)
                return cls(cls._connect(path))
        except (OSError, sqlite3.Error) as error:
            _warn_once(path, error)
            return cls(cls._in_memory())

    @classmethod
    def remove(cls, path: Path | None = None) -> None:
        """Forget everything.

        Raises:
            OSError: if the file is there and cannot be removed.
        """
        path = path if path is not None else cls.default_path()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def read(self, keys: Iterable[str], kind: type[Found]) -> dict[str, Found]:
        """What is stored for those of the keys that have anything, all of one kind."""
        found = {key: _parsed(text, kind) for key in keys if (text := self._value(key))}
        return {key: one for key, one in found.items() if one is not None}

    def write(self, found: Mapping[str, Any], *, replaces: bool = False) -> None:
        """Store these; those that another process stored meanwhile stay, unless told otherwise."""
        rows = [(key, json.dumps(astuple(one))) for key, one in found.items()]
        instead = "REPLACE" if replaces else "IGNORE"
        with suppress(sqlite3.Error), self._connection:
            self._connection.executemany(f"INSERT OR {instead} INTO found VALUES (?, ?)", rows)

    def merge(self, path: Path) -> int:
        """Add what another such file has and this one has not; how many that were.

        Raises:
            ValueError: if it is no such file, or one of another format.
            OSError: if it cannot be read.
        """
        path.open("rb").close()  # SQLite does not say why it cannot
        before = self.count()
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as other:
                (version,) = other.execute("PRAGMA user_version").fetchone()
                if version != self.FORMAT:
                    raise ValueError(
                        f"{path} has format {version}, and this autoremat reads {self.FORMAT}: "
                        "export it again with the same version."
                    )
                rows = other.execute("SELECT key, value FROM found").fetchall()
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} is no file of this cache: {error}.") from error
        with self._connection:
            self._connection.executemany("INSERT OR IGNORE INTO found VALUES (?, ?)", rows)
        return self.count() - before

    def copy(self, path: Path) -> None:
        """Write everything to another such file, which must not be there.

        Raises:
            OSError: if it cannot be written.
        """
        path.open("xb").close()
        with closing(sqlite3.connect(path)) as other:
            self._connection.backup(other)

    def count(self, *, without: str = "") -> int:
        """How many keys there are; without those that begin so, if that is given."""
        query = "SELECT COUNT(*) FROM found WHERE ? = '' OR substr(key, 1, ?) <> ?"
        (count,) = self._connection.execute(query, (without, len(without), without)).fetchone()
        return int(count)

    def _value(self, key: str) -> str | None:
        try:
            row = self._connection.execute("SELECT value FROM found WHERE key = ?", (key,))
            found = row.fetchone()
        except sqlite3.Error:
            # A page damaged after opening costs one search, not the user's run.
            return None
        return None if found is None else found[0]

    @classmethod
    def _in_memory(cls) -> sqlite3.Connection:
        cls._keeper()
        return cls._connect(cls._memory())

    @classmethod
    @functools.cache
    def _keeper(cls) -> sqlite3.Connection:
        """What keeps things in memory while nobody else has them open."""
        return cls._connect(cls._memory())

    @classmethod
    def _memory(cls) -> str:
        return f"file:autoremat_{cls.FILE}?mode=memory&cache=shared"

    @classmethod
    def _connect(cls, path: Path | str) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=20.0, uri=path == cls._memory())
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, cls.FORMAT):
                raise sqlite3.DatabaseError(f"format {version} of {cls.FILE} is not {cls.FORMAT}")
            if not version:  # what is there by then stays, and costs a write each time
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA user_version = {cls.FORMAT}")
                connection.commit()
            # Fails now, not at the first result, where the file or its directory is read-only.
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _parsed(text: str, kind: type[Found]) -> Found | None:
    """A stored value; None if something else was stored there."""
    try:
        fields = json.loads(text)
        return kind(*fields) if isinstance(fields, list) else None
    except (ValueError, TypeError, RecursionError):
        return None


_warned = False


def _warn_once(path: Path, error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"autoremat: what was found cannot be kept in {path.parent} ({error}); this process "
            "measures and plans anew. Give a writable place by XDG_CACHE_HOME.",
            stacklevel=users_level(),
        )
