#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr))]

mod error;
mod labels;
pub mod layer;
pub mod limiter;
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "metrics of what only Redis does"))]
mod metrics;
pub mod semaphore;
pub mod store;
mod trace;

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use ::redis;

pub use crate::error::ConfigError;
pub use crate::layer::{
    ConcurrencyLimit, ConcurrencyLimitLayer, Hold, OnMissing, RateLimitFields, Rejection, key,
};
pub use crate::limiter::{
    Acquire, AcquireError, HeldSlot, KeyError, Limit, LimitSource, Limiter, LimiterBuilder, OnOutage, Origin,
    ProjectId, Slot, SlotHandle,
};
pub use crate::store::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use crate::store::redis::RedisStore;
