//! What the crate logs.

use std::io::Write;
use std::sync::{Arc, Mutex};

/// The crate's log lines of the thread that started it, for as long as its guard lives.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic under this lock").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Starts to listen.
    pub fn start() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let sink = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || sink.clone()).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    /// All lines with that part.
    pub fn lines(&self, part: &str) -> Vec<String> {
        let bytes = self.0.lock().expect("no panic under this lock").clone();
        let text = String::from_utf8(bytes).expect("log lines are text");
        text.lines()
            .filter(|line| line.contains("tower_slots") && line.contains(part))
            .map(str::to_owned)
            .collect()
    }

    /// All warnings.
    pub fn warnings(&self) -> Vec<String> {
        self.lines(" WARN ")
    }
}
