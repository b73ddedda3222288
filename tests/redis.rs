//! Slots in a real Redis: the store and its scripts.

#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use redis::Value;
use redis::aio::MultiplexedConnection;
use support::{Gotsem, Proxy, RedisServer, connect, eventually};
use tower_slots::store::{Claim, Grant, Key, SlotId, SlotStore, StoreError, StoreErrorKind, Terms};
use tower_slots::{Acquire, AcquireError, Limiter, LimiterBuilder, OnOutage, Origin, RedisStore, Slot};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// For what comes at once, on however busy a machine.
const SOON: Duration = Duration::from_secs(10);
/// The key of the id `acme`.
const ACME: &str = "sem:acme";

macro_rules! script {
    ($($part:literal),+) => { concat!($(include_str!(concat!("../src/store/redis/", $part, ".lua"))),+) };
}

const FLIGHT: &str = script!("clock", "single", "prelude", "flight");
const COUNT: &str = script!("clock", "prelude", "count");

/// A limiter with a store of its own, as another process would have it. An outage is an error.
fn on(url: &str) -> LimiterBuilder {
    Limiter::builder(RedisStore::open(url).unwrap()).on_outage(OnOutage::Refuse).store_timeout(5 * SECOND)
}

fn limiter(server: &RedisServer, limit: u32) -> Limiter {
    on(&server.url()).limit(limit).build().unwrap()
}

/// A limiter with a lease of a second.
fn brief(url: &str, limit: u32) -> Limiter {
    on(url).limit(limit).lease(SECOND).store_timeout(900 * MS).build().unwrap()
}

async fn acquire_many(limiter: &Limiter, id: &str, n: usize) -> Vec<Result<Slot, AcquireError>> {
    join_all((0..n).map(|_| limiter.try_acquire(id))).await
}

async fn hold(limiter: &Limiter, n: usize) -> Vec<Slot> {
    acquire_many(limiter, "acme", n).await.into_iter().collect::<Result<_, _>>().unwrap()
}

fn is_saturated<T>(result: &Result<T, AcquireError>) -> bool {
    matches!(result, Err(AcquireError::Saturated { .. }))
}

/// Exactly `limit` slots can be taken, and are given back.
async fn assert_whole(limiter: &Limiter, limit: usize) {
    let all = acquire_many(limiter, "acme", limit + 1).await;
    let granted = all.iter().filter(|slot| slot.is_ok()).count();
    assert_eq!(granted, limit, "{all:?}");
    assert!(all.iter().all(|slot| slot.is_ok() || is_saturated(slot)), "{all:?}");
}

async fn empty(server: &RedisServer) {
    eventually("no slot is left", SOON, async || !server.exists(ACME).await).await;
}

async fn counts(server: &RedisServer, n: u64, within: Duration) {
    eventually(&format!("{n} slots"), within, async || server.zcard(ACME).await == n).await;
}

async fn lost(slot: &Slot) {
    tokio::time::timeout(SOON, slot.lost()).await.expect("the holder is told");
}

fn terms() -> Arc<Terms> {
    Arc::new(Terms::new(30 * SECOND, 5 * SECOND))
}

fn claim(slot: SlotId, weight: u32, limit: u32) -> Claim {
    Claim::new(Key::new(ACME), slot, weight, limit, &terms())
}

fn granted(grant: &Result<Grant, StoreError>) -> bool {
    matches!(grant, Ok(Grant::Granted { .. }))
}

// ---- acquire and release

#[tokio::test]
async fn grants_up_to_the_limit_and_takes_slots_back() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 2);
    let first = limiter.try_acquire("acme").await.unwrap();
    let second = limiter.try_acquire("acme").await.unwrap();
    assert_eq!((first.active(), second.active()), (1, 2));
    assert_eq!(second.origin(), Origin::Store);
    let third = limiter.try_acquire("acme").await;
    assert!(matches!(third, Err(AcquireError::Saturated { active: 2, limit: 2, .. })), "{third:?}");
    first.release().await.unwrap();
    assert_eq!(server.zcard(ACME).await, 1, "a release that was awaited is done");
    assert_eq!(limiter.active("acme").await.unwrap(), 1);
    assert_eq!(server.members(ACME).await[0].0, second.id().to_string());
    drop(second);
    assert!(limiter.shutdown(SOON).await);
    assert!(!server.exists(ACME).await, "a shutdown flushes the releases");
    assert!(matches!(limiter.try_acquire("acme").await, Err(AcquireError::Closed)));
}

#[tokio::test]
async fn of_many_at_once_the_limit_is_granted_exactly() {
    let server = RedisServer::start();
    for (limit, callers) in [(1, 2), (10, 11), (10, 100), (700, 7000)] {
        let (one, other) = (limiter(&server, limit), limiter(&server, limit));
        let (mut all, more) = tokio::join!(
            acquire_many(&one, "acme", callers / 2),
            acquire_many(&other, "acme", callers - callers / 2)
        );
        all.extend(more);
        let granted = all.iter().filter(|slot| slot.is_ok()).count();
        assert_eq!(granted, limit as usize, "{callers} callers");
        assert!(all.iter().all(|slot| slot.is_ok() || is_saturated(slot)));
        assert_eq!(server.zcard(ACME).await, u64::from(limit));
        drop(all);
        empty(&server).await;
    }
}

#[tokio::test]
async fn a_slot_id_is_granted_once_however_often_it_is_acquired() {
    let server = RedisServer::start();
    let (one, other) = (RedisStore::open(server.url()).unwrap(), RedisStore::open(server.url()).unwrap());
    let slot = SlotId::new();
    for store in [&one, &one, &other] {
        let grant = store.acquire(claim(slot, 1, 1)).await;
        assert!(matches!(grant, Ok(Grant::Granted { active: 1 })), "{grant:?}");
    }
    assert!(!granted(&one.acquire(claim(SlotId::new(), 1, 1)).await), "the limit of 1 is used up");
    // Those that follow the second one go out as one batch, which does not fit as a whole.
    let batch: Vec<_> = (0..6).map(|n| if n == 4 { slot } else { SlotId::new() }).collect();
    let grants =
        join_all(batch.iter().map(|slot| other.acquire(claim(*slot, 1, 1))).collect::<Vec<_>>()).await;
    for (n, grant) in grants.iter().enumerate() {
        assert_eq!(granted(grant), n == 4, "{n}: {grant:?}");
    }
    assert_eq!(server.members(ACME).await.len(), 1);
}

#[tokio::test]
async fn a_slot_id_acquired_many_times_at_once_through_one_store_is_granted_to_all() {
    let server = RedisServer::start();
    let store = RedisStore::open(server.url()).unwrap();
    for _ in 0..20 {
        let slot = SlotId::new();
        for held in [false, true] {
            let grants = join_all((0..6).map(|_| store.acquire(claim(slot, 1, 1)))).await;
            assert!(grants.iter().all(granted), "held before: {held}: {grants:?}");
            assert_eq!(server.zcard(ACME).await, 1);
        }
        store.release_confirmed(&Key::new(ACME), slot).await.unwrap();
        assert_eq!(server.zcard(ACME).await, 0, "it is released once for all");
    }
}

#[tokio::test]
async fn a_slot_id_acquired_again_while_it_is_renewed_is_granted_and_renewed_on() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let (store, slot) = (RedisStore::open(proxy.url()).unwrap(), SlotId::new());
    let terms = Arc::new(Terms::new(SECOND, 900 * MS));
    let claim = || Claim::new(Key::new(ACME), slot, 1, 1, &terms);
    assert!(granted(&store.acquire(claim()).await));
    let before = proxy.replies();
    proxy.hold_replies(true);
    eventually("a renewal is out", SOON, async || proxy.replies() > before).await;
    let again: Vec<_> = (0..2).map(|_| store.acquire(claim())).collect();
    proxy.hold_replies(false);
    let again = join_all(again).await;
    assert!(again.iter().all(granted), "{again:?}");
    let first = server.members(ACME).await[0].1;
    eventually("renewed", SOON, async || server.members(ACME).await[0].1 > first).await;
    store.release_confirmed(&Key::new(ACME), slot).await.unwrap();
    assert!(!server.exists(ACME).await);
}

#[tokio::test]
async fn a_slot_id_acquired_by_two_processes_at_once_is_granted_to_both() {
    let server = RedisServer::start();
    let stores: Vec<_> = (0..4).map(|_| RedisStore::open(server.url()).unwrap()).collect();
    let slot = SlotId::new();
    let grants = join_all(stores.iter().map(|store| store.acquire(claim(slot, 1, 1)))).await;
    assert!(grants.iter().all(granted), "{grants:?}");
    assert_eq!(server.zcard(ACME).await, 1);
}

#[tokio::test]
async fn a_claim_is_served_however_many_go_away_whose_flights_it_was_in() {
    let server = RedisServer::start();
    let store = RedisStore::open(server.url()).unwrap();
    assert!(granted(&store.acquire(claim(SlotId::new(), 1, 10)).await));
    let first: Vec<_> = (0..2).map(|_| store.acquire(claim(SlotId::new(), 1, 10))).collect();
    let rider = store.acquire(claim(SlotId::new(), 1, 10));
    drop(first);
    for _ in 0..10 {
        drop(store.acquire(claim(SlotId::new(), 1, 10)));
    }
    let rider = tokio::time::timeout(SOON, rider).await.unwrap();
    assert!(granted(&rider), "{rider:?}");
}

#[tokio::test]
async fn a_weight_is_granted_whole_or_not_at_all() {
    let server = RedisServer::start();
    let four = limiter(&server, 4);
    let _two = hold(&four, 2).await;
    let three = four.acquire("acme", Acquire::weight(3)).await;
    assert!(matches!(three, Err(AcquireError::Saturated { active: 2, limit: 4, .. })), "{three:?}");
    assert_eq!(server.zcard(ACME).await, 2, "a refused weight takes nothing");
    let two = four.acquire("acme", Acquire::weight(2)).await.unwrap();
    assert_eq!((two.active(), two.weight()), (4, 2));
    let five = four.acquire("acme", Acquire::weight(5)).await;
    assert!(matches!(five, Err(AcquireError::Weight { weight: 5, most: 4 })), "{five:?}");
    two.release().await.unwrap();
    assert_eq!(server.zcard(ACME).await, 2, "a weight is released whole");
}

#[tokio::test]
async fn the_greatest_weight_owns_consecutive_members_and_releases_them_all() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 2048);
    let slots = join_all((0..3).map(|_| limiter.acquire("acme", Acquire::weight(1024)))).await;
    let mut held: Vec<_> = slots.into_iter().filter_map(Result::ok).collect();
    assert_eq!(held.len(), 2);
    let mut expected: Vec<_> =
        held.iter().flat_map(|slot| slot.id().members(1024)).map(|id| id.to_string()).collect();
    expected.sort();
    let mut members: Vec<_> = server.members(ACME).await.into_iter().map(|(member, _)| member).collect();
    members.sort();
    assert!(members == expected);
    held.pop().unwrap().release().await.unwrap();
    assert_eq!(server.zcard(ACME).await, 1024);
    let more = limiter.acquire("acme", Acquire::weight(1025)).await;
    assert!(matches!(more, Err(AcquireError::Weight { weight: 1025, .. })), "{more:?}");
}

#[tokio::test]
async fn callers_of_one_key_are_served_first_come_first_served() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 50);
    let slots = acquire_many(&limiter, "acme", 400).await;
    let first_refused = slots.iter().position(is_saturated).unwrap();
    // The two that fly alone may change places with those that follow.
    assert!((50..=52).contains(&first_refused), "{first_refused}");
    let active: Vec<_> = slots.iter().flatten().map(Slot::active).collect();
    assert_eq!(active.len(), 50);
    assert!(active[2..].is_sorted(), "{active:?}");
}

#[tokio::test]
async fn a_burst_goes_out_in_few_calls() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 1000);
    drop(limiter.try_acquire("acme").await.unwrap());
    empty(&server).await;
    let before = server.script_calls().await;
    let pairs = (0..1000).map(|_| async { limiter.try_acquire("acme").await.map(drop) });
    assert!(join_all(pairs).await.iter().all(Result::is_ok));
    empty(&server).await;
    let calls = server.script_calls().await - before;
    assert!(calls < 200, "{calls} calls for 1000 acquires and 1000 releases");
}

#[tokio::test]
async fn limiters_of_different_prefixes_and_leases_share_a_store_and_not_their_slots() {
    let server = RedisServer::start();
    let store = RedisStore::open(server.url()).unwrap();
    let build = |prefix: &str, lease| {
        let builder = Limiter::builder(store.clone()).prefix(prefix).lease(lease).limit(1);
        builder.on_outage(OnOutage::Refuse).store_timeout(900 * MS).build().unwrap()
    };
    let (one, other) = (build("one:", SECOND), build("other:", 60 * SECOND));
    let slots = (one.try_acquire("acme").await.unwrap(), other.try_acquire("acme").await.unwrap());
    assert_eq!(server.keys().await, ["one:acme", "other:acme"]);
    let now = server.time_ms().await;
    let (brief, long) = (server.members("one:acme").await, server.members("other:acme").await);
    assert!(brief[0].1 <= now + 1000 && long[0].1 > now + 50_000, "{brief:?} {long:?} at {now}");
    assert!(is_saturated(&one.try_acquire("acme").await) && is_saturated(&other.try_acquire("acme").await));
    assert_eq!(slots.0.active() + slots.1.active(), 2);
}

// ---- data

#[tokio::test]
async fn keys_and_members_are_those_of_the_seed() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 1);
    let longest = "x".repeat(128);
    let mut slots = Vec::new();
    for (id, key) in [
        ("AZaz09._~:@-", "sem:AZaz09._~:@-"),
        (&*longest, &*format!("sem:{longest}")),
        ("a{b}", "sem:a%7Bb%7D"),
        ("a%7Bb%7D", "sem:a%257Bb%257D"),
        ("ä \r\n", "sem:%C3%A4%20%0D%0A"),
    ] {
        let slot = limiter.try_acquire(id).await.unwrap();
        let now = server.time_ms().await;
        let members = server.members(key).await;
        assert_eq!(members.len(), 1, "{key}");
        assert_eq!(members[0].0, slot.id().to_string());
        let hex = members[0].0.strip_prefix("slot_").unwrap();
        assert!(hex.len() == 32 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
        assert!((now + 20_000..=now + 30_000).contains(&members[0].1), "{members:?} at {now}");
        slots.push(slot);
    }
    assert_eq!(server.keys().await.len(), 5);
    for id in ["", &"x".repeat(129)] {
        assert!(matches!(limiter.try_acquire(id).await, Err(AcquireError::Key(_))));
    }
}

#[tokio::test]
async fn members_that_have_lapsed_are_evicted_before_counting() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 3);
    let now = server.time_ms().await;
    let scores = [now - 3_600_000, now - 1, now, now + 60_000, now + 120_000];
    for (n, score) in scores.iter().enumerate() {
        server.command(&["ZADD", ACME, &score.to_string(), &format!("slot_{n:032x}")]).await;
    }
    assert_eq!(limiter.active("acme").await.unwrap(), 2);
    assert_eq!(server.zcard(ACME).await, 5, "counting writes nothing");
    let slot = limiter.try_acquire("acme").await.unwrap();
    assert_eq!(slot.active(), 3, "the two that live, and this one");
    assert!(is_saturated(&limiter.try_acquire("acme").await));
    assert_eq!(server.zcard(ACME).await, 3);
    assert!(server.pttl(ACME).await > 0, "a key without a TTL gets one");
}

#[cfg(feature = "metrics")]
#[tokio::test]
async fn calls_to_the_store_are_measured() {
    let server = RedisServer::start();
    let (limiter, meter) =
        support::meter::recorded(|| on(&server.url()).name("uploads").limit(4).build().unwrap());
    let put_lapsed = async |names: &[&str]| {
        for name in names {
            server.command(&["ZADD", ACME, "1", name]).await;
        }
    };
    put_lapsed(&["slot_a", "slot_b"]).await;
    let three = limiter.acquire("acme", Acquire::weight(3)).await.unwrap();
    assert_eq!(meter.sum("slots_expired_total"), 2.0, "by an acquire");
    put_lapsed(&["slot_c"]).await;
    three.release().await.unwrap();
    assert_eq!(meter.sum("slots_expired_total"), 3.0, "and by a release");
    let seen = meter.read();
    assert_eq!(seen["batch_size"], [3.0, 3.0]);
    assert_eq!(seen["releases_total{confirmed}"], [1.0]);
    assert_eq!(seen["release_backlog"], [0.0]);
}

#[tokio::test]
async fn a_member_whose_score_is_now_has_lapsed() {
    let server = RedisServer::start();
    let mut connection = connect(&server.url()).await;
    let put = "local t = redis.call('TIME')
        redis.call('ZADD', KEYS[1], string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000)), 'slot_x')";
    let mut same_ms = 0;
    for _ in 0..50 {
        let mut both = redis::pipe();
        both.atomic().cmd("EVAL").arg(put).arg(1).arg(ACME).ignore();
        both.cmd("ZRANGE").arg(ACME).arg(0).arg(0).arg("WITHSCORES");
        both.cmd("EVAL").arg(COUNT).arg(1).arg(ACME);
        // Not after 2^53 - 1 ms; the first key has claims: none back, one claim, limit 1, 30 000 ms, of
        // weight 1, and 37 bytes.
        let mut cargo =
            b"\x98\xcf\x00\x1f\xff\xff\xff\xff\xff\xff\x01\x00\x01\x01\xcd\x75\x30\x01\xd9\x25".to_vec();
        cargo.extend_from_slice(b"slot_00000000000000000000000000000000");
        both.cmd("EVAL").arg(FLIGHT).arg(1).arg(ACME).arg(cargo);
        both.cmd("DEL").arg(ACME).ignore();
        type Answer = ((String, i64), (i64, u32), (i64, (u32, u32), i64));
        let ((_, score), (counted_at, counted), (flown_at, (_, lapsed), used)): Answer =
            both.query_async(&mut connection).await.unwrap();
        same_ms += u32::from(score == counted_at && score == flown_at);
        assert_eq!((counted, lapsed, used), (0, 1, 1), "score {score}, now {counted_at} and {flown_at}");
    }
    assert!(same_ms > 0, "the scripts ran within one millisecond at least once");
}

/// A flight as the script reads it, in MessagePack: numbers, in eight bytes each, and then slots, again
/// and again.
fn cargo(parts: &[(&[u64], &[&str])]) -> Vec<u8> {
    let items: usize = parts.iter().map(|(numbers, slots)| numbers.len() + slots.len()).sum();
    let mut list = vec![0x90 | items as u8];
    for (numbers, slots) in parts {
        for number in *numbers {
            list.push(0xcf);
            list.extend_from_slice(&number.to_be_bytes());
        }
        for slot in *slots {
            list.extend_from_slice(&[0xd9, slot.len() as u8]);
            list.extend_from_slice(slot.as_bytes());
        }
    }
    list
}

/// What is left of a key: its members with their scores from now on, and its TTL, in seconds.
const LEFT: &str = "local t = redis.call('TIME')
    local now = t[1] * 1000 + math.floor(t[2] / 1000)
    local kind = redis.call('TYPE', KEYS[1]).ok
    local left = { kind, math.floor(redis.call('PTTL', KEYS[1]) / 1000 + 0.5) }
    if kind == 'zset' then
      local members = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
      for i = 1, #members, 2 do
        left[#left + 1] = members[i] .. ' ' .. math.floor((members[i + 1] - now) / 1000 + 0.5)
      end
    end
    return left";

#[tokio::test]
async fn a_flight_of_one_slot_comes_to_what_it_comes_to_among_others() {
    const AMONG_OTHERS: &str = concat!(
        script!("clock"),
        "local cargo, type = cmsgpack.unpack(ARGV[1]), type\n",
        script!("prelude", "flight")
    );
    const FOR_EVER: u64 = (1 << 53) - 1;
    const OWN: &str = "slot_00000000000000000000000000000000";
    const OTHER: &str = "slot_10000000000000000000000000000000";
    let server = RedisServer::start();
    let mut connection = connect(&server.url()).await;
    let flights = [
        ("claim", cargo(&[(&[FOR_EVER, 1, 0, 1, 2, 30_000, 1], &[OWN])])),
        ("claim of a long lease", cargo(&[(&[FOR_EVER, 1, 0, 1, 2, 300_000, 1], &[OWN])])),
        ("claim over the limit", cargo(&[(&[FOR_EVER, 1, 0, 1, 1, 30_000, 1], &[OWN])])),
        ("late claim", cargo(&[(&[1, 1, 0, 1, 2, 30_000, 1], &[OWN])])),
        ("claim of two", cargo(&[(&[FOR_EVER, 1, 0, 1, 3, 30_000, 2, 2], &[OWN])])),
        ("release", cargo(&[(&[FOR_EVER, 0, 1, 0], &[OWN])])),
        ("late release", cargo(&[(&[1, 0, 1, 0], &[OWN])])),
        ("release and claim", cargo(&[(&[FOR_EVER, 1, 1, 1], &[OTHER]), (&[2, 30_000, 1], &[OWN])])),
        (
            "release and claim at the limit",
            cargo(&[(&[FOR_EVER, 1, 1, 1], &[OTHER]), (&[1, 30_000, 1], &[OWN])]),
        ),
        (
            "release of another and claim",
            cargo(&[(&[FOR_EVER, 1, 1, 1], &["slot_y"]), (&[2, 30_000, 1], &[OWN])]),
        ),
        ("release and late claim", cargo(&[(&[1, 1, 1, 1], &[OTHER]), (&[2, 30_000, 1], &[OWN])])),
        ("two releases", cargo(&[(&[FOR_EVER, 0, 2, 0], &[OWN, OTHER])])),
    ];
    // Members with how many ms they have left, and the key's TTL.
    type State<'a> = (&'a [(&'a str, i64)], Option<i64>);
    let states: [State<'_>; 8] = [
        (&[], None),
        (&[(OTHER, 20_000)], Some(70_000)),
        (&[(OTHER, 20_000)], Some(30_000)),
        (&[(OTHER, 20_000)], None),
        (&[(OTHER, -20_000)], Some(70_000)),
        (&[(OTHER, -20_000), ("slot_x", -1_000)], Some(30_000)),
        (&[(OWN, 20_000)], Some(70_000)),
        (&[(OTHER, 20_000), (OWN, 10_000)], Some(70_000)),
    ];
    let mut cases = 0;
    for full in [false, true] {
        // The last state is text.
        for state in 0..=states.len() {
            for (flight, cargo) in &flights {
                let mut came = Vec::new();
                for script in [FLIGHT, AMONG_OTHERS] {
                    server.command(&["DEL", ACME]).await;
                    let Some((members, ttl)) = states.get(state) else {
                        server.command(&["SET", ACME, "text"]).await;
                        came.push(fly(&mut connection, &server, script, cargo, full).await);
                        continue;
                    };
                    for (member, left) in *members {
                        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
                        let score = (now + left).to_string();
                        server.command(&["ZADD", ACME, &score, member]).await;
                    }
                    if let Some(ttl) = ttl {
                        server.command(&["PEXPIRE", ACME, &ttl.to_string()]).await;
                    }
                    came.push(fly(&mut connection, &server, script, cargo, full).await);
                }
                assert_eq!(came[0], came[1], "{flight} in state {state}, full: {full}");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 2 * 9 * 12);
}

/// The reply but for its time, and what is left of the key.
async fn fly(
    connection: &mut MultiplexedConnection,
    server: &RedisServer,
    script: &str,
    cargo: &[u8],
    full: bool,
) -> (Result<Vec<Value>, String>, Vec<Value>) {
    if full {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    }
    let reply: Result<Vec<Value>, _> =
        redis::cmd("EVAL").arg(script).arg(1).arg(ACME).arg(cargo).query_async(connection).await;
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    let reply = reply.map(|reply| reply[1..].to_vec()).map_err(|error| error.to_string());
    let left = redis::cmd("EVAL").arg(LEFT).arg(1).arg(ACME).query_async(connection).await.unwrap();
    (reply, left)
}

#[tokio::test]
async fn a_fleet_may_mix_this_and_the_seed() {
    let server = RedisServer::start();
    let ours = limiter(&server, 3);
    let theirs = Gotsem::new(connect(&server.url()).await, "sem:", 30 * SECOND, 3);
    let (granted, their_slot, _) = theirs.try_acquire("acme").await.unwrap();
    assert!(granted);
    let slot = ours.try_acquire("acme").await.unwrap();
    assert_eq!(slot.active(), 2);
    let (granted, _, active) = theirs.try_acquire("acme").await.unwrap();
    assert!(granted && active == 3);
    assert!(is_saturated(&ours.try_acquire("acme").await));
    assert!(!theirs.try_acquire("acme").await.unwrap().0);
    // Either side can release the other's slot.
    assert!(theirs.release("acme", &slot.id().to_string()).await.unwrap());
    assert_eq!(ours.active("acme").await.unwrap(), 2);
    let store = RedisStore::open(server.url()).unwrap();
    let their_id: SlotId = their_slot.parse().unwrap();
    assert!(granted_again(&store, their_id).await);
    store.release_confirmed(&Key::new(ACME), their_id).await.unwrap();
    assert_eq!(theirs.active("acme").await.unwrap(), 1);
}

async fn granted_again(store: &RedisStore, slot: SlotId) -> bool {
    granted(&store.acquire(claim(slot, 1, 1)).await)
}

#[tokio::test]
async fn another_clients_clock_does_not_move_ours() {
    let server = RedisServer::start();
    let ours = limiter(&server, 3);
    let slot = ours.try_acquire("acme").await.unwrap();
    let theirs = Gotsem::new(connect(&server.url()).await, "sem:", 30 * SECOND, 3);
    // An hour behind: its slots have lapsed for whoever asks the server's clock.
    theirs.set_clock_offset(-3_600_000);
    assert!(theirs.try_acquire("acme").await.unwrap().0);
    assert_eq!(ours.active("acme").await.unwrap(), 1);
    // An hour ahead, it evicts ours; its own stay for as long.
    theirs.set_clock_offset(3_600_000);
    assert!(theirs.try_acquire("acme").await.unwrap().0);
    assert_eq!(ours.active("acme").await.unwrap(), 1);
    let next = ours.try_acquire("acme").await.unwrap();
    assert_eq!(next.active(), 2);
    drop(slot);
}

// ---- renewal

#[tokio::test]
async fn a_held_slot_outlives_its_lease_and_a_dead_holders_does_not() {
    let server = RedisServer::start();
    let limiter = brief(&server.url(), 2);
    let slot = limiter.try_acquire("acme").await.unwrap();
    let heavy = brief(&server.url(), 10);
    let three = heavy.acquire("acme", Acquire::weight(3)).await.unwrap();
    let abandoned = SlotId::new().to_string();
    let lapses = server.time_ms().await + 1000;
    server.command(&["ZADD", ACME, &lapses.to_string(), &abandoned]).await;
    let start = Instant::now();
    while start.elapsed() < 3500 * MS {
        let now = server.time_ms().await;
        let live = server.members(ACME).await.iter().filter(|(_, score)| *score > now).count();
        assert!(live >= 4, "{live} live members after {:?}", start.elapsed());
        tokio::time::sleep(20 * MS).await;
    }
    assert_eq!(server.zcard(ACME).await, 4, "the abandoned one has lapsed");
    drop((slot, three));
    empty(&server).await;
}

#[tokio::test]
async fn a_renewal_is_one_call_per_key() {
    let server = RedisServer::start();
    let limiter = on(&server.url()).limit(300).lease(3 * SECOND).store_timeout(2 * SECOND).build().unwrap();
    let mut slots = hold(&limiter, 300).await;
    slots.push(limiter.try_acquire("other").await.unwrap());
    let before = server.script_calls().await;
    let renewed_at = server.members(ACME).await[0].1;
    eventually("two renewals", SOON, async || server.members(ACME).await[0].1 > renewed_at + 1500).await;
    let calls = server.script_calls().await - before;
    assert!((4..=12).contains(&calls), "{calls} calls for two or three renewals of two keys");
}

#[tokio::test]
async fn held_slots_are_back_soon_after_the_server_lost_its_data() {
    let server = RedisServer::start();
    let limiter = on(&server.url()).limit(5).lease(3 * SECOND).store_timeout(SECOND).build().unwrap();
    let slots = hold(&limiter, 5).await;
    for restart in [false, true] {
        if restart {
            server.restart();
        } else {
            server.flushall().await;
        }
        let start = Instant::now();
        // A third of the lease, and what a reconnect and a busy machine take.
        counts(&server, 5, SECOND + 1500 * MS).await;
        assert!(start.elapsed() < 2500 * MS);
        assert!(server.pttl(ACME).await >= 12_000);
    }
    assert!(is_saturated(&limiter.try_acquire("acme").await));
    drop(slots);
    empty(&server).await;
}

#[tokio::test]
async fn slots_are_put_back_over_the_limit_and_then_nothing_new_is_granted() {
    let server = RedisServer::start();
    let (one, other) = (brief(&server.url(), 2), brief(&server.url(), 2));
    let first = hold(&one, 2).await;
    server.flushall().await;
    let second = acquire_many(&other, "acme", 2).await;
    counts(&server, 2 + second.iter().flatten().count() as u64, SOON).await;
    let third = other.try_acquire("acme").await;
    assert!(is_saturated(&third), "{third:?}");
    drop(first);
    counts(&server, second.iter().flatten().count() as u64, SOON).await;
    drop(second);
    empty(&server).await;
    assert_whole(&other, 2).await;
}

#[tokio::test]
async fn past_max_hold_a_slot_is_given_back_and_its_holder_told() {
    let server = RedisServer::start();
    let limiter = on(&server.url()).limit(1).lease(SECOND).store_timeout(900 * MS);
    let limiter = limiter.max_hold(1500 * MS).build().unwrap();
    let start = Instant::now();
    let slot = limiter.try_acquire("acme").await.unwrap();
    lost(&slot).await;
    assert!(start.elapsed() >= 1400 * MS);
    empty(&server).await;
    assert_whole(&limiter, 1).await;
    slot.release().await.unwrap();
}

#[tokio::test]
async fn a_release_during_a_renewal_does_not_bring_the_slot_back() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = brief(&proxy.url(), 1);
    for held_back in [50 * MS, 600 * MS] {
        let slot = limiter.try_acquire("acme").await.unwrap();
        let before = proxy.replies();
        proxy.hold_replies(true);
        eventually("a renewal is out", SOON, async || proxy.replies() > before).await;
        let release = tokio::spawn(slot.release());
        tokio::time::sleep(held_back).await;
        proxy.hold_replies(false);
        release.await.unwrap().unwrap();
        for _ in 0..60 {
            assert!(!server.exists(ACME).await, "the slot came back");
            tokio::time::sleep(10 * MS).await;
        }
    }
}

// ---- drain

#[tokio::test]
async fn a_drain_drops_all_slots_and_no_renewal_brings_them_back() {
    let server = RedisServer::start();
    let (one, other) = (brief(&server.url(), 10), brief(&server.url(), 10));
    let (ours, theirs) = (hold(&one, 3).await, hold(&other, 2).await);
    tokio::time::sleep(2 * MS).await;
    assert_eq!(one.drain("acme").await.unwrap(), 5);
    let ttl = server.pttl("{sem:acme}:drained").await;
    assert!((1000..=2000).contains(&ttl), "two leases: {ttl}");
    assert!(!server.exists(ACME).await);
    for slot in ours.iter().chain(&theirs) {
        lost(slot).await;
    }
    assert!(!server.exists(ACME).await, "a renewal undid the drain");
    let next = one.try_acquire("acme").await.unwrap();
    drop((ours, theirs));
    tokio::time::sleep(1500 * MS).await;
    assert_eq!(server.zcard(ACME).await, 1, "what came after the drain is renewed, and only that");
    assert_eq!(one.drain("acme").await.unwrap(), 1);
    lost(&next).await;
    assert_eq!(one.drain("acme").await.unwrap(), 0);
}

#[tokio::test]
async fn a_drain_that_cannot_leave_its_marker_drops_nothing() {
    let server = RedisServer::start();
    server.command(&["ACL", "SETUSER", "app", "on", ">pass", "~sem:*", "~{sem:*", "+@all", "-set"]).await;
    let limiter = brief(&format!("redis://app:pass@{}/", server.addr()), 3);
    let _slots = hold(&limiter, 3).await;
    assert!(matches!(limiter.drain("acme").await, Err(AcquireError::Unavailable(_))));
    assert_eq!(server.zcard(ACME).await, 3);
}

#[tokio::test]
async fn a_drain_holds_against_a_longer_lease_than_the_drainers() {
    let server = RedisServer::start();
    let long = on(&server.url()).limit(1).lease(12 * SECOND).build().unwrap();
    let slot = long.try_acquire("acme").await.unwrap();
    tokio::time::sleep(2 * MS).await;
    assert_eq!(brief(&server.url(), 1).drain("acme").await.unwrap(), 1);
    lost(&slot).await;
    assert!(!server.exists(ACME).await, "a renewal undid the drain");
}

// ---- callers that go away, replies that do not come

#[tokio::test]
async fn a_reply_that_is_dropped_before_its_first_poll_leaks_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 5);
    drop(limiter.try_acquire("acme"));
    let store = RedisStore::open(server.url()).unwrap();
    let warm = SlotId::new();
    assert!(granted(&store.acquire(claim(warm, 1, 5)).await));
    let dropped: Vec<_> = (0..4).map(|_| SlotId::new()).collect();
    let replies: Vec<_> = dropped.iter().map(|slot| store.acquire(claim(*slot, 1, 5))).collect();
    let rider = store.acquire(claim(SlotId::new(), 1, 5));
    drop(replies);
    dropped.iter().for_each(|slot| store.release(&Key::new(ACME), *slot));
    let rider = tokio::time::timeout(SOON, rider).await.unwrap();
    assert!(granted(&rider), "{rider:?}");
    tokio::time::timeout(SOON, store.flush()).await.unwrap();
    counts(&server, 2, SOON).await;
    let before = server.script_calls().await;
    for _ in 0..20 {
        let slot = SlotId::new();
        assert!(granted(&store.acquire(claim(slot, 1, 5)).await));
        store.release_confirmed(&Key::new(ACME), slot).await.unwrap();
    }
    assert_eq!(server.script_calls().await - before, 40, "flights are free again");
}

/// Callers that are sent directly and callers that are queued behind them go away.
async fn callers_go_away(server: &RedisServer, limiter: &Limiter, stall: impl Fn(bool)) {
    drop(limiter.try_acquire("acme").await.unwrap());
    empty(server).await;
    stall(true);
    let callers: Vec<_> = (0..20)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.try_acquire("acme").await })
        })
        .collect();
    tokio::time::sleep(50 * MS).await;
    callers.iter().for_each(tokio::task::JoinHandle::abort);
    assert!(join_all(callers).await.iter().all(Result::is_err), "nobody was answered");
    stall(false);
    empty(server).await;
    assert_whole(limiter, 5).await;
    empty(server).await;
}

#[tokio::test]
async fn callers_that_go_away_before_the_server_saw_them_leak_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 5);
    for _ in 0..3 {
        callers_go_away(&server, &limiter, |on| if on { server.stop() } else { server.cont() }).await;
    }
}

#[tokio::test]
async fn callers_that_go_away_before_their_reply_leak_nothing() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(5).build().unwrap();
    for _ in 0..3 {
        callers_go_away(&server, &limiter, |on| proxy.hold_replies(on)).await;
    }
    assert_eq!(proxy.connections(), 1, "that is no outage");
}

#[tokio::test]
async fn a_caller_that_goes_away_after_its_reply_leaks_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 5);
    for n in 0..100 {
        let mut callers: Vec<_> = (0..4).map(|_| Box::pin(limiter.try_acquire("acme"))).collect();
        for caller in &mut callers {
            let _pending = futures_util::poll!(caller.as_mut());
        }
        tokio::time::sleep(Duration::from_micros(20 * n)).await;
        drop(callers);
    }
    empty(&server).await;
    assert_whole(&limiter, 5).await;
}

#[tokio::test]
async fn a_flight_goes_on_for_others_when_the_time_of_who_sent_it_is_over() {
    const ONE_WAY: Duration = Duration::from_millis(600);
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::open(proxy.url()).unwrap();
    assert!(granted(&store.acquire(claim(SlotId::new(), 1, 9)).await));
    let before = server.calls("evalsha").await;
    proxy.set_delay(ONE_WAY);
    let start = Instant::now();
    let patient = store.acquire(claim(SlotId::new(), 1, 9));
    let brief = Arc::new(Terms::new(30 * SECOND, SECOND));
    // It is polled first, and takes along what waits.
    let error = store.acquire(Claim::new(Key::new(ACME), SlotId::new(), 1, 9, &brief)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout);
    assert!(granted(&patient.await));
    assert!(start.elapsed() < 2 * ONE_WAY + 500 * MS, "by the same flight, not {:?}", start.elapsed());
    assert_eq!(server.calls("evalsha").await - before, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_slow_link_nothing_waits_until_the_flights_that_are_out_are_back() {
    const ONE_WAY: Duration = Duration::from_millis(300);
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(10).build().unwrap();
    drop(limiter.try_acquire("warm").await.unwrap());
    proxy.set_delay(ONE_WAY);
    let start = Instant::now();
    let callers = (0..5).map(|n| {
        let limiter = limiter.clone();
        // Later than the one before it, so that both flights are out when the third comes.
        tokio::spawn(async move {
            tokio::time::sleep(n * 20 * MS).await;
            (limiter.try_acquire("acme").await.unwrap(), start.elapsed() - n * 20 * MS)
        })
    });
    for (n, caller) in join_all(callers).await.into_iter().enumerate() {
        let (_slot, took) = caller.unwrap();
        assert!(took >= 2 * ONE_WAY && took < 3 * ONE_WAY, "caller {n} took {took:?}");
    }
}

#[tokio::test]
async fn those_who_stay_are_served_though_all_around_them_go_away() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    proxy.set_delay(MS);
    let limiter = on(&proxy.url()).limit(1000).build().unwrap();
    drop(limiter.try_acquire("acme").await.unwrap());
    let impatient = {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            loop {
                let calls = (0..3).map(|_| tokio::time::timeout(MS, limiter.try_acquire("acme")));
                drop(join_all(calls).await);
            }
        })
    };
    for _ in 0..200 {
        let slot = limiter.try_acquire("acme").await.unwrap();
        assert_eq!(slot.origin(), Origin::Store);
    }
    impatient.abort();
    empty(&server).await;
}

#[tokio::test]
async fn a_release_that_has_to_wait_is_confirmed_as_soon_as_it_may_be() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).lease(600 * SECOND).store_timeout(SECOND).limit(1).build().unwrap();
    drop(limiter.try_acquire("acme").await.unwrap());
    empty(&server).await;
    proxy.lose_replies(1);
    let slot = limiter.try_acquire("acme").await.unwrap();
    // The call that was lost with its connection could still be executed, for a second.
    let start = Instant::now();
    slot.release().await.unwrap();
    assert!(start.elapsed() < SOON, "with the next renewals, after {:?}", start.elapsed());
}

#[tokio::test]
async fn callers_that_timed_out_on_a_stopped_server_leak_nothing() {
    let server = RedisServer::start();
    let limiter = on(&server.url()).limit(20).store_timeout(250 * MS).build().unwrap();
    drop(limiter.try_acquire("acme").await.unwrap());
    empty(&server).await;
    server.stop();
    let late = acquire_many(&limiter, "acme", 20).await;
    assert!(late.iter().all(|slot| matches!(slot, Err(AcquireError::Unavailable(_)))), "{late:?}");
    server.cont();
    eventually("it works again", SOON, async || limiter.try_acquire("acme").await.is_ok()).await;
    empty(&server).await;
    assert_whole(&limiter, 20).await;
}

// ---- runtimes

#[test]
fn a_store_moves_to_the_next_runtime_with_the_slots_it_holds() {
    let server = RedisServer::start();
    let limiter = brief(&server.url(), 3);
    let mut held = Vec::new();
    for n in 1..=3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let slot = limiter.try_acquire("acme").await.unwrap();
            assert_eq!(slot.active(), n);
            held.push(slot);
            let first = server.members(ACME).await[0].1;
            eventually("renewed", SOON, async || server.members(ACME).await[0].1 > first).await;
            assert_eq!(server.zcard(ACME).await, u64::from(n));
        });
    }
}

#[test]
fn releases_whose_runtime_ends_before_they_are_sent_are_sent_on_the_next() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 3);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime().block_on(async { drop(hold(&limiter, 3).await) });
    runtime().block_on(async {
        assert!(limiter.active("acme").await.is_ok());
        empty(&server).await;
        assert_whole(&limiter, 3).await;
        assert!(limiter.shutdown(SOON).await);
    });
}

#[test]
fn renewals_whose_runtime_ends_are_made_on_the_next() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = brief(&proxy.url(), 1);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ids: Vec<_> = (0..30).map(|n| n.to_string()).collect();
    let slots = runtime().block_on(async {
        let slots = join_all(ids.iter().map(|id| limiter.try_acquire(id))).await;
        proxy.hold_replies(true);
        let before = proxy.replies();
        eventually("renewals are out", SOON, async || proxy.replies() > before).await;
        slots
    });
    assert!(slots.iter().all(Result::is_ok));
    proxy.hold_replies(false);
    runtime().block_on(async {
        let start = Instant::now();
        while start.elapsed() < 2 * SECOND {
            let _moves_in = limiter.active("0").await;
            tokio::time::sleep(50 * MS).await;
        }
        let now = server.time_ms().await;
        for id in &ids {
            let members = server.members(&format!("sem:{id}")).await;
            assert!(members.iter().any(|(_, score)| *score > now), "{id}: {members:?} at {now}");
        }
        drop(slots);
        assert!(limiter.shutdown(SOON).await);
        assert_eq!(server.keys().await, Vec::<String>::new());
    });
}

#[test]
fn renewals_that_a_runtime_left_unsent_are_not_sent_once_it_runs_again() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = brief(&proxy.url(), 1);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, next) = (runtime(), runtime());
    let ids: Vec<_> = (0..30).map(|n| n.to_string()).collect();
    let slots = first.block_on(async {
        let slots = join_all(ids.iter().map(|id| limiter.try_acquire(id))).await;
        proxy.hold_replies(true);
        let before = proxy.replies();
        eventually("some renewals are out", SOON, async || proxy.replies() > before).await;
        slots
    });
    assert!(slots.iter().all(Result::is_ok));
    proxy.hold_replies(false);
    next.block_on(async {
        eventually("the store moves", SOON, async || limiter.active("0").await.is_ok()).await;
        drop(slots);
        assert!(limiter.shutdown(SOON).await, "no slot is left");
    });
    std::thread::scope(|scope| {
        scope.spawn(|| first.block_on(async { tokio::time::sleep(SECOND).await }));
        next.block_on(async { tokio::time::sleep(SECOND).await });
    });
    next.block_on(async { assert_eq!(server.keys().await, Vec::<String>::new()) });
}

#[test]
fn without_a_runtime_there_is_an_error_and_no_panic() {
    let store = RedisStore::open("redis://127.0.0.1:1/").unwrap();
    let limiter = Limiter::builder(store).on_outage(OnOutage::Refuse).build().unwrap();
    let answer = futures_util::FutureExt::now_or_never(limiter.try_acquire("acme"));
    assert!(matches!(answer, Some(Err(AcquireError::Unavailable(_)))), "{answer:?}");
}

// ---- connections

async fn works(store: RedisStore, server: &RedisServer) {
    let builder = Limiter::builder(store).limit(2).on_outage(OnOutage::Refuse).lease(SECOND);
    let limiter = builder.store_timeout(900 * MS).build().unwrap();
    let slots = hold(&limiter, 2).await;
    assert!(slots.iter().all(|slot| slot.origin() == Origin::Store));
    assert!(is_saturated(&limiter.try_acquire("acme").await));
    assert_eq!(limiter.active("acme").await.unwrap(), 2);
    let first = server.members(ACME).await[0].1;
    eventually("renewed", SOON, async || server.members(ACME).await[0].1 > first).await;
    drop(slots);
    empty(server).await;
    let slot = limiter.try_acquire("acme").await.unwrap();
    tokio::time::sleep(2 * MS).await;
    assert_eq!(limiter.drain("acme").await.unwrap(), 1);
    lost(&slot).await;
    server.flushall().await;
}

#[tokio::test]
async fn every_kind_of_connection_works() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let unix = server.unix_url();
    let resp3 = [format!("{}?protocol=resp3", server.url()), format!("{unix}?protocol=resp3")];
    let plain =
        [server.url(), unix.clone(), unix.replace("redis+unix:", "unix:"), format!("{}3", server.url())];
    for url in plain.iter().chain(&resp3).filter(|url| !url.ends_with('3') || url.contains("resp3")) {
        works(RedisStore::open(url.as_str()).unwrap(), &server).await;
    }
    works(RedisStore::from(client.clone()), &server).await;
    works(RedisStore::from(redis::aio::ConnectionManager::new(client.clone()).await.unwrap()), &server).await;
    works(RedisStore::from(client.get_multiplexed_async_connection().await.unwrap()), &server).await;
}

#[tokio::test]
async fn the_login_comes_from_the_url() {
    let server = RedisServer::with(&["--requirepass", "open/sesame"]);
    let url = format!("redis://:open%2Fsesame@{}/", server.addr());
    works(RedisStore::open(url).unwrap(), &server).await;
}

#[tokio::test]
async fn a_database_in_the_url_needs_the_right_to_select_it() {
    let server = RedisServer::start();
    let rights: Vec<_> =
        RIGHTS.iter().filter(|right| !right.is_empty()).map(|right| format!("+{right}")).collect();
    let mut set = vec!["ACL", "SETUSER", "app", "on", ">pass", "~sem:*", "~{sem:*"];
    set.extend(rights.iter().map(String::as_str));
    server.command(&set).await;
    let limiter = brief(&format!("redis://app:pass@{}/3", server.addr()), 2);
    let denied = limiter.try_acquire("acme").await;
    let Err(AcquireError::Unavailable(error)) = denied else { panic!("{denied:?}") };
    assert_eq!(error.kind(), StoreErrorKind::NoPerm, "{error}");
    server.command(&["ACL", "SETUSER", "app", "+select"]).await;
    eventually("the right is there", SOON, async || limiter.try_acquire("acme").await.is_ok()).await;
    let _slot = limiter.try_acquire("acme").await.unwrap();
    let databases: String = server.read(&["INFO", "keyspace"]).await;
    assert!(databases.contains("db3:keys=1") && !databases.contains("db0:"), "{databases}");
}

#[test]
fn a_malformed_address_is_an_error_without_the_address() {
    let error = RedisStore::open("http://user:secret@example.org/").unwrap_err();
    assert!(error.to_string().starts_with("url: ") && !error.to_string().contains("secret"), "{error}");
}

// ---- rights

const RIGHTS: [&str; 15] = [
    "eval",
    "evalsha",
    "time",
    "get",
    "set",
    "del",
    "zadd",
    "zcard",
    "zcount",
    "zmscore",
    "zrem",
    "zremrangebyscore",
    "pttl",
    "pexpire",
    "",
];

/// What was denied to a user who has all rights but one and does everything.
async fn denied_without(server: &RedisServer, missing: &str) -> Vec<String> {
    let user = format!("without-{missing}");
    let rights: Vec<_> = RIGHTS
        .iter()
        .filter(|right| !right.is_empty() && **right != missing)
        .map(|right| format!("+{right}"))
        .collect();
    let mut set = vec!["ACL", "SETUSER", &user, "on", ">pass", "~sem:*", "~{sem:*"];
    set.extend(rights.iter().map(String::as_str));
    server.command(&set).await;
    let url = format!("redis://{user}:pass@{}/", server.addr());
    let (id, limiter) = (format!("acme-{missing}"), brief(&url, 2));
    let slots = acquire_many(&limiter, &id, 8).await;
    let _any = (limiter.active(&id).await, limiter.drain(&id).await);
    // What is acquired in the drain's own millisecond counts as drained once it is gone.
    tokio::time::sleep(5 * MS).await;
    let slot = limiter.try_acquire(&id).await;
    // A renewal that finds all its slots asks no more; this one does not.
    server.command(&["DEL", &format!("sem:{id}")]).await;
    // Long enough for a renewal.
    tokio::time::sleep(700 * MS).await;
    drop((slots, slot));
    limiter.shutdown(200 * MS).await;
    let log: Vec<redis::Value> = server.read(&["ACL", "LOG", "10000"]).await;
    let mut denied: Vec<String> = log
        .into_iter()
        .map(|entry| {
            redis::from_redis_value::<std::collections::HashMap<String, redis::Value>>(entry).unwrap()
        })
        .filter(|entry| entry["username"] == redis::Value::BulkString(user.clone().into_bytes()))
        .map(|entry| redis::from_redis_value(entry["object"].clone()).unwrap())
        .collect();
    // The client library's greeting and a look at the settings are done without where they are denied.
    denied.retain(|object| !matches!(object.as_str(), "client|setinfo" | "config|get"));
    denied
}

#[tokio::test]
async fn the_documented_rights_are_enough_and_all_needed() {
    // `eval` is needed only where nobody has brought the scripts yet.
    let (server, bare) = (RedisServer::start(), RedisServer::start());
    let on = |right: &str| if right == "eval" { &bare } else { &server };
    server.command(&["CONFIG", "SET", "acllog-max-len", "10000"]).await;
    let denied = join_all(RIGHTS.iter().map(|right| denied_without(on(right), right))).await;
    for (right, denied) in RIGHTS.iter().zip(denied) {
        if right.is_empty() {
            assert!(denied.is_empty(), "the documented rights are not enough: {denied:?}");
        } else {
            assert!(denied.iter().any(|object| object == right), "{right} is not needed: {denied:?}");
        }
    }
}

/// What a server says no to by its hash, is not asked again in full.
#[tokio::test]
async fn a_script_goes_whole_to_a_server_that_does_not_know_it_and_to_no_other() {
    let server = RedisServer::start();
    server.command(&["ACL", "SETUSER", "user", "on", ">pass", "~sem:*", "+@all"]).await;
    let limiter = brief(&format!("redis://user:pass@{}/", server.addr()), 2);
    drop(acquire_many(&limiter, "acme", 8).await);
    let whole = async || server.calls("eval").await;
    let known = whole().await;
    assert!(known > 0, "nobody brought the scripts");
    server.command(&["ACL", "SETUSER", "user", "-evalsha"]).await;
    for denied in acquire_many(&limiter, "acme", 8).await {
        let Err(AcquireError::Unavailable(error)) = denied else { panic!("{denied:?}") };
        assert_eq!(error.kind(), StoreErrorKind::NoPerm, "{error}");
    }
    assert_eq!(whole().await, known);
    assert!(limiter.active("acme").await.is_err());
    assert_eq!(whole().await, known);
    server.command(&["ACL", "SETUSER", "user", "+evalsha"]).await;
    server.command(&["SCRIPT", "FLUSH"]).await;
    let granted = async || limiter.try_acquire("acme").await.is_ok_and(|slot| slot.origin() == Origin::Store);
    eventually("the scripts are brought again", SOON, granted).await;
    assert!(whole().await > known);
}

/// A caller that has dropped its slot finds it free: its release goes out before what it asks next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_slot_is_free_for_whoever_asks_next() {
    let server = RedisServer::start();
    let limiter = Limiter::builder(RedisStore::open(server.url()).unwrap()).limit(1).build().unwrap();
    for round in 0..500 {
        let slot = limiter.try_acquire("acme").await.unwrap_or_else(|error| panic!("round {round}: {error}"));
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        drop(slot);
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
    }
}
