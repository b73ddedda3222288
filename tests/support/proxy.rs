//! A TCP proxy in front of a Redis server that understands RESP frames and injects faults.
//!
//! It runs on its own thread with its own runtime. Per connection and direction, one future reads
//! frames into an unbounded queue and another writes them out again; a delay is a due time beside
//! each queued piece, so that it adds latency without costing throughput. RESP2 and RESP3, plain TCP
//! only; no replication links, as what they carry is not all RESP.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// What [`Proxy::rewrite_replies`] takes: a complete reply frame in, any bytes out.
pub type Rewrite = Box<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// A running proxy. All controls may be used at any time and from any thread.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    cut: Option<mpsc::UnboundedSender<std::sync::mpsc::Sender<()>>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// The faults that last until they are switched off.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    delay: Duration,
    throttle: Option<u64>,
    refuse: bool,
    black_hole: bool,
    hold_replies: bool,
    /// Connections with a lower number are frozen.
    frozen_below: u64,
    /// Those with a lower number are closed towards the client.
    hung_up_below: u64,
}

/// What the controls and the proxy's thread share.
struct Shared {
    upstream: Mutex<SocketAddr>,
    faults: watch::Sender<Faults>,
    refuse_next: AtomicU64,
    drop_replies: AtomicU64,
    lose_replies: AtomicU64,
    rewrite: Mutex<Option<Arc<Rewrite>>>,
    requests: AtomicU64,
    replies: AtomicU64,
    connections: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("faults", &*self.faults.borrow()).finish_non_exhaustive()
    }
}

impl Proxy {
    /// Starts a proxy on a free loopback port in front of `upstream`, which need not be up yet.
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = (0..10)
            .find_map(|_| std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, super::free_port())).ok())
            .expect("the proxy finds a port");
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let addr = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared {
            upstream: Mutex::new(upstream),
            faults: watch::Sender::default(),
            refuse_next: AtomicU64::default(),
            drop_replies: AtomicU64::default(),
            lose_replies: AtomicU64::default(),
            rewrite: Mutex::default(),
            requests: AtomicU64::default(),
            replies: AtomicU64::default(),
            connections: AtomicU64::default(),
        });
        let (cut, cuts) = mpsc::unbounded_channel();
        let its_share = shared.clone();
        let run = move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("the proxy's runtime starts")
                .block_on(serve(listener, its_share, cuts));
        };
        let thread =
            thread::Builder::new().name("proxy".to_owned()).spawn(run).expect("the proxy's thread starts");
        Self { addr, shared, cut: Some(cut), thread: Some(thread) }
    }

    /// `redis://127.0.0.1:PORT/`
    pub fn url(&self) -> String {
        format!("redis://{}/", self.addr)
    }

    /// The address clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Adds latency to what is read from now on, in each direction: a round trip takes twice this.
    pub fn set_delay(&self, delay: Duration) {
        self.shared.faults.send_modify(|faults| faults.delay = delay);
    }

    /// Bounds the bytes per second of each connection and direction.
    pub fn throttle(&self, bytes_per_second: Option<u64>) {
        self.shared.faults.send_modify(|faults| faults.throttle = bytes_per_second);
    }

    /// Closes all connections; what was on its way is lost. Returns when they are closed.
    pub fn cut(&self) {
        let (done, wait) = std::sync::mpsc::channel();
        let cut = self.cut.as_ref().expect("present until the drop");
        cut.send(done).expect("the proxy's thread runs");
        wait.recv_timeout(Duration::from_secs(10)).expect("the proxy's thread cuts its connections");
    }

    /// Closes new connections at once; those that exist stay.
    pub fn refuse(&self, on: bool) {
        self.shared.faults.send_modify(|faults| faults.refuse = on);
    }

    /// Closes the next `n` new connections at once.
    pub fn refuse_next(&self, n: u64) {
        self.shared.refuse_next.store(n, Ordering::SeqCst);
    }

    /// Forwards nothing in either direction, the end of a connection included, but keeps the
    /// sockets open; switched off, what was held back is delivered.
    pub fn black_hole(&self, on: bool) {
        self.shared.faults.send_modify(|faults| faults.black_hole = on);
    }

    /// Holds back, in both directions, what the connections of now carry; new ones pass. That is a
    /// connection that is half open, as behind a router that forgot it. Their ends are held back too,
    /// so that what a client sent before it gave up is delivered by [`Proxy::thaw`].
    pub fn freeze(&self) {
        let number = self.connections();
        self.shared.faults.send_modify(|faults| faults.frozen_below = number);
    }

    /// Delivers what frozen connections held back.
    pub fn thaw(&self) {
        self.shared.faults.send_modify(|faults| faults.frozen_below = 0);
    }

    /// Closes the connections of now towards their clients. What these have sent still arrives at the
    /// server, at once or after a [`Proxy::thaw`].
    pub fn hang_up(&self) {
        let number = self.connections();
        self.shared.faults.send_modify(|faults| faults.hung_up_below = number);
    }

    /// Leads new connections to another server; those that exist stay where they are.
    pub fn redirect(&self, upstream: SocketAddr) {
        *self.shared.upstream.lock().expect("no panic under this lock") = upstream;
    }

    /// Swallows the next `n` replies, which the server has executed the commands of. Zero ends it.
    ///
    /// The connection goes on, so a client that pairs replies with requests in their order takes
    /// the next reply for the swallowed one, as it never could in real TCP. Where the loss of a
    /// reply is the point, use [`Proxy::lose_replies`].
    pub fn drop_replies(&self, n: u64) {
        self.shared.drop_replies.store(n, Ordering::SeqCst);
    }

    /// Swallows the next `n` replies and closes the connection of each. Zero ends it.
    pub fn lose_replies(&self, n: u64) {
        self.shared.lose_replies.store(n, Ordering::SeqCst);
    }

    /// Keeps replies back until it is switched off; requests do pass.
    pub fn hold_replies(&self, on: bool) {
        self.shared.faults.send_modify(|faults| faults.hold_replies = on);
    }

    /// Passes each complete reply frame (pushes too) through a function, on the proxy's thread.
    pub fn rewrite_replies(&self, rewrite: Option<Rewrite>) {
        let mut place = self.shared.rewrite.lock().expect("no panic under this lock");
        *place = rewrite.map(Arc::new);
    }

    /// How many request frames have come in, connection set-up included.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// How many replies have come from the server, swallowed and held ones included.
    pub fn replies(&self) -> u64 {
        self.shared.replies.load(Ordering::SeqCst)
    }

    /// How many connections have been accepted, refused ones included.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the proxy has been printed; do not panic on top of another one.
            let _panicked = thread.join();
        }
    }
}

/// The proxy's thread: accepts connections and cuts them, until the [`Proxy`] is gone.
async fn serve(
    listener: std::net::TcpListener,
    shared: Arc<Shared>,
    mut cuts: mpsc::UnboundedReceiver<std::sync::mpsc::Sender<()>>,
) {
    let listener = TcpListener::from_std(listener).expect("the listener fits the runtime");
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            // In this order, so that a cut also meets who has just connected.
            biased;
            accepted = listener.accept() => {
                let (client, _) = accepted.expect("the proxy can accept");
                let number = shared.connections.fetch_add(1, Ordering::SeqCst);
                if !shared.faults.borrow().refuse && !take_one(&shared.refuse_next) {
                    connections.spawn(connection(client, number, shared.clone()));
                }
            }
            cut = cuts.recv() => {
                let Some(done) = cut else { return };
                connections.abort_all();
                while connections.join_next().await.is_some() {}
                let _nobody_waits = done.send(());
            }
            Some(_ended) = connections.join_next() => {}
        }
    }
}

/// A reply of the connection was lost, so the connection ends.
struct Lost;

/// One connection, until both directions have ended or a reply of it is lost.
async fn connection(client: TcpStream, number: u64, shared: Arc<Shared>) {
    let upstream = *shared.upstream.lock().expect("no panic under this lock");
    let Ok(server) = TcpStream::connect(upstream).await else {
        return;
    };
    for stream in [&client, &server] {
        stream.set_nodelay(true).expect("a socket can be without delay");
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let requests = async {
        let (queue, queued) = mpsc::unbounded_channel();
        tokio::join!(
            read_requests(from_client, queue, &shared),
            write(to_server, queued, &shared, number, false),
        );
        Ok(())
    };
    let replies = async {
        let (queue, queued) = mpsc::unbounded_channel();
        let mut faults = shared.faults.subscribe();
        let write = async {
            tokio::select! {
                () = write(to_client, queued, &shared, number, true) => {}
                _ = faults.wait_for(|faults| number < faults.hung_up_below) => {}
            }
        };
        let (read, ()) = tokio::join!(read_replies(from_server, queue, &shared), write);
        read
    };
    let _lost_or_ended = tokio::try_join!(requests, replies);
}

/// Some frames on their way, and when they are due at the other side.
type Queued = (Instant, Vec<u8>);

/// Reads requests into the queue, whole frames only.
async fn read_requests(mut from: OwnedReadHalf, queue: mpsc::UnboundedSender<Queued>, shared: &Shared) {
    let mut buffer = Vec::new();
    while read_more(&mut from, &mut buffer).await {
        let frames = take_frames(&mut buffer, request_length);
        let count = frames.len() as u64;
        shared.requests.fetch_add(count, Ordering::SeqCst);
        if queue.send((due(shared), frames.concat())).is_err() {
            return;
        }
    }
}

/// Reads replies into the queue, whole frames only, and drops, loses and rewrites them.
async fn read_replies(
    mut from: OwnedReadHalf,
    queue: mpsc::UnboundedSender<Queued>,
    shared: &Shared,
) -> Result<(), Lost> {
    let mut buffer = Vec::new();
    while read_more(&mut from, &mut buffer).await {
        let mut pass = Vec::new();
        let mut read = Ok(());
        for frame in take_frames(&mut buffer, frame_length) {
            if frame[0] != b'>' {
                shared.replies.fetch_add(1, Ordering::SeqCst);
                if take_one(&shared.lose_replies) {
                    read = Err(Lost);
                    break;
                }
                if take_one(&shared.drop_replies) {
                    continue;
                }
            }
            let rewrite = shared.rewrite.lock().expect("no panic under this lock").clone();
            pass.extend(match rewrite {
                Some(rewrite) => rewrite(frame),
                None => frame,
            });
        }
        // What came before a lost reply still reaches the client.
        let sent = queue.send((due(shared), pass));
        read?;
        if sent.is_err() {
            break;
        }
    }
    Ok(())
}

/// Writes what is queued when it is due and no fault holds it back, then closes this direction.
async fn write(
    mut to: OwnedWriteHalf,
    mut queue: mpsc::UnboundedReceiver<Queued>,
    shared: &Shared,
    number: u64,
    replies: bool,
) {
    let mut faults = shared.faults.subscribe();
    let mut line_free = Instant::now();
    while let Some((due, bytes)) = queue.recv().await {
        reach(due).await;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            reach(line_free).await;
            let throttle = open(&mut faults, number, replies).await.throttle;
            // A fiftieth of a second's worth at a time.
            let chunk = throttle.map_or(rest.len(), |rate| (rate / 50).max(1) as usize);
            let (now, later) = rest.split_at(chunk.min(rest.len()));
            if to.write_all(now).await.is_err() {
                return;
            }
            if let Some(rate) = throttle {
                let time = Duration::from_secs_f64(now.len() as f64 / rate.max(1) as f64);
                line_free = line_free.max(Instant::now()) + time;
            }
            rest = later;
        }
    }
    open(&mut faults, number, replies).await;
    let _already_closed = to.shutdown().await;
}

/// Waits until nothing holds this direction back; returns the faults of that moment.
async fn open(faults: &mut watch::Receiver<Faults>, number: u64, replies: bool) -> Faults {
    let held = |faults: &Faults| {
        faults.black_hole || number < faults.frozen_below || (replies && faults.hold_replies)
    };
    *faults.wait_for(|faults| !held(faults)).await.expect("the sender outlives its connections")
}

/// Waits for a moment. One that has passed costs nothing, where tokio's timer takes up to 1 ms.
async fn reach(moment: Instant) {
    if moment > Instant::now() {
        sleep_until(moment).await;
    }
}

/// When something that is read now is due at the other side.
fn due(shared: &Shared) -> Instant {
    Instant::now() + shared.faults.borrow().delay
}

/// Counts down, but not below zero; whether there was one left.
fn take_one(counter: &AtomicU64) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
}

/// Reads what has come; false at the end.
async fn read_more(from: &mut OwnedReadHalf, buffer: &mut Vec<u8>) -> bool {
    buffer.reserve(64 * 1024);
    from.read_buf(buffer).await.is_ok_and(|length| length > 0)
}

/// Takes the complete frames off the buffer.
fn take_frames(buffer: &mut Vec<u8>, length: fn(&[u8]) -> Option<usize>) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut at = 0;
    while let Some(length) = length(&buffer[at..]) {
        frames.push(buffer[at..at + length].to_vec());
        at += length;
    }
    buffer.drain(..at);
    frames
}

/// The length of the request at the start: a frame, or a line ("inline command").
fn request_length(bytes: &[u8]) -> Option<usize> {
    match bytes.first()? {
        b'*' => frame_length(bytes),
        _ => line_length(bytes),
    }
}

/// The length of the first line, CRLF included.
fn line_length(bytes: &[u8]) -> Option<usize> {
    Some(bytes.windows(2).position(|pair| pair == b"\r\n")? + 2)
}

/// The length of the RESP2 or RESP3 frame at the start, once it is complete.
pub fn frame_length(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    let mut missing = 1;
    while missing > 0 {
        let line = line_length(&bytes[at..])?;
        let header = &bytes[at..at + line - 2];
        // -1 is RESP2's null bulk string or null array.
        let count = || {
            let text = str::from_utf8(&header[1..]).ok();
            let count: i64 = text
                .and_then(|text| text.parse().ok())
                .unwrap_or_else(|| panic!("a RESP length: {:?}", header.escape_ascii()));
            usize::try_from(count).ok()
        };
        at += line;
        missing -= 1;
        match header.first() {
            // String, error, integer, null, boolean, double, big number: a line.
            Some(b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(') => {}
            // Bulk string, bulk error, verbatim string.
            Some(b'$' | b'!' | b'=') => at += count().map_or(0, |bytes| bytes + 2),
            // Array, set, push.
            Some(b'*' | b'~' | b'>') => missing += count().unwrap_or(0),
            // Map.
            Some(b'%') => missing += 2 * count().unwrap_or(0),
            // Attributes, which precede the value they belong to.
            Some(b'|') => missing += 2 * count().unwrap_or(0) + 1,
            _ => panic!("not RESP: {:?}", header.escape_ascii()),
        }
        if at > bytes.len() {
            return None;
        }
    }
    Some(at)
}
