//! What all benches share: how much effort to take, rounds of ours and theirs in turns, and the rows
//! of the one table that `scripts/bench` prints.
//!
//! A row compares ours with theirs within one run: both ways are measured in rounds that alternate,
//! and the ratio is the median of the rounds' ratios, so that a machine that is slow for a while is so
//! for both. Absolute numbers depend on the machine: read the ratios.
//!
//! Each bench takes these arguments:
//!
//! - `--quick`: short rounds, and fewer of them
//! - `--smoke`: each row once, with next to no time, to see that it runs; nothing is judged
//! - `--only TEXT`: only the groups of rows whose name contains it
//! - `--rows`: no heading
//!
//! Each bench uses a part of it, hence the two lints that are switched off here.
#![allow(dead_code, unreachable_pub)]

use std::time::Duration;

/// How much effort a run takes, and what it is about.
#[derive(Debug)]
pub struct Bench {
    effort: Effort,
    only: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effort {
    Full,
    Quick,
    Smoke,
}

impl Bench {
    /// Reads the arguments and prints the heading.
    pub fn start() -> Self {
        let has = |name: &str| std::env::args().any(|argument| argument == name);
        let effort = match (has("--smoke"), has("--quick")) {
            (true, _) => Effort::Smoke,
            (_, true) => Effort::Quick,
            _ => Effort::Full,
        };
        if !has("--rows") {
            print_line("row", "unit, better", "ours", "theirs", "ratio", "target", "");
        }
        Self { effort, only: value_of("--only") }
    }

    /// Whether this group of rows is to run.
    pub fn wants(&self, group: &str) -> bool {
        self.only.as_ref().is_none_or(|only| group.contains(only.as_str()))
    }

    /// One of three, by the effort.
    pub fn pick<T>(&self, full: T, quick: T, smoke: T) -> T {
        match self.effort {
            Effort::Full => full,
            Effort::Quick => quick,
            Effort::Smoke => smoke,
        }
    }

    /// So many milliseconds, by the effort.
    pub fn millis(&self, full: u64, quick: u64) -> Duration {
        Duration::from_millis(self.pick(full, quick, 5))
    }

    /// How many rounds each way has.
    pub fn rounds(&self) -> usize {
        self.pick(9, 5, 1)
    }

    /// Rounds of ours and theirs, in turns; who goes first changes from round to round. One of each
    /// before them warms up.
    pub async fn compare<T>(
        &self,
        mut ours: impl AsyncFnMut() -> T,
        mut theirs: impl AsyncFnMut() -> T,
    ) -> Rounds<T> {
        let mut rounds = Rounds { ours: Vec::new(), theirs: Vec::new() };
        if self.effort != Effort::Smoke {
            ours().await;
            theirs().await;
        }
        for round in 0..self.rounds() {
            if round % 2 == 0 {
                rounds.ours.push(ours().await);
                rounds.theirs.push(theirs().await);
            } else {
                rounds.theirs.push(theirs().await);
                rounds.ours.push(ours().await);
            }
        }
        rounds
    }

    /// Prints a row.
    pub fn row(&self, name: &str, unit: Unit, figures: Figures, target: Target) {
        let Figures { ours, theirs, ratio } = figures;
        let (value, bound, of) = match target {
            Target::None => (None, 0.0, ""),
            Target::Ratio(bound) => (ratio, bound, "ratio"),
            Target::Ours(bound) => (Some(ours), bound, "ours"),
        };
        let (sign, met) = match unit.better {
            Better::Higher => (">=", value.map(|value| value >= bound)),
            Better::Lower => ("<=", value.map(|value| value <= bound)),
        };
        let verdict = match met {
            _ if self.effort == Effort::Smoke => "-",
            None => "-",
            Some(true) => "met",
            Some(false) => "short",
        };
        let target = if of.is_empty() { "-".to_owned() } else { format!("{of} {sign} {bound}") };
        let unit = format!("{}, {}", unit.name, unit.better.word());
        let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let theirs = theirs.map_or("-".to_owned(), number);
        print_line(name, &unit, &number(ours), &theirs, &ratio, &target, verdict);
    }
}

/// What is measured, and what is better.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    name: &'static str,
    better: Better,
}

#[derive(Debug, Clone, Copy)]
enum Better {
    Higher,
    Lower,
}

impl Better {
    fn word(self) -> &'static str {
        match self {
            Self::Higher => "higher",
            Self::Lower => "lower",
        }
    }
}

impl Unit {
    /// The more the better.
    pub const fn higher(name: &'static str) -> Self {
        Self { name, better: Better::Higher }
    }

    /// The less the better.
    pub const fn lower(name: &'static str) -> Self {
        Self { name, better: Better::Lower }
    }
}

/// What a row must reach: at least or at most this, as its unit says.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    None,
    /// Ours over theirs.
    Ratio(f64),
    /// Ours by itself.
    Ours(f64),
}

/// What the two ways came to, round by round.
#[derive(Debug)]
pub struct Rounds<T> {
    ours: Vec<T>,
    theirs: Vec<T>,
}

impl<T> Rounds<T> {
    /// One figure of all rounds.
    pub fn figures(&self, of: impl Fn(&T) -> f64) -> Figures {
        let ratios = self.ours.iter().zip(&self.theirs).map(|(ours, theirs)| of(ours) / of(theirs));
        Figures {
            ours: median(self.ours.iter().map(&of).collect()),
            theirs: Some(median(self.theirs.iter().map(&of).collect())),
            ratio: Some(median(ratios.collect())),
        }
    }
}

/// The figures of one row.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    ours: f64,
    theirs: Option<f64>,
    ratio: Option<f64>,
}

impl Figures {
    /// Where there is nothing to compare with.
    pub fn ours(ours: f64) -> Self {
        Self { ours, theirs: None, ratio: None }
    }

    /// Where each was measured once.
    pub fn once(ours: f64, theirs: f64) -> Self {
        Self { ours, theirs: Some(theirs), ratio: Some(ours / theirs) }
    }
}

/// The median; NaN of nothing.
pub fn median(values: Vec<f64>) -> f64 {
    percentile(values, 0.5)
}

/// The value that this share of all lies below; NaN of nothing.
pub fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * share) as usize;
    values.get(at.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

/// `1 id`, `2 ids`.
pub fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// What stands behind an argument.
pub fn value_of(name: &str) -> Option<String> {
    std::env::args().skip_while(|argument| argument != name).nth(1)
}

/// With three digits that tell something.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

fn print_line(name: &str, unit: &str, ours: &str, theirs: &str, ratio: &str, target: &str, verdict: &str) {
    let line = format!("{name:<60} {unit:<21} {ours:>9} {theirs:>9} {ratio:>7}  {target:<14} {verdict}");
    println!("{}", line.trim_end());
}
