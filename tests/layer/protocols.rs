//! Refusals in the protocols that a request may speak, byte by byte.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower_slots::key::header;
use tower_slots::layer::Reason;
use tower_slots::semaphore::Semaphore;
use tower_slots::{ConcurrencyLimitLayer, KeyError, Limiter, MemoryStore, OnOutage, Rejection};

use crate::support::{Down, endless, is_at_end, origins, request, send, serve};

/// A second, in base64: as RetryInfo, and within a Status of this code and message.
const RETRY_INFO: &str = "CgIIAQ";
const AT_LIMIT: &str = "CAgSGWNvbmN1cnJlbmN5IGxpbWl0IHJlYWNoZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIAQ";
const UNAVAILABLE: &str =
    "CA4SE3NlcnZpY2UgdW5hdmFpbGFibGUaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIAQ";
const CLOSED: &str = "CA4SGHNlcnZpY2UgaXMgc2h1dHRpbmcgZG93bhowCih0eXBlLmdvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuUmV0cnlJbmZvEgQKAggB";
const FULL: &str = "CA4SGnNlcnZpY2UgaXMgYXQgaXRzIGNhcGFjaXR5GjAKKHR5cGUuZ29vZ2xlYXBpcy5jb20vZ29vZ2xlLnJwYy5SZXRyeUluZm8SBAoCCAE";

/// A row of the table of answers.
struct Row {
    layer: ConcurrencyLimitLayer,
    id: &'static str,
    reason: Reason,
    status: u16,
    title: &'static str,
    code: u8,
    name: &'static str,
    message: &'static str,
    /// `grpc-status-details-bin`, of those that may be tried again.
    details: Option<&'static str>,
}

fn in_a_second(layer: ConcurrencyLimitLayer) -> ConcurrencyLimitLayer {
    layer.retry_after(|_: &Rejection, _: &Parts| Duration::from_secs(1))
}

fn at_limit() -> ConcurrencyLimitLayer {
    in_a_second(ConcurrencyLimitLayer::in_memory(0))
}

async fn rows() -> Vec<Row> {
    let outage = Limiter::builder(Down).on_outage(OnOutage::Refuse).build().expect("valid settings");
    let closed = ConcurrencyLimitLayer::in_memory(1);
    assert!(closed.limiter().shutdown(Duration::from_secs(1)).await);
    let semaphore = Semaphore::builder(1).build().expect("valid settings");
    let permit = semaphore.try_acquire(1).expect("open").expect("a permit");
    std::mem::forget(permit);
    let memory = || ConcurrencyLimitLayer::in_memory(1);
    let soon = |layer, reason, message, details| Row {
        layer,
        id: "acme",
        reason,
        status: 503,
        title: "Service Unavailable",
        code: 14,
        name: "unavailable",
        message,
        details: Some(details),
    };
    let bad = |layer, id, reason, message| Row {
        layer,
        id,
        reason,
        status: 400,
        title: "Bad Request",
        code: 3,
        name: "invalid_argument",
        message,
        details: None,
    };
    let saturated = Row {
        layer: at_limit(),
        id: "acme",
        reason: Reason::Saturated,
        status: 429,
        title: "",
        code: 8,
        name: "resource_exhausted",
        message: "concurrency limit reached",
        details: Some(AT_LIMIT),
    };
    let unusable = Row {
        status: 500,
        title: "Internal Server Error",
        code: 13,
        name: "internal",
        ..bad(
            memory().key(header("cookie")),
            "acme",
            Reason::Key(KeyError::Unusable),
            "the service cannot read project ids: its configuration is at fault",
        )
    };
    let unauthenticated = Row {
        status: 401,
        title: "Unauthorized",
        code: 16,
        name: "unauthenticated",
        ..bad(
            memory().challenge(HeaderValue::from_static("Bearer")),
            "",
            Reason::Key(KeyError::Empty),
            "empty project id: send 1 to 128 bytes",
        )
    };
    vec![
        saturated,
        soon(memory().bulkhead(semaphore), Reason::Bulkhead, "service is at its capacity", FULL),
        soon(ConcurrencyLimitLayer::new(outage), Reason::Unavailable, "service unavailable", UNAVAILABLE),
        soon(closed, Reason::Closed, "service is shutting down", CLOSED),
        bad(
            memory().weight(|_: &Parts| 2),
            "acme",
            Reason::Weight,
            "the request has a weight that can never be admitted",
        ),
        bad(memory(), "", Reason::Key(KeyError::Empty), "empty project id: send 1 to 128 bytes"),
        bad(memory(), "a,b", Reason::Key(KeyError::Duplicate), "more than one project id: send exactly one"),
        unauthenticated,
        unusable,
    ]
}

fn media(id: &str, media: &'static str) -> Request<Body> {
    let mut request = request(id);
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media));
    request
}

fn connect(id: &str) -> Request<Body> {
    let mut request = media(id, "application/proto");
    request.headers_mut().insert("connect-protocol-version", HeaderValue::from_static("1"));
    request
}

/// The head as sorted lines, and the body.
async fn answer(row: &Row, request: Request<Body>) -> (u16, Vec<String>, Bytes) {
    let response = send(&origins(row.layer.clone()), request).await;
    let rejection = response.extensions().get::<Rejection>().expect("a rejection in the extensions");
    assert_eq!(rejection.reason(), row.reason);
    assert_eq!(rejection.status(), row.status);
    let (status, lines) = (response.status().as_u16(), lines(response.headers()));
    (status, lines, response.into_body().collect().await.expect("a whole body").to_bytes())
}

fn lines(headers: &HeaderMap) -> Vec<String> {
    let text = |value: &HeaderValue| value.to_str().expect("ascii").to_owned();
    let mut lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {}", text(value))).collect();
    lines.sort();
    lines
}

fn sorted(lines: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<_> = lines.into_iter().collect();
    lines.sort();
    lines
}

impl Row {
    fn error(&self) -> String {
        let details = self
            .details
            .map(|_| format!(r#","details":[{{"type":"google.rpc.RetryInfo","value":"{RETRY_INFO}"}}]"#));
        let Self { name, message, .. } = self;
        format!(r#"{{"code":"{name}","message":"{message}"{}}}"#, details.unwrap_or_default())
    }

    /// The envelope that ends a Connect stream: flags, length, message.
    fn end_of_stream(&self) -> Bytes {
        let end = format!(r#"{{"error":{}}}"#, self.error());
        let length = u32::try_from(end.len()).expect("a short message").to_be_bytes();
        [&[2_u8][..], &length, end.as_bytes()].concat().into()
    }

    /// The headers of an answer with an HTTP status of its own.
    fn http_headers(&self, media: &str) -> Vec<String> {
        let mut lines = vec!["cache-control: no-store".to_owned(), format!("content-type: {media}")];
        lines.extend(self.details.map(|_| "retry-after: 1".to_owned()));
        lines.extend((self.status == 401).then(|| "www-authenticate: Bearer".to_owned()));
        sorted(lines)
    }

    fn grpc_headers(&self, media: &str) -> Vec<String> {
        let mut lines = vec![
            format!("content-type: {media}"),
            format!("grpc-status: {}", self.code),
            format!("grpc-message: {}", self.message),
        ];
        lines.extend(self.details.map(|details| format!("grpc-status-details-bin: {details}")));
        sorted(lines)
    }

    fn problem(&self) -> String {
        let Self { status, title, message, .. } = self;
        match status {
            429 => r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Too many concurrent requests","status":429,"violated-policies":["concurrency"]}"#.to_owned(),
            503 => format!(r#"{{"type":"about:blank","title":"{title}","status":{status}}}"#),
            _ => format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{message}"}}"#),
        }
    }
}

#[tokio::test]
async fn plain_http() {
    for row in rows().await {
        let answer = answer(&row, media(row.id, "application/json")).await;
        let expected = (row.status, row.http_headers("application/problem+json"), row.problem().into());
        assert_eq!(answer, expected, "{:?}", row.reason);
    }
}

#[tokio::test]
async fn grpc() {
    let cases = [
        ("application/grpc", "application/grpc"),
        ("application/grpc+proto", "application/grpc"),
        ("application/grpc+json", "application/grpc+json"),
    ];
    for row in rows().await {
        for (asked, media_type) in cases {
            let answer = answer(&row, media(row.id, asked)).await;
            assert_eq!(answer, (200, row.grpc_headers(media_type), Bytes::new()), "{:?}", row.reason);
        }
    }
}

#[tokio::test]
async fn grpc_web() {
    let cases = [
        ("application/grpc-web", "application/grpc-web+proto"),
        ("application/grpc-web+proto", "application/grpc-web+proto"),
        ("application/grpc-web-text", "application/grpc-web-text+proto"),
    ];
    for row in rows().await {
        for (asked, media_type) in cases {
            let answer = answer(&row, media(row.id, asked)).await;
            let mut headers = row.grpc_headers(media_type);
            headers.insert(0, "cache-control: no-store".to_owned());
            assert_eq!(answer, (200, headers, Bytes::new()), "{:?}", row.reason);
        }
    }
}

#[tokio::test]
async fn a_grpc_answer_is_at_its_end_before_it_is_read() {
    for asked in ["application/grpc", "application/grpc-web", "application/grpc-web-text+proto"] {
        let response = send(&origins(at_limit()), media("acme", asked)).await;
        assert!(is_at_end(&response), "{asked}");
    }
}

#[tokio::test]
async fn connect_unary() {
    for row in rows().await {
        let get = Request::get("/?connect=v1&encoding=proto").header("x-project-id", row.id);
        for request in [connect(row.id), get.body(Body::empty()).expect("a valid request")] {
            let answer = answer(&row, request).await;
            let expected = (row.status, row.http_headers("application/json"), row.error().into());
            assert_eq!(answer, expected, "{:?}", row.reason);
        }
    }
}

#[tokio::test]
async fn connect_stream() {
    for row in rows().await {
        for asked in ["application/connect+proto", "application/connect+json"] {
            let answer = answer(&row, media(row.id, asked)).await;
            let headers = vec!["cache-control: no-store".to_owned(), format!("content-type: {asked}")];
            assert_eq!(answer, (200, headers, row.end_of_stream()), "{:?}", row.reason);
        }
    }
}

/// A message in the framing that gRPC, gRPC-Web and Connect streams share.
const FRAMED: &[u8] = b"\0\0\0\0\x05hello";
/// The same in base64.
const FRAMED_TEXT: &[u8] = b"AAAAAAVoZWxsbw==";

/// A request as a client writes it, over HTTP/1.1.
fn written(row: &Row, method_and_query: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let (method, query) = method_and_query.split_once(' ').unwrap_or((method_and_query, ""));
    let head = format!(
        "{method} /test.Demo/Echo{query} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         x-project-id: {}\r\ncookie: a\r\n{headers}content-length: {}\r\n\r\n",
        row.id,
        body.len(),
    );
    [head.as_bytes(), body].concat()
}

/// The status line, the other lines of the head but the date, sorted, and the body.
async fn read_back(row: &Row, request: &[u8]) -> (String, Vec<String>, Bytes) {
    let router = Router::new().fallback(async || "not refused").layer(row.layer.clone());
    let mut stream = TcpStream::connect(serve(router).await).await.expect("a connection");
    stream.write_all(request).await.expect("an open connection");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    let end = answer.windows(4).position(|end| end == b"\r\n\r\n").expect("a head");
    let head = std::str::from_utf8(&answer[..end]).expect("ascii");
    let mut lines = head.split("\r\n").map(str::to_owned);
    let status = lines.next().expect("a status line");
    let lines = lines.filter(|line| !line.starts_with("date: ") && line != "connection: close");
    (status, sorted(lines), Bytes::copy_from_slice(&answer[end + 4..]))
}

#[tokio::test]
async fn requests_of_each_protocol_over_real_connections() {
    const UNARY: &str = "content-type: application/proto\r\nconnect-protocol-version: 1\r\n";
    const STREAM: &str = "content-type: application/connect+proto\r\nconnect-protocol-version: 1\r\n";
    const WEB: &str = "content-type: application/grpc-web+proto\r\nx-grpc-web: 1\r\n";
    const WEB_TEXT: &str = "content-type: application/grpc-web-text\r\nx-grpc-web: 1\r\n";
    const GET: &str = "GET ?connect=v1&encoding=proto&base64=1&message=aGVsbG8";

    for row in rows().await {
        let web = |media| {
            let mut lines = row.grpc_headers(media);
            lines.push("cache-control: no-store".to_owned());
            (200, lines, Bytes::new())
        };
        let unary = || (row.status, row.http_headers("application/json"), Bytes::from(row.error()));
        let no_store = "cache-control: no-store".to_owned();
        let stream_headers = vec![no_store, "content-type: application/connect+proto".to_owned()];
        let cases = [
            (written(&row, "POST", WEB, FRAMED), web("application/grpc-web+proto")),
            (written(&row, "POST", WEB_TEXT, FRAMED_TEXT), web("application/grpc-web-text+proto")),
            (written(&row, "POST", UNARY, b"hello"), unary()),
            (written(&row, GET, "", b""), unary()),
            (written(&row, "POST", STREAM, FRAMED), (200, stream_headers, row.end_of_stream())),
        ];
        for (request, (status, mut headers, body)) in cases {
            headers.push(format!("content-length: {}", body.len()));
            let (line, lines, read) = read_back(&row, &request).await;
            assert_eq!(line.split(' ').nth(1), Some(status.to_string().as_str()), "{:?}", row.reason);
            assert_eq!((lines, read), (sorted(headers), body), "{:?}", row.reason);
        }
    }
}

#[tokio::test]
async fn connect_at_the_limit_as_it_is_on_the_wire() {
    let response = send(&origins(at_limit()), connect("acme")).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    let expected = r#"{"code":"resource_exhausted","message":"concurrency limit reached","details":[{"type":"google.rpc.RetryInfo","value":"CgIIAQ"}]}"#;
    assert_eq!(body, expected);

    let response = send(&origins(at_limit()), media("acme", "application/connect+proto")).await;
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    assert_eq!(body, [b"\x02\x00\x00\x00\x8a{\"error\":", expected.as_bytes(), b"}"].concat());
}

#[tokio::test]
async fn the_layers_own_estimate_is_in_every_protocol() {
    let limiter = Limiter::builder(MemoryStore::new()).limit(0).build().expect("valid settings");
    let app = origins(ConcurrencyLimitLayer::new(limiter));
    for asked in ["application/json", "application/grpc", "application/connect+proto"] {
        let response = send(&app, media("acme", asked)).await;
        let rejection = response.extensions().get::<Rejection>().expect("a rejection");
        assert!(rejection.retry_after().is_some_and(|after| after >= Duration::from_secs(1)), "{asked}");
    }
}

#[tokio::test]
async fn a_hook_says_when_to_come_back() {
    let layer = ConcurrencyLimitLayer::in_memory(0).retry_after(|rejection: &Rejection, parts: &Parts| {
        assert!(rejection.retry_after().is_some_and(|estimate| estimate >= Duration::from_secs(1)));
        parts.uri.path()[1..].parse().map(Duration::from_millis).unwrap_or(Duration::MAX)
    });
    let app = origins(layer);
    for (path, expected) in
        [("/0", "1"), ("/1001", "2"), ("/86400000", "86400"), ("/", "18446744073709551615")]
    {
        let mut request = request("acme");
        *request.uri_mut() = path.parse().expect("a path");
        let response = send(&app, request).await;
        assert_eq!(response.headers()["retry-after"], expected);
        let rejection = response.extensions().get::<Rejection>().expect("a rejection");
        assert!(rejection.retry_after() >= Some(Duration::from_secs(1)));
    }
    // It is not asked about what no waiting can mend.
    assert!(!send(&app, request("")).await.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn a_hook_replaces_the_answer_in_every_protocol() {
    let layer = at_limit().rate_limit_fields(tower_slots::layer::RateLimitFields::DraftIetf11);
    let app = origins(layer.on_reject(|rejection: &Rejection, _: &Parts| {
        assert_eq!(rejection.retry_after(), Some(Duration::from_secs(1)));
        Response::new(Body::from("busy"))
    }));
    for asked in ["application/grpc", "application/grpc-web", "application/connect+json", "text/plain"] {
        let response = send(&app, media("acme", asked)).await;
        assert_eq!((response.status(), response.headers().len()), (StatusCode::OK, 0), "{asked}");
        assert!(response.extensions().get::<Rejection>().is_some());
        assert_eq!(crate::support::text(response).await, "busy");
    }
}

#[tokio::test]
async fn nothing_of_the_request_is_in_an_answer() {
    let app = origins(at_limit());
    for asked in ["application/grpc+evil", "application/grpc-web+evil", "application/connect+evil", "a/evil"]
    {
        let response = send(&app, media("evil", asked)).await;
        assert!(!format!("{:?}", response.headers()).contains("evil"), "{asked}");
        let body = response.into_body().collect().await.expect("a whole body").to_bytes();
        assert!(!String::from_utf8_lossy(&body).contains("evil"), "{asked}");
    }
}

#[tokio::test]
async fn a_chosen_status_of_a_full_bulkhead_decides_the_code() {
    let semaphore = Semaphore::builder(1).build().expect("valid settings");
    let layer = ConcurrencyLimitLayer::in_memory(9).bulkhead(semaphore);
    let app = endless(layer.bulkhead_status(StatusCode::TOO_MANY_REQUESTS));
    let _held = send(&app, request("acme")).await;
    assert_eq!(send(&app, media("acme", "application/grpc")).await.headers()["grpc-status"], "8");
}
