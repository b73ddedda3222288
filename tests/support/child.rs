//! A test's own binary run again as a child process: a real holder to kill, stop and resume.
//!
//! The child's side is a test function of the same binary that starts with
//! `let Some(args) = child::role("holder") else { return };`, so it passes at once when it is not
//! run as a child. What it prints with `println!` the parent reads, and the other way round
//! [`Child::send_line`] and [`Args::read_line`].

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::process::Process;

/// The variable that tells a process which child it is.
const ROLE: &str = "TOWER_SLOTS_CHILD";

/// In the child: its arguments if this process is to play that role.
pub fn role(name: &str) -> Option<Args> {
    (std::env::var(ROLE).ok()? == name).then_some(Args(()))
}

/// In the child: what the parent gave it.
#[derive(Debug)]
pub struct Args(());

impl Args {
    /// The value of one of the pairs given to [`Child::spawn`].
    pub fn get(&self, name: &str) -> String {
        std::env::var(name).unwrap_or_else(|error| panic!("the child's argument {name}: {error}"))
    }

    /// The next line the parent sends; none when the parent has closed the pipe or is gone. Blocks.
    pub fn read_line(&self) -> Option<String> {
        let line = std::io::stdin().lines().next()?;
        Some(line.expect("the parent sends text"))
    }
}

/// In the parent: a running child. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Child {
    process: Mutex<Process>,
    output: Arc<watch::Sender<Output>>,
    read: Mutex<usize>,
}

/// What a child has printed, without what libtest adds.
#[derive(Debug, Default)]
struct Output {
    lines: Vec<String>,
    ended: bool,
}

impl Child {
    /// Runs the test function `test` of this binary (its whole path, such as `faults::holder`) as a
    /// child with that role and further environment variables.
    pub fn spawn(test: &str, role: &str, args: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a path to this binary"));
        command
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(args.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command, None).expect("this binary starts again");
        let stdout = process.child().stdout.take().expect("stdout is a pipe");
        let output = Arc::new(watch::Sender::default());
        let (sink, start) = (output.clone(), format!("test {test} ... "));
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // libtest leaves its own line open, so the first output continues it.
                let line = line.strip_prefix(&start).unwrap_or(&line).to_owned();
                if !is_noise(&line) {
                    sink.send_modify(|output: &mut Output| output.lines.push(line));
                }
            }
            sink.send_modify(|output| output.ended = true);
        });
        Self { process: Mutex::new(process), output, read: Mutex::default() }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// SIGSTOP; returns once the child stands still.
    pub fn stop(&self) {
        self.process().stop();
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.process().cont();
    }

    /// Sends a line to the child's stdin.
    pub fn send_line(&self, line: &str) {
        let mut process = self.process();
        let stdin = process.child().stdin.as_mut().expect("stdin is a pipe");
        writeln!(stdin, "{line}").unwrap_or_else(|error| panic!("send {line:?}: {error}"));
    }

    /// The next line with that prefix, of the lines after the one this last returned. Panics with
    /// all output when there is none within `timeout` or the child ends without it.
    pub async fn wait_line(&self, prefix: &str, timeout: Duration) -> String {
        let mut output = self.output.subscribe();
        let found = |output: &Output| {
            let unread = output.lines.iter().enumerate().skip(*self.position());
            let (at, line) = unread.into_iter().find(|(_, line)| line.starts_with(prefix))?;
            *self.position() = at + 1;
            Some(line.clone())
        };
        let mut line = None;
        let search = output.wait_for(|output| {
            line = found(output);
            line.is_some() || output.ended
        });
        // The inner result cannot be an error, as this child holds the sender.
        let in_time = tokio::time::timeout(timeout, search).await.is_ok();
        line.unwrap_or_else(|| {
            let why = if in_time { "ended" } else { "is late" };
            panic!("the child {why} without {prefix:?}; {}", self.said())
        })
    }

    /// All lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.output.borrow().lines.clone()
    }

    /// SIGKILL; returns all lines that it has printed.
    pub async fn killed(self) -> Vec<String> {
        self.kill();
        let mut output = self.output.subscribe();
        output.wait_for(|output| output.ended).await.expect("this child holds the sender").lines.clone()
    }

    /// Closes the child's stdin, waits for its end and returns all its lines. Panics with all
    /// output when it does not end within `timeout` or its test fails.
    pub async fn finish(self, timeout: Duration) -> Vec<String> {
        let start = Instant::now();
        drop(self.process().child().stdin.take());
        let status = loop {
            if let Some(status) = self.process().exited() {
                break status;
            }
            let waited = start.elapsed();
            assert!(waited < timeout, "the child does not end; {}", self.said());
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let mut output = self.output.subscribe();
        let rest = timeout.saturating_sub(start.elapsed()) + Duration::from_secs(1);
        let _checked_below = tokio::time::timeout(rest, output.wait_for(|o| o.ended)).await;
        assert!(status.success(), "the child failed: {status}; {}", self.said());
        self.lines()
    }

    /// The output, for a message.
    fn said(&self) -> String {
        format!("it said:\n{}", self.lines().join("\n"))
    }

    /// The process, also after a panic under the lock.
    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// How many lines [`Child::wait_line`] has passed.
    fn position(&self) -> MutexGuard<'_, usize> {
        self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Whether libtest prints such a line, rather than the child's function.
fn is_noise(line: &str) -> bool {
    line.is_empty() || line == "ok" || line == "running 1 test" || line.starts_with("test result: ")
}
