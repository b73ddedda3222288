//! What callers and holders are to be told once no lock is held.

use std::sync::{Arc, Weak};

use tokio::sync::oneshot;

use super::flight::Confirm;
use crate::store::{Grant, Holder, Lost, StoreError};

pub(super) type Answer = oneshot::Sender<Result<Grant, StoreError>>;

/// Answers and news to deliver once no lock is held.
#[derive(Default)]
pub(super) struct News {
    pub(super) replies: Vec<(Answer, Result<Grant, StoreError>)>,
    pub(super) confirms: Vec<(Confirm, Result<(), StoreError>)>,
    pub(super) losses: Vec<(Weak<dyn Holder>, Lost)>,
    pub(super) flushed: Vec<oneshot::Sender<()>>,
    /// Holders that were asked something: they may be dropped with no lock held only.
    pub(super) asked: Vec<Arc<dyn Holder>>,
}

impl News {
    /// A receiver that is gone needs no news.
    pub(super) fn deliver(self) {
        for (reply, answer) in self.replies {
            let _ = reply.send(answer);
        }
        for (confirm, result) in self.confirms {
            let _ = confirm.send(result);
        }
        for (holder, why) in self.losses {
            if let Some(holder) = holder.upgrade() {
                holder.lost(why);
            }
        }
        for flushed in self.flushed {
            let _ = flushed.send(());
        }
    }
}
