//! Renewals: which slots are due, and what became of them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::super::error::timed_out;
use super::super::flight::{Doubt, MOST_SLOTS};
use super::super::script::{RenewReply, RenewVerdict, Renewal};
use super::{GivenUp, News, Phase, Table};
use crate::metrics;
use crate::store::{Key, KeyMap, Lost, SlotId, Terms};

/// Slots of one key that are due for renewal.
pub(in super::super) struct Batch {
    pub(in super::super) key: Key,
    pub(in super::super) terms: Arc<Terms>,
    pub(in super::super) slots: Vec<Renewal>,
    pub(in super::super) sent: Instant,
}

impl Table {
    /// Once a tick: what has to be renewed before the next tick but one. Tells who has lost a slot.
    /// `can_send` is said of each lane.
    pub(in super::super) fn due_renewals(
        &mut self,
        now: Instant,
        tick: Duration,
        can_send: &[bool],
        news: &mut News,
    ) -> Vec<Batch> {
        let mut batches: Vec<Batch> = Vec::new();
        let mut open: KeyMap<(usize, u32), (Key, Duration)> = KeyMap::default();
        for (slot, entry) in &mut self.slots {
            if entry.phase != Phase::Held {
                continue;
            }
            if entry.registered && !entry.told_lapsed && entry.renewed + entry.terms.lease <= now {
                entry.told_lapsed = true;
                news.losses.push((Weak::clone(&entry.holder), Lost::Lapsed));
            }
            let due = if entry.registered {
                now + tick >= entry.renewed + entry.terms.lease / 3
            } else {
                can_send[self.routes.lane_of(&entry.key)]
            };
            if !due {
                continue;
            }
            entry.phase = Phase::Renewing;
            entry.sent = now;
            let renewal = Renewal { slot: *slot, weight: entry.weight, since: entry.since_server };
            let group =
                open.entry((entry.key.clone(), entry.terms.lease)).or_insert((usize::MAX, MOST_SLOTS));
            if group.1 + entry.weight > MOST_SLOTS {
                *group = (batches.len(), 0);
                let (key, terms) = (entry.key.clone(), Arc::clone(&entry.terms));
                batches.push(Batch { key, terms, slots: Vec::new(), sent: now });
            }
            group.1 += entry.weight;
            batches[group.0].slots.push(renewal);
        }
        batches
    }

    /// A renewal is back with a reply.
    pub(in super::super) fn renewed(
        &mut self,
        batch: &Batch,
        reply: &RenewReply,
        doubt: Doubt,
        news: &mut News,
    ) {
        let meters = &batch.terms.meters;
        meters.expired.add(reply.lapsed);
        for (Renewal { slot, .. }, verdict) in batch.slots.iter().zip(&reply.verdicts) {
            let Some(entry) = self.slots.get_mut(slot) else { continue };
            let result = match verdict {
                RenewVerdict::Renewed => metrics::Renewal::Renewed,
                RenewVerdict::PutBack => {
                    meters.reasserted.add(1);
                    metrics::Renewal::Reasserted
                }
                RenewVerdict::Drained => metrics::Renewal::Lost,
                RenewVerdict::Late => metrics::Renewal::Error,
            };
            meters.renewals.get(result).add(1);
            match verdict {
                RenewVerdict::Renewed | RenewVerdict::PutBack => {
                    entry.renewed = batch.sent;
                    if !std::mem::replace(&mut entry.registered, true) {
                        entry.since_server = reply.now;
                    }
                    self.renewal_over(*slot, None);
                }
                RenewVerdict::Drained => {
                    news.losses.push((Weak::clone(&entry.holder), Lost::Drained));
                    (entry.doubt, entry.registered) = (None, false);
                    let followers = std::mem::take(&mut entry.followers);
                    self.undo(*slot, news);
                    news.replies.extend(followers.into_iter().map(|claim| (claim.reply, Err(timed_out()))));
                }
                RenewVerdict::Late => self.renewal_over(*slot, Some(doubt)),
            }
        }
    }

    /// A renewal brought no reply: the next tick tries again.
    pub(in super::super) fn not_renewed(&mut self, batch: &Batch, doubt: Option<Doubt>) {
        for Renewal { slot, .. } in &batch.slots {
            batch.terms.meters.renewals.get(metrics::Renewal::Error).add(1);
            self.renewal_over(*slot, doubt);
        }
    }

    /// Renewals are out that nobody will hear of.
    pub(in super::super) fn strand_renewals(&mut self, server_now: u64, epoch: u64) {
        let out = self.slots.iter().filter(|(_, entry)| entry.phase == Phase::Renewing);
        let out: Vec<_> = out.map(|(slot, entry)| (*slot, entry.terms.timeout)).collect();
        for (slot, timeout) in out {
            let timeout = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            let until = server_now.saturating_add(timeout).saturating_add(1);
            self.renewal_over(slot, Some(Doubt { until, epoch }));
        }
    }

    fn renewal_over(&mut self, slot: SlotId, doubt: Option<Doubt>) {
        let Some(entry) = self.slots.get_mut(&slot) else { return };
        entry.phase = Phase::Held;
        entry.doubt = doubt.map(|doubt| doubt.or(entry.doubt)).or(entry.doubt);
        if let Some(GivenUp(confirm)) = entry.given_up.take() {
            self.give_back(slot, confirm);
        } else if !entry.followers.is_empty() {
            entry.phase = Phase::Queued;
            let next = entry.followers.remove(0);
            self.queues[self.routes.lane_of(&entry.key)].acquires.push_back(next);
        }
    }
}
