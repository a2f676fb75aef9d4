//! Which addresses are global, by the registries of special-purpose addresses.

use ::core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why an address must not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Class {
    /// This host itself.
    #[error("an address of this host")]
    Loopback,
    /// A private network.
    #[error("a private address")]
    Private,
    /// The link itself, where clouds keep their metadata.
    #[error("a link-local address")]
    LinkLocal,
    /// Many at once.
    #[error("a multicast or broadcast address")]
    Multicast,
    /// Set aside for something that is no host on the Internet.
    #[error("a reserved address")]
    Reserved,
    /// A form of IPv6 that hides another address.
    #[error("an address that hides another")]
    Embedded,
}

/// A network: an address and how many of its bits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    /// Whether an address lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(net), IpAddr::V4(one)) => {
                same(u128::from(u32::from(net)), u128::from(u32::from(one)), 32 - self.bits)
            }
            (IpAddr::V6(net), IpAddr::V6(one)) => {
                same(u128::from(net), u128::from(one), 128 - self.bits)
            }
            _ => false,
        }
    }
}

fn same(net: u128, one: u128, free: u8) -> bool {
    free >= 128 || net >> free == one >> free
}

impl std::str::FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no network such as 10.0.0.0/8");
        let (address, bits) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits: u8 = bits.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        if bits > most { Err(wrong()) } else { Ok(Self { address, bits }) }
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

const V4: [(Ipv4Addr, u8, Class); 17] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8, Class::Loopback), // "this host" reaches it on many systems
    (Ipv4Addr::new(10, 0, 0, 0), 8, Class::Private),
    (Ipv4Addr::new(100, 64, 0, 0), 10, Class::Private), // shared by carriers and clouds
    (Ipv4Addr::new(127, 0, 0, 0), 8, Class::Loopback),
    (Ipv4Addr::new(168, 63, 129, 16), 32, Class::LinkLocal), // a cloud's metadata, in a global range
    (Ipv4Addr::new(169, 254, 0, 0), 16, Class::LinkLocal),
    (Ipv4Addr::new(172, 16, 0, 0), 12, Class::Private),
    (Ipv4Addr::new(192, 0, 0, 0), 24, Class::Reserved),
    (Ipv4Addr::new(192, 0, 2, 0), 24, Class::Reserved),
    (Ipv4Addr::new(192, 31, 196, 0), 24, Class::Reserved),
    (Ipv4Addr::new(192, 52, 193, 0), 24, Class::Reserved),
    (Ipv4Addr::new(192, 88, 99, 0), 24, Class::Reserved),
    (Ipv4Addr::new(192, 168, 0, 0), 16, Class::Private),
    (Ipv4Addr::new(192, 175, 48, 0), 24, Class::Reserved),
    (Ipv4Addr::new(198, 18, 0, 0), 15, Class::Reserved),
    (Ipv4Addr::new(198, 51, 100, 0), 24, Class::Reserved),
    (Ipv4Addr::new(203, 0, 113, 0), 24, Class::Reserved),
];

/// Within what is handed out at all (`2000::/3`), what is set aside.
const V6: [(u128, u8, Class); 5] = [
    (0x2001_0000 << 96, 23, Class::Reserved), // protocols, with Teredo and benchmarks
    (0x2001_0db8 << 96, 32, Class::Reserved),
    (0x2002 << 112, 16, Class::Embedded), // 6to4
    (0x2620_004f_8000 << 80, 48, Class::Reserved),
    (0x3fff << 112, 20, Class::Reserved),
];

/// Why an address must not be reached; `None` for one of the Internet.
///
/// Only what is handed out is let through, so that a range that is new or forgotten here is refused
/// and not reached.
pub fn class(address: IpAddr) -> Option<Class> {
    match address {
        IpAddr::V4(address) => class_v4(address),
        IpAddr::V6(address) => class_v6(address),
    }
}

fn class_v4(address: Ipv4Addr) -> Option<Class> {
    if u32::from(address) >= u32::from(Ipv4Addr::new(240, 0, 0, 0)) {
        return Some(if address.is_broadcast() { Class::Multicast } else { Class::Reserved });
    }
    if address.is_multicast() {
        return Some(Class::Multicast);
    }
    let within = |(net, bits, _): &&(Ipv4Addr, u8, Class)| {
        same(u128::from(u32::from(*net)), u128::from(u32::from(address)), 32 - bits)
    };
    V4.iter().find(within).map(|(_, _, class)| *class)
}

fn class_v6(address: Ipv6Addr) -> Option<Class> {
    let bits = u128::from(address);
    let starts = |net: u128, length: u8| same(net, bits, 128 - length);
    if address.is_loopback() || address.is_unspecified() {
        return Some(Class::Loopback);
    }
    if address.is_multicast() {
        return Some(Class::Multicast);
    }
    if starts(0xfe80 << 112, 10) {
        return Some(Class::LinkLocal);
    }
    if starts(0xfc00 << 112, 7) || starts(0xfec0 << 112, 10) {
        return Some(Class::Private);
    }
    // Mapped, compatible, translated: whoever writes an IPv4 address so has something to hide.
    if starts(0, 80) || starts(0x0064_ff9b << 96, 32) {
        return Some(Class::Embedded);
    }
    // ISATAP: the same, in the host's half of any prefix.
    if bits as u64 >> 32 & 0xfdff_ffff == 0x5efe {
        return Some(Class::Embedded);
    }
    if !starts(0x2000 << 112, 3) {
        return Some(Class::Reserved);
    }
    V6.iter().find(|(net, length, _)| starts(*net, *length)).map(|(_, _, class)| *class)
}

#[cfg(all(test, not(carrick_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(first: &str, last: &str, expected: Option<Class>) {
        for address in [first, last] {
            assert_eq!(class(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn every_range_that_is_not_the_internets_is_refused_from_its_first_address_to_its_last() {
        use Class::{Embedded, LinkLocal, Loopback, Multicast, Private, Reserved};
        check("0.0.0.0", "0.255.255.255", Some(Loopback));
        check("1.0.0.0", "9.255.255.255", None);
        check("10.0.0.0", "10.255.255.255", Some(Private));
        check("11.0.0.0", "100.63.255.255", None);
        check("100.64.0.0", "100.127.255.255", Some(Private));
        check("100.128.0.0", "126.255.255.255", None);
        check("127.0.0.0", "127.255.255.255", Some(Loopback));
        check("128.0.0.0", "169.253.255.255", None);
        check("168.63.129.16", "168.63.129.16", Some(LinkLocal));
        check("169.254.0.0", "169.254.255.255", Some(LinkLocal));
        check("169.254.169.254", "169.254.170.2", Some(LinkLocal)); // metadata of clouds
        check("169.255.0.0", "172.15.255.255", None);
        check("172.16.0.0", "172.31.255.255", Some(Private));
        check("172.32.0.0", "191.255.255.255", None);
        check("192.0.0.0", "192.0.0.255", Some(Reserved));
        check("192.0.1.0", "192.0.1.255", None);
        check("192.0.2.0", "192.0.2.255", Some(Reserved));
        check("192.88.99.0", "192.88.99.255", Some(Reserved));
        check("192.167.255.255", "192.169.0.0", None);
        check("192.168.0.0", "192.168.255.255", Some(Private));
        check("198.18.0.0", "198.19.255.255", Some(Reserved));
        check("198.17.255.255", "198.20.0.0", None);
        check("198.51.100.0", "198.51.100.255", Some(Reserved));
        check("203.0.113.0", "203.0.113.255", Some(Reserved));
        check("223.255.255.255", "223.0.0.0", None);
        check("224.0.0.0", "239.255.255.255", Some(Multicast));
        check("240.0.0.0", "255.255.255.254", Some(Reserved));
        check("255.255.255.255", "255.255.255.255", Some(Multicast));

        check("::", "::1", Some(Loopback));
        check("::2", "::ffff", Some(Embedded));
        check("::ffff:0.0.0.0", "::ffff:255.255.255.255", Some(Embedded)); // mapped
        check("::127.0.0.1", "::8.8.8.8", Some(Embedded)); // compatible
        check("64:ff9b::", "64:ff9b::ffff:ffff", Some(Embedded)); // NAT64
        check("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", Some(Embedded));
        check("100::", "100::ffff:ffff:ffff:ffff", Some(Reserved));
        check("2000::", "2000:ffff:ffff:ffff::", None);
        check("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Reserved)); // Teredo, too
        check("2001:200::", "2001:db7:ffff:ffff::", None);
        check("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", Some(Reserved));
        check("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Embedded));
        check("2606:4700::1111", "2a00:1450:4001::200e", None);
        check("2a00::5efe:7f00:1", "2a00::200:5efe:10.0.0.1", Some(Embedded)); // ISATAP
        check("3fff::", "3fff:fff:ffff::", Some(Reserved));
        check("3fff:1000::", "3fff:ffff::", None);
        check("4000::", "fbff::", Some(Reserved));
        check("fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Private));
        check("fd00:ec2::254", "fd20:ce::254", Some(Private)); // metadata of clouds
        check("fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(LinkLocal));
        check("fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Private));
        check("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Multicast));
    }

    proptest! {
        #[test]
        fn what_the_standard_library_calls_private_is_never_global(bits: u32, wide: u128) {
            let v4 = Ipv4Addr::from(bits);
            if v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_documentation() {
                prop_assert!(class(v4.into()).is_some());
            }
            prop_assert!(class(v4.to_ipv6_mapped().into()).is_some());
            let v6 = Ipv6Addr::from(wide);
            if v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_multicast() {
                prop_assert!(class(v6.into()).is_some());
            }
        }
    }
}
