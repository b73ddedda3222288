//! Limits how many requests of one project are in flight at once across a whole fleet.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
pub mod limiter;
mod metrics;
pub mod store;
mod trace;

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use ::redis;

pub use crate::error::ConfigError;
pub use crate::limiter::{
    Acquire, AcquireError, HeldSlot, KeyError, Limit, LimitSource, Limiter, LimiterBuilder, OnOutage, Origin,
    ProjectId, Slot, SlotHandle,
};
pub use crate::store::MemoryStore;
#[cfg(feature = "redis")]
pub use crate::store::redis::RedisStore;
