//! The same load spread over ever more drivers: each is a store of its own with a connection of its
//! own, as every process of a fleet has one. They run in a few processes, which are this binary again.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::harness::{Bench, Rounds, Target, Unit, count, value_of};
use crate::support::RedisServer;
use crate::support::process::Process;
use crate::ways::{Came, Cost, Load, Spent, Way};

const PART: &str = "--part-of-fleet";
const PROCESSES: usize = 4;
const IDS: usize = 10;
const CALLERS: usize = 1000;
/// As many as an id has callers that hold a slot or would, on average: some are refused.
const LIMIT: u32 = 50;
const WORK: Duration = Duration::from_millis(50);

pub(crate) async fn run(bench: &Bench) {
    let server = RedisServer::start();
    for drivers in bench.pick(vec![1, 10, 100, 1000], vec![1, 10, 100, 1000], vec![1, 10]) {
        let measure = async |way| load(&server, way, drivers, bench.millis(1000, 400)).await;
        let rounds = bench.compare(async || measure("ours").await, async || measure("theirs").await).await;
        print(bench, drivers, &rounds);
    }
}

fn print(bench: &Bench, drivers: usize, rounds: &Rounds<Cost>) {
    let load = format!("fleet: {}, {CALLERS} callers", count(drivers, "driver"));
    let row = |what: &str, unit, of: &dyn Fn(&Cost) -> f64| {
        bench.row(&format!("{load}: {what}"), unit, rounds.figures(of), Target::None);
    };
    let micros = Unit::lower("µs");
    row("acquires", Unit::higher("1/s"), &|cost| cost.came.per_second());
    row("refused", Unit::lower("% of them"), &|cost| {
        cost.came.refused as f64 / cost.came.asked as f64 * 100.0
    });
    row("acquire p50", micros, &|cost| cost.came.acquire(0.5));
    row("acquire p99", micros, &|cost| cost.came.acquire(0.99));
    row("server CPU per acquire", micros, &|cost| cost.per_pair(|spent| spent.cpu * 1e6));
    row("script calls per acquire", Unit::lower("1"), &|cost| cost.per_pair(|spent| spent.script_calls));
}

async fn load(server: &RedisServer, way: &str, drivers: usize, time: Duration) -> Cost {
    let parts = PROCESSES.min(drivers);
    let mut parts: Vec<Part> = (0..parts)
        .map(|n| Part::start(&server.url(), way, share(drivers, parts, n), share(CALLERS, parts, n), time))
        .collect();
    for part in &mut parts {
        assert_eq!(part.line(), "ready");
    }
    let before = Spent::by(server).await;
    for part in &mut parts {
        part.begin();
    }
    let mut came = Came::default();
    for part in &mut parts {
        part.came(&mut came);
    }
    Cost { came, spent: Spent::by(server).await.since(before) }
}

/// The share of the `n`th of so many parts in a total.
fn share(total: usize, parts: usize, n: usize) -> usize {
    total * (n + 1) / parts - total * n / parts
}

/// A process of the fleet, as its parent sees it.
struct Part {
    process: Process,
    output: BufReader<ChildStdout>,
}

impl Part {
    fn start(url: &str, way: &str, drivers: usize, callers: usize, time: Duration) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a path to this binary"));
        command.args([PART, way, "--url", url, "--drivers", &drivers.to_string()]);
        command.args(["--callers", &callers.to_string(), "--millis", &time.as_millis().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command, None).expect("this binary starts again");
        let output = process.child().stdout.take().expect("stdout is a pipe");
        Self { process, output: BufReader::new(output) }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a part's output");
        line.trim_end().to_owned()
    }

    fn begin(&mut self) {
        let input = self.process.child().stdin.as_mut().expect("stdin is a pipe");
        writeln!(input).expect("the part reads");
    }

    /// Adds what it came to: seconds, refusals, the time of each acquire.
    fn came(&mut self, sum: &mut Came) {
        let line = self.line();
        let mut numbers = line.split(' ').map(|number| number.parse::<f64>().expect("a number"));
        sum.seconds = sum.seconds.max(numbers.next().expect("seconds"));
        sum.refused += numbers.next().expect("refusals") as u64;
        let before = sum.acquires.len();
        sum.acquires.extend(numbers);
        sum.asked += (sum.acquires.len() - before) as u64;
    }
}

/// In a process of the fleet: runs its part and returns true.
pub(crate) async fn run_part() -> bool {
    let Some(way) = value_of(PART) else { return false };
    let number = |name| value_of(name).and_then(|value| value.parse::<usize>().ok()).expect("an argument");
    let url = value_of("--url").expect("an argument");
    let mut ways = Vec::new();
    for _ in 0..number("--drivers") {
        let way = if way == "ours" { Way::ours(&url, LIMIT) } else { Way::theirs(&url, LIMIT).await };
        // Connects.
        if let Some(taken) = way.try_acquire("warm-up").await {
            way.release("warm-up", taken).await;
        }
        ways.push(way);
    }
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).expect("the parent says when");
    let time = Duration::from_millis(number("--millis") as u64);
    let came = Load::new(IDS, number("--callers"), time).with_work(WORK).run_over(&ways).await;
    let acquires: Vec<String> = came.acquires.iter().map(|micros| format!("{micros:.0}")).collect();
    println!("{} {} {}", came.seconds, came.refused, acquires.join(" "));
    true
}
