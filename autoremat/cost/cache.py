"""What was measured on this machine before, in an SQLite file that processes share.

Enters: texts that identify a call or a device. Leaves: the figures stored for them. Guarantees:
many processes may read and write at once, the first figure stored for a key stays; a damaged file
is thrown away and begun anew; a place that cannot be written is replaced by memory, which lasts as
long as the process, with one warning. Nothing raises. Torch is not imported.
"""

from __future__ import annotations

import functools
import sqlite3
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import platformdirs

from autoremat.call_stack import users_level

_FORMAT = 4  # 2 had times that were not compared with each other, 3 a table for each kind
_TABLE = """
CREATE TABLE IF NOT EXISTS figures (
    key TEXT PRIMARY KEY, first NOT NULL, second NOT NULL, third NOT NULL
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What running one call showed.

    Attributes:
        time_us: median time of one warm run, in the quietest of a few rounds.
        peak_nbytes: bytes allocated above the inputs at the highest point, outputs included.
        kept_nbytes: bytes that the outputs hold at the end.
    """

    time_us: float
    peak_nbytes: int
    kept_nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """The fastest a device was seen to go.

    Attributes:
        copy_gbps: bytes read plus written per second by a large copy, in 10^9.
        matmul_gflops: floating-point operations per second of a large product, in 10^9.
        launch_us: time of the smallest operator.
    """

    copy_gbps: float
    matmul_gflops: float
    launch_us: float


Figures = TypeVar("Figures", Measured, DeviceCeilings)


def default_cache_path() -> Path:
    """The file used when the caller names none."""
    return platformdirs.user_cache_path("autoremat", appauthor=False) / "costs.sqlite3"


class CostCache:
    """An open cache; use it as a context manager."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Take over an open connection whose tables exist; see `open`."""
        self._connection = connection

    @classmethod
    def open(cls, path: Path | None = None) -> CostCache:
        """Open the file, create it, replace it if damaged, or fall back to memory."""
        path = Path(path) if path is not None else default_cache_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return cls(_connect(path))
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                _remove(path)
                return cls(_connect(path))
        except (OSError, sqlite3.Error) as error:
            _warn_once(path, error)
            return cls(_in_memory())

    def __enter__(self) -> CostCache:
        """The cache itself."""
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

    def read(self, keys: Iterable[str], kind: type[Figures]) -> dict[str, Figures]:
        """The figures stored for those of the keys that have any, all of one kind."""
        found = {key: self._row(key) for key in keys}
        return {key: kind(*row) for key, row in found.items() if row is not None}

    def write(self, figures: Mapping[str, Measured | DeviceCeilings]) -> None:
        """Store figures; those that another process stored meanwhile stay."""
        rows = [(key, *astuple(found)) for key, found in figures.items()]
        with suppress(sqlite3.Error), self._connection:
            self._connection.executemany("INSERT OR IGNORE INTO figures VALUES (?, ?, ?, ?)", rows)

    def _row(self, key: str) -> tuple | None:
        query = "SELECT first, second, third FROM figures WHERE key = ?"
        try:
            return self._connection.execute(query, (key,)).fetchone()
        except sqlite3.Error:
            # A page damaged after opening costs one measurement, not the user's run.
            return None


_MEMORY = "file:autoremat_costs?mode=memory&cache=shared"


@functools.cache
def _keeper() -> sqlite3.Connection:
    """What keeps the figures in memory while nobody else has them open."""
    return _connect(_MEMORY)


def _in_memory() -> sqlite3.Connection:
    _keeper()
    return _connect(_MEMORY)


def _connect(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=20.0, uri=path == _MEMORY)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _FORMAT):
            raise sqlite3.DatabaseError(f"format {version} of the cost cache is not {_FORMAT}")
        connection.executescript(_TABLE)
        connection.execute(f"PRAGMA user_version = {_FORMAT}")
        connection.commit()
        # Fails now, not at the first result, where the file or its directory is read-only.
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


_warned = False


def _warn_once(path: Path, error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"autoremat: operator costs cannot be kept in {path} ({error}); this process "
            "measures them anew. Give a writable path to keep them.",
            stacklevel=users_level(),
        )
