//! One process of the operating system that never outlives the test that started it.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// What the watchdog runs: it reads until the test process is gone, however that ended, then kills
/// process `$1` and removes folder `$2`.
const WATCHDOG: &str = r#"read -r _; kill -KILL "$1"; [ -z "$2" ] || rm -rf -- "$2""#;

/// A started process; dropping it kills and reaps it, and a watchdog does so should this process
/// die without dropping anything.
#[derive(Debug)]
pub struct Process {
    child: Child,
    watchdog: Child,
}

impl Process {
    /// Starts `command`; `folder` is what the watchdog removes too.
    pub fn spawn(command: &mut Command, folder: Option<&Path>) -> std::io::Result<Self> {
        let child = command.spawn()?;
        let watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "watchdog"])
            .arg(child.id().to_string())
            .arg(folder.unwrap_or(Path::new("")))
            // Out of the group, so that neither Ctrl-C nor a runner's kill reaches it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh, which watches over the test's processes, starts");
        Ok(Self { child, watchdog })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The standard library's handle, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How the process ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// SIGSTOP; returns once the process stands still.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        // NOWAIT leaves an exit for `Child::wait` to collect.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.raw_pid()), options).expect("a child can be waited for");
        assert!(self.exited().is_none(), "the process ended before its stop");
    }

    /// SIGCONT.
    pub fn cont(&mut self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL, which a stopped process obeys as well; returns once the process is gone and reaped.
    pub fn kill(&mut self) {
        // The watchdog first, so that it can never kill a stranger that got this process id.
        for child in [&mut self.watchdog, &mut self.child] {
            let _already_gone = child.kill();
            let _already_reaped = child.wait();
        }
    }

    /// Sends a signal to the process, which must not have been reaped.
    fn signal(&mut self, signal: Signal) {
        let ended = self.exited();
        assert!(ended.is_none(), "no {signal:?} for a process that has ended: {ended:?}");
        kill_process(self.raw_pid(), signal).expect("a child can be signalled");
    }

    /// The process id as `rustix` wants it.
    fn raw_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
