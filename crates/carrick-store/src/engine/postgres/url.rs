//! The URL of a database, and what of it is for the engine.

use sqlx::postgres::PgConnectOptions;

use super::config::{PostgresConfig, PostgresOptions};
use crate::StoreError;

/// Takes our parameters out of a URL; the rest is the driver's.
pub(super) fn parse(
    url: &str,
    config: PostgresConfig,
) -> Result<(PgConnectOptions, PostgresOptions), StoreError> {
    let mut options = config.into_options();
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let mut theirs = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match key {
            "schema" => value.clone_into(&mut options.schema),
            "listen" => options.listen = switch("listen", value)?,
            "pgbouncer" | "pooler" => options.pooler = switch("pgbouncer", value)?,
            "max-connections" => {
                options.max_connections = value
                    .parse()
                    .map_err(|_| invalid("max-connections", "a number from 2 to 200", value))?;
            }
            _ => theirs.push(pair),
        }
    }
    let options = PostgresConfig::try_from(options)
        .map_err(|faults| StoreError::Invalid {
            what: "the settings",
            range: "within their ranges",
            value: faults.to_string(),
        })?
        .into_options();
    let separator = if theirs.is_empty() { "" } else { "?" };
    let address = format!("{address}{separator}{}", theirs.join("&"));
    // The address may hold a password, so it is not shown.
    let wrong = || invalid("the database URL", "postgres://user@host:port/database", "(hidden)");
    if !address.starts_with("postgres://") && !address.starts_with("postgresql://") {
        return Err(wrong());
    }
    let connect: PgConnectOptions = address.parse().map_err(|_| wrong())?;
    Ok((connect, options))
}

fn switch(what: &'static str, value: &str) -> Result<bool, StoreError> {
    match value {
        "" | "1" | "true" | "on" => Ok(true),
        "0" | "false" | "off" => Ok(false),
        other => Err(invalid(what, "true or false", other)),
    }
}

fn invalid(what: &'static str, range: &'static str, value: &str) -> StoreError {
    StoreError::Invalid { what, range, value: value.chars().take(80).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_parameters_are_taken_out_and_theirs_are_left() {
        let (connect, options) = parse(
            "postgres://me@db:6432/app?schema=msgs&application_name=x&pgbouncer=true&max-connections=4",
            PostgresConfig::default(),
        )
        .unwrap();
        assert_eq!((connect.get_host(), connect.get_port()), ("db", 6432));
        assert_eq!(connect.get_application_name(), Some("x"));
        assert_eq!((options.schema.as_str(), options.max_connections), ("msgs", 4));
        assert!(options.pooler && options.listen);
    }

    #[test]
    fn a_bad_url_names_the_fault_and_keeps_the_password() {
        for url in ["postgres://u:secret@h/d?schema=a;b", "postgres://u:secret@h:x/d", "u:secret"] {
            let told = parse(url, PostgresConfig::default()).unwrap_err().to_string();
            assert!(!told.contains("secret"), "{told}");
        }
    }
}
