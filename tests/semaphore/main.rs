//! The contract of the local weighted FIFO semaphore, rule by rule: `rule_16_…` holds rule 16. Most
//! rules run twice, with and without a listener, since the two take different ways through the code.

mod acquire;
mod close;
mod construction;
mod counters;
mod events;
mod model;
mod others;
mod permit;
mod queue;
mod races;
mod source;
mod structure;
mod support;
