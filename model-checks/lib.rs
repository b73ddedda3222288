//! Nothing but the semaphore of the crate beside.

#[path = "../src/semaphore/mod.rs"]
pub mod semaphore;
