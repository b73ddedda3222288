//! A master with a replica, and three sentinels that watch over them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use redis::{FromRedisValue, Value};

use super::process::Process;
use super::server::{RedisServer, binary, query};
use super::{eventually, free_port};

/// For what takes the servers seconds, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The name under which the sentinels know the master.
pub const MASTER: &str = "mymaster";

/// A master, its replica, and three sentinels of which two suffice to declare the master dead, after
/// half a second.
pub struct Watched {
    /// The master at the start.
    pub master: RedisServer,
    /// Its replica at the start.
    pub replica: RedisServer,
    /// Who watches.
    pub sentinels: Vec<Sentinel>,
}

impl Watched {
    /// Starts them all, and waits until a failover would go well.
    pub async fn start() -> Self {
        Self::with(&[]).await
    }

    /// The same, with further arguments for master and replica.
    pub async fn with(args: &[&str]) -> Self {
        let args = [&["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"], args].concat();
        let master = RedisServer::with(&args);
        let port = master.port().to_string();
        let replica = RedisServer::with(&[&args[..], &["--replicaof", "127.0.0.1", &port]].concat());
        let up =
            async || replica.read::<String>(&["INFO", "replication"]).await.contains("master_link_status:up");
        eventually("the replica follows", PATIENCE, up).await;
        let sentinels: Vec<_> = (0..3).map(|_| Sentinel::start(&[(MASTER, &master)])).collect();
        let watched = Self { master, replica, sentinels };
        eventually("the sentinels know the others", PATIENCE, async || watched.are_settled().await).await;
        watched
    }

    /// The sentinels' addresses.
    pub fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Sentinel::url).collect()
    }

    /// Whether each sentinel knows the two others and the replica.
    async fn are_settled(&self) -> bool {
        for sentinel in &self.sentinels {
            for (list, length) in [("SENTINELS", 2), ("REPLICAS", 1)] {
                if sentinel.read::<Vec<Value>>(&["SENTINEL", list, MASTER]).await.len() != length {
                    return false;
                }
            }
        }
        true
    }
}

/// One sentinel.
pub struct Sentinel {
    process: Process,
    port: u16,
    folder: PathBuf,
}

impl Sentinel {
    /// A sentinel that watches these masters, by their names.
    pub fn start(masters: &[(&str, &RedisServer)]) -> Self {
        let folder = std::env::temp_dir().join(format!("slots-sentinel-{:016x}", super::random()));
        fs::create_dir_all(&folder).expect("the sentinel's folder can be made");
        let port = free_port();
        let mut settings = format!("port {port}\nbind 127.0.0.1\ndir {}\n", folder.display());
        for (name, master) in masters {
            settings += &format!(
                "sentinel monitor {name} 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds {name} 500\n\
                 sentinel failover-timeout {name} 3000\n",
                master.port()
            );
        }
        let file = folder.join("sentinel.conf");
        fs::write(&file, settings).expect("the sentinel's settings can be written");
        let mut command = Command::new(binary());
        command.arg(&file).arg("--sentinel").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process =
            Process::spawn(&mut command, Some(&folder)).expect("a server that starts is a sentinel too");
        Self { process, port, folder }
    }

    /// `redis://127.0.0.1:PORT/`
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// SIGSTOP: connections stay open, nothing is answered.
    pub fn stop(&mut self) {
        self.process.stop();
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Runs a command and converts its reply, once the sentinel has come up.
    pub async fn read<T: FromRedisValue>(&self, command: &[&str]) -> T {
        let mut reply = None;
        eventually("the sentinel answers", PATIENCE, async || {
            reply = query(self.url(), command).await.ok();
            reply.is_some()
        })
        .await;
        redis::from_redis_value(reply.expect("it has answered")).expect("a reply of that type")
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.kill();
        let _best_effort = fs::remove_dir_all(&self.folder);
    }
}
