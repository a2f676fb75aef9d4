//! What is refused, where, and in whose words.

use std::{
    error::Error,
    net::{Ipv4Addr, Ipv6Addr},
    sync::atomic::{AtomicUsize, Ordering},
};

use tokio::net::TcpListener;
use tower::ServiceExt;

use super::*;

/// Answers with these, one after the other.
#[derive(Debug)]
struct Script(Vec<Vec<&'static str>>, AtomicUsize);

impl Resolve for Script {
    fn resolve<'a>(&'a self, _host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let answer = &self.0[self.1.fetch_add(1, Ordering::SeqCst).min(self.0.len() - 1)];
        let found = answer.iter().map(|text| text.parse().unwrap()).collect();
        Box::pin(async { Ok(found) })
    }
}

fn guarded(options: EgressOptions, answers: &[&[&'static str]]) -> Guarded {
    let script = Script(answers.iter().map(|one| one.to_vec()).collect(), AtomicUsize::new(0));
    let config = EgressConfig::try_from(options).unwrap();
    Guarded::with_resolver(config, Arc::new(script))
}

#[tokio::test]
async fn one_bad_address_among_good_ones_refuses_them_all() {
    for bad in ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:8.8.8.8", "fd00::1"] {
        let guarded = guarded(EgressOptions::default(), &[&["93.184.216.34", bad]]);
        let error = guarded.addresses("evil.test", 443).await.unwrap_err();
        assert!(matches!(error, EgressError::Forbidden { .. }), "{bad}: {error}");
        assert!(!error.to_string().contains(bad), "what the resolver knows is not told");
    }
}

#[tokio::test]
async fn a_name_that_changes_between_check_and_connection_is_checked_where_it_connects() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = EgressOptions { ports: vec![port], ..EgressOptions::default() };
    let guarded = guarded(options, &[&["93.184.216.34"], &["127.0.0.1"]]);
    assert!(guarded.addresses("rebinds.test", port).await.is_ok(), "what a check would see");
    let error = guarded.connect("rebinds.test", port).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[tokio::test]
async fn an_exception_is_reached_and_only_that() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = EgressOptions {
        ports: Vec::new(),
        danger_allow: vec!["127.0.0.0/8".to_owned()],
        ..EgressOptions::default()
    };
    let guarded = guarded(options, &[&["127.0.0.1"]]);
    assert!(guarded.connect("here.test", port).await.is_ok());
    assert!(guarded.connect("10.0.0.1", port).await.is_err());
    assert!(guarded.connect("[::1]", port).await.is_err());
}

#[track_caller]
fn check(url: &str, fine: bool) {
    let found = EgressConfig::default().check(&url.parse().unwrap());
    assert_eq!(found.is_ok(), fine, "{url}: {found:?}");
}

#[test]
fn a_url_is_checked_for_what_shows() {
    check("https://example.com/hook", true);
    check("http://example.com", true);
    check("https://example.com:8443/", false);
    check("https://user:secret@example.com/", false);
    check("ftp://example.com/", false);
    check("/hook", false);
    check("http://127.0.0.1/", false);
    check("http://[::1]/", false);
    check("http://[::ffff:127.0.0.1]/", false);
    check("http://example.com:99999/", false);
    check("http://[::1]:99999/", false);
    check("http://example.com:/", true);
    check("http://[2606:4700::1111]/", true);
    check("http://93.184.216.34/", true);
    let strict = EgressOptions { plain: false, ..EgressOptions::default() };
    let strict = EgressConfig::try_from(strict).unwrap();
    assert!(strict.check(&"http://example.com/".parse().unwrap()).is_err());
}

#[track_caller]
fn redirects(from: &str, location: &str, hops: usize, expected: Option<&str>) {
    let mut headers = HeaderMap::new();
    headers.insert(LOCATION, location.parse().unwrap());
    let config = EgressConfig::default();
    let found = follow(&config, &from.parse().unwrap(), &headers, hops);
    assert_eq!(found.as_ref().ok().map(ToString::to_string).as_deref(), expected, "{found:?}");
}

#[test]
fn a_redirect_is_checked_like_the_url_that_led_to_it() {
    let from = "https://a.example/x?y";
    redirects(from, "https://b.example/z", 0, Some("https://b.example/z"));
    redirects(from, "/z", 2, Some("https://a.example/z"));
    redirects(from, "/z", 3, None);
    redirects(from, "http://b.example/z", 0, None);
    redirects("http://a.example/", "http://b.example/z", 0, Some("http://b.example/z"));
    redirects(from, "https://169.254.169.254/latest", 0, None);
    redirects(from, "https://b.example:22/", 0, None);
    redirects(from, "//b.example/z", 0, Some("https://b.example/z"));
    redirects(from, "//127.0.0.1/z", 0, None);
    redirects(from, "https://user:secret@b.example/z", 0, None);
    redirects(from, "https://b.example:65536/z", 0, None);
    redirects(from, "", 0, None);
    redirects(from, "gopher://b.example/", 0, None);
    let none = follow(&EgressConfig::default(), &from.parse().unwrap(), &HeaderMap::new(), 0);
    assert!(none.is_err());
}

#[test]
fn every_setting_is_checked_and_all_faults_are_told() {
    let options = EgressOptions {
        ports: vec![0],
        danger_allow: vec!["10.0.0.0/33".to_owned(), "x".to_owned()],
        plain: true,
    };
    assert_eq!(EgressConfig::try_from(options).unwrap_err().faults().len(), 3);
}

fn step(address: IpAddr, forward: bool) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) => {
            let bits = u32::from(address);
            let next = if forward { bits.checked_add(1) } else { bits.checked_sub(1) };
            next.map(|bits| Ipv4Addr::from(bits).into())
        }
        IpAddr::V6(address) => {
            let bits = u128::from(address);
            let next = if forward { bits.checked_add(1) } else { bits.checked_sub(1) };
            next.map(|bits| Ipv6Addr::from(bits).into())
        }
    }
}

/// Checks a range of a registry at its first and last address, and what lies before and after it.
#[track_caller]
fn range(first: &str, last: &str, expected: Class, before: Option<Class>, after: Option<Class>) {
    let (first, last) = (first.parse().unwrap(), last.parse().unwrap());
    assert_eq!(class(first), Some(expected), "{first}");
    assert_eq!(class(last), Some(expected), "{last}");
    if let Some(address) = step(first, false) {
        assert_eq!(class(address), before, "{address}, before {first}");
    }
    if let Some(address) = step(last, true) {
        assert_eq!(class(address), after, "{address}, after {last}");
    }
}

#[test]
fn every_special_purpose_range_of_ipv4_is_refused_and_its_neighbours_are_not() {
    use Class::{LinkLocal, Loopback, Multicast, Private, Reserved};
    range("0.0.0.0", "0.255.255.255", Loopback, None, None);
    range("10.0.0.0", "10.255.255.255", Private, None, None);
    range("100.64.0.0", "100.127.255.255", Private, None, None);
    range("127.0.0.0", "127.255.255.255", Loopback, None, None);
    range("168.63.129.16", "168.63.129.16", LinkLocal, None, None);
    range("169.254.0.0", "169.254.255.255", LinkLocal, None, None);
    range("172.16.0.0", "172.31.255.255", Private, None, None);
    range("192.0.0.0", "192.0.0.255", Reserved, None, None);
    range("192.0.2.0", "192.0.2.255", Reserved, None, None);
    range("192.31.196.0", "192.31.196.255", Reserved, None, None);
    range("192.52.193.0", "192.52.193.255", Reserved, None, None);
    range("192.88.99.0", "192.88.99.255", Reserved, None, None);
    range("192.168.0.0", "192.168.255.255", Private, None, None);
    range("192.175.48.0", "192.175.48.255", Reserved, None, None);
    range("198.18.0.0", "198.19.255.255", Reserved, None, None);
    range("198.51.100.0", "198.51.100.255", Reserved, None, None);
    range("203.0.113.0", "203.0.113.255", Reserved, None, None);
    range("224.0.0.0", "239.255.255.255", Multicast, None, Some(Reserved));
    range("240.0.0.0", "255.255.255.254", Reserved, Some(Multicast), Some(Multicast));
    range("255.255.255.255", "255.255.255.255", Multicast, Some(Reserved), None);
}

#[test]
fn every_special_purpose_range_of_ipv6_is_refused_and_its_neighbours_are_not() {
    use Class::{Embedded, LinkLocal, Loopback, Multicast, Private, Reserved};
    let reserved = Some(Reserved);
    const END: &str = "ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    let to = |prefix: &str, groups: usize| format!("{prefix}:{}", &END[..groups * 5 - 1]);
    range("::", "::1", Loopback, None, Some(Embedded));
    range("::ffff:0.0.0.0", "::ffff:255.255.255.255", Embedded, Some(Embedded), reserved);
    range("64:ff9b::", "64:ff9b::ffff:ffff", Embedded, reserved, Some(Embedded));
    range("64:ff9b:1::", &to("64:ff9b:1", 5), Embedded, Some(Embedded), Some(Embedded));
    range("100::", &to("100:0:0:0", 4), Reserved, reserved, reserved);
    range("100:0:0:1::", &to("100:0:0:1", 4), Reserved, reserved, reserved);
    range("2001::", &to("2001:1ff", 6), Reserved, None, None); // Teredo, ORCHID, AS112 and more
    range("2001:db8::", &to("2001:db8", 6), Reserved, None, None);
    range("2002::", &to("2002", 7), Embedded, None, None);
    range("2620:4f:8000::", &to("2620:4f:8000", 5), Reserved, None, None);
    range("3fff::", &to("3fff:fff", 6), Reserved, None, None);
    range("4000::", &to("fbff", 7), Reserved, None, Some(Private)); // 5f00::/16 among them
    range("fc00::", &to("fdff", 7), Private, reserved, reserved);
    range("fe80::", &to("febf", 7), LinkLocal, reserved, Some(Private));
    range("fec0::", &to("feff", 7), Private, Some(LinkLocal), Some(Multicast));
    range("ff00::", &to("ffff", 7), Multicast, Some(Private), None);
}

#[tokio::test]
async fn an_address_in_another_notation_is_what_it_resolves_to() {
    // The system's resolver reads these as 127.0.0.1 or not at all; no network is needed for it.
    for host in ["2130706433", "0x7f000001", "017700000001", "127.1", "0"] {
        let uri: Uri = format!("http://{host}/").parse().unwrap();
        let error = Guarded::new(EgressConfig::default()).oneshot(uri).await.unwrap_err();
        let error = error.get_ref().and_then(|inner| inner.downcast_ref::<EgressError>());
        assert!(
            matches!(error, Some(EgressError::Forbidden { .. } | EgressError::NoAddress(_))),
            "{host}: {error:?}"
        );
    }
}

#[tokio::test]
async fn astrid_1020_an_address_in_the_url_skips_the_resolver_and_not_the_check() {
    let guarded = guarded(EgressOptions::default(), &[]);
    for host in ["169.254.169.254", "[::ffff:10.0.0.1]", "[fe80::1]", "10.0.0.1"] {
        let uri: Uri = format!("http://{host}/latest/meta-data").parse().unwrap();
        let error = guarded.clone().oneshot(uri).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{host}");
    }
}

#[tokio::test]
async fn vibenvr_297_capgo_2200_open_swe_1186_all_answers_are_checked_where_it_connects() {
    // AAAA beside A; another answer at the second question; a redirect to a name that leads inside.
    let both = guarded(EgressOptions::default(), &[&["93.184.216.34", "fd00::1"]]);
    assert!(both.oneshot(Uri::from_static("http://evil.test/")).await.is_err());
    let inside = guarded(EgressOptions::default(), &[&["10.0.0.1"]]);
    let mut headers = HeaderMap::new();
    headers.insert(LOCATION, "https://inside.test/".parse().unwrap());
    let from = Uri::from_static("https://evil.test/");
    let next = follow(inside.config(), &from, &headers, 0).unwrap();
    let error = inside.oneshot(next).await.unwrap_err();
    assert_eq!(error.to_string(), "inside.test leads to a private address");
}

#[tokio::test]
async fn as_a_service_it_connects_to_where_the_uri_says_and_nowhere_else() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = EgressOptions {
        ports: vec![port],
        danger_allow: vec!["127.0.0.0/8".to_owned()],
        ..EgressOptions::default()
    };
    let guarded = guarded(options, &[&["127.0.0.1"]]);
    let uri: Uri = format!("http://here.test:{port}/path").parse().unwrap();
    let stream = guarded.clone().oneshot(uri).await.unwrap();
    assert_eq!(stream.peer_addr().unwrap().port(), port);
    let with_user: Uri = format!("http://me@here.test:{port}/").parse().unwrap();
    assert!(guarded.clone().oneshot(with_user).await.is_err());
    assert!(guarded.oneshot(Uri::from_static("http://here.test/")).await.is_err(), "port 80");
}

#[derive(Debug)]
struct Broken;

impl Resolve for Broken {
    fn resolve<'a>(&'a self, _host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Err(io::Error::other("10.0.0.53 did not answer")) })
    }
}

#[tokio::test]
async fn a_resolver_that_fails_lets_nobody_through_and_is_not_quoted() {
    let broken = Guarded::with_resolver(EgressConfig::default(), Arc::new(Broken));
    let error = broken.connect("example.com", 80).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string()),
        (io::ErrorKind::NotFound, "example.com has no address".to_owned(),)
    );
    assert!(error.source().is_none());
    let nothing = guarded(EgressOptions::default(), &[&[]]);
    assert!(nothing.connect("example.com", 80).await.is_err());
}

#[tokio::test]
async fn of_very_many_addresses_all_are_checked_and_a_few_are_tried() {
    let many = |last| -> Vec<&'static str> { [vec!["93.184.216.34"; 100], vec![last]].concat() };
    let fine = guarded(EgressOptions::default(), &[&many("93.184.216.35")]);
    assert_eq!(fine.addresses("many.test", 80).await.unwrap().len(), MAX_TRIED);
    let bad = guarded(EgressOptions::default(), &[&many("10.0.0.1")]);
    assert!(bad.addresses("many.test", 80).await.is_err());
}

#[test]
fn a_refusal_names_the_policy_and_what_is_there() {
    let error = EgressConfig::default().check(&Uri::from_static("http://10.0.0.1/")).unwrap_err();
    let refusal = Refusal::from(error);
    assert_eq!(refusal.to_string(), "refused by the egress: 10.0.0.1 leads to a private address");
}
