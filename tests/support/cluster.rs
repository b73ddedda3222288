//! A cluster of masters that share all hash slots.

use std::time::Duration;

use super::server::RedisServer;
use super::{eventually, free_port};

/// For what takes the servers seconds, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many hash slots there are.
const HASH_SLOTS: usize = 16384;

/// Masters, each with an equal share of the hash slots. One that is down takes only its own share
/// along.
pub struct Cluster {
    /// The masters in the order of their shares, then what was added.
    pub nodes: Vec<RedisServer>,
    masters: usize,
}

impl Cluster {
    /// Starts so many masters, and waits until they agree.
    pub async fn start(masters: usize) -> Self {
        let mut cluster = Self { nodes: Vec::new(), masters };
        for n in 0..masters {
            let (first, last) = (n * HASH_SLOTS / masters, (n + 1) * HASH_SLOTS / masters - 1);
            let node = cluster.add().await;
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]).await;
        }
        cluster.settled("cluster_slots_ok:16384").await;
        cluster.settled("cluster_state:ok").await;
        cluster
    }

    /// Adds a node without a share.
    pub async fn add(&mut self) -> &RedisServer {
        let bus = free_port().to_string();
        let node = RedisServer::with(&[
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            &bus,
            "--cluster-node-timeout",
            "1000",
            "--cluster-require-full-coverage",
            "no",
            "--cluster-allow-replica-migration",
            "no",
            "--cluster-replica-validity-factor",
            "0",
            "--repl-diskless-sync-delay",
            "0",
        ]);
        if let Some(first) = self.nodes.first() {
            first.command(&["CLUSTER", "MEET", "127.0.0.1", &node.port().to_string(), &bus]).await;
        }
        self.nodes.push(node);
        self.settled(&format!("cluster_known_nodes:{}", self.nodes.len())).await;
        if self.nodes.len() > self.masters {
            self.settled("cluster_state:ok").await;
        }
        &self.nodes[self.nodes.len() - 1]
    }

    /// Adds a replica of a master, and returns its place.
    pub async fn add_replica_of(&mut self, master: usize) -> usize {
        let id = self.id_of(master).await;
        let replica = self.add().await;
        let known = async || replica.try_command(&["CLUSTER", "REPLICATE", &id]).await.is_ok();
        eventually("the replica knows its master", PATIENCE, known).await;
        let up =
            async || replica.read::<String>(&["INFO", "replication"]).await.contains("master_link_status:up");
        eventually("the replica follows", PATIENCE, up).await;
        for node in &self.nodes {
            let known = async || node.read::<Vec<String>>(&["CLUSTER", "REPLICAS", &id]).await.len() == 1;
            eventually("all know the replica", PATIENCE, known).await;
        }
        self.nodes.len() - 1
    }

    /// Waits until all nodes say that in CLUSTER INFO.
    async fn settled(&self, line: &str) {
        for node in &self.nodes {
            let says = async || node.read::<String>(&["CLUSTER", "INFO"]).await.contains(line);
            eventually(line, PATIENCE, says).await;
        }
    }

    /// The address of one node.
    pub fn url(&self) -> String {
        self.nodes[0].url()
    }

    /// The master that has an id at the start.
    pub fn node_of(&self, id: &str) -> usize {
        (0..self.masters).find(|n| hash_slot(id) < (n + 1) * HASH_SLOTS / self.masters).expect("a share")
    }

    /// So many ids that a master has at the start.
    pub fn ids_on(&self, node: usize, n: usize) -> Vec<String> {
        let all = (0..).map(|n| format!("id-{n}"));
        all.filter(|id| self.node_of(id) == node).take(n).collect()
    }

    /// Hands the hash slot of an id over from one node to another, with what is in it; `between` is
    /// done in the middle of it.
    pub async fn move_id(&self, id: &str, from: usize, to: usize, between: impl AsyncFnOnce()) {
        let (source, target) = (&self.nodes[from], &self.nodes[to]);
        let (slot, port) = (hash_slot(id).to_string(), target.port().to_string());
        let (from, to) = (self.id_of(from).await, self.id_of(to).await);
        target.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from]).await;
        source.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to]).await;
        between().await;
        loop {
            let keys: Vec<String> = source.read(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]).await;
            if keys.is_empty() {
                break;
            }
            let head = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"].map(str::to_owned);
            let migrate: Vec<_> = head.into_iter().chain(keys).collect();
            source.command(&migrate.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        for node in [target, source] {
            node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &to]).await;
        }
    }

    /// The node's name in the cluster.
    async fn id_of(&self, node: usize) -> String {
        self.nodes[node].read(&["CLUSTER", "MYID"]).await
    }
}

/// The hash slot of an id's key.
pub fn hash_slot(id: &str) -> usize {
    usize::from(crc16::State::<crc16::XMODEM>::calculate(format!("sem:{id}").as_bytes())) % HASH_SLOTS
}
