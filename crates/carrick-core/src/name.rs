//! Names: of tenants, topics and groups, checked once where they enter.
//!
//! A name is 1..=200 characters of `A-Z a-z 0-9 . _ -`, and not `.` or `..`: it is safe in a path, a
//! header, a metric label and a file name without being escaped.

use std::{fmt, str::FromStr, sync::Arc};

/// The tenant that names belong to when there are no tokens.
pub const DEFAULT_TENANT: &str = "default";

/// The longest name, in bytes.
pub const MAX_NAME: usize = 200;

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} must be 1 to 200 characters of A-Z a-z 0-9 . _ -, not {given:?}")]
pub struct InvalidName {
    kind: &'static str,
    given: String,
}

fn check(kind: &'static str, text: &str) -> Result<(), InvalidName> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let fits = (1..=MAX_NAME).contains(&text.len());
    if fits && text.bytes().all(allowed) && text != "." && text != ".." {
        return Ok(());
    }
    // An outside text may be huge: the message shows enough of it to be recognised.
    let given = text.chars().take(80).collect();
    Err(InvalidName { kind, given })
}

/// A topic and the tenant it belongs to. Its text form is `tenant/name`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Topic {
    full: Arc<str>,
    slash: u8,
}

impl Topic {
    /// A topic of the default tenant.
    ///
    /// # Errors
    /// [`InvalidName`] if `name` is not a name.
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        Self::in_tenant(DEFAULT_TENANT, name)
    }

    /// A topic of a tenant.
    ///
    /// # Errors
    /// [`InvalidName`] if either is not a name.
    pub fn in_tenant(tenant: &str, name: &str) -> Result<Self, InvalidName> {
        check("a tenant", tenant)?;
        check("a topic", name)?;
        let slash = u8::try_from(tenant.len()).expect("a name has at most 200 bytes");
        Ok(Self { full: format!("{tenant}/{name}").into(), slash })
    }

    /// The tenant.
    pub fn tenant(&self) -> &str {
        &self.full[..usize::from(self.slash)]
    }

    /// The name within the tenant.
    pub fn name(&self) -> &str {
        &self.full[usize::from(self.slash) + 1..]
    }

    /// `tenant/name`.
    pub fn as_str(&self) -> &str {
        &self.full
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl fmt::Debug for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Topic({})", self.full)
    }
}

/// Reads `tenant/name`, or `name` alone for the default tenant.
impl FromStr for Topic {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        match text.split_once('/') {
            Some((tenant, name)) => Self::in_tenant(tenant, name),
            None => Self::new(text),
        }
    }
}

/// A consumer group of a topic.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group(Arc<str>);

impl Group {
    /// A group.
    ///
    /// # Errors
    /// [`InvalidName`] if `name` is not a name.
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        check("a group", name)?;
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({})", self.0)
    }
}

impl FromStr for Group {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_tells_its_tenant_and_name() {
        let topic: Topic = "acme/orders.v1".parse().unwrap();
        assert_eq!((topic.tenant(), topic.name()), ("acme", "orders.v1"));
        assert_eq!(Topic::new("orders").unwrap().to_string(), "default/orders");
    }

    #[test]
    fn what_could_escape_a_path_is_no_name() {
        for text in ["", ".", "..", "a/b/c", "a b", "é", "a\n", "/a", "a/", &"x".repeat(201)] {
            assert!(text.parse::<Topic>().is_err(), "{text:?}");
        }
        assert!(Topic::new(&"x".repeat(200)).is_ok());
    }
}
