//! Limits from a plan table that changes while the limiter runs.
//!
//! `cargo run --example dynamic_limits`

use std::collections::HashMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tower_slots::{AcquireError, Limit, Limiter, MemoryStore, ProjectId, Slot};

/// What would be a table in a database.
#[derive(Clone, Default)]
struct Plans(Arc<RwLock<HashMap<String, Limit>>>);

impl Plans {
    fn set(&self, project: &str, limit: Limit) {
        self.0.write().expect("no writer panics").insert(project.to_owned(), limit);
    }

    async fn limit(&self, project: &str) -> Limit {
        self.0.read().expect("no writer panics").get(project).copied().unwrap_or(Limit::Default)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plans = Plans::default();
    let table = plans.clone();
    let limiter = Limiter::builder(MemoryStore::new())
        .limit(1) // for projects that are not in the table
        .limits(move |id: ProjectId| {
            let table = table.clone();
            async move { table.limit(&id).await }
        })
        .limit_cache(Duration::from_secs(60), 10_000)
        .build()?;

    show(&limiter, "not in the table: the default of 1").await?;

    plans.set("acme", Limit::Max(3));
    show(&limiter, "upgraded to 3, but the old limit is cached for a minute").await?;
    limiter.invalidate("acme");
    show(&limiter, "after invalidate(\"acme\")").await?;

    let kept = fill(&limiter).await?;
    plans.set("acme", Limit::Max(2));
    limiter.invalidate("acme");
    show(&limiter, "lowered to 2 with 3 in flight: nobody is stopped, nobody is let in").await?;
    drop(kept);
    show(&limiter, "once they are done").await?;

    plans.set("acme", Limit::Max(0));
    limiter.invalidate("acme");
    show(&limiter, "paused").await?;
    plans.set("acme", Limit::Unlimited);
    limiter.invalidate("acme");
    let slot = limiter.try_acquire("acme").await?;
    println!("unlimited: admitted with {:?}", slot.origin());
    Ok(())
}

/// Takes slots until one is refused.
async fn fill(limiter: &Limiter) -> Result<Vec<Slot>, AcquireError> {
    let mut slots = Vec::new();
    loop {
        match limiter.try_acquire("acme").await {
            Ok(slot) => slots.push(slot),
            Err(AcquireError::Saturated { .. }) => return Ok(slots),
            Err(error) => return Err(error),
        }
    }
}

async fn show(limiter: &Limiter, what: &str) -> Result<(), AcquireError> {
    let slots = fill(limiter).await?;
    println!("{what}: {} more could be acquired", slots.len());
    Ok(())
}
