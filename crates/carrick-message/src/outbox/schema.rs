//! The tables of the outbox: a public contract, which any language writes with plain SQL. What each
//! column means is told in `docs/tables.md`.
//!
//! * A payload is one of `data` (JSON, kept to the byte), `data_binary`, or a whole structured
//!   CloudEvent in `event`. Where a column has a default, a writer leaves it out.
//! * Published is a fact about a row (`published_at`), not a position in a numbering: late commits,
//!   restored databases and several relays are all safe because of that.
//! * One narrow partial index holds the unpublished rows; a published row is in the primary key only.

use carrick_store::schema::{Component, Migration};

/// The outbox's tables.
///
/// ```
/// # #[cfg(feature = "rusqlite")] {
/// let mut conn = rusqlite::Connection::open_in_memory().unwrap();
/// carrick_store::schema::sqlite::migrate(&mut conn, &carrick_message::outbox::COMPONENT).unwrap();
/// conn.execute(
///     "INSERT INTO carrick_outbox (topic, key, type, source, data) VALUES (?, ?, ?, ?, ?)",
///     ("orders", "A-4471", "order.placed.v1", "/shop", r#"{"total": 12.50}"#),
/// )
/// .unwrap();
/// # }
/// ```
pub const COMPONENT: Component = Component {
    name: "outbox",
    migrations: &[Migration { version: 1, name: "outbox", sqlite: SQLITE, postgres: POSTGRES }],
};

/// Rows of one key share a bucket, and a bucket has one relay at a time.
#[cfg(feature = "sqlx-postgres")]
pub(crate) const POSTGRES_BUCKETS: u16 = 64;

// AUTOINCREMENT: a number must not come back after the last row was pruned, because relays remember
// how far they have read. STRICT is left out: programs with an SQLite before 3.37 could not open
// the file any more.
const SQLITE: &str = "
CREATE TABLE carrick_outbox (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    published_at    TEXT,
    attempts        INTEGER NOT NULL DEFAULT 0,
    next_attempt_at TEXT,
    last_error      TEXT,
    created_at      TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    version         INTEGER,
    topic           TEXT NOT NULL,
    key             TEXT,
    id              TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))),
    type            TEXT,
    source          TEXT,
    subject         TEXT,
    time            TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    specversion     TEXT NOT NULL DEFAULT '1.0',
    datacontenttype TEXT,
    dataschema      TEXT,
    traceparent     TEXT,
    tracestate      TEXT,
    extensions      TEXT,
    data            TEXT,
    data_binary     BLOB,
    event           TEXT,
    CONSTRAINT carrick_outbox_topic_is_a_name CHECK (
        topic <> '' AND length(topic) <= 401 AND topic NOT GLOB '*[^A-Za-z0-9._/-]*'),
    CONSTRAINT carrick_outbox_key_has_1_to_500_bytes CHECK (
        typeof(key) IN ('text', 'null') AND length(CAST(key AS BLOB)) BETWEEN 1 AND 500 OR key IS NULL),
    CONSTRAINT carrick_outbox_version_is_a_number_and_needs_a_key CHECK (
        version IS NULL OR typeof(version) = 'integer' AND key IS NOT NULL),
    CONSTRAINT carrick_outbox_id_is_a_text CHECK (typeof(id) = 'text' AND id <> ''),
    CONSTRAINT carrick_outbox_type_and_source_are_needed_without_event CHECK (
        event IS NOT NULL OR
        type IS NOT NULL AND type <> '' AND source IS NOT NULL AND source <> ''),
    CONSTRAINT carrick_outbox_time_is_rfc3339 CHECK (
        time GLOB '????-??-??[Tt]??:??:??*' AND julianday(time) IS NOT NULL),
    CONSTRAINT carrick_outbox_specversion_is_1_0 CHECK (specversion = '1.0'),
    CONSTRAINT carrick_outbox_extensions_is_a_json_object CHECK (
        extensions IS NULL OR json_valid(extensions) AND json_type(extensions) = 'object'),
    CONSTRAINT carrick_outbox_data_is_json CHECK (
        data IS NULL OR typeof(data) = 'text' AND json_valid(data)),
    CONSTRAINT carrick_outbox_data_has_a_json_content_type CHECK (
        data IS NULL OR datacontenttype IS NULL OR datacontenttype LIKE '%json%'),
    CONSTRAINT carrick_outbox_data_binary_is_a_blob CHECK (
        typeof(data_binary) IN ('blob', 'null')),
    CONSTRAINT carrick_outbox_event_is_a_json_object CHECK (
        event IS NULL OR typeof(event) = 'text' AND json_valid(event)
        AND json_type(event) = 'object'),
    CONSTRAINT carrick_outbox_payload_is_one_of_data_data_binary_event CHECK (
        (data IS NOT NULL) + (data_binary IS NOT NULL) + (event IS NOT NULL) <= 1)
);
CREATE INDEX carrick_outbox_unpublished ON carrick_outbox (seq) WHERE published_at IS NULL;
CREATE UNIQUE INDEX carrick_outbox_version ON carrick_outbox (topic, key, version)
    WHERE version IS NOT NULL;
";

// `seq`: the transaction gets its id before its number, so that a relay which sees a number and a
// snapshot can tell which transactions may still bring a lower one.
// `json` for what is JSON: refused at the INSERT if it is not, and kept to the byte, which `jsonb`
// does not do. EXTERNAL: sizes are known without reading, and nothing is compressed and expanded
// again on its way. Checks run at every mark too: a counted repeat in the expression for the topic
// would make them three times as slow.
const POSTGRES: &str = "
CREATE SEQUENCE carrick_outbox_seq AS bigint CACHE 1;
CREATE TABLE carrick_outbox (
    seq             bigint NOT NULL PRIMARY KEY DEFAULT
        CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('carrick_outbox_seq') END,
    version         bigint,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_at    timestamptz,
    next_attempt_at timestamptz,
    time            timestamptz NOT NULL DEFAULT now(),
    attempts        integer NOT NULL DEFAULT 0,
    bucket          smallint NOT NULL GENERATED ALWAYS AS (
        CASE WHEN key IS NULL THEN seq & 63
             ELSE hashtextextended(topic || '/' || key, 0) & 63 END) STORED,
    topic           text NOT NULL,
    key             text,
    id              text NOT NULL DEFAULT gen_random_uuid()::text,
    type            text,
    source          text,
    subject         text,
    specversion     text NOT NULL DEFAULT '1.0',
    datacontenttype text,
    dataschema      text,
    traceparent     text,
    tracestate      text,
    extensions      json,
    last_error      text,
    data            json,
    data_binary     bytea,
    event           text,
    CONSTRAINT carrick_outbox_topic_is_a_name CHECK (
        topic ~ '^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?$' AND length(topic) <= 401),
    CONSTRAINT carrick_outbox_key_has_1_to_500_bytes CHECK (
        octet_length(key) BETWEEN 1 AND 500),
    CONSTRAINT carrick_outbox_version_needs_a_key CHECK (version IS NULL OR key IS NOT NULL),
    CONSTRAINT carrick_outbox_id_is_not_empty CHECK (id <> ''),
    CONSTRAINT carrick_outbox_type_and_source_are_needed_without_event CHECK (
        event IS NOT NULL OR
        type IS NOT NULL AND type <> '' AND source IS NOT NULL AND source <> ''),
    CONSTRAINT carrick_outbox_specversion_is_1_0 CHECK (specversion = '1.0'),
    CONSTRAINT carrick_outbox_extensions_is_a_json_object CHECK (
        json_typeof(extensions) = 'object'),
    CONSTRAINT carrick_outbox_data_has_a_json_content_type CHECK (
        data IS NULL OR datacontenttype ILIKE '%json%' OR datacontenttype IS NULL),
    CONSTRAINT carrick_outbox_payload_is_one_of_data_data_binary_event CHECK (
        num_nonnulls(data, data_binary, event) <= 1)
);
ALTER SEQUENCE carrick_outbox_seq OWNED BY carrick_outbox.seq;
ALTER TABLE carrick_outbox
    ALTER COLUMN data SET STORAGE EXTERNAL,
    ALTER COLUMN data_binary SET STORAGE EXTERNAL,
    ALTER COLUMN event SET STORAGE EXTERNAL,
    SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1);
CREATE INDEX carrick_outbox_unpublished ON carrick_outbox (seq) WHERE published_at IS NULL;
CREATE UNIQUE INDEX carrick_outbox_version ON carrick_outbox (topic, key, version)
    WHERE version IS NOT NULL;

CREATE FUNCTION carrick_outbox_lock(topic text, key text) RETURNS void LANGUAGE sql AS
    'SELECT pg_advisory_xact_lock(hashtextextended(topic || ''/'' || key, 1))';
COMMENT ON FUNCTION carrick_outbox_lock IS
    'Makes writers of one key wait for each other until they commit; call it before the INSERT.';

CREATE TABLE carrick_relay (
    id      text        NOT NULL PRIMARY KEY,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
";
