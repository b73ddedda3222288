//! A wall clock that can be set for one process: libfaketime, whose wrapper `faketime` must be there.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use super::RedisServer;

/// The environment that puts a process under libfaketime. What its timers use keeps the right time.
fn environment() -> Vec<(&'static str, String)> {
    let advice =
        "this test needs libfaketime: install it (apt-get install faketime, brew install libfaketime)";
    let variables = ["LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "DYLD_FORCE_FLAT_NAMESPACE"];
    let print =
        r#"printf '%s\n%s\n%s\n' "$LD_PRELOAD" "$DYLD_INSERT_LIBRARIES" "$DYLD_FORCE_FLAT_NAMESPACE""#;
    let output = Command::new("faketime").args(["-f", "+0s", "sh", "-c", print]).output().expect(advice);
    let text = String::from_utf8(output.stdout).expect("paths are text");
    let mut values: Vec<_> = text.lines().map(str::to_owned).collect();
    if cfg!(target_os = "linux") {
        // It allocates before it is ready; a server's own allocator would ask it for the time then.
        values[0].push_str(" libc.so.6");
    }
    let set: Vec<_> = variables.into_iter().zip(values).filter(|(_, value)| !value.is_empty()).collect();
    assert!(!set.is_empty(), "{advice}");
    [set, vec![("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned())]].concat()
}

/// The environment of a process whose wall clock is `offset` seconds ahead.
pub fn with_offset(offset: i64) -> Vec<(&'static str, String)> {
    [environment(), vec![("FAKETIME", format!("{offset:+}s"))]].concat()
}

/// A Redis server whose clock can be set.
#[derive(Debug)]
pub struct ClockedServer {
    server: RedisServer,
    offset: PathBuf,
}

impl std::ops::Deref for ClockedServer {
    type Target = RedisServer;

    fn deref(&self) -> &RedisServer {
        &self.server
    }
}

impl ClockedServer {
    /// Starts one with the right time.
    pub fn start() -> Self {
        let name = format!("slots-clock-{}-{:08x}", std::process::id(), super::random() as u32);
        let path = std::env::temp_dir().join(name);
        fs::write(&path, offset(0)).expect("the clock's file can be written");
        let file = path.to_str().expect("a path of text").to_owned();
        let more = [("FAKETIME_TIMESTAMP_FILE", file), ("FAKETIME_NO_CACHE", "1".to_owned())];
        let env = [environment(), more.into()].concat();
        let env: Vec<_> = env.iter().map(|(name, value)| (*name, &**value)).collect();
        Self { server: RedisServer::with_env(&[], &env), offset: path }
    }

    /// Sets the clock so many ms ahead of the right time, or behind it.
    pub fn set_ahead(&self, ms: i64) {
        fs::OpenOptions::new()
            .write(true)
            .open(&self.offset)
            .and_then(|mut file| file.write_all(offset(ms).as_bytes()))
            .expect("the clock's file can be written");
    }
}

/// What libfaketime reads, at any time: always as long, so that a write over it is whole at once.
fn offset(ms: i64) -> String {
    format!("{:+018.3}s", ms as f64 / 1000.0)
}

impl Drop for ClockedServer {
    fn drop(&mut self) {
        let _best_effort = fs::remove_file(&self.offset);
    }
}
