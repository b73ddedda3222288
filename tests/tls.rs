//! Slots in a Redis that is reached over TLS.

#![cfg(feature = "redis-tls")]
#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod support;

use std::time::Duration;

#[cfg(feature = "redis-sentinel")]
use support::sentinel::{MASTER, Sentinel};
use support::tls::{Authority, TlsServer};
use support::{Child, RedisServer, child, eventually};
use tokio::io::AsyncWriteExt;
use tower_slots::store::redis::TlsAddress;
use tower_slots::store::{StoreError, StoreErrorKind};
use tower_slots::{AcquireError, ConfigError, Limiter, OnOutage, RedisStore};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// For what comes at once, on however busy a machine.
const SOON: Duration = Duration::from_secs(10);

fn limiter(store: Result<RedisStore, ConfigError>) -> Limiter {
    let builder = Limiter::builder(store.unwrap()).limit(2).lease(SECOND).store_timeout(900 * MS);
    builder.on_outage(OnOutage::Refuse).build().unwrap()
}

/// Slots are taken, counted, renewed and given back.
async fn works(limiter: &Limiter, server: &RedisServer) {
    let granted = async || limiter.try_acquire("acme").await.is_ok();
    eventually("a connection", SOON, granted).await;
    let slot = limiter.try_acquire("acme").await.unwrap();
    tokio::time::sleep(1500 * MS).await;
    assert_eq!(limiter.active("acme").await.unwrap(), 1, "it is renewed");
    slot.release().await.unwrap();
    assert!(!server.exists("sem:acme").await);
}

/// What the connection fails with.
async fn error_of(limiter: &Limiter) -> StoreError {
    match limiter.try_acquire("acme").await {
        Err(AcquireError::Unavailable(error)) => error,
        other => panic!("not an outage: {other:?}"),
    }
}

async fn fails(store: Result<RedisStore, ConfigError>, kind: StoreErrorKind, advice: &str) {
    let limiter = limiter(store);
    let error = error_of(&limiter).await;
    assert!(error.kind() == kind && error.to_string().contains(advice), "{error}");
}

#[tokio::test]
async fn an_authority_of_ones_own_is_trusted() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "no");
    for url in [server.url(), format!("{}?protocol=resp3", server.url())] {
        let address = TlsAddress::new(url).unwrap().authority(authority.pem());
        works(&limiter(RedisStore::open(address)), &server).await;
    }
}

#[tokio::test]
async fn a_client_certificate_is_shown() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "yes");
    let bare = TlsAddress::new(server.url()).unwrap().authority(authority.pem());
    let client = authority.sign("client");
    let address = bare.clone().identity(client.certificate, client.key);
    works(&limiter(RedisStore::open(address)), &server).await;
    fails(RedisStore::open(bare.clone()), StoreErrorKind::Io, "TlsAddress::identity").await;
    let stranger = Authority::new().sign("client");
    let address = bare.identity(stranger.certificate, stranger.key);
    fails(RedisStore::open(address), StoreErrorKind::Io, "does it trust the authority").await;
}

#[tokio::test]
async fn a_server_that_is_not_the_right_one_is_an_outage_that_says_what_to_do() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = TlsServer::start(&authority, "no");
    let address = |url: &str| TlsAddress::new(url).unwrap();
    let io = StoreErrorKind::Io;
    let wrong = RedisStore::open(address(&server.url()).authority(other.pem()));
    fails(wrong, io, "TlsAddress::authority").await;
    fails(RedisStore::open(server.url()), io, "TlsAddress::authority").await;
    let renamed = server.url().replace("127.0.0.1", "localhost");
    let renamed = RedisStore::open(address(&renamed).authority(authority.pem()));
    fails(renamed, io, "another name").await;
    let plain = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = plain.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = plain.accept().await {
            client.write_all(b"-ERR unknown command\r\n").await.unwrap();
        }
    });
    let address = address(&format!("rediss://127.0.0.1:{port}/")).authority(authority.pem());
    fails(RedisStore::open(address), io, "use redis://").await;
    // Nobody who speaks no TLS gets in either.
    error_of(&limiter(RedisStore::open(server.url().replace("rediss:", "redis:")))).await;
}

#[test]
fn what_is_no_tls_address_or_no_certificate_is_an_error_of_its_own() {
    for url in ["redis://127.0.0.1/", "unix:///run/redis.sock", "rediss://user:secret@"] {
        let error = TlsAddress::new(url).unwrap_err();
        assert!(error.field() == "url" && !error.to_string().contains("secret"), "{error}");
    }
    let address = || TlsAddress::new("rediss://user:secret@127.0.0.1/").unwrap();
    let key = Authority::new().sign("client").key;
    for address in [
        address().authority(""),
        address().authority(key.clone()),
        address().identity("", key.clone()),
        address().identity(Authority::new().pem(), "no key"),
    ] {
        assert!(!format!("{address:?}").contains("secret"), "{address:?}");
        assert_eq!(RedisStore::open(address).unwrap_err().field(), "certificates");
    }
}

#[tokio::test]
async fn a_certificate_with_anothers_key_is_an_outage_and_no_panic() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "yes");
    let (one, other) = (authority.sign("one"), authority.sign("other"));
    let address = TlsAddress::new(server.url()).unwrap().authority(authority.pem());
    let address = address.identity(one.certificate, other.key);
    fails(RedisStore::open(address), StoreErrorKind::Other, "TLS").await;
}

#[tokio::test]
async fn the_provider_that_a_process_has_installed_is_used() {
    let child = Child::spawn("child_with_a_provider", "provider", &[]);
    child.finish(SOON).await;
}

/// A process whose own provider has but one cipher suite.
#[tokio::test]
async fn child_with_a_provider() {
    let Some(_) = child::role("provider") else { return };
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.cipher_suites.truncate(1);
    provider.install_default().unwrap();
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "no");
    let address = TlsAddress::new(server.url()).unwrap().authority(authority.pem());
    works(&limiter(RedisStore::open(address)), &server).await;
    assert_eq!(rustls::crypto::CryptoProvider::get_default().unwrap().cipher_suites.len(), 1);
}

#[tokio::test]
async fn a_login_that_changes_while_connected_counts_at_the_next_connect() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "no");
    let password =
        async |rule: &str| _ = server.command(&["ACL", "SETUSER", "slots", "resetpass", rule]).await;
    server.command(&["ACL", "SETUSER", "slots", "on", "~*", "+@all"]).await;
    password(">one").await;
    let url = server.url().replace("//", "//slots:one@");
    let limiter = limiter(RedisStore::open(TlsAddress::new(url).unwrap().authority(authority.pem())));
    works(&limiter, &server).await;
    password(">two").await;
    works(&limiter, &server).await;
    server.command(&["CLIENT", "KILL", "USER", "slots"]).await;
    let named = async || match limiter.try_acquire("acme").await {
        Err(AcquireError::Unavailable(error)) => error.kind() == StoreErrorKind::NoPerm,
        _ => false,
    };
    eventually("the login is named", SOON, named).await;
    password(">one").await;
    works(&limiter, &server).await;
    // A user that is deleted takes its connections along.
    server.command(&["ACL", "DELUSER", "slots"]).await;
    eventually("the login is named", SOON, named).await;
}

#[cfg(feature = "redis-cluster")]
#[tokio::test]
async fn the_nodes_of_a_cluster_are_reached_over_tls() {
    let authority = Authority::new();
    let server = TlsServer::with(&authority, "no", &["--cluster-enabled", "yes", "--tls-cluster", "yes"]);
    server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).await;
    let up = async || server.read::<String>(&["CLUSTER", "INFO"]).await.contains("cluster_state:ok");
    eventually("the cluster is up", SOON, up).await;
    let address = TlsAddress::new(server.url()).unwrap().authority(authority.pem());
    works(&limiter(RedisStore::cluster([address])), &server).await;
    fails(RedisStore::cluster([server.url()]), StoreErrorKind::Io, "TlsAddress::authority").await;
}

#[cfg(feature = "redis-sentinel")]
#[tokio::test]
async fn a_master_that_sentinels_name_is_reached_over_tls() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, "no");
    let sentinel = Sentinel::start(&[]);
    let port = server.tls_port().to_string();
    let _: () = sentinel.read(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "1"]).await;
    let master = || TlsAddress::new("rediss://mymaster").unwrap().authority(authority.pem());
    works(&limiter(RedisStore::sentinel([sentinel.url()], master())), &server).await;
}
