//! The sockets.

use std::{
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, sleep_until},
};

use super::{
    Toxics,
    pump::{End, Lot, Rules, Side, pump},
};

/// Connections at a time; more are reset. Tests have dozens, and a process may have 1024 files.
pub const MOST_CONNECTIONS: usize = 400;

/// A TCP proxy that harms connections. Dropping it closes its port and all connections.
///
/// ```
/// use std::time::Duration;
/// use carrick_testkit::toxic::{Toxic, Toxics};
/// use tokio::{io::AsyncReadExt, net::{TcpListener, TcpStream}, time::timeout};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let server = TcpListener::bind("127.0.0.1:0").await?;
/// let proxy = Toxic::start(server.local_addr()?).await?;
/// proxy.set(Toxics::black_hole());
///
/// let mut client = TcpStream::connect(proxy.address()).await?; // it is accepted
/// server.accept().await?.0.try_write(b"hello")?;
/// let answer = timeout(Duration::from_millis(20), client.read_u8()).await;
/// assert!(answer.is_err(), "and nothing comes");
///
/// proxy.cut();
/// assert!(client.read_u8().await.is_err());
/// # Ok(())
/// # }
/// ```
pub struct Toxic {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: AbortHandle,
    runtime: Handle,
    /// Bound and not listening: keeps the port while new connections are refused.
    _port: Socket,
}

struct Shared {
    upstream: SocketAddr,
    seed: u64,
    /// What a connection is made by; whoever holds it sees connections and cuts in one order.
    door: Mutex<Door>,
    rules: watch::Sender<Rules>,
    tally: Tally,
}

struct Door {
    listener: Option<TcpListener>,
    cuts: u64,
}

#[derive(Debug, Default)]
struct Tally {
    accepted: AtomicU64,
    reset: AtomicU64,
    unreachable: AtomicU64,
    open: AtomicU64,
    up: AtomicU64,
    down: AtomicU64,
    swallowed: AtomicU64,
}

/// What a proxy has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that are open.
    pub open: u64,
    /// Connections that ended by a reset: by [`Toxics::reset`], by [`Toxic::cut`], since a peer reset
    /// them, or since there were too many.
    pub reset: u64,
    /// Connections whose server could not be reached; the client was reset.
    pub unreachable: u64,
    /// Bytes that were passed on from clients to the server.
    pub up: u64,
    /// Bytes that were passed on from the server to clients.
    pub down: u64,
    /// Bytes that black holes had.
    pub swallowed: u64,
}

impl Toxic {
    /// Starts a proxy before `upstream`, on a free port of the loopback interface, that does no harm
    /// yet.
    ///
    /// # Errors
    /// If no port can be had.
    ///
    /// # Cancel safety
    /// Safe to drop: what was begun is undone.
    pub async fn start(upstream: SocketAddr) -> io::Result<Self> {
        Self::with(upstream, Toxics::default(), 0).await
    }

    /// The same, with harm from the first connection on, and the seed of jitter and toxicity.
    ///
    /// # Errors
    /// As [`Toxic::start`].
    ///
    /// # Cancel safety
    /// As [`Toxic::start`].
    pub async fn with(upstream: SocketAddr, toxics: Toxics, seed: u64) -> io::Result<Self> {
        let port = bound((Ipv4Addr::LOCALHOST, 0).into())?;
        let address = port.local_addr()?.as_socket().ok_or(io::ErrorKind::Unsupported)?;
        let (rules, _) = watch::channel(Rules { toxics, cuts: 0 });
        let door = Mutex::new(Door { listener: Some(listening(address)?), cuts: 0 });
        let tally = Tally::default();
        let shared = Arc::new(Shared { upstream, seed, door, rules, tally });
        let acceptor = tokio::spawn(accept(Arc::clone(&shared))).abort_handle();
        Ok(Self { address, shared, acceptor, runtime: Handle::current(), _port: port })
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Replaces what is done, as a whole, to connections that are there and to those to come. It
    /// waits for nothing, and holds for every byte that is not being written at this very moment.
    pub fn set(&self, toxics: Toxics) {
        self.shared.rules.send_modify(|rules| rules.toxics = toxics);
    }

    /// What is done now.
    pub fn toxics(&self) -> Toxics {
        self.shared.rules.borrow().toxics
    }

    /// Resets all connections that are there when this is called, those too that were not yet seen by
    /// the proxy. Connections made after it has returned are not touched.
    pub fn cut(&self) {
        let mut door = self.shared.door.lock();
        if let Some(listener) = &door.listener {
            // Made by the kernel already, as their clients see it. Asked for directly, since a listener
            // that has not been told yet would say that there are none.
            while let Ok((socket, _)) = SockRef::from(listener).accept() {
                self.shared.tally.accepted.fetch_add(1, Relaxed);
                self.shared.tally.reset.fetch_add(1, Relaxed);
                socket.set_linger(Some(Duration::ZERO)).ok();
            }
        }
        door.cuts += 1;
        self.shared.rules.send_modify(|rules| rules.cuts = door.cuts);
    }

    /// Refuses new connections: whoever connects is told so at once. Those that are there go on.
    pub fn refuse(&self) {
        self.shared.door.lock().listener = None;
    }

    /// Accepts new connections again, at the same address.
    ///
    /// # Errors
    /// If the port cannot be listened on.
    pub fn accept(&self) -> io::Result<()> {
        let _entered = self.runtime.enter();
        let mut door = self.shared.door.lock();
        if door.listener.is_none() {
            door.listener = Some(listening(self.address)?);
        }
        drop(door);
        self.shared.rules.send_modify(|_| {}); // wakes the acceptor
        Ok(())
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        let Tally { accepted, reset, unreachable, open, up, down, swallowed } = &self.shared.tally;
        Counts {
            accepted: accepted.load(Relaxed),
            open: open.load(Relaxed),
            reset: reset.load(Relaxed),
            unreachable: unreachable.load(Relaxed),
            up: up.load(Relaxed),
            down: down.load(Relaxed),
            swallowed: swallowed.load(Relaxed),
        }
    }
}

impl Drop for Toxic {
    fn drop(&mut self) {
        self.refuse();
        self.acceptor.abort(); // and with it goes its set of connections
    }
}

impl fmt::Debug for Toxic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Toxic")
            .field("address", &self.address)
            .field("upstream", &self.shared.upstream)
            .field("toxics", &self.toxics())
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

/// A socket of which there can be another on the same port: one that keeps it and one that listens.
fn bound(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    #[cfg(unix)]
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn listening(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = bound(address)?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

impl Shared {
    /// The next connection, with how often connections were cut before it was made.
    fn poll_door(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, u64)>> {
        let door = self.door.lock();
        let Some(listener) = &door.listener else { return Poll::Pending };
        let (stream, _) = ready!(listener.poll_accept(cx))?;
        Poll::Ready(Ok((stream, door.cuts)))
    }
}

async fn accept(shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    let mut rules = shared.rules.subscribe();
    for number in 0_u64.. {
        let accepted = loop {
            rules.mark_unchanged();
            tokio::select! {
                accepted = std::future::poll_fn(|cx| shared.poll_door(cx)) => break accepted,
                _ = rules.changed() => {} // there may be another listener to wait for
                Some(_) = connections.join_next() => {}
            }
        };
        let Ok((client, cuts)) = accepted else {
            // Out of files, mostly; at once it would be the same again.
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        shared.tally.accepted.fetch_add(1, Relaxed);
        if connections.len() >= MOST_CONNECTIONS {
            shared.tally.reset.fetch_add(1, Relaxed);
            client.set_zero_linger().ok();
            continue;
        }
        let mut dice = Xoshiro256PlusPlus::seed_from_u64(shared.seed.wrapping_add(number));
        let lot = Lot { rules: shared.rules.subscribe(), draw: dice.random(), cuts };
        connections.spawn(connection(Arc::clone(&shared), client, lot, dice));
    }
}

/// Counts a connection as open for as long as it lives.
struct Open<'a>(&'a AtomicU64);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

async fn connection(
    shared: Arc<Shared>,
    mut client: TcpStream,
    mut lot: Lot,
    mut dice: Xoshiro256PlusPlus,
) {
    let tally = &shared.tally;
    tally.open.fetch_add(1, Relaxed);
    let _open = Open(&tally.open);
    let since = Instant::now();
    let server = tokio::select! {
        server = TcpStream::connect(shared.upstream) => server,
        () = doomed(&mut lot, since) => {
            return reset(tally, &client, None);
        }
    };
    let Ok(mut server) = server else {
        tally.unreachable.fetch_add(1, Relaxed);
        client.set_zero_linger().ok();
        return;
    };
    // What is written goes out at once: the delays here are those that were asked for.
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    let end = {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        let other = Xoshiro256PlusPlus::seed_from_u64(dice.random());
        let (up, down) = ((&tally.up, &tally.swallowed), (&tally.down, &tally.swallowed));
        let up = pump(from_client, to_server, Side::Up, lot.clone(), dice, up);
        let down = pump(from_server, to_client, Side::Down, lot.clone(), other, down);
        tokio::select! {
            end = both(up, down) => end,
            () = doomed(&mut lot, since) => End::Reset,
        }
    };
    if end == End::Reset {
        reset(tally, &client, Some(&server));
    }
}

/// Runs both directions until both have ended, or one that ends the other too.
async fn both(up: impl Future<Output = End>, down: impl Future<Output = End>) -> End {
    let whole = |end| if end == End::Ended { Ok(()) } else { Err(end) };
    match tokio::try_join!(async { whole(up.await) }, async { whole(down.await) }) {
        Ok(_) => End::Ended,
        Err(end) => end,
    }
}

/// Waits until the connection is cut or too old.
async fn doomed(lot: &mut Lot, since: Instant) {
    while let Some(toxics) = lot.toxics() {
        match toxics.reset.map(|after| since.checked_add(after)) {
            Some(Some(at)) if at <= Instant::now() => return,
            Some(Some(at)) => tokio::select! {
                () = sleep_until(at) => return,
                () = lot.changed() => {}
            },
            _ => lot.changed().await,
        }
    }
}

/// Ends both sides without a farewell, and without what they have not sent yet.
fn reset(tally: &Tally, client: &TcpStream, server: Option<&TcpStream>) {
    tally.reset.fetch_add(1, Relaxed);
    for stream in [Some(client), server].into_iter().flatten() {
        stream.set_zero_linger().ok();
    }
}
