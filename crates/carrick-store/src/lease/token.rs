//! The text form of a lease token: `group.seq.fence`.

use std::{fmt, num::NonZeroU64, str::FromStr};

use super::LeaseToken;

/// A text that is no lease token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a lease token")]
pub struct InvalidToken;

impl fmt::Display for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.group, self.seq, self.fence)
    }
}

impl FromStr for LeaseToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let mut parts = text.splitn(3, '.').map(|part| part.parse::<u64>().ok());
        let mut next = || parts.next().flatten().ok_or(InvalidToken);
        let group = NonZeroU64::new(next()?).ok_or(InvalidToken)?;
        Ok(Self { group, seq: next()?, fence: next()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_is_written() {
        let token = LeaseToken { group: NonZeroU64::MIN, seq: u64::MAX, fence: 42 };
        assert_eq!(token.to_string().parse(), Ok(token));
        for junk in ["", "1.2", "0.1.1", "1.2.3.4", "1.-2.3", "a.b.c", "1..3"] {
            assert_eq!(junk.parse::<LeaseToken>(), Err(InvalidToken), "{junk:?}");
        }
    }
}
