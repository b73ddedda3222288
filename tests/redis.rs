//! Slots in a real Redis.

mod support;

use std::time::Duration;

use support::RedisServer;
use tower_slots::{AcquireError, Limiter, Origin, RedisStore};

#[tokio::test]
async fn grants_up_to_the_limit_and_takes_slots_back() {
    let server = RedisServer::start();
    let limiter = Limiter::builder(RedisStore::open(server.url()).unwrap()).limit(2).build().unwrap();
    let first = limiter.try_acquire("acme").await.unwrap();
    let second = limiter.try_acquire("acme").await.unwrap();
    assert_eq!((first.active(), second.active()), (1, 2));
    assert_eq!(second.origin(), Origin::Store);
    let third = limiter.try_acquire("acme").await;
    assert!(matches!(third, Err(AcquireError::Saturated { active: 2, limit: 2, .. })), "{third:?}");
    first.release().await.unwrap();
    assert_eq!(limiter.active("acme").await.unwrap(), 1);
    assert_eq!(server.members("sem:acme").await[0].0, second.id().to_string());
    drop(second);
    assert!(limiter.shutdown(Duration::from_secs(5)).await);
    assert!(!server.exists("sem:acme").await);
}
