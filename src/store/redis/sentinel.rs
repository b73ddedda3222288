//! Which server is the master, as the sentinels have it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Client, ConnectionInfo};
use tokio::time::timeout;

use super::connection::{Address, address_of, dial, relocated, request};
use super::error::from_redis;
use crate::store::{StoreError, StoreErrorKind};

/// So long does one sentinel have for its answer, before the next is asked.
const ASK_TIMEOUT: Duration = Duration::from_millis(300);

/// The sentinels, and what they are asked for.
pub(super) struct Sentinels {
    sentinels: Vec<Client>,
    name: String,
    /// How to connect to the master, but for its address.
    master: ConnectionInfo,
    /// Who is asked first: who answered last, unless that led to nothing.
    first: AtomicUsize,
    /// The connection to that one.
    conn: Mutex<Option<MultiplexedConnection>>,
    /// Where the master was last.
    known: Mutex<Option<Address>>,
}

impl Sentinels {
    /// `master` holds the master's name in place of a host.
    pub(super) fn new(sentinels: Vec<Client>, master: ConnectionInfo) -> Option<Self> {
        let ((name, _), first) = (address_of(&master)?, AtomicUsize::new(0));
        Some(Self { sentinels, name, master, first, conn: Mutex::default(), known: Mutex::default() })
    }

    /// A connection to whom the sentinels have for the master.
    ///
    /// A sentinel may be behind the others: unless this connection turns out well, the next one is
    /// asked next time.
    pub(super) async fn dial(&self) -> Result<MultiplexedConnection, StoreError> {
        let address = self.resolve().await?;
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
        let client = relocated(&self.master, address).map_err(|error| from_redis(&error))?;
        dial(&client).await.inspect_err(|_| self.distrust())
    }

    /// Does not ask the sentinel first that answered last.
    pub(super) fn distrust(&self) {
        self.first.fetch_add(1, Ordering::Relaxed);
        self.forget();
    }

    /// Does not use the connection any more over which one was asked.
    pub(super) fn forget(&self) {
        *self.conn.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether the master is another one than that which was dialled last. Not if nobody answers.
    pub(super) async fn has_moved(&self) -> bool {
        let Ok(address) = self.resolve().await else { return false };
        self.known.lock().unwrap_or_else(PoisonError::into_inner).as_ref() != Some(&address)
    }

    /// The master's address, from the first sentinel that knows it.
    async fn resolve(&self) -> Result<Address, StoreError> {
        let mut outcome = Err(unknown_master());
        for _ in 0..self.sentinels.len() {
            let first = self.first.load(Ordering::Relaxed) % self.sentinels.len();
            let answer = timeout(ASK_TIMEOUT, self.ask(&self.sentinels[first])).await;
            outcome = answer.unwrap_or_else(|_| Err(no_answer()));
            if outcome.is_ok() {
                break;
            }
            self.distrust();
        }
        outcome
    }

    async fn ask(&self, sentinel: &Client) -> Result<Address, StoreError> {
        let kept = self.conn.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It may have ended since, with the sentinel or with the runtime that it was made on.
        if let Some(conn) = kept
            && let Ok(address) = self.ask_over(conn).await
        {
            return Ok(address);
        }
        self.ask_over(dial(sentinel).await?).await
    }

    async fn ask_over(&self, mut conn: MultiplexedConnection) -> Result<Address, StoreError> {
        let mut ask = ::redis::cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        let reply = request(&mut conn, &ask).await.map_err(|error| from_redis(&error))?;
        let address = ::redis::from_redis_value::<Option<Address>>(reply).ok().flatten();
        *self.conn.lock().unwrap_or_else(PoisonError::into_inner) = Some(conn);
        address.ok_or_else(unknown_master)
    }
}

fn no_answer() -> StoreError {
    StoreError::new(StoreErrorKind::Timeout, "a sentinel did not answer in time: is it up and reachable?")
}

fn unknown_master() -> StoreError {
    let message = "the sentinels know no master of this name: use the one that is in their configuration";
    StoreError::new(StoreErrorKind::Other, message)
}
