//! Every example runs to its end, and shows what it says.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rustix::process::{Pid, Signal, kill_process};
use support::RedisServer;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// How long an example may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The examples that end by themselves, each with a line that it prints if all goes well.
const ENDING: [(&str, &str); 8] = [
    ("auth", "all answers were as they should be"),
    ("bulkhead", "  all slots given back: true"),
    ("dynamic_limits", "unlimited: admitted with Unlimited"),
    ("hyper", "one of three was refused, over either protocol"),
    ("quickstart", "no limit was exceeded"),
    ("sse", "each stream held its slots until its last token"),
    ("tonic", "both slots are free, and acme is served: hello from acme"),
    ("websocket", "acme's next socket says \"hello again\""),
];

/// The examples that serve until they are told to stop; each has a test of its own.
const SERVING: [&str; 1] = ["axum"];

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name).with_extension("rs")
}

/// The example as a child process that does not outlive this test. It stands beside this test's own
/// folder.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().expect("a path to this binary");
    let profile = test.parent().and_then(Path::parent).expect("a folder of the profile");
    let binary = profile.join("examples").join(name);
    let modified = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
    assert!(
        binary.exists() && modified(&binary) >= modified(&source(name)),
        "{} is not built, or old: a whole `cargo test` builds it, and so does `cargo build --all-features --examples`",
        binary.display()
    );
    let mut command = Command::new(binary);
    command.kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn no_example_is_left_out() {
    let folder = source("any").parent().expect("a folder").read_dir().expect("the examples' folder");
    let mut found: Vec<String> = folder
        .map(|entry| entry.expect("a readable folder").path())
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    found.sort();
    let mut known: Vec<&str> = ENDING.iter().map(|(name, _)| *name).chain(SERVING).collect();
    known.sort_unstable();
    assert_eq!(found, known);
}

#[tokio::test]
async fn each_example_shows_what_it_says_and_ends() {
    let runs = ENDING.map(async |(name, line)| {
        let output = timeout(PATIENCE, example(name).output()).await;
        (name, line, output.unwrap_or_else(|_| panic!("{name} does not end")).expect("it can be run"))
    });
    for (name, line, Output { status, stdout, stderr }) in join_all(runs).await {
        let (stdout, stderr) = (text(&stdout), text(&stderr));
        assert!(status.success(), "{name}: {status}\n{stdout}\n{stderr}");
        assert!(stdout.lines().any(|printed| printed == line), "{name} without {line:?}:\n{stdout}");
        assert_eq!(stderr, "", "{name}");
    }
}

#[tokio::test]
async fn the_axum_example_serves_until_it_is_told_to_stop() {
    let redis = RedisServer::start();
    let mut child = example("axum").args([&redis.url(), "127.0.0.1:0"]).spawn().expect("it can be run");
    let mut stdout = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
    let mut line = String::new();
    timeout(PATIENCE, stdout.read_line(&mut line)).await.expect("it starts").expect("text");
    let url = line.strip_prefix("listening on ").expect("where it listens").trim_end();

    assert_eq!(status(url, Some("acme")).await, 200);
    assert_eq!(status(url, None).await, 400);

    interrupt(&child);
    let mut rest = String::new();
    timeout(PATIENCE, stdout.read_to_string(&mut rest)).await.expect("it ends").expect("text");
    assert_eq!(rest, "all slots given back: true\n");
    assert!(timeout(PATIENCE, child.wait()).await.expect("it ends").expect("a status").success());
}

async fn status(url: &str, project: Option<&str>) -> u16 {
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut request = hyper::Request::get(url);
    if let Some(project) = project {
        request = request.header("x-project-id", project);
    }
    let request = request.body(Empty::new()).expect("a request");
    client.request(request).await.expect("an answer").status().as_u16()
}

/// What Ctrl-C does.
fn interrupt(child: &Child) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)).expect("a running child");
    kill_process(pid, Signal::INT).expect("a child can be signalled");
}
