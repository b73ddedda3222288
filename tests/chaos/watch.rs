//! Whether the machine gives the server, and a proxy, the time to answer at all.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::record::{MS, Nanos, Span, now};

/// A PING that takes longer is noted.
const LATE: Nanos = 40 * MS;
const EVERY: Duration = Duration::from_millis(20);

/// Pings a server over and over, through a proxy that no fault touches.
pub(crate) struct Watch {
    ended: Arc<AtomicBool>,
    late: Arc<Mutex<Vec<Span>>>,
    thread: JoinHandle<()>,
}

impl Watch {
    pub(crate) fn start(addr: SocketAddr) -> Self {
        let (ended, late) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<_>>>::default());
        let (until, sink) = (Arc::clone(&ended), Arc::clone(&late));
        let thread = thread::spawn(move || {
            let (mut stream, mut before) = (None, now());
            while !until.load(Ordering::SeqCst) {
                // A gap between two of them counts as well: this thread may be the one that waits.
                if ping(&mut stream, addr).is_none() {
                    stream = None;
                }
                thread::sleep(EVERY);
                let after = now();
                if after - before > LATE {
                    sink.lock().expect("no panic under this lock").push(Span::new(before, after));
                }
                before = after;
            }
        });
        Self { ended, late, thread }
    }

    /// When no answer came in time.
    pub(crate) fn end(self) -> Vec<Span> {
        self.ended.store(true, Ordering::SeqCst);
        self.thread.join().expect("it does not panic");
        std::mem::take(&mut self.late.lock().expect("no panic under this lock"))
    }
}

/// Fails where the server is not there.
fn ping(stream: &mut Option<TcpStream>, addr: SocketAddr) -> Option<()> {
    if stream.is_none() {
        let connected = TcpStream::connect(addr).ok()?;
        connected.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        *stream = Some(connected);
    }
    let stream = stream.as_mut()?;
    stream.write_all(b"PING\r\n").ok()?;
    // "+PONG\r\n"
    stream.read_exact(&mut [0; 7]).ok()
}
