//! Position: how far a reader has come in a topic, as `(epoch, seq)`.
//!
//! The epoch names the store's history: after a store was made anew, its sequence starts over, and a
//! position of the earlier one must be noticed instead of skipping what is new.

use crate::seal::{Seal, Unsealed};

/// What a sealed position is for.
const PURPOSE: &str = "position";

/// The place after the event numbered `seq`; 0 is the place before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The store's history.
    pub epoch: u64,
    /// Number of the last event before this place.
    pub seq: u64,
}

impl Position {
    /// The opaque text that clients hold; `scope` is the topic with its tenant.
    pub fn seal(&self, seal: &Seal, scope: &str) -> String {
        let mut payload = [0; 16];
        payload[..8].copy_from_slice(&self.epoch.to_be_bytes());
        payload[8..].copy_from_slice(&self.seq.to_be_bytes());
        seal.seal(PURPOSE, scope, &payload)
    }

    /// Reads a text that a client handed back.
    ///
    /// # Errors
    /// [`Unsealed`] if it was not made here for this scope.
    pub fn open(seal: &Seal, scope: &str, text: &str) -> Result<Self, Unsealed> {
        let payload = seal.open(PURPOSE, scope, text)?;
        let (epoch, seq) = payload.split_at_checked(8).ok_or(Unsealed)?;
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_be_bytes).map_err(|_| Unsealed);
        Ok(Self { epoch: number(epoch)?, seq: number(seq)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_comes_back_only_for_its_topic() {
        let seal = Seal::new([9; 32]);
        let position = Position { epoch: u64::MAX, seq: 17 };
        let text = position.seal(&seal, "default/orders");
        assert_eq!(Position::open(&seal, "default/orders", &text), Ok(position));
        assert_eq!(Position::open(&seal, "acme/orders", &text), Err(Unsealed));
    }

    #[test]
    fn a_sealed_payload_of_another_length_is_no_position() {
        let seal = Seal::new([9; 32]);
        for length in [0, 7, 8, 15, 17] {
            let text = seal.seal(PURPOSE, "t", &vec![0; length]);
            assert_eq!(Position::open(&seal, "t", &text), Err(Unsealed), "{length} bytes");
        }
    }
}
