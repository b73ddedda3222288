//! Limits behind API keys: by the tenant that a key belongs to, and by the key itself.
//!
//! `cargo run --example auth`
//!
//! Neither the key table nor Redis, where the names of slots are, ever has a key in it: one has plain
//! hashes, as keys that were drawn at random cannot be guessed, the other has keyed ones. Ends by
//! itself; exits with 1 if anything is not as it says.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header::AUTHORIZATION};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use sha2::{Digest, Sha256};
use tower::ServiceExt;
use tower_slots::ConcurrencyLimitLayer;
use tower_slots::key::{KeyExtractor, extension, header};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// What authentication finds out; the limit is by it.
#[derive(Clone)]
struct Tenant(String);

/// Tenants by the SHA-256 of their keys: what would be a table in a database.
#[derive(Clone)]
struct Keys(Arc<HashMap<[u8; 32], Tenant>>);

impl Keys {
    fn new(keys: &[(&str, &str)]) -> Self {
        let hashed = keys.iter().map(|(key, tenant)| (Sha256::digest(key).into(), Tenant((*tenant).into())));
        Self(Arc::new(hashed.collect()))
    }

    fn tenant(&self, request: &Request) -> Option<Tenant> {
        let credentials = request.headers().get(AUTHORIZATION)?.to_str().ok()?;
        let key: [u8; 32] = Sha256::digest(credentials.strip_prefix("Bearer ")?).into();
        self.0.get(&key).cloned()
    }
}

async fn authenticate(State(keys): State<Keys>, mut request: Request, next: Next) -> Response {
    let Some(tenant) = keys.tenant(&request) else {
        let mut response = Response::new(Body::from("who are you?"));
        *response.status_mut() = StatusCode::UNAUTHORIZED;
        return response;
    };
    request.extensions_mut().insert(tenant);
    next.run(request).await
}

/// One request in flight for each tenant, whichever of its keys it uses. What is added last is
/// outermost, so authentication comes first.
fn by_tenant(keys: Keys) -> Router {
    let limit = ConcurrencyLimitLayer::in_memory(1).key(extension::<Tenant>(|tenant| tenant.0.clone()));
    Router::new().route("/", get(async || "done")).layer(limit).layer(from_fn_with_state(keys, authenticate))
}

/// One request in flight for each key, whoever has it: for a service that passes keys on, and cannot
/// tell which are good. The secret is the same in all of a fleet.
fn by_key() -> Result<Router, Error> {
    let key = header("authorization").hashed("a secret of this service")?;
    let (parts, _) = request("sk-acme-1")?.into_parts();
    println!("  the id of \"sk-acme-1\": {:?}", key.extract(&parts)?.as_deref().unwrap_or_default());
    let limit = ConcurrencyLimitLayer::in_memory(1).key(key).challenge(HeaderValue::from_static("Bearer"));
    Ok(Router::new().route("/", get(async || "done")).layer(limit))
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    println!("by tenant:");
    let keys = Keys::new(&[("sk-acme-1", "acme"), ("sk-acme-2", "acme"), ("sk-globex", "globex")]);
    let app = by_tenant(keys);
    let running = ask(&app, "sk-acme-1", StatusCode::OK).await?;
    ask(&app, "sk-acme-2", StatusCode::TOO_MANY_REQUESTS).await?;
    ask(&app, "sk-globex", StatusCode::OK).await?;
    ask(&app, "sk-guessed", StatusCode::UNAUTHORIZED).await?;
    drop(running);
    ask(&app, "sk-acme-2", StatusCode::OK).await?;

    println!("by key:");
    let app = by_key()?;
    let running = ask(&app, "sk-acme-1", StatusCode::OK).await?;
    ask(&app, "sk-acme-1", StatusCode::TOO_MANY_REQUESTS).await?;
    ask(&app, "sk-acme-2", StatusCode::OK).await?;
    let refusal = ask(&app, "", StatusCode::UNAUTHORIZED).await?;
    println!("    with the challenge {:?}", refusal.headers().get("www-authenticate"));
    drop(running);
    ask(&app, "sk-acme-1", StatusCode::OK).await?;
    println!("all answers were as they should be");
    Ok(())
}

/// The answer, which must be `expected`. The request is in flight until that is dropped: nobody reads
/// the body.
async fn ask(app: &Router, key: &str, expected: StatusCode) -> Result<Response, Error> {
    let response = app.clone().oneshot(request(key)?).await?;
    println!("  {key:?}: {}", response.status());
    if response.status() == expected { Ok(response) } else { Err(format!("not {expected}").into()) }
}

fn request(key: &str) -> Result<Request, Error> {
    let credentials = if key.is_empty() { String::new() } else { format!("Bearer {key}") };
    Ok(Request::get("/").header(AUTHORIZATION, credentials).body(Body::empty())?)
}
