"""What an audit has found so far, in one SQLite file beside its report.

Memory stays the same for any number of files, repeated states are found by an index, and an
interrupted audit continues: a file counts as read once its transaction is there.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from truetap.harness.errors import CouldNotRun, UsageError
from truetap.pipeline.foreign.producers.sample import Found, Problem

_TABLES = """
BEGIN;
CREATE TABLE about (what TEXT);
CREATE TABLE files (file TEXT PRIMARY KEY, size INT, mtime INT) WITHOUT ROWID;
CREATE TABLE samples (name TEXT PRIMARY KEY, file TEXT, rows INT, tokens INT, slots INT,
    dtype TEXT, width INT, masked INT, mask_judged INT) WITHOUT ROWID;
CREATE INDEX samples_of ON samples (file);
CREATE TABLE problems (name TEXT, file TEXT, code TEXT, text TEXT);
CREATE INDEX problems_of ON problems (name);
CREATE TABLE prefixes (name TEXT, rows INT, states INT, tokens INT,
    PRIMARY KEY (name, rows)) WITHOUT ROWID;
CREATE INDEX prefixes_by_states ON prefixes (states, tokens);
CREATE TABLE judged (name TEXT PRIMARY KEY, reading TEXT) WITHOUT ROWID;
COMMIT;
"""
_COMPARABLE = (
    "SELECT name, file, tokens FROM samples s WHERE rows = tokens AND rows > 1 AND tokens <= ?"
    " AND NOT EXISTS (SELECT 1 FROM problems p WHERE p.name = s.name"
    " AND p.code IN ('nan', 'zeros', 'width', 'vocabulary', 'keys'))"
)
"""What is already known to be wrong in a way that shows in every value needs no reference."""
COMMIT_EVERY = 200
"""Files read between two commits: what an interruption can cost."""


@dataclass(frozen=True)
class Drawn:
    """A sample that is to be compared by value."""

    name: str
    file: str
    tokens: int


@dataclass(frozen=True)
class Examined:
    """What was seen of one sample without a reference."""

    name: str
    rows: int
    tokens: int
    slots: int
    dtype: str
    width: int
    masked: int | None
    mask_judged: bool
    problems: list[Problem]
    prefixes: list[tuple[int, int, int]]
    """Rows, digest of these first rows' states, digest of their token ids."""


class AuditState:
    """An open state file. ``about`` says what is audited; a file about anything else is refused."""

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        wanted = json.dumps(about, sort_keys=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._require_own()
            if not resume:
                for old in (path, path.with_name(path.name + "-journal")):
                    old.unlink(missing_ok=True)
            self._db = sqlite3.connect(path)
            found = self._about()
            if found is None:
                self._db.executescript(_TABLES)
                self._db.execute("INSERT INTO about VALUES (?)", (wanted,))
                self._db.commit()
        except (sqlite3.DatabaseError, OSError) as error:
            raise CouldNotRun(
                f"the state of the audit cannot be kept in {path}: {error}",
                remedy="name another file with --state; it is overwritten only if it is an audit's",
            ) from error
        if found not in (None, wanted):
            raise UsageError(
                f"{path} is the state of another audit: another folder, producer or verifier",
                remedy="run without --resume to begin anew, or name another file with --state",
            )
        self._waiting = 0

    def _require_own(self) -> None:
        """Refuse a file that is no audit's: it would be deleted, or written into."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        with closing(sqlite3.connect(self.path)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
                raise sqlite3.DatabaseError("it is something else's")

    def _about(self) -> str | None:
        try:
            row = self._db.execute("SELECT what FROM about").fetchone()
        except sqlite3.OperationalError:  # a new file
            return None
        return str(row[0]) if row else None

    def close(self) -> None:
        """Commit and close."""
        self._db.commit()
        self._db.close()

    def has(self, found: Found) -> bool:
        """Return whether a file was read, and has not changed since."""
        row = self._db.execute(
            "SELECT size, mtime FROM files WHERE file = ?", (found.name,)
        ).fetchone()
        return bool(row == (found.size, found.mtime_ns))

    def record(
        self, found: Found, examined: Sequence[Examined], problem: Problem | None = None
    ) -> None:
        """Keep what was seen of one file, in place of what was known of it."""
        db, file = self._db, found.name
        for (name,) in db.execute("SELECT name FROM samples WHERE file = ?", (file,)).fetchall():
            db.execute("DELETE FROM prefixes WHERE name = ?", (name,))
            db.execute("DELETE FROM judged WHERE name = ?", (name,))
            db.execute("DELETE FROM problems WHERE name = ?", (name,))
            db.execute("DELETE FROM samples WHERE name = ?", (name,))
        db.execute("DELETE FROM problems WHERE name = ?", (file,))
        for one in examined:
            _insert(db, file, one)
        if problem is not None:
            row = (file, file, problem.code, problem.text)
            db.execute("INSERT INTO problems VALUES (?, ?, ?, ?)", row)
        db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (file, found.size, found.mtime_ns)
        )
        self._waiting += 1
        if self._waiting >= COMMIT_EVERY:
            self.commit()

    def commit(self) -> None:
        """Make what was recorded last."""
        self._db.commit()
        self._waiting = 0

    def require_present(self, seen: int) -> None:
        """Refuse to judge files that have gone since an earlier, interrupted run."""
        (known,) = self._db.execute("SELECT COUNT(*) FROM files").fetchone()
        if known != seen:
            raise UsageError(
                f"{known - seen} files that were audited before are not there any more",
                remedy="run without --resume",
            )

    def totals(self) -> dict[str, int]:
        """Return sums over all samples."""
        row = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(rows), 0), COALESCE(SUM(tokens), 0),"
            " COALESCE(SUM(masked), 0), COALESCE(SUM(masked IS NOT NULL), 0),"
            " COALESCE(SUM(mask_judged), 0) FROM samples"
        ).fetchone()
        names = ("samples", "rows", "tokens", "masked_tokens", "with_mask", "masks_judged")
        return dict(zip(names, map(int, row), strict=True))

    def shapes(self) -> list[tuple[int, int, str, int]]:
        """Return (slots, width, dtype, samples), the most frequent first."""
        rows = self._db.execute(
            "SELECT slots, width, dtype, COUNT(*) FROM samples GROUP BY slots, width, dtype"
            " ORDER BY COUNT(*) DESC, slots, width, dtype"
        )
        return [(int(a), int(b), str(c), int(d)) for a, b, c, d in rows]

    def of_other_shape(self, slots: int, width: int, dtype: str) -> Iterator[tuple[str, Problem]]:
        """Yield the samples that are not of the usual shape."""
        for name, *shape in self._db.execute(
            "SELECT name, slots, width, dtype FROM samples"
            " WHERE NOT (slots = ? AND width = ? AND dtype = ?) ORDER BY name",
            (slots, width, dtype),
        ):
            text = (
                f"{shape[0]} slots of width {shape[1]} in {shape[2]}, where most files have "
                f"{slots} of {width} in {dtype}"
            )
            yield name, Problem("shape", text)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Yield every file's problems, by name."""
        rows = self._db.execute("SELECT name, code, text FROM problems ORDER BY name, code")
        for name, code, text in rows:
            yield name, Problem(code, text)

    def repeated(self) -> Iterator[tuple[str, str, int]]:
        """Yield (sample, another, rows): as many first rows equal, though their tokens differ."""
        rows = self._db.execute(
            "SELECT p.name, MIN(q.name), MAX(p.rows) FROM prefixes p JOIN"
            " (SELECT states FROM prefixes GROUP BY states HAVING COUNT(DISTINCT tokens) > 1) r"
            " ON p.states = r.states JOIN prefixes q"
            " ON q.states = p.states AND q.tokens <> p.tokens GROUP BY p.name ORDER BY p.name"
        )
        for name, other, count in rows:
            yield name, other, int(count)

    def draw(self, seed: int, count: int | None, most_tokens: int) -> list[Drawn]:
        """Return a random choice among the samples that can be compared by value.

        The same seed draws the same samples, in whatever order the folder was read.
        """

        def rank(name: str) -> int:
            return _signed(f"{seed}\0{name}".encode())

        self._db.create_function("rank_of", 1, rank, deterministic=True)
        rows = self._db.execute(
            f"{_COMPARABLE} ORDER BY rank_of(name) LIMIT ?",
            (most_tokens, -1 if count is None else count),
        )
        return [Drawn(*row) for row in rows.fetchall()]

    def drawn(self, name: str, most_tokens: int) -> Drawn | None:
        """Return one sample by name, if it can be compared by value."""
        row = self._db.execute(f"{_COMPARABLE} AND name = ?", (most_tokens, name)).fetchone()
        return None if row is None else Drawn(*row)

    def is_judged(self, name: str) -> bool:
        """Return whether a sample was compared by value."""
        row = self._db.execute("SELECT 1 FROM judged WHERE name = ?", (name,)).fetchone()
        return row is not None

    def keep_reading(self, name: str, reading: Mapping[str, Any]) -> None:
        """Keep what a sample's slots hold."""
        row = (name, json.dumps(reading))
        self._db.execute("INSERT OR REPLACE INTO judged VALUES (?, ?)", row)

    def readings(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return what the slots of samples hold, of those that were compared."""
        found = {}
        for name in names:
            row = self._db.execute("SELECT reading FROM judged WHERE name = ?", (name,)).fetchone()
            if row is not None:
                found[name] = json.loads(row[0])
        return found


def _insert(db: sqlite3.Connection, file: str, one: Examined) -> None:
    db.execute(
        "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(one.name, file, one.rows, one.tokens, one.slots, one.dtype, one.width),
            *(one.masked, one.mask_judged),
        ),
    )
    db.executemany(
        "INSERT INTO problems VALUES (?, ?, ?, ?)",
        [(one.name, file, problem.code, problem.text) for problem in one.problems],
    )
    db.executemany(
        "INSERT OR REPLACE INTO prefixes VALUES (?, ?, ?, ?)",
        [(one.name, *prefix) for prefix in one.prefixes],
    )


def _signed(data: bytes) -> int:
    """Return 64 bits of a digest, as SQLite keeps integers."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
