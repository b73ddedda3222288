//! What a client sees that everybody has.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use http::request::Parts;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::sync::Notify;
use tower_slots::{ConcurrencyLimitLayer, Rejection};

const HTTP1: &str = "--http1.1";
const HTTP2: &str = "--http2-prior-knowledge";

async fn serve(layer: ConcurrencyLimitLayer) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let router = Router::new().route("/", get(async || "done")).layer(layer);
    tokio::spawn(async { axum::serve(listener, router).await });
    url
}

/// What curl prints.
async fn curl(arguments: &[&str]) -> String {
    // Without the user's own settings, and without a proxy.
    let mut command = Command::new("curl");
    command.args(["-q", "--noproxy", "*", "--silent", "--show-error", "--max-time", "30"]);
    let output = command.args(arguments).kill_on_drop(true).output().await.unwrap_or_else(|error| {
        let advice = if error.kind() == ErrorKind::NotFound {
            ": install it (apt-get install curl, brew install curl)"
        } else {
            ""
        };
        panic!("curl does not start: {error}{advice}")
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "curl {arguments:?}: {}: {said}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// The protocols that this curl speaks.
async fn protocols() -> Vec<&'static str> {
    let has_http2 = curl(&["--version"]).await.split_whitespace().any(|feature| feature == "HTTP2");
    if has_http2 { vec![HTTP1, HTTP2] } else { vec![HTTP1] }
}

async fn fetch(protocol: &str, url: &str) -> Answer {
    let answer = curl(&[protocol, "--include", "--header", "x-project-id: acme", url]).await;
    let (head, body) = answer.split_once("\r\n\r\n").expect("an end of the head");
    Answer { head: head.split("\r\n").map(str::to_owned).collect(), body: body.to_owned() }
}

struct Answer {
    head: Vec<String>,
    body: String,
}

impl Answer {
    /// The first two words of the status line: the third is HTTP/1's alone.
    fn status(&self) -> String {
        self.head[0].split(' ').take(2).collect::<Vec<_>>().join(" ")
    }

    fn field(&self, name: &str) -> Option<&str> {
        let fields = self.head.iter().filter_map(|line| line.split_once(": "));
        fields.into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

#[tokio::test]
async fn curl_sees_answers_and_refusals() {
    for protocol in protocols().await {
        let version = if protocol == HTTP1 { "HTTP/1.1" } else { "HTTP/2" };
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let limiter = layer.limiter().clone();
        let url = serve(layer).await;

        let served = fetch(protocol, &url).await;
        assert_eq!(served.status(), format!("{version} 200"));
        assert_eq!((served.field("retry-after"), served.body.as_str()), (None, "done"));

        let slot = limiter.try_acquire("acme").await.expect("a free slot");
        let refused = fetch(protocol, &url).await;
        assert_eq!(refused.status(), format!("{version} 429"));
        assert_eq!(refused.field("content-type"), Some("application/problem+json"));
        assert_eq!(refused.field("cache-control"), Some("no-store"));
        let seconds: u64 = refused.field("retry-after").and_then(|s| s.parse().ok()).expect("seconds");
        assert!((1..=60).contains(&seconds), "{seconds}");
        assert!(
            refused.body.starts_with('{') && refused.body.contains(r#""status":429"#),
            "{}",
            refused.body
        );

        drop(slot);
        assert_eq!(fetch(protocol, &url).await.status(), format!("{version} 200"));
    }
}

#[tokio::test]
async fn curl_comes_back_when_the_refusal_says() {
    const AGAIN: Duration = Duration::from_secs(3);
    let refused = Arc::new(Notify::new());
    let told = Arc::clone(&refused);
    let layer = ConcurrencyLimitLayer::in_memory(1).retry_after(move |_: &Rejection, _: &Parts| {
        told.notify_one();
        AGAIN
    });
    let limiter = layer.limiter().clone();
    let url = serve(layer).await;

    let slot = limiter.try_acquire("acme").await.expect("a free slot");
    let start = Instant::now();
    let retrying = ["--retry", "1", "--header", "x-project-id: acme", "--write-out", "%{http_code}", &url];
    let (printed, ()) = tokio::join!(curl(&retrying), async {
        refused.notified().await;
        drop(slot);
    });
    assert!(printed.ends_with("done200"), "{printed}");
    assert!(start.elapsed() >= AGAIN, "after {:?}", start.elapsed());
}
