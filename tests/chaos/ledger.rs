//! What the server says is taken, looked up now and then past all proxies.

use std::collections::HashMap;

use crate::arena::Arena;
use crate::projects::PROJECTS;
use crate::record::{MS, Nanos, Span, now};

/// What was there of one project.
pub(crate) struct Page {
    pub(crate) project: usize,
    /// It was looked up in between.
    pub(crate) span: Span,
    /// When each member's lease runs out, at the earliest.
    pub(crate) members: HashMap<u128, Nanos>,
}

/// Looks all projects up. No fault keeps the server from answering meanwhile.
pub(crate) async fn look(arena: &Arena) -> Vec<Page> {
    let _answers = arena.server_taken.lock().await;
    let mut pages = Vec::new();
    for (project, known) in PROJECTS.iter().enumerate() {
        let from = now();
        let server_now = arena.server.time_ms().await;
        let members = arena.server.members(&known.key()).await;
        let span = Span::new(from, now());
        let runs_out = |(name, score): &(String, i64)| {
            // Of those that have run out, in the past.
            (number_of(name), span.from.saturating_add_signed((score - server_now) * MS as i64))
        };
        pages.push(Page { project, span, members: members.iter().map(runs_out).collect() });
    }
    pages
}

/// The number in the name of a slot.
pub(crate) fn number_of(slot: &str) -> u128 {
    let digits = slot.strip_prefix("slot_").expect("the name of a slot");
    u128::from_str_radix(digits, 16).expect("hex digits")
}
