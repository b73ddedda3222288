//! WebSockets: at most one of each project is open, for as long as it is open.
//!
//! `cargo run --example websocket`
//!
//! An axum server with the layer, and a client of tokio-tungstenite. Ends by itself; exits with 1 if
//! anything is not as it says.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::response::Response;
use axum::routing::any;
use axum::{Extension, Router};
use futures_util::{SinkExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tower_slots::{ConcurrencyLimitLayer, Limiter, SlotHandle};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let limiter = layer.limiter().clone();
    // `any` and not `get`: over HTTP/2 a WebSocket begins with a CONNECT.
    let app = Router::new().route("/socket", any(upgrade)).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let server = listener.local_addr()?;
    tokio::spawn(async { axum::serve(listener, app).await });

    let mut first = connect(server, "acme").await?.ok_or("acme's first socket was refused")?;
    println!("acme's first socket is open and says {:?}", echo(&mut first, "hello").await?);
    expect(connect(server, "acme").await?.is_none(), "acme's second socket is refused")?;
    let mut other = connect(server, "globex").await?.ok_or("globex was refused")?;
    println!("globex is not held up: {:?}", echo(&mut other, "hello").await?);
    println!("acme's first socket still says {:?}", echo(&mut first, "good-bye").await?);

    first.close(None).await?;
    until_free(&limiter, "acme").await?;
    println!("it is closed, and its slot is free");
    let mut next = connect(server, "acme").await?.ok_or("acme's next socket was refused")?;
    println!("acme's next socket says {:?}", echo(&mut next, "hello again").await?);
    Ok(())
}

/// The response to the upgrade ends before the socket has said a word, and with it the request's own
/// hold on its slot: what keeps the slot goes to where the socket lives.
async fn upgrade(Extension(slot): Extension<SlotHandle>, upgrade: WebSocketUpgrade) -> Response {
    let slot = slot.hold();
    upgrade.on_upgrade(async move |socket| {
        talk(socket).await;
        drop(slot);
    })
}

async fn talk(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            return;
        }
    }
}

/// A socket, or none if the project has one already.
async fn connect(server: SocketAddr, project: &str) -> Result<Option<Socket>, Error> {
    let mut request = format!("ws://{server}/socket").into_client_request()?;
    request.headers_mut().insert("x-project-id", project.parse()?);
    match connect_async(request).await {
        Ok((socket, _)) => Ok(Some(socket)),
        Err(tungstenite::Error::Http(answer)) if answer.status() == 429 => {
            let again = answer.headers().get("retry-after").ok_or("no Retry-After")?;
            println!("another socket of {project}: {}, again in {} s", answer.status(), again.to_str()?);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

async fn echo(socket: &mut Socket, text: &str) -> Result<String, Error> {
    socket.send(Message::text(text)).await?;
    Ok(socket.next().await.ok_or("the socket is closed")??.into_text()?.to_string())
}

/// The server learns of the end a little later than the client.
async fn until_free(limiter: &Limiter, project: &str) -> Result<(), Error> {
    for _ in 0..500 {
        if limiter.active(project).await? == 0 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err("the slot is not given back".into())
}

fn expect(holds: bool, what: &str) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(format!("not so: {what}").into()) }
}
