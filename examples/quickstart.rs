//! Two projects hit their limits on a fleet of three small servers.
//!
//! `cargo run --example quickstart` keeps the slots in this process; with `-- --redis URL` each
//! server has a limiter of its own, and they share their slots through Redis.
//!
//! What counts is measured in the handlers, not taken from the limiter: the exit code is 1 if any
//! project ever had more requests in flight than its limit.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use futures_util::stream;
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tower_slots::{ConcurrencyLimitLayer, Limiter, MemoryStore, ProjectId, RedisStore};

type Error = Box<dyn std::error::Error + Send + Sync>;
type HttpClient = Client<HttpConnector, Empty<Bytes>>;

const SERVERS: usize = 3;
/// Each project's limit, and how many clients call for it at once.
const PROJECTS: [(&str, u32, usize); 2] = [("acme", 4, 12), ("globex", 9, 16)];
const REQUESTS_PER_CLIENT: usize = 80;
/// The project of the streamed response: one slot.
const STREAMER: &str = "initech";

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("quickstart: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<bool, Error> {
    let limiters = limiters(redis_url()?)?;
    let fleet = Arc::new(Fleet::default());
    let mut servers = Vec::new();
    for limiter in &limiters {
        servers.push(serve(limiter.clone(), Arc::clone(&fleet)).await?);
    }
    println!("servers on {}\n", servers.join(", "));
    let client: HttpClient = Client::builder(TokioExecutor::new()).build_http();

    load(&client, &servers, &fleet).await?;
    let streamed = stream_holds_its_slot(&client, &servers, &fleet).await?;
    for limiter in &limiters {
        limiter.shutdown(Duration::from_secs(2)).await;
    }
    Ok(report(&fleet) && streamed)
}

fn redis_url() -> Result<Option<String>, Error> {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => Ok(None),
        (Some("--redis"), Some(url)) => Ok(Some(url)),
        _ => Err("usage: quickstart [--redis redis://HOST:PORT]".into()),
    }
}

/// One limiter per server: clones of one over memory, or independent ones that share a Redis.
fn limiters(redis: Option<String>) -> Result<Vec<Limiter>, Error> {
    let limits = |id: ProjectId| async move {
        PROJECTS.iter().find(|(project, ..)| *project == id.as_str()).map_or(1, |(_, limit, _)| *limit)
    };
    let Some(url) = redis else {
        println!("slots are kept in this process (for a shared Redis: -- --redis URL)");
        return Ok(vec![Limiter::builder(MemoryStore::new()).limits(limits).build()?; SERVERS]);
    };
    println!("slots are kept in {url}");
    let limiter = || {
        let store = RedisStore::open(url.as_str())?;
        // A prefix of this run's own, and no pass in an outage: a limit is to be shown.
        let prefix = format!("quickstart:{}:", std::process::id());
        let builder = Limiter::builder(store).prefix(prefix).on_outage(tower_slots::OnOutage::Refuse);
        Ok(builder.limits(limits).store_timeout(Duration::from_secs(1)).build()?)
    };
    (0..SERVERS).map(|_| limiter()).collect()
}

/// What the handlers of all servers share.
#[derive(Default)]
struct Fleet {
    /// What they saw of each project.
    seen: Mutex<BTreeMap<String, Seen>>,
    /// Lets the streamed response go on: what is shown does not hang on how fast this runs.
    next_token: Notify,
}

#[derive(Default, Clone)]
struct Seen {
    in_flight: u32,
    most: u32,
    admitted: u32,
    refused: u32,
    other: u32,
    acquires: Vec<Duration>,
}

impl Fleet {
    fn with<T>(&self, project: &str, change: impl FnOnce(&mut Seen) -> T) -> T {
        change(self.seen.lock().expect("no handler panics").entry(project.to_owned()).or_default())
    }
}

async fn serve(limiter: Limiter, fleet: Arc<Fleet>) -> Result<String, Error> {
    let app = Router::new()
        .route("/work", get(work))
        .route("/stream", get(tokens))
        .layer(ConcurrencyLimitLayer::new(limiter)) // limits by the x-project-id header
        .layer(from_fn(stamp))
        .with_state(fleet);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address.to_string())
}

/// When a request came in, before the limit: its distance to the handler is the acquire.
#[derive(Clone, Copy)]
struct Arrived(Instant);

async fn stamp(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(Arrived(Instant::now()));
    next.run(request).await
}

async fn work(
    State(fleet): State<Arc<Fleet>>,
    Extension(Arrived(arrived)): Extension<Arrived>,
    headers: HeaderMap,
) -> &'static str {
    let project = headers["x-project-id"].to_str().unwrap_or_default().to_owned();
    fleet.with(&project, |seen| {
        seen.acquires.push(arrived.elapsed());
        seen.in_flight += 1;
        seen.most = seen.most.max(seen.in_flight);
    });
    tokio::time::sleep(Duration::from_millis(15)).await;
    fleet.with(&project, |seen| seen.in_flight -= 1);
    "done"
}

async fn tokens(State(fleet): State<Arc<Fleet>>) -> Response {
    let chunks = stream::unfold(0, move |n| {
        let fleet = Arc::clone(&fleet);
        async move {
            fleet.next_token.notified().await;
            (n < 5).then(|| (Ok::<_, std::convert::Infallible>(format!("token {n} ")), n + 1))
        }
    });
    Response::new(Body::from_stream(chunks))
}

fn get_request(server: &str, path: &str, project: &str) -> Result<hyper::Request<Empty<Bytes>>, Error> {
    let uri = format!("http://{server}{path}");
    Ok(hyper::Request::get(uri).header("x-project-id", project).body(Empty::new())?)
}

/// Both projects at once, every client going round the servers; ends by itself.
async fn load(client: &HttpClient, servers: &[String], fleet: &Arc<Fleet>) -> Result<(), Error> {
    let over = Arc::new(AtomicBool::new(false));
    let progress = tokio::spawn(progress(Arc::clone(fleet), Arc::clone(&over)));
    let mut clients = Vec::new();
    for (project, _, count) in PROJECTS {
        for number in 0..count {
            let (client, servers, fleet) = (client.clone(), servers.to_vec(), Arc::clone(fleet));
            clients.push(tokio::spawn(async move {
                for n in 0..REQUESTS_PER_CLIENT {
                    let request = get_request(&servers[(number + n) % servers.len()], "/work", project)?;
                    let response = client.request(request).await?;
                    let status = response.status();
                    response.into_body().collect().await?;
                    fleet.with(project, |seen| match status {
                        StatusCode::OK => seen.admitted += 1,
                        StatusCode::TOO_MANY_REQUESTS => seen.refused += 1,
                        _ => seen.other += 1,
                    });
                    if status == StatusCode::TOO_MANY_REQUESTS {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
                Ok::<_, Error>(())
            }));
        }
    }
    for client in clients {
        client.await??;
    }
    over.store(true, Ordering::Relaxed);
    progress.await?;
    Ok(())
}

async fn progress(fleet: Arc<Fleet>, over: Arc<AtomicBool>) {
    while !over.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let line: Vec<_> = PROJECTS
            .iter()
            .map(|(project, limit, _)| {
                let seen = fleet.with(project, |seen| seen.clone());
                format!(
                    "{project:>7}: {:>2} of {limit} in flight, {:>4} admitted, {:>4} refused",
                    seen.in_flight, seen.admitted, seen.refused
                )
            })
            .collect();
        println!("{}", line.join("   "));
    }
}

/// A streamed response keeps its slot until its last byte, and no longer.
async fn stream_holds_its_slot(
    client: &HttpClient,
    servers: &[String],
    fleet: &Fleet,
) -> Result<bool, Error> {
    println!("\na streamed response of {STREAMER}, whose limit is 1:");
    let mut response = client.request(get_request(&servers[0], "/stream", STREAMER)?).await?;
    let mut refused = 0;
    fleet.next_token.notify_one();
    while let Some(frame) = response.frame().await {
        let Ok(token) = frame?.into_data() else { continue };
        let other = client.request(get_request(&servers[1], "/work", STREAMER)?).await?;
        refused += u32::from(other.status() == StatusCode::TOO_MANY_REQUESTS);
        println!(
            "  got {:?}; another request meanwhile: {}",
            String::from_utf8_lossy(&token),
            other.status()
        );
        fleet.next_token.notify_one();
    }
    // The slot is on its way back once the last byte was sent.
    let start = Instant::now();
    let mut after = StatusCode::TOO_MANY_REQUESTS;
    while after == StatusCode::TOO_MANY_REQUESTS && start.elapsed() < Duration::from_secs(2) {
        after = client.request(get_request(&servers[1], "/work", STREAMER)?).await?.status();
    }
    println!("  after its last byte: {after}");
    Ok(refused == 5 && after == StatusCode::OK)
}

fn report(fleet: &Fleet) -> bool {
    println!("\nproject   limit  most in flight  admitted  refused (429)  acquire p50      p99");
    let mut within = true;
    for (project, limit, _) in PROJECTS {
        let mut seen = fleet.with(project, |seen| seen.clone());
        seen.acquires.sort();
        let at =
            |part: usize| seen.acquires.get(seen.acquires.len() * part / 100).copied().unwrap_or_default();
        println!(
            "{project:<8}  {limit:>5}  {:>14}  {:>8}  {:>13}  {:>8} µs  {:>5} µs",
            seen.most,
            seen.admitted,
            seen.refused,
            at(50).as_micros(),
            at(99).as_micros()
        );
        if seen.other > 0 {
            println!("{project:<8}  {} other answers", seen.other);
        }
        within &= seen.most <= limit && seen.other == 0;
    }
    println!("{}", if within { "no limit was exceeded" } else { "A LIMIT WAS EXCEEDED, or requests failed" });
    within
}
