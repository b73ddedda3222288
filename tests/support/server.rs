//! A real `redis-server` of a test's own.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use redis::{FromRedisValue, IntoConnectionInfo, RedisResult, Value};

use super::process::Process;

/// How long a server may take until it answers, and how long a helper's command may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A `redis-server` process on a free loopback port and a unix socket, without persistence.
///
/// `REDIS_SERVER_BIN` names another binary (Valkey, a newer Redis). Starting blocks the thread for
/// some 20 ms. The helpers (`command` and what follows it) use a short connection of their own over
/// the unix socket, so no proxy, port or dropped runtime is in their way. They panic when the
/// server does not answer within 10 s or answers with an error.
#[derive(Debug)]
pub struct RedisServer {
    args: Vec<String>,
    env: Vec<(String, String)>,
    port: u16,
    folder: PathBuf,
    process: Mutex<Process>,
}

impl RedisServer {
    /// Starts a server with the defaults.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// Starts a server with further arguments, such as `&["--requirepass", "x"]`.
    pub fn with(args: &[&str]) -> Self {
        Self::with_env(args, &[])
    }

    /// Starts a server with further arguments and environment variables.
    pub fn with_env(args: &[&str], env: &[(&str, &str)]) -> Self {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let env: Vec<_> = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let name = format!("slots-{}-{:08x}", std::process::id(), super::random() as u32);
        let folder = std::env::temp_dir().join(name);
        let mut log = String::new();
        for _ in 0..10 {
            let port = super::free_port();
            match launch(&args, &env, port, &folder) {
                Ok(process) => {
                    let process = Mutex::new(process);
                    return Self { args, env, port, folder, process };
                }
                Err(failure) => log = failure,
            }
            let _best_effort = fs::remove_dir_all(&folder);
            if !log.contains("Address already in use") {
                break;
            }
        }
        panic!("redis-server {args:?} did not start: {log}");
    }

    /// `redis://127.0.0.1:PORT/`
    pub fn url(&self) -> String {
        format!("redis://{}/", self.addr())
    }

    /// `redis+unix:///…`
    pub fn unix_url(&self) -> String {
        format!("redis+unix://{}", socket(&self.folder).display())
    }

    /// The TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The TCP address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The process id; another one after a restart.
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// SIGSTOP: connections stay open, nothing is answered.
    pub fn stop(&self) {
        self.process().stop();
    }

    /// SIGCONT: what had been sent meanwhile is executed now.
    pub fn cont(&self) {
        self.process().cont();
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// `kill -9`, then an empty server with the same port and arguments.
    pub fn restart(&self) {
        let mut process = self.process();
        process.kill();
        *process = launch(&self.args, &self.env, self.port, &self.folder)
            .unwrap_or_else(|log| panic!("redis-server did not come back: {log}"));
    }

    /// What the server has logged since its start.
    pub fn log(&self) -> String {
        fs::read_to_string(log_file(&self.folder)).expect("the server's log can be read")
    }

    /// Runs a command; panics on an error.
    pub async fn command(&self, command: &[&str]) -> Value {
        self.try_command(command).await.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// Runs a command; a server's error is an `Err`.
    pub async fn try_command(&self, command: &[&str]) -> RedisResult<Value> {
        let mut info = self.unix_url().into_connection_info()?;
        if let Some(at) = self.args.iter().position(|arg| arg == "--requirepass") {
            let settings = info.redis_settings().clone().set_password(&self.args[at + 1]);
            info = info.set_redis_settings(settings);
        }
        query(info, command).await
    }

    /// Members of the sorted set: ZCARD.
    pub async fn zcard(&self, key: &str) -> u64 {
        self.read(&["ZCARD", key]).await
    }

    /// The sorted set's members with their scores, lowest score first.
    pub async fn members(&self, key: &str) -> Vec<(String, i64)> {
        let range: Vec<(String, f64)> = self.read(&["ZRANGE", key, "0", "-1", "WITHSCORES"]).await;
        let whole = |(member, score): (String, f64)| {
            assert_eq!(score.fract(), 0.0, "{member} has a score of whole ms");
            (member, score as i64)
        };
        range.into_iter().map(whole).collect()
    }

    /// PTTL in ms: -1 without a TTL, -2 without the key.
    pub async fn pttl(&self, key: &str) -> i64 {
        self.read(&["PTTL", key]).await
    }

    /// The server's clock, ms since the Unix epoch.
    pub async fn time_ms(&self) -> i64 {
        let (seconds, micros): (i64, i64) = self.read(&["TIME"]).await;
        seconds * 1000 + micros / 1000
    }

    /// Whether the key exists.
    pub async fn exists(&self, key: &str) -> bool {
        self.read(&["EXISTS", key]).await
    }

    /// All keys, sorted.
    pub async fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.read(&["KEYS", "*"]).await;
        keys.sort();
        keys
    }

    /// FLUSHALL.
    pub async fn flushall(&self) {
        self.command(&["FLUSHALL", "SYNC"]).await;
    }

    /// SCRIPT FLUSH.
    pub async fn script_flush(&self) {
        self.command(&["SCRIPT", "FLUSH", "SYNC"]).await;
    }

    /// How many EVALSHA and EVAL the server has executed, those that failed (NOSCRIPT) included.
    pub async fn script_calls(&self) -> u64 {
        self.calls("evalsha").await + self.calls("eval").await
    }

    /// How often the server has executed a command, by its lower-case name in `INFO commandstats`;
    /// commands that a script runs count too.
    pub async fn calls(&self, command: &str) -> u64 {
        let stats: String = self.read(&["INFO", "commandstats"]).await;
        let prefix = format!("cmdstat_{command}:calls=");
        stats
            .lines()
            .find_map(|line| line.strip_prefix(&prefix)?.split(',').next())
            .map_or(0, |calls| calls.parse().expect("calls is a number"))
    }

    /// How often the server has answered with an error of that code.
    pub async fn errors(&self, code: &str) -> u64 {
        let stats: String = self.read(&["INFO", "errorstats"]).await;
        let prefix = format!("errorstat_{code}:count=");
        let count = stats.lines().find_map(|line| line.strip_prefix(&prefix));
        count.map_or(0, |count| count.parse().expect("a count is a number"))
    }

    /// Runs a command and converts its reply.
    pub async fn read<T: FromRedisValue>(&self, command: &[&str]) -> T {
        let reply = self.command(command).await;
        redis::from_redis_value(reply).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// The process, also after a test panicked while it had it.
    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.process().kill();
        let _best_effort = fs::remove_dir_all(&self.folder);
    }
}

/// The server that all tests use.
pub fn binary() -> OsString {
    std::env::var_os("REDIS_SERVER_BIN").unwrap_or_else(|| "redis-server".into())
}

/// Runs one command over a connection of its own.
pub async fn query(address: impl IntoConnectionInfo, command: &[&str]) -> RedisResult<Value> {
    let info = address.into_connection_info()?;
    let settings = info.redis_settings().clone().set_skip_set_lib_name();
    let info = info.set_redis_settings(settings);
    let mut call = redis::Cmd::new();
    call.arg(command);
    // A blocking call on a thread of its own: it does not mind a paused clock.
    let query = move || {
        let mut connection = redis::Client::open(info)?.get_connection_with_timeout(PATIENCE)?;
        connection.set_read_timeout(Some(PATIENCE))?;
        call.query(&mut connection)
    };
    tokio::task::spawn_blocking(query).await.expect("the helper's thread ends well")
}

/// The unix socket of the server in `folder`.
fn socket(folder: &Path) -> PathBuf {
    folder.join("redis.sock")
}

/// The log of the server in `folder`.
fn log_file(folder: &Path) -> PathBuf {
    folder.join("redis.log")
}

/// Starts a server in an emptied `folder` and waits until it answers; an `Err` is its log.
fn launch(args: &[String], env: &[(String, String)], port: u16, folder: &Path) -> Result<Process, String> {
    let _not_there = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).expect("the server's folder can be made");
    let log = File::create(log_file(folder)).expect("the server's log can be made");
    let binary = binary();
    let mut command = Command::new(&binary);
    command
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .arg("--unixsocket")
        .arg(socket(folder))
        .arg("--dir")
        .arg(folder)
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .args(["--enable-debug-command", "yes"])
        .args(args)
        .envs(env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a file can be cloned"))
        .stderr(log);
    let mut process = match Process::spawn(&mut command, Some(folder)) {
        Ok(process) => process,
        Err(error) => {
            let _best_effort = fs::remove_dir_all(folder);
            let advice = match error.kind() {
                ErrorKind::NotFound => {
                    ": these tests need Redis 7 or newer, or Valkey: install it (apt-get install \
                     redis-server, brew install redis) or name the binary in REDIS_SERVER_BIN"
                }
                _ => "",
            };
            panic!("{} does not start: {error}{advice}", binary.display());
        }
    };
    let start = Instant::now();
    // The socket file is this server's alone, so its answer also says that the port was free.
    while !answers(&socket(folder)) {
        let log = || fs::read_to_string(log_file(folder)).unwrap_or_default();
        if let Some(status) = process.exited() {
            return Err(format!("{status}\n{}", log()));
        }
        if start.elapsed() > PATIENCE {
            return Err(format!("no answer within {PATIENCE:?}\n{}", log()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(process)
}

/// Whether the server behind `socket` says anything to a PING; -NOAUTH and -LOADING will do.
fn answers(socket: &Path) -> bool {
    let ping = || -> std::io::Result<usize> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"PING\r\n")?;
        stream.read(&mut [0; 64])
    };
    ping().is_ok_and(|length| length > 0)
}

/// A connection of the client library with a generous time-out: a machine under load is no fault.
pub async fn connect(url: &str) -> redis::aio::MultiplexedConnection {
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(10)));
    let client = redis::Client::open(url).expect("a good URL");
    client.get_multiplexed_async_connection_with_config(&config).await.expect("connects")
}
