//! The layer, by real requests through it.

mod answers;
mod attach;
#[cfg(feature = "axum")]
mod axum_types;
mod bounds;
mod bulkhead;
mod curl;
mod disconnect;
mod fields;
mod hold;
mod keys;
mod observed;
mod outer;
mod protocols;
mod support;
mod upgrade;
