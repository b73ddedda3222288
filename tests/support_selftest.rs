//! Proves the test support.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult, Value};
use support::{
    Child, ClockedServer, Gotsem, History, Proxy, RedisServer, child, connect, eventually, free_port, proxy,
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

async fn ping(connection: &MultiplexedConnection) -> RedisResult<String> {
    redis::cmd("PING").query_async(&mut connection.clone()).await
}

async fn ping_within(connection: &MultiplexedConnection, time: Duration) -> bool {
    matches!(tokio::time::timeout(time, ping(connection)).await, Ok(Ok(_)))
}

async fn incr(connection: &MultiplexedConnection, key: &str) -> RedisResult<u64> {
    redis::cmd("INCR").arg(key).query_async(&mut connection.clone()).await
}

fn process_exists(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

/// The server's folder.
fn folder_of(server: &RedisServer) -> String {
    let url = server.unix_url();
    let socket = url.strip_prefix("redis+unix://").unwrap();
    socket.strip_suffix("/redis.sock").unwrap().to_owned()
}

// ---- server

#[tokio::test]
async fn server_answers_on_both_sockets_and_its_helpers_read() {
    let server = RedisServer::start();
    let tcp = connect(&server.url()).await;
    let unix = connect(&server.unix_url()).await;
    assert_eq!(ping(&tcp).await.unwrap(), "PONG");
    assert_eq!(ping(&unix).await.unwrap(), "PONG");
    server.command(&["ZADD", "k", "1700000000123", "a", "5", "b"]).await;
    server.command(&["PEXPIRE", "k", "60000"]).await;
    assert_eq!(server.zcard("k").await, 2);
    let members = server.members("k").await;
    assert_eq!(members, [("b".to_owned(), 5), ("a".to_owned(), 1_700_000_000_123)]);
    assert!((50_000..=60_000).contains(&server.pttl("k").await));
    assert_eq!(server.pttl("none").await, -2);
    assert!(server.exists("k").await && !server.exists("none").await);
    assert_eq!(server.keys().await, ["k"]);
    assert!(server.time_ms().await > 1_700_000_000_000);
    assert_eq!(server.script_calls().await, 0);
    server.command(&["EVAL", "return 1", "0"]).await;
    let hash: String = server.read(&["SCRIPT", "LOAD", "return 1"]).await;
    server.command(&["EVALSHA", &hash, "0"]).await;
    assert_eq!(server.script_calls().await, 2);
    server.script_flush().await;
    assert!(server.try_command(&["EVALSHA", &hash, "0"]).await.is_err());
    assert_eq!(server.script_calls().await, 3);
    server.flushall().await;
    assert!(server.keys().await.is_empty());
    assert!(server.log().contains("Ready to accept connections"));
}

#[tokio::test]
async fn server_stops_continues_dies_and_restarts_empty() {
    let server = RedisServer::start();
    let connection = connect(&server.url()).await;
    server.stop();
    server.stop();
    assert!(!ping_within(&connection, 100 * MS).await);
    server.cont();
    assert!(ping_within(&connection, SECOND).await);
    server.stop();
    assert!(!ping_within(&connection, 50 * MS).await);
    server.cont();
    server.command(&["SET", "k", "v"]).await;
    let (pid, port) = (server.pid(), server.port());
    server.restart();
    assert_ne!(server.pid(), pid);
    assert_eq!(server.port(), port);
    assert!(!server.exists("k").await);
    assert!(!process_exists(pid));
    server.kill();
    assert!(std::net::TcpStream::connect(server.addr()).is_err());
    server.restart();
    assert_eq!(ping(&connect(&server.url()).await).await.unwrap(), "PONG");
    server.stop();
    server.restart();
    assert_eq!(server.zcard("k").await, 0);
}

#[tokio::test]
async fn server_takes_arguments() {
    let server = RedisServer::with(&["--requirepass", "x y/@", "--maxmemory-policy", "noeviction"]);
    let policy: Vec<String> = server.read(&["CONFIG", "GET", "maxmemory-policy"]).await;
    assert_eq!(policy[1], "noeviction");
    server.restart();
    let bare = redis::Client::open(server.url()).unwrap();
    let mut bare = bare.get_multiplexed_async_connection().await.unwrap();
    let refused: RedisResult<Value> = redis::cmd("PING").query_async(&mut bare).await;
    assert!(refused.unwrap_err().to_string().contains("NOAUTH"));
    server.command(&["PING"]).await;
}

#[test]
fn server_leaves_nothing_after_a_panic() {
    let (send, receive) = std::sync::mpsc::channel();
    let test = std::thread::spawn(move || {
        let server = RedisServer::start();
        server.stop();
        send.send((server.pid(), folder_of(&server))).unwrap();
        panic!("this panic is wanted");
    });
    assert!(test.join().is_err());
    let (pid, folder) = receive.recv().unwrap();
    assert!(!process_exists(pid));
    assert!(!std::path::Path::new(&folder).exists());
}

#[test]
fn server_says_what_is_wrong() {
    let message = |run: fn()| {
        let panic = std::thread::spawn(run).join().unwrap_err();
        panic.downcast_ref::<String>().unwrap().clone()
    };
    let wrong = message(|| drop(RedisServer::with(&["--no-such-option", "1"])));
    assert!(wrong.contains("no-such-option"), "{wrong}");
}

#[tokio::test]
async fn server_missing_is_a_failure_that_says_how_to_get_it() {
    let missing = [("REDIS_SERVER_BIN", "/nowhere/redis-server")];
    let child = Child::spawn("child_without_a_server", "no-server", &missing);
    let said = child.finish(10 * SECOND).await.join("\n");
    assert!(said.contains("apt-get install") && said.contains("REDIS_SERVER_BIN"), "{said}");
}

#[test]
fn child_without_a_server() {
    let Some(_) = child::role("no-server") else {
        return;
    };
    let panic = std::thread::spawn(RedisServer::start).join().unwrap_err();
    println!("{}", panic.downcast_ref::<String>().unwrap());
}

#[tokio::test]
async fn server_does_not_outlive_a_killed_test_process() {
    let child = Child::spawn("child_with_a_server", "server", &[]);
    let line = child.wait_line("SERVER ", 10 * SECOND).await;
    let mut words = line.split(' ').skip(1);
    let pid: u32 = words.next().unwrap().parse().unwrap();
    let folder = words.next().unwrap().to_owned();
    assert!(process_exists(pid) && std::path::Path::new(&folder).exists());
    child.kill();
    eventually("the watchdog kills the server", 5 * SECOND, async || {
        // A zombie is dead too: who reaps orphans here may be slow.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z")) && !std::path::Path::new(&folder).exists()
    })
    .await;
}

#[test]
fn child_with_a_server() {
    let Some(args) = child::role("server") else {
        return;
    };
    let server = RedisServer::start();
    server.stop();
    println!("SERVER {} {}", server.pid(), folder_of(&server));
    args.read_line();
}

// ---- proxy

#[test]
fn proxy_finds_the_end_of_every_kind_of_frame() {
    let frames: [&[u8]; 19] = [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":-12\r\n",
        b"$3\r\na\r\n\r\n",
        b"$0\r\n\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"_\r\n",
        b"#t\r\n",
        b",1.5e3\r\n",
        b",inf\r\n",
        b"(3492890328409238509324850943850943825024385\r\n",
        b"!5\r\nERR x\r\n",
        b"=7\r\ntxt:a\r\n\r\n",
        b"*2\r\n*2\r\n:1\r\n$1\r\nx\r\n~1\r\n+a\r\n",
        b"%2\r\n+a\r\n*1\r\n:1\r\n+b\r\n_\r\n",
        b">2\r\n+message\r\n$2\r\nhi\r\n",
        b"|1\r\n+ttl\r\n:3\r\n*2\r\n:1\r\n:2\r\n",
    ];
    for frame in frames {
        let text = frame.escape_ascii();
        let followed = [frame, b"+next\r\n"].concat();
        assert_eq!(proxy::frame_length(&followed), Some(frame.len()), "{text}");
        for part in 0..frame.len() {
            assert_eq!(proxy::frame_length(&frame[..part]), None, "{part} of {text}");
        }
    }
}

#[tokio::test]
async fn proxy_forwards_and_counts() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    for url in [proxy.url(), proxy.url() + "?protocol=resp3"] {
        let connection = connect(&url).await;
        let (requests, replies) = (proxy.requests(), proxy.replies());
        let calls = (0..1000).map(|_| ping(&connection));
        assert!(join_all(calls).await.iter().all(Result::is_ok));
        assert_eq!(proxy.requests() - requests, 1000);
        assert_eq!(proxy.replies() - replies, 1000);
        let big = "x".repeat(3_000_000);
        let mut echo = redis::cmd("ECHO");
        let back: String = echo.arg(&big).query_async(&mut connection.clone()).await.unwrap();
        assert!(back == big);
        let mut config = redis::cmd("CONFIG");
        let all: std::collections::HashMap<String, String> =
            config.arg("GET").arg("*").query_async(&mut connection.clone()).await.unwrap();
        assert!(all.len() > 100);
    }
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn proxy_adds_little_latency_of_its_own() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;
    let mut times = Vec::new();
    for _ in 0..200 {
        let start = Instant::now();
        ping(&connection).await.unwrap();
        times.push(start.elapsed());
    }
    times.sort();
    println!("PING through the proxy, median: {:?}", times[100]);
    assert!(times[20] < 2 * MS, "{times:?}");
}

#[tokio::test]
async fn proxy_delay_is_latency_not_throughput() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;
    proxy.set_delay(50 * MS);
    let start = Instant::now();
    ping(&connection).await.unwrap();
    assert!(start.elapsed() >= 100 * MS);
    let start = Instant::now();
    // Staggered, so that they are many separate pieces on the line.
    let calls = (0..200).map(|n| {
        let connection = &connection;
        async move {
            tokio::time::sleep(n / 10 * MS).await;
            ping(connection).await.unwrap();
        }
    });
    join_all(calls).await;
    let took = start.elapsed();
    assert!((100 * MS..600 * MS).contains(&took), "{took:?}");
    proxy.set_delay(Duration::ZERO);
    assert!(ping_within(&connection, SECOND).await);
    let start = Instant::now();
    for _ in 0..10 {
        ping(&connection).await.unwrap();
    }
    assert!(start.elapsed() < 500 * MS, "no delay is left");
}

#[tokio::test]
async fn proxy_throttles() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;
    proxy.throttle(Some(10_000));
    let mut echo = redis::cmd("ECHO");
    echo.arg("x".repeat(4_000));
    let start = Instant::now();
    let _: String = echo.query_async(&mut connection.clone()).await.unwrap();
    let took = start.elapsed();
    assert!((700 * MS..1500 * MS).contains(&took), "2 x 4 KB at 10 KB/s: {took:?}");
    proxy.throttle(None);
    let start = Instant::now();
    let _: String = echo.query_async(&mut connection.clone()).await.unwrap();
    assert!(start.elapsed() < 500 * MS);
}

#[tokio::test]
async fn proxy_cuts_and_refuses() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;
    let fresh = connect(&proxy.url()).await;
    proxy.cut();
    assert!(ping(&connection).await.is_err());
    assert!(ping(&fresh).await.is_err());
    let connection = connect(&proxy.url()).await;
    let before = proxy.connections();
    proxy.refuse(true);
    let client = redis::Client::open(proxy.url()).unwrap();
    // RESP2 without set-up replies can connect; the first command fails.
    let refused = match client.get_multiplexed_async_connection().await {
        Ok(connection) => ping(&connection).await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
    assert!(proxy.connections() > before);
    assert!(ping(&connection).await.is_ok(), "what exists stays");
    proxy.refuse(false);
    assert!(ping(&connect(&proxy.url()).await).await.is_ok());
    server.kill();
    assert!(ping(&connection).await.is_err(), "the server's end reaches the client");
    server.restart();
    assert!(ping(&connect(&proxy.url()).await).await.is_ok());
}

#[tokio::test]
async fn proxy_black_hole_holds_back_and_delivers() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;
    proxy.black_hole(true);
    let call = tokio::spawn({
        let connection = connection.clone();
        async move { incr(&connection, "n").await }
    });
    tokio::time::sleep(100 * MS).await;
    assert!(!call.is_finished());
    assert!(!server.exists("n").await);
    proxy.black_hole(false);
    assert_eq!(call.await.unwrap().unwrap(), 1);

    // A caller that goes away, and its connection with it: executed all the same, after the heal.
    proxy.black_hole(true);
    let gone = tokio::time::timeout(50 * MS, incr(&connection, "n")).await;
    assert!(gone.is_err());
    drop(connection);
    tokio::time::sleep(50 * MS).await;
    let clients: String = server.read(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    assert_eq!(clients.lines().count(), 2, "the server does not see the end yet");
    proxy.black_hole(false);
    eventually("the ghost is executed and its connection ends", SECOND, async || {
        let clients: String = server.read(&["CLIENT", "LIST", "TYPE", "normal"]).await;
        let n: u64 = server.read(&["GET", "n"]).await;
        n == 2 && clients.lines().count() == 1
    })
    .await;
}

#[tokio::test]
async fn proxy_freezes_hangs_up_and_redirects() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(server.addr());
    let frozen = connect(&proxy.url()).await;
    proxy.freeze();
    let call = tokio::spawn(async move { incr(&frozen, "n").await });
    proxy.redirect(other.addr());
    let next = connect(&proxy.url()).await;
    assert_eq!(incr(&next, "n").await.unwrap(), 1, "a new connection passes, to the other server");
    assert!(!server.exists("n").await && !call.is_finished());
    proxy.hang_up();
    assert!(call.await.unwrap().is_err(), "its client hears the end");
    assert!(!server.exists("n").await);
    proxy.thaw();
    eventually("what it had sent arrives", SECOND, async || server.exists("n").await).await;
    assert_eq!(other.read::<u64>(&["GET", "n"]).await, 1);
}

#[tokio::test]
async fn a_servers_clock_can_be_set() {
    let (server, right) = (ClockedServer::start(), RedisServer::start());
    for ahead in [0, 3_600_000, -2_500, 0] {
        server.set_ahead(ahead);
        let off = server.time_ms().await - right.time_ms().await - ahead;
        assert!(off.abs() < 1000, "{off} ms off at {ahead} ms");
    }
}

#[tokio::test]
async fn proxy_drops_loses_holds_and_rewrites_replies() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;

    proxy.drop_replies(1);
    let call = tokio::time::timeout(100 * MS, incr(&connection, "n")).await;
    assert!(call.is_err(), "the reply is gone");
    assert_eq!(server.read::<u64>(&["GET", "n"]).await, 1, "it was executed");

    let connection = connect(&proxy.url()).await;
    proxy.lose_replies(1);
    let replies = proxy.replies();
    let start = Instant::now();
    assert!(incr(&connection, "n").await.is_err());
    assert!(start.elapsed() < SECOND, "the connection ends with its reply");
    assert_eq!(proxy.replies() - replies, 1);
    assert_eq!(server.read::<u64>(&["GET", "n"]).await, 2, "it was executed");

    let connection = connect(&proxy.url()).await;
    assert_eq!(incr(&connection, "n").await.unwrap(), 3);
    proxy.hold_replies(true);
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let connection = connection.clone();
            tokio::spawn(async move { incr(&connection, "n").await.unwrap() })
        })
        .collect();
    eventually("all five are executed", SECOND, async || server.read::<u64>(&["GET", "n"]).await == 8).await;
    tokio::time::sleep(20 * MS).await;
    assert!(calls.iter().all(|call| !call.is_finished()));
    proxy.hold_replies(false);
    let mut results: Vec<u64> = join_all(calls).await.into_iter().map(Result::unwrap).collect();
    results.sort();
    assert_eq!(results, [4, 5, 6, 7, 8]);

    let readonly = b"-READONLY You can't write against a read only replica.\r\n";
    proxy.rewrite_replies(Some(Box::new(
        move |frame| {
            if frame[0] == b':' { readonly.to_vec() } else { frame }
        },
    )));
    assert!(ping(&connection).await.is_ok());
    let error = incr(&connection, "n").await.unwrap_err();
    assert_eq!(error.code(), Some("READONLY"));
    proxy.rewrite_replies(None);
    assert_eq!(incr(&connection, "n").await.unwrap(), 10);
}

#[tokio::test]
async fn proxy_delivers_what_came_before_a_lost_reply() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).await;
    proxy.hold_replies(true);
    let call = || {
        let connection = connection.clone();
        tokio::spawn(async move { incr(&connection, "n").await })
    };
    let replies = proxy.replies();
    let before = call();
    eventually("the first reply is held", SECOND, async || proxy.replies() == replies + 1).await;
    proxy.lose_replies(1);
    let lost = call();
    eventually("the second is lost", SECOND, async || proxy.replies() == replies + 2).await;
    assert!(!before.is_finished());
    proxy.hold_replies(false);
    assert_eq!(before.await.unwrap().unwrap(), 1);
    assert!(lost.await.unwrap().is_err());
    assert_eq!(server.read::<u64>(&["GET", "n"]).await, 2);
}

#[tokio::test]
async fn proxy_passes_pushes_but_does_not_count_them_as_replies() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let (send, mut pushes) = tokio::sync::mpsc::unbounded_channel();
    let client = redis::Client::open(proxy.url() + "?protocol=resp3").unwrap();
    let config = AsyncConnectionConfig::new().set_push_sender(send);
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
    connection.subscribe("news").await.unwrap();
    let replies = proxy.replies();
    proxy.drop_replies(1);
    server.command(&["PUBLISH", "news", "hello"]).await;
    let message = async {
        while let Some(push) = pushes.recv().await {
            if push.kind == redis::PushKind::Message {
                return push.data;
            }
        }
        panic!("no push");
    };
    let data = tokio::time::timeout(SECOND, message).await.expect("in time");
    assert_eq!(data[1], Value::BulkString(b"hello".to_vec()));
    assert_eq!(proxy.replies(), replies);
}

#[test]
fn proxy_runs_on_after_a_runtime_has_gone_and_ends_with_its_drop() {
    let server = RedisServer::start();
    let proxy = Arc::new(Proxy::start(server.addr()));
    for _ in 0..2 {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async { ping(&connect(&proxy.url()).await).await.unwrap() });
    }
    let addr = proxy.addr();
    proxy.black_hole(true);
    let stuck = std::net::TcpStream::connect(addr).unwrap();
    drop(proxy);
    // A process that another test is just starting may hold the listener until its exec.
    let closed = |_| {
        std::net::TcpStream::connect(addr).is_err() || {
            std::thread::sleep(10 * MS);
            false
        }
    };
    assert!((0..100).any(closed), "the proxy still listens");
    drop(stuck);
}

// ---- history

#[test]
fn history_sweeps_and_judges() {
    let history = History::new();
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    history.record("a", 1, at(0), at(10));
    history.record("a", 2, at(10), at(20)); // touches the first and does not overlap it
    history.record("a", 1, at(15), at(15)); // of no length
    history.record("b", 7, at(0), at(100));
    assert_eq!(history.overlap("a"), 2);
    assert_eq!(history.overlap("none"), 0);
    history.record("a", 3, at(12), at(14));
    assert_eq!(history.overlap("a"), 5);
    assert_eq!(history.time_above("a", 2), 2 * MS);
    assert_eq!(history.time_above("a", 5), Duration::ZERO);
    assert_eq!(history.visits("a"), 4);
    history.assert_within("a", 5);
    history.assert_within("none", 0);
    let judged = history.clone();
    let panic = std::thread::spawn(move || judged.assert_within("a", 4)).join().unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("had 5 at once where 4 is the limit"), "{message}");
    assert!(message.contains("weight 3 of process"), "{message}");
}

#[test]
fn history_guards_and_lines() {
    let history = History::new();
    let first = history.enter("x y", 2);
    let open = first.line();
    let second = history.clone().enter("x y", 1);
    assert_eq!(history.overlap("x y"), 3);
    drop(first);
    std::thread::sleep(2 * MS);
    assert!(history.time_above("x y", 0) >= 2 * MS, "an open visit lasts until now");
    drop(history.enter("x y", 2));
    assert_eq!(history.overlap("x y"), 3);

    // The earlier, open line of the first visit is replaced by its later one.
    let noise = "running 1 test".to_owned();
    let lines = [vec![noise, open.clone()], history.to_lines()].concat();
    let read = History::from_lines(&lines);
    read.read_lines(&lines);
    assert_eq!(read.to_lines(), history.to_lines());
    drop(second);
    assert!(history.to_lines().iter().all(|line| !line.contains(" - ")));

    let killed = History::from_lines([open]);
    assert!(killed.to_lines()[0].contains(" - "));
    killed.end_process(std::process::id());
    assert!(!killed.to_lines()[0].contains(" - "));
}

// ---- child

#[tokio::test]
async fn child_talks_stops_and_finishes() {
    let child = Child::spawn("child_echo", "echo", &[("GREETING", "hello you")]);
    let line = child.wait_line("READY", 10 * SECOND).await;
    assert_eq!(line, format!("READY hello you {}", child.pid()));
    child.send_line("one");
    assert_eq!(child.wait_line("GOT", SECOND).await, "GOT one");
    child.stop();
    child.send_line("two");
    tokio::time::sleep(50 * MS).await;
    assert_eq!(child.lines().len(), 2);
    child.cont();
    assert_eq!(child.wait_line("GOT", SECOND).await, "GOT two");
    let all = child.finish(10 * SECOND).await;
    assert_eq!(all[1..], ["GOT one", "GOT two", "BYE"]);
}

#[test]
fn child_echo() {
    let Some(args) = child::role("echo") else {
        return;
    };
    println!("READY {} {}", args.get("GREETING"), std::process::id());
    while let Some(line) = args.read_line() {
        println!("GOT {line}");
    }
    println!("BYE");
}

#[tokio::test]
async fn child_is_killed_and_reaped() {
    let child = Child::spawn("child_echo", "echo", &[("GREETING", "")]);
    child.wait_line("READY", 10 * SECOND).await;
    let pid = child.pid();
    child.kill();
    child.kill();
    assert!(!process_exists(pid));
    let child = Child::spawn("child_echo", "echo", &[("GREETING", "")]);
    let pid = child.pid();
    child.stop();
    drop(child);
    assert!(!process_exists(pid));
}

#[tokio::test]
async fn child_failures_say_what_happened() {
    async fn message(test: impl Future<Output = ()> + Send + 'static) -> String {
        let panic = tokio::spawn(test).await.unwrap_err().into_panic();
        panic.downcast_ref::<String>().unwrap().clone()
    }
    let late = message(async {
        let child = Child::spawn("child_echo", "echo", &[("GREETING", "hi")]);
        child.wait_line("READY", 10 * SECOND).await;
        child.wait_line("NEVER", 50 * MS).await;
    });
    let late = late.await;
    assert!(late.contains("late without \"NEVER\"") && late.contains("READY hi"), "{late}");
    let failed = message(async {
        let child = Child::spawn("child_echo", "echo", &[]); // it misses its argument
        child.finish(10 * SECOND).await;
    });
    let failed = failed.await;
    assert!(failed.contains("the child failed"), "{failed}");
    let unknown = message(async {
        let child = Child::spawn("no_such_test", "echo", &[]);
        child.wait_line("READY", 10 * SECOND).await;
    });
    let unknown = unknown.await;
    assert!(unknown.contains("ended without") && unknown.contains("running 0 tests"), "{unknown}");
}

#[tokio::test]
async fn histories_of_several_processes_compare() {
    let server = RedisServer::start();
    let url = server.url();
    let args = [("REDIS_URL", url.as_str())];
    let children: Vec<_> = (0..2).map(|_| Child::spawn("child_holder", "holder", &args)).collect();
    let history = History::new();
    for child in &children {
        child.wait_line("READY", 10 * SECOND).await;
    }
    let open = history.enter("probe", 1);
    for child in &children {
        child.send_line("go");
    }
    for child in children {
        let lines = child.finish(20 * SECOND).await;
        history.read_lines(lines);
    }
    drop(open);
    assert_eq!(history.visits("job"), 400);
    history.assert_within("job", 3);
    assert_eq!(history.overlap("job"), 3, "the limit is reached");
    // The children's visits lie within the parent's own one.
    assert_eq!(history.overlap("probe"), 3);
}

#[tokio::test]
async fn child_holder() {
    let Some(args) = child::role("holder") else {
        return;
    };
    let connection = connect(&args.get("REDIS_URL")).await;
    let gotsem = Gotsem::new(connection, "sem:", 10 * SECOND, 3);
    let history = History::new();
    println!("READY");
    args.read_line();
    let probe = (history.enter("probe", 1), history.enter("other", 1));
    let worker = |_| async {
        for _ in 0..50 {
            let slot = loop {
                let (granted, slot, _) = gotsem.try_acquire("job").await.unwrap();
                if granted {
                    break slot;
                }
                tokio::time::sleep(MS).await;
            };
            let visit = history.enter("job", 1);
            tokio::time::sleep(MS).await;
            drop(visit);
            gotsem.release("job", &slot).await.unwrap();
        }
    };
    join_all((0..4).map(worker)).await;
    drop(probe);
    for line in history.to_lines() {
        println!("{line}");
    }
}

// ---- gotsem

#[tokio::test]
async fn gotsem_keeps_the_seeds_semantics() {
    let server = RedisServer::start();
    let gotsem = Gotsem::new(connect(&server.url()).await, "sem:", 30 * SECOND, 2);
    let (granted, first, active) = gotsem.try_acquire("a").await.unwrap();
    assert!(granted && active == 1);
    let hex = first.strip_prefix("slot_").unwrap();
    assert!(hex.len() == 32 && hex.bytes().all(|b| b"0123456789abcdef".contains(&b)), "{hex}");
    let (granted, second, active) = gotsem.try_acquire("a").await.unwrap();
    assert!(granted && active == 2 && second != first);
    let (granted, _, active) = gotsem.try_acquire("a").await.unwrap();
    assert!(!granted && active == 2);
    let members = server.members("sem:a").await;
    assert_eq!(members.len(), 2);
    let now = server.time_ms().await;
    assert!(members.iter().all(|(_, score)| (now + 28_000..=now + 30_100).contains(score)));
    assert!((28_000..=30_000).contains(&server.pttl("sem:a").await));
    assert_eq!(gotsem.active("a").await.unwrap(), 2);
    assert!(gotsem.release("a", &first).await.unwrap());
    assert!(!gotsem.release("a", &first).await.unwrap());
    assert_eq!(gotsem.active("a").await.unwrap(), 1);

    // NOSCRIPT is invisible.
    server.script_flush().await;
    assert!(gotsem.try_acquire("a").await.unwrap().0);
    server.script_flush().await;
    gotsem.release("a", &second).await.unwrap();
    assert_eq!(server.zcard("sem:a").await, 1);

    // A clock that runs an hour ahead evicts the slots of everybody else: the seed's fault.
    let ahead = Gotsem::new(connect(&server.url()).await, "sem:", 30 * SECOND, 2);
    ahead.set_clock_offset(3_600_000);
    assert_eq!(ahead.active("a").await.unwrap(), 0);
    assert_eq!(ahead.try_acquire("a").await.unwrap().2, 1);
    assert_eq!(server.zcard("sem:a").await, 1);
    gotsem.force_release("a").await.unwrap();
    assert!(!server.exists("sem:a").await);
    server.kill();
    assert!(gotsem.try_acquire("a").await.is_err());
}

#[tokio::test]
async fn gotsem_costs_one_script_call() {
    let server = RedisServer::start();
    let gotsem = Gotsem::new(connect(&server.url()).await, "sem:", 30 * SECOND, 1_000);
    let slot = gotsem.try_acquire("a").await.unwrap().1;
    gotsem.release("a", &slot).await.unwrap();
    let before = server.script_calls().await;
    for _ in 0..100 {
        let slot = gotsem.try_acquire("a").await.unwrap().1;
        gotsem.release("a", &slot).await.unwrap();
    }
    assert_eq!(server.script_calls().await - before, 200);
}

// ---- the rest

#[tokio::test]
async fn eventually_waits_and_complains() {
    let start = Instant::now();
    eventually("time passes", SECOND, async || start.elapsed() > 20 * MS).await;
    let never = tokio::spawn(async { eventually("pigs fly", 20 * MS, async || false).await });
    let panic = never.await.unwrap_err().into_panic();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("pigs fly"), "{message}");
}

#[test]
fn ports_are_free_and_different() {
    let ports: std::collections::HashSet<u16> = (0..100).map(|_| free_port()).collect();
    assert_eq!(ports.len(), 100);
}
