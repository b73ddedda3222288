//! Faults, one test or more for each row of the table in `docs/reliability.md`, whose number is in the
//! test's name. Each says what it measured and the bound: `cargo test --all-features --test faults --
//! --nocapture fault_07`.

#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod clocks;
mod common;
mod holder;
mod networks;
mod processes;
mod requests;
mod runtimes;
mod servers;
#[path = "../support/mod.rs"]
mod support;
