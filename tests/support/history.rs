//! A history of who held how much and when, and the check that a limit was kept.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How a line of [`History::to_lines`] begins.
pub const LINE: &str = "visit ";

/// A moment in ns since the Unix epoch, comparable between the processes of one host.
type Nanos = u64;

/// A recorded history; clones share it.
///
/// Record a visit after its admission and end it before the release is asked for: then the history
/// never claims more than was the case.
#[derive(Debug, Clone, Default)]
pub struct History {
    entries: Arc<Mutex<Vec<Entry>>>,
}

/// One visit: from its admission to its end, if it has ended.
#[derive(Debug, Clone)]
struct Entry {
    process: u32,
    number: u64,
    id: String,
    weight: u32,
    admitted: Nanos,
    ended: Option<Nanos>,
}

/// A visit that is going on; dropping it ends it.
#[derive(Debug)]
#[must_use = "a visit ends when it is dropped"]
pub struct Visit {
    history: History,
    index: usize,
}

impl Drop for Visit {
    fn drop(&mut self) {
        let now = nanos(Instant::now());
        // `get_mut`: a panic here could meet another one.
        if let Some(entry) = self.history.entries().get_mut(self.index) {
            entry.ended = Some(now);
        }
    }
}

impl Visit {
    /// The visit as a line for the parent process, open or not; see [`History::read_lines`].
    pub fn line(&self) -> String {
        self.history.entries()[self.index].line()
    }
}

impl History {
    /// An empty history.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that `id` has been admitted with `weight`, now.
    pub fn enter(&self, id: &str, weight: u32) -> Visit {
        let index = self.push(id, weight, nanos(Instant::now()), None);
        Visit { history: self.clone(), index }
    }

    /// Records a visit that is over.
    pub fn record(&self, id: &str, weight: u32, admitted: Instant, ended: Instant) {
        assert!(admitted <= ended, "a visit ends after its start");
        self.push(id, weight, nanos(admitted), Some(nanos(ended)));
    }

    /// Ends, now, all visits of a process that has been killed.
    pub fn end_process(&self, pid: u32) {
        let now = nanos(Instant::now());
        for entry in self.entries().iter_mut().filter(|entry| entry.process == pid) {
            entry.ended.get_or_insert(now);
        }
    }

    /// How many visits of `id` there have been.
    pub fn visits(&self, id: &str) -> usize {
        self.entries().iter().filter(|entry| entry.id == id).count()
    }

    /// The highest total weight of `id` that was ever there at once; an end at the same instant as
    /// a start comes first, and a visit without an end is still there.
    pub fn overlap(&self, id: &str) -> u32 {
        self.steps(id).iter().map(|&(_, total)| total).max().unwrap_or(0)
    }

    /// For how long, all in all, the total weight of `id` was above `limit`.
    pub fn time_above(&self, id: &str, limit: u32) -> Duration {
        let steps = self.steps(id);
        let now = nanos(Instant::now());
        let ends = steps.iter().skip(1).map(|&(at, _)| at).chain([now]);
        let above = steps.iter().zip(ends).filter(|((_, total), _)| *total > limit);
        Duration::from_nanos(above.map(|(&(at, _), end)| end.saturating_sub(at)).sum())
    }

    /// Panics if the total weight of `id` was ever above `limit`, and says when and by whom.
    pub fn assert_within(&self, id: &str, limit: u32) {
        let steps = self.steps(id);
        let Some(&(at, _)) = steps.iter().find(|&&(_, total)| total > limit) else {
            return;
        };
        let start = self.entries().iter().map(|entry| entry.admitted).min().unwrap_or(at);
        let millis = |moment: Nanos| moment.saturating_sub(start) as f64 / 1e6;
        let present: Vec<String> = self
            .entries()
            .iter()
            .filter(|entry| entry.id == id && entry.holds(at))
            .take(20)
            .map(|entry| {
                let end = entry.ended.map_or("now".to_owned(), |end| format!("{:.3}", millis(end)));
                format!(
                    "  weight {} of process {}, {:.3} to {end} ms",
                    entry.weight,
                    entry.process,
                    millis(entry.admitted)
                )
            })
            .collect();
        panic!(
            "{id:?} had {} at once where {limit} is the limit, and was above it for {:?}; first at \
             {:.3} ms of {} visits, by\n{}",
            self.overlap(id),
            self.time_above(id, limit),
            millis(at),
            self.visits(id),
            present.join("\n")
        );
    }

    /// Every visit as a line, for the parent process.
    pub fn to_lines(&self) -> Vec<String> {
        self.entries().iter().map(Entry::line).collect()
    }

    /// A history of the visits in other processes' lines.
    pub fn from_lines<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Self {
        let history = Self::new();
        history.read_lines(lines);
        history
    }

    /// Adds the visits in other processes' lines; other lines are passed over. A later line about
    /// a visit replaces an earlier one, so a child can say [`Visit::line`] when a visit starts, for
    /// the case that it is killed, and [`History::to_lines`] in the end.
    pub fn read_lines<S: AsRef<str>>(&self, lines: impl IntoIterator<Item = S>) {
        let mut entries = self.entries();
        let key = |entry: &Entry| (entry.process, entry.number);
        let places = entries.iter().enumerate();
        let mut places: HashMap<_, _> = places.map(|(at, entry)| (key(entry), at)).collect();
        for line in lines {
            let Some(text) = line.as_ref().strip_prefix(LINE) else {
                continue;
            };
            let entry = Entry::parse(text).unwrap_or_else(|| panic!("not a visit: {text:?}"));
            let at = *places.entry(key(&entry)).or_insert(entries.len());
            match entries.get_mut(at) {
                Some(earlier) => *earlier = entry,
                None => entries.push(entry),
            }
        }
    }

    /// Adds an entry of this process.
    fn push(&self, id: &str, weight: u32, admitted: Nanos, ended: Option<Nanos>) -> usize {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        assert!(!id.contains(['\n', '\r']), "an id is one line: {id:?}");
        let mut entries = self.entries();
        entries.push(Entry {
            process: std::process::id(),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            id: id.to_owned(),
            weight,
            admitted,
            ended,
        });
        entries.len() - 1
    }

    /// The sweep: each moment at which the total weight of `id` changed, and what it became.
    fn steps(&self, id: &str) -> Vec<(Nanos, u32)> {
        let mut changes = Vec::new();
        for entry in self.entries().iter().filter(|entry| entry.id == id) {
            // A visit of no length holds nothing, and its end must not come before its start.
            if entry.ended != Some(entry.admitted) {
                changes.push((entry.admitted, i64::from(entry.weight)));
                changes.extend(entry.ended.map(|end| (end, -i64::from(entry.weight))));
            }
        }
        // Of one moment, the negative ones, that is the ends, come first.
        changes.sort_unstable();
        let mut total = 0;
        let step = |(at, change): (Nanos, i64)| {
            total += change;
            (at, u32::try_from(total).expect("a total is never negative"))
        };
        changes.into_iter().map(step).collect()
    }

    /// The entries, also after a panic under the lock.
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Entry {
    /// Whether the visit was there at that moment.
    fn holds(&self, at: Nanos) -> bool {
        self.admitted <= at && self.ended.is_none_or(|end| at < end)
    }

    /// `visit <process> <number> <weight> <admitted> <ended or -> <id>`
    fn line(&self) -> String {
        let ended = self.ended.map_or("-".to_owned(), |end| end.to_string());
        format!(
            "{LINE}{} {} {} {} {ended} {}",
            self.process, self.number, self.weight, self.admitted, self.id
        )
    }

    /// The reverse of [`Entry::line`], without its beginning.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.splitn(6, ' ');
        Some(Self {
            process: fields.next()?.parse().ok()?,
            number: fields.next()?.parse().ok()?,
            weight: fields.next()?.parse().ok()?,
            admitted: fields.next()?.parse().ok()?,
            ended: match fields.next()? {
                "-" => None,
                end => Some(end.parse().ok()?),
            },
            id: fields.next()?.to_owned(),
        })
    }
}

/// An instant as ns since the Unix epoch.
///
/// The two clocks are read together once per process; of several readings the one counts that was
/// the least interrupted, so the processes of a host agree to about a microsecond, unless the wall
/// clock is set between their starts.
fn nanos(instant: Instant) -> Nanos {
    static ANCHOR: OnceLock<(Instant, Nanos)> = OnceLock::new();
    let (anchor, wall) = *ANCHOR.get_or_init(|| {
        let read = || {
            let before = Instant::now();
            let wall = SystemTime::now();
            (before.elapsed(), before, wall)
        };
        let (gap, before, wall) = (0..32).map(|_| read()).min().expect("32 readings");
        let wall = wall.duration_since(UNIX_EPOCH).expect("a clock after 1970");
        (before + gap / 2, wall.as_nanos() as Nanos)
    });
    match instant.checked_duration_since(anchor) {
        Some(after) => wall + after.as_nanos() as Nanos,
        None => wall - anchor.duration_since(instant).as_nanos() as Nanos,
    }
}
