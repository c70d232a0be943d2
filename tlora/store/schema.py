"""The tables of the SQLite store, and how an older file is brought up to them.

Turns are the truth: events, progress and decisions, as the loop gave them. `jobs` is what follows
from them, kept beside them for whoever asks how a job stands. A sweep has turns of its own, in
`study`, each of one of its tasks where it has several; `requests` is what people ask of a run from
another process.
"""

import sqlite3

from tlora.core.errors import SpecError

MIGRATIONS = (
    """
    CREATE TABLE sessions (
        session INTEGER PRIMARY KEY,
        about TEXT NOT NULL
    );
    CREATE TABLE turns (
        session INTEGER NOT NULL REFERENCES sessions,
        number INTEGER NOT NULL,
        time REAL NOT NULL,
        progress TEXT NOT NULL,
        decided_s REAL NOT NULL,
        PRIMARY KEY (session, number)
    ) WITHOUT ROWID;
    CREATE TABLE events (
        session INTEGER NOT NULL,
        turn INTEGER NOT NULL,
        place INTEGER NOT NULL,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        job TEXT,
        body TEXT NOT NULL,
        PRIMARY KEY (session, turn, place)
    ) WITHOUT ROWID;
    CREATE INDEX events_of_a_job ON events (job);
    CREATE TABLE decisions (
        session INTEGER NOT NULL,
        turn INTEGER NOT NULL,
        place INTEGER NOT NULL,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        job TEXT,
        group_name TEXT,
        sentence TEXT NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (session, turn, place)
    ) WITHOUT ROWID;
    CREATE INDEX decisions_on_a_job ON decisions (job);
    CREATE TABLE jobs (
        name TEXT PRIMARY KEY,
        session INTEGER NOT NULL,
        status TEXT NOT NULL,
        group_name TEXT,
        arrived_s REAL NOT NULL,
        ended_s REAL,
        steps REAL NOT NULL,
        reason TEXT,
        request TEXT NOT NULL
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE study (
        number INTEGER PRIMARY KEY,
        session INTEGER NOT NULL REFERENCES sessions,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        trial TEXT,
        event TEXT NOT NULL,
        actions TEXT NOT NULL
    );
    CREATE TABLE requests (
        number INTEGER PRIMARY KEY,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        trial TEXT NOT NULL,
        body TEXT NOT NULL,
        answer TEXT
    );
    """,
    """
    ALTER TABLE study ADD COLUMN task TEXT;
    """,
)
"""Each takes a file from the version of its place to the next."""

VERSION = len(MIGRATIONS)


def bring_up(connection: sqlite3.Connection, name: str) -> None:
    """To this version, in one transaction. Raises SpecError for a file of a later one."""
    if version(connection) == VERSION:
        return
    with connection:
        # Another process may have made the file meanwhile: whoever writes looks again.
        connection.execute("BEGIN IMMEDIATE")
        _migrate(connection, name)


def _migrate(connection: sqlite3.Connection, name: str) -> None:
    found = version(connection)
    if found > VERSION:
        raise SpecError(
            f"{name} was written by a later tlora (version {found}, this one knows {VERSION}); "
            "use that one, or name another directory"
        )
    for script in MIGRATIONS[found:]:
        # `executescript` would end the transaction first. No statement has a semicolon inside.
        for statement in script.split(";"):
            connection.execute(statement)
    # It is part of the file's header and changes with the transaction.
    connection.execute(f"PRAGMA user_version = {VERSION}")


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
