//! Seal: opaque tokens that only we can make.
//!
//! A position, a cursor or a lease that a client hands back was in its hands: it may be cut, changed
//! or taken from another tenant. A seal is a MAC over the payload, what it is for and whom it is for;
//! a text that was not sealed for exactly this is refused, in constant time.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit, Mac};
use rand::CryptoRng;
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// Bytes of MAC in a token: 128 bits are out of reach of guessing, and keep positions short.
const MAC: usize = 16;

/// The longest token that is looked at; ours are far shorter.
const MAX_TOKEN: usize = 4096;

/// A text that was not sealed for this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the token was not made here for this use")]
pub struct Unsealed;

/// Makes and checks sealed tokens with one key.
///
/// ```
/// # use carrick_core::seal::Seal;
/// let seal = Seal::new([7; 32]);
/// let token = seal.seal("position", "default/orders", b"42");
/// assert_eq!(seal.open("position", "default/orders", &token).unwrap(), b"42");
/// assert!(seal.open("position", "default/refunds", &token).is_err());
/// ```
#[derive(Clone)]
pub struct Seal {
    keyed: Hmac<Sha256>,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal(..)")
    }
}

impl Seal {
    /// A seal with this key. Every hub that shares a store needs the same one.
    pub fn new(key: [u8; 32]) -> Self {
        Self { keyed: Hmac::new_from_slice(&key).expect("HMAC takes a key of any length") }
    }

    /// A new key.
    pub fn random_key(rng: &mut impl CryptoRng) -> [u8; 32] {
        let mut key = [0; 32];
        rng.fill_bytes(&mut key);
        key
    }

    /// Seals a payload for a purpose, such as `position`, and a scope, such as `tenant/topic`.
    pub fn seal(&self, purpose: &str, scope: &str, payload: &[u8]) -> String {
        let mut token = Vec::with_capacity(MAC + payload.len());
        token.extend_from_slice(&self.mac(purpose, scope, payload));
        token.extend_from_slice(payload);
        BASE64_URL_SAFE_NO_PAD.encode(token)
    }

    /// Gives the payload back if the text was sealed with this key for this purpose and scope.
    ///
    /// # Errors
    /// [`Unsealed`] otherwise, whatever the text is.
    pub fn open(&self, purpose: &str, scope: &str, text: &str) -> Result<Vec<u8>, Unsealed> {
        if text.len() > MAX_TOKEN {
            return Err(Unsealed);
        }
        let mut token = BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|_| Unsealed)?;
        if token.len() < MAC {
            return Err(Unsealed);
        }
        let payload = token.split_off(MAC);
        let genuine = self.mac(purpose, scope, &payload).ct_eq(&token);
        if bool::from(genuine) { Ok(payload) } else { Err(Unsealed) }
    }

    fn mac(&self, purpose: &str, scope: &str, payload: &[u8]) -> [u8; MAC] {
        let mut mac = self.keyed.clone();
        // Each part with its length, so that no two splits of one text are the same to the MAC.
        for part in [purpose.as_bytes(), scope.as_bytes(), payload] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        let whole = mac.finalize().into_bytes();
        whole[..MAC].try_into().expect("SHA-256 has 32 bytes")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_changed_token_is_refused_wherever_it_is_changed() {
        let seal = Seal::new([1; 32]);
        let token = seal.seal("p", "s", b"payload");
        for index in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[index] = if changed[index] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(seal.open("p", "s", &changed), Err(Unsealed), "at {index}");
        }
    }

    #[test]
    fn parts_cannot_be_shifted_between_purpose_and_scope() {
        let seal = Seal::new([1; 32]);
        assert!(seal.open("a", "bc", &seal.seal("ab", "c", b"")).is_err());
        assert!(Seal::new([2; 32]).open("a", "b", &seal.seal("a", "b", b"")).is_err());
    }

    proptest! {
        #[test]
        fn what_is_sealed_opens(payload: Vec<u8>) {
            let seal = Seal::new([3; 32]);
            prop_assert_eq!(seal.open("p", "s", &seal.seal("p", "s", &payload)).unwrap(), payload);
        }

        #[test]
        fn junk_is_refused(text: String) {
            prop_assert!(Seal::new([3; 32]).open("p", "s", &text).is_err());
        }
    }
}
