use std::collections::VecDeque;

use futures_util::{FutureExt, stream};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use proptest::prelude::*;

use super::*;

type Frames = VecDeque<Frame<Bytes>>;

fn body(frames: Frames) -> impl Body<Data = Bytes, Error = std::io::Error> + Unpin {
    StreamBody::new(stream::iter(frames.into_iter().map(Ok)))
}

fn data(pieces: &[&[u8]]) -> Frames {
    pieces.iter().map(|piece| Frame::data(Bytes::copy_from_slice(piece))).collect()
}

fn read<B>(body: ReplayBody<B>) -> Result<(Bytes, Option<HeaderMap>), BodyError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    let collected = body.collect().now_or_never().expect("the test's body never waits")?;
    let trailers = collected.trailers().cloned();
    Ok((collected.to_bytes(), trailers))
}

proptest! {
    #[test]
    fn linkerd2_15649_14050_a_repeat_is_the_same_bytes_however_far_the_first_had_come(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..10),
        read_first in 0..12_usize,
        with_trailers: bool,
    ) {
        let whole: Vec<u8> = pieces.concat();
        let mut frames = data(&pieces.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        if with_trailers {
            frames.push_back(Frame::trailers(trailers.clone()));
        }
        let mut first = ReplayBody::new(body(frames), 1024);
        let again = first.repeat();
        for _ in 0..read_first {
            if first.frame().now_or_never().unwrap().is_none() {
                break;
            }
        }
        prop_assert!(again.is_replayable());
        let (bytes, seen) = read(again).unwrap();
        prop_assert_eq!(&bytes[..], &whole[..]);
        prop_assert_eq!(seen, with_trailers.then_some(trailers));
    }
}

#[test]
fn a_body_beyond_the_cap_is_sent_once_and_not_again() {
    let first = ReplayBody::new(body(data(&[b"12345", b"67890", b"x"])), 10);
    let again = first.repeat();
    assert_eq!(read(first).unwrap().0, "1234567890x");
    assert!(!again.is_replayable());
    assert!(read(again).is_err(), "never a shorter one");
    let first = ReplayBody::new(body(data(&[b"12345", b"67890"])), 10);
    let again = first.repeat();
    read(first).unwrap();
    assert!(again.is_replayable(), "the cap itself fits");
}

#[test]
fn linkerd2_proxy_3216_an_answer_before_the_bodys_end_leaves_the_rest_to_the_next_attempt() {
    let mut first = ReplayBody::new(body(data(&[b"a", b"b", b"c"])), 10);
    let mut again = first.repeat();
    assert!(first.frame().now_or_never().unwrap().unwrap().is_ok());
    assert!(again.frame().now_or_never().unwrap().unwrap().is_ok());
    let superseded = first.frame().now_or_never().unwrap().unwrap();
    assert!(matches!(superseded, Err(BodyError::Superseded)));
    assert_eq!(read(again).unwrap().0, "bc");
}

#[test]
fn sizes_are_known_as_they_were() {
    let first = ReplayBody::new(Full::from("12345"), 10);
    let again = first.repeat();
    assert_eq!(first.size_hint().exact(), Some(5));
    read(first).unwrap();
    assert_eq!(again.size_hint().exact(), Some(5));
    assert!(ReplayBody::new(Empty::<Bytes>::new(), 10).is_end_stream());
    assert_eq!(ReplayBody::<Full<Bytes>>::whole("abc".into()).size_hint().exact(), Some(3));
}

#[test]
fn what_overflowed_is_never_sent_from_its_middle() {
    let mut first = ReplayBody::new(body(data(&[b"12345", b"678901", b"the rest"])), 10);
    let mut again = first.repeat();
    (0..2).for_each(|_| assert!(first.frame().now_or_never().unwrap().unwrap().is_ok()));
    assert!(!again.is_end_stream(), "or an empty body would be sent");
    assert!(again.frame().now_or_never().unwrap().unwrap().is_err());
    assert_eq!(read(first).unwrap().0, "the rest", "the one under way is not disturbed");
    assert!(!again.is_end_stream());
    assert!(read(again).is_err());
}

/// While one copy polls it, another begins.
struct Meanwhile {
    frames: Frames,
    other: Arc<Mutex<Option<ReplayBody<Self>>>>,
}

impl Body for Meanwhile {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = self.get_mut();
        if let Some(other) = this.other.lock().as_mut() {
            assert!(Pin::new(other).poll_frame(cx).is_pending());
        }
        Poll::Ready(this.frames.pop_front().map(Ok))
    }
}

#[test]
fn a_copy_that_begins_while_an_older_one_reads_gets_the_whole_body_or_an_error() {
    for (cap, expected) in [(10, Some("12345")), (4, None)] {
        let other = Arc::new(Mutex::new(None));
        let frames = data(&[b"12345"]);
        let mut first = ReplayBody::new(Meanwhile { frames, other: Arc::clone(&other) }, cap);
        *other.lock() = Some(first.repeat());
        let superseded = first.frame().now_or_never().unwrap().unwrap();
        assert!(matches!(superseded, Err(BodyError::Superseded)));
        let again = other.lock().take().unwrap();
        assert_eq!(read(again).ok().map(|(bytes, _)| bytes), expected.map(Bytes::from));
    }
}

#[test]
fn a_body_in_one_piece_is_repeated_also_after_it_was_sent() {
    let mut first = ReplayBody::<Full<Bytes>>::whole("abc".into());
    assert!(first.frame().now_or_never().unwrap().unwrap().is_ok());
    assert_eq!(read(first.repeat()).unwrap().0, "abc");
    assert!(first.is_end_stream());
}

#[test]
fn a_body_that_fails_is_not_repeated() {
    let broken = StreamBody::new(stream::iter(vec![
        Ok(Frame::data(Bytes::from_static(b"a"))),
        Err(std::io::Error::other("gone")),
    ]));
    let first = ReplayBody::new(broken, 10);
    let again = first.repeat();
    assert!(matches!(read(first), Err(BodyError::Inner(_))));
    assert!(!again.is_replayable());
}
