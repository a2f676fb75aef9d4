//! The tables of the engine. They are its own: programs use the engine, people may look.
//!
//! Keys and causes come from outside and are kept as bytes (UTF-8): a text of Postgres refuses NUL.
//! Times are microseconds since 1970 by the database's clock: `to_timestamp(t / 1e6)` shows one.
//!
//! What may be held up by a snapshot that somebody keeps open is written so that nothing dead lies
//! in the way of the living. The log and the groups' journals only grow at their ends and are read
//! from there; where they are cut, at the other end, nobody reads. Dedupe identities go by
//! truncating the older of two tables. No row is updated on the way of an append, a claim or an
//! acknowledgement.

use crate::schema::{Component, Migration};

/// The engine's tables. Those of the fence come first: they bring the clock.
pub(super) const COMPONENT: Component = Component {
    name: "store",
    migrations: &[Migration { version: 1, name: "store", sqlite: "", postgres: V1 }],
};

const V1: &str = "
-- One row: which store this is.
CREATE TABLE carrick_store (
    one           boolean PRIMARY KEY DEFAULT true CHECK (one),
    epoch         bigint  NOT NULL,
    dedupe_window bigint  NOT NULL
);
INSERT INTO carrick_store (epoch, dedupe_window)
VALUES (carrick_now(), 0);

-- A row changes when its stream is trimmed, and at no other time.
CREATE TABLE carrick_stream (
    id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name  text   COLLATE \"C\" NOT NULL UNIQUE,
    first bigint NOT NULL DEFAULT 1
);

CREATE TABLE carrick_log (
    stream_id bigint NOT NULL,
    seq       bigint NOT NULL,
    stored_at bigint NOT NULL,
    due       bigint,
    expires   bigint,
    key       bytea,
    body      bytea  NOT NULL,
    PRIMARY KEY (stream_id, seq)
);
-- Insertions are most of what happens to this table; without the scale factor's wait they are
-- frozen and put into the visibility map in small steps.
ALTER TABLE carrick_log SET (autovacuum_vacuum_insert_scale_factor = 0.05);

-- Identities seen, in two tables that take turns: the one of the turn is written, both are read,
-- and at the end of a window the older one is emptied and becomes the one of the next turn.
CREATE TABLE carrick_dedupe_0 (
    stream_id bigint NOT NULL,
    id        bytea  NOT NULL,
    seq       bigint NOT NULL,
    PRIMARY KEY (stream_id, id)
);
CREATE TABLE carrick_dedupe_1 (LIKE carrick_dedupe_0 INCLUDING ALL);
CREATE TABLE carrick_dedupe_turn (
    turn       bigint PRIMARY KEY,
    started_at bigint NOT NULL
);
INSERT INTO carrick_dedupe_turn
VALUES (0, carrick_now());

CREATE TABLE carrick_group (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream_id bigint NOT NULL,
    name      text   COLLATE \"C\" NOT NULL,
    UNIQUE (stream_id, name)
);

-- What happened in a group, one row a transaction, the newest last; and now and then the whole
-- state, from which on the rows before it are not needed any more.
CREATE TABLE carrick_journal (
    group_id bigint  NOT NULL,
    version  bigint  NOT NULL,
    at       bigint  NOT NULL,
    whole    boolean NOT NULL,
    floor    bigint  NOT NULL,
    change   bytea   NOT NULL,
    PRIMARY KEY (group_id, version)
);

CREATE TABLE carrick_dead (
    group_id         bigint NOT NULL,
    seq              bigint NOT NULL,
    attempts         bigint NOT NULL,
    cause            bytea  NOT NULL,
    fence            bigint NOT NULL,
    first_claimed_at bigint NOT NULL,
    buried_at        bigint NOT NULL,
    PRIMARY KEY (group_id, seq)
);

CREATE TABLE carrick_once (
    scope       bytea  NOT NULL,
    key         bytea  NOT NULL,
    fingerprint bytea  NOT NULL,
    token       bigint NOT NULL,
    ends_at     bigint NOT NULL,
    answer      bytea,
    PRIMARY KEY (scope, key)
);
CREATE INDEX carrick_once_ends ON carrick_once (ends_at);
CREATE SEQUENCE carrick_once_token;
";
