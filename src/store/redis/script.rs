//! The scripts, and how calls are written for them and read back; flights have a module of their own.

use std::sync::LazyLock;

use ::redis::{Cmd, Script, Value};

use super::error::malformed;
use crate::store::{Key, SlotId, StoreError};

/// One script, of several parts: its text, and the hash under which the server keeps it.
pub(super) struct Source {
    text: &'static str,
    script: LazyLock<Script>,
}

macro_rules! source {
    ($($file:literal),+) => {{
        const TEXT: &str = concat!($(include_str!(concat!($file, ".lua"))),+);
        Source { text: TEXT, script: LazyLock::new(|| Script::new(TEXT)) }
    }};
}

// A script with flags that do not rule writing out is refused by a replica, and by a master that may
// not write: a login needs no further right to learn that.
pub(super) static HELLO: Source = source!("allow_oom", "clock", "hello");
pub(super) static FLIGHT: Source = source!("clock", "single", "prelude", "flight");
// A renewal writes over what is there: it must work on a server that has reached `maxmemory`.
pub(super) static RENEW: Source = source!("allow_oom", "clock", "prelude", "renew");
pub(super) static COUNT: Source = source!("clock", "prelude", "count");
pub(super) static DRAIN: Source = source!("clock", "prelude", "drain");
#[cfg(feature = "redis-cluster")]
pub(super) static MARK: Source = source!("clock", "prelude", "mark");
#[cfg(feature = "redis-cluster")]
pub(super) static TTL: Source = source!("clock", "ttl");

impl Source {
    /// The command that runs it by its hash.
    pub(super) fn by_hash(&self) -> Cmd {
        command("EVALSHA", self.script.get_hash())
    }

    /// The command that runs it whole, and makes it known to the server.
    pub(super) fn whole(&self) -> Cmd {
        command("EVAL", self.text)
    }
}

fn command(verb: &str, script: &str) -> Cmd {
    let mut cmd = ::redis::cmd(verb);
    cmd.arg(script);
    cmd
}

/// One slot that is to be renewed.
#[derive(Clone, Copy)]
pub(super) struct Renewal {
    pub(super) slot: SlotId,
    pub(super) weight: u32,
    /// When it was acquired, on the server's clock.
    pub(super) since: u64,
}

/// Without its drain marker, a key gets no slot back that is gone: then `alone` is true.
pub(super) fn write_renewal(
    cmd: &mut Cmd,
    key: &Key,
    alone: bool,
    not_after: u64,
    lease_ms: u64,
    slots: &[Renewal],
) {
    if alone {
        cmd.arg(1).arg(key.as_str());
    } else {
        cmd.arg(2).arg(key.as_str()).arg(drain_marker(key));
    }
    let total: u64 = slots.iter().map(|renewal| u64::from(renewal.weight)).sum();
    let weights = total > slots.len() as u64;
    let mut list = List::of(4 + slots.len() * if weights { 3 } else { 2 });
    [not_after, lease_ms, slots.len() as u64, total].into_iter().for_each(|number| list.number(number));
    slots.iter().for_each(|renewal| list.slot(renewal.slot));
    slots.iter().for_each(|renewal| list.number(renewal.since));
    if weights {
        slots.iter().for_each(|renewal| list.number(u64::from(renewal.weight)));
    }
    cmd.arg(list.into_bytes());
}

/// A slot id's text and what goes before it.
const SLOT_ID_ITEM: usize = 2 + 37;

/// A MessagePack list that is being written. Writing into memory does not fail.
pub(super) struct List(Vec<u8>);

impl List {
    /// One of so many items, most of which are slots.
    pub(super) fn of(items: usize) -> Self {
        let mut list = Vec::with_capacity(16 + SLOT_ID_ITEM * items);
        let _ = rmp::encode::write_array_len(&mut list, items as u32);
        Self(list)
    }

    pub(super) fn number(&mut self, number: u64) {
        // Lua takes larger ones for negative.
        let _ = rmp::encode::write_uint(&mut self.0, number.min(i64::MAX as u64));
    }

    pub(super) fn slot(&mut self, slot: SlotId) {
        let text = slot.to_bytes();
        let _ = rmp::encode::write_str_len(&mut self.0, text.len() as u32);
        self.0.extend_from_slice(&text);
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// What became of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RenewVerdict {
    Renewed,
    PutBack,
    Drained,
    Late,
}

pub(super) struct RenewReply {
    pub(super) now: u64,
    pub(super) lapsed: u64,
    pub(super) verdicts: Vec<RenewVerdict>,
}

pub(super) fn read_renewal(reply: Value, slots: usize) -> Result<RenewReply, StoreError> {
    let mut items = sequence(reply)?.into_iter();
    let mut number = || items.next().and_then(|value| unsigned(&value)).ok_or_else(malformed);
    let (now, lapsed) = (number()?, number()?);
    let verdicts: Vec<_> = items
        .map(|value| match value {
            Value::Int(0) => Ok(RenewVerdict::Drained),
            Value::Int(1) => Ok(RenewVerdict::Renewed),
            Value::Int(2) => Ok(RenewVerdict::PutBack),
            Value::Nil | Value::Boolean(false) => Ok(RenewVerdict::Late),
            _ => Err(malformed()),
        })
        .collect::<Result<_, _>>()?;
    let verdicts = match verdicts.as_slice() {
        [all] => vec![*all; slots],
        _ => verdicts,
    };
    if verdicts.len() == slots { Ok(RenewReply { now, lapsed, verdicts }) } else { Err(malformed()) }
}

/// What a script takes that has one key and nothing else.
pub(super) fn write_key(cmd: &mut Cmd, key: &Key) {
    cmd.arg(1).arg(key.as_str());
}

pub(super) fn write_drain(cmd: &mut Cmd, key: &Key, lease_ms: u64) {
    cmd.arg(2).arg(key.as_str()).arg(drain_marker(key)).arg(lease_ms);
}

/// Server ms and a number: the reply of the count and drain scripts.
pub(super) fn read_number(reply: Value) -> Result<(u64, u32), StoreError> {
    match sequence(reply)?.as_slice() {
        [now, Value::Int(number)] => Ok((unsigned(now).ok_or_else(malformed)?, count(*number))),
        _ => Err(malformed()),
    }
}

/// Server ms and the server's version: the reply of the hello script.
pub(super) fn read_hello(reply: Value) -> Result<(u64, String), StoreError> {
    match sequence(reply)?.as_slice() {
        [now, version] => {
            let version = text(version).ok_or_else(malformed)?;
            Ok((unsigned(now).ok_or_else(malformed)?, version.to_owned()))
        }
        _ => Err(malformed()),
    }
}

#[cfg(feature = "redis-cluster")]
pub(super) fn write_mark(cmd: &mut Cmd, key: &Key, keep_ms: u64) {
    cmd.arg(1).arg(drain_marker(key)).arg(keep_ms);
}

/// With the drain marker left before.
#[cfg(feature = "redis-cluster")]
pub(super) fn write_drop(cmd: &mut Cmd, key: &Key, lease_ms: u64) {
    cmd.arg(1).arg(key.as_str()).arg(lease_ms);
}

/// Where a drain leaves its marker: beside the key, in its Cluster slot.
fn drain_marker(key: &Key) -> String {
    format!("{{{}}}:drained", key.as_str())
}

pub(super) fn sequence(value: Value) -> Result<Vec<Value>, StoreError> {
    value.into_sequence().map_err(|_| malformed())
}

pub(super) fn signed(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        _ => None,
    }
}

pub(super) fn unsigned(value: &Value) -> Option<u64> {
    signed(value).and_then(|number| u64::try_from(number).ok())
}

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

pub(super) fn count(number: i64) -> u32 {
    u32::try_from(number).unwrap_or(if number < 0 { 0 } else { u32::MAX })
}
