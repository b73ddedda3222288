//! The source of the semaphore: what it must not use. What it does under its lock is checked by its
//! behaviour, in `structure`.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/semaphore")
}

fn files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// The code that is built into the crate: without comments, text and what only tests build.
fn code(source: &str) -> String {
    let plain = without_comments_and_text(source);
    let mut kept = String::new();
    let mut rest = plain.as_str();
    while let Some(at) = rest.find("#[cfg(") {
        let end = at + rest[at..].find(")]").map_or(rest.len() - at, |end| end + 2);
        let attribute = &rest[at..end];
        kept.push_str(&rest[..at]);
        rest = &rest[end..];
        if only_tests(attribute) {
            rest = &rest[item(rest)..];
        }
    }
    kept.push_str(rest);
    kept
}

fn only_tests(attribute: &str) -> bool {
    attribute == "#[cfg(test)]" || attribute.starts_with("#[cfg(all(test")
}

/// The modules in files of their own that only tests build.
fn test_modules(source: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let declared = lines.windows(2).filter(|pair| only_tests(pair[0]));
    let name = |pair: &[&str]| pair[1].strip_prefix("mod ")?.strip_suffix(';').map(str::to_owned);
    declared.filter_map(name).collect()
}

/// How long the item is that `code` begins with.
fn item(code: &str) -> usize {
    let mut depth = 0_usize;
    for (at, char) in code.char_indices() {
        match char {
            '{' => depth += 1,
            '}' if depth <= 1 => return at + 1,
            '}' => depth -= 1,
            ';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

fn without_comments_and_text(source: &str) -> String {
    let mut code = String::new();
    let mut chars = source.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '/' if chars.peek() == Some(&'/') => {
                chars.by_ref().find(|char| *char == '\n');
                code.push('\n');
            }
            '"' => {
                code.push_str("\"\"");
                while let Some(char) = chars.next() {
                    match char {
                        '\\' => drop(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            // A character, not a lifetime: its quote comes second or, escaped, third.
            '\'' => {
                let ahead: Vec<char> = chars.clone().take(3).collect();
                let len = match ahead.as_slice() {
                    ['\\', _, '\''] => 3,
                    [_, '\'', ..] => 2,
                    _ => 0,
                };
                chars.by_ref().take(len).for_each(drop);
                code.push('\'');
            }
            _ => code.push(char),
        }
    }
    code
}

/// What is wrong with a file's code, if anything.
fn faults(code: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let forbidden = [
        "spawn",
        "std::thread",
        "thread_local!",
        "block_on",
        "sleep(",
        "interval",
        "std::time::Instant",
        "SystemTime",
        "static mut",
        "OnceLock",
        "LazyLock",
        "OnceCell",
        "unsafe",
        "println!",
        "tokio::sync",
        "tokio::runtime",
        "tokio::task::JoinHandle",
        "tracing::",
        "metrics::",
        "redis",
    ];
    faults.extend(forbidden.iter().filter(|word| code.contains(**word)).map(|word| (*word).to_owned()));
    for line in code.lines() {
        let words = line.trim_start().trim_start_matches("pub ").trim_start_matches("pub(super) ");
        if words.starts_with("static ") {
            faults.push(format!("global state: {line}"));
        }
    }
    // Of this crate, only the semaphore itself.
    let mut rest = code;
    while let Some(at) = rest.find("crate::") {
        let path = &rest[at..];
        let whole =
            rest[..at].chars().next_back().is_none_or(|before| !before.is_alphanumeric() && before != '_');
        if whole && !path.starts_with("crate::semaphore") {
            faults.push(format!("imports {}", path.lines().next().unwrap_or_default()));
        }
        rest = &path["crate::".len()..];
    }
    faults
}

/// The code of each file that is built into the crate, by its path below the semaphore.
fn built() -> Vec<(PathBuf, String)> {
    let mut all = Vec::new();
    files(&root(), &mut all);
    let source =
        |path: &PathBuf| (path.strip_prefix(root()).unwrap().to_owned(), fs::read_to_string(path).unwrap());
    let sources: Vec<_> = all.iter().map(source).collect();
    let skipped: Vec<String> = sources.iter().flat_map(|(_, source)| test_modules(source)).collect();
    let is_built = |path: &Path| {
        let mut names = path.iter().map(|name| Path::new(name).file_stem().unwrap_or_default());
        !names.any(|name| skipped.iter().any(|skipped| name == skipped.as_str()))
    };
    sources
        .into_iter()
        .filter(|(path, _)| is_built(path))
        .map(|(path, source)| (path, code(&source)))
        .collect()
}

/// The one file that follows pointers.
const UNSAFE: &str = "handle.rs";

#[test]
fn rule_37_the_source_spawns_nothing_and_imports_nothing_of_the_crate() {
    let built = built();
    let length: usize = built.iter().map(|(_, code)| code.len()).sum();
    assert!(built.len() > 3 && length > 10_000, "nearly nothing was looked at: {length} characters");
    for (path, code) in built {
        let mut faults = faults(&code);
        if path.ends_with(UNSAFE) {
            faults.retain(|fault| fault != "unsafe");
        }
        assert!(faults.is_empty(), "{}: {faults:?}", path.display());
    }
}

/// Nothing leads up and out of the semaphore either.
#[test]
fn rule_37_no_file_of_the_semaphore_reaches_above_it() {
    for (path, code) in built() {
        // As many as lead to the semaphore, and one more.
        let folders = path.iter().count() - 1;
        let depth = if path.ends_with("mod.rs") { folders } else { folders + 1 };
        let out = "super::".repeat(depth + 1);
        for line in code.lines() {
            let imported = line.trim_start().split_once("use ").map_or("", |(_, imported)| imported);
            assert!(!imported.starts_with(&out), "{}: {line}", path.display());
        }
    }
}

#[test]
fn rule_37_the_check_of_the_source_finds_what_it_looks_for() {
    for bad in [
        "fn run() { tokio::spawn(async {}); }",
        "use std::thread;\n",
        "use crate::store::SlotStore;",
        "    use crate::limiter::{self};",
        "static ALL: Mutex<()> = Mutex::new(());",
        "pub(super) static COUNT: AtomicU64 = AtomicU64::new(0);",
        "fn late() { let at = std::time::Instant::now(); }",
        "let quote = '\"'; spawn(); let other = '\"';",
        "fn a<'a>(x: &'a str) { spawn(x) }",
        "#[cfg(not(test))] fn a() { spawn() }",
        "#[cfg(test)] mod tests { fn a() { { } } } fn b() { spawn() }",
        "#[cfg(test)] mod tests; fn b() { spawn() }",
    ] {
        assert!(!faults(&code(bad)).is_empty(), "{bad}");
    }
    for good in [
        "// spawn\nuse crate::semaphore::Permit;",
        "/// crate::store\nfn a() {}",
        "let text = \"spawn \\\" crate::store\";",
        "#[cfg(test)] mod tests { fn a() { spawn() } }",
        "#[cfg(all(test, loom))]\nmod tests { fn a() { { spawn() } } }\nfn b() {}",
        "fn a() -> &'static str { \"\" }",
        "use std::sync::Arc;",
        "use mycrate::other;",
    ] {
        assert_eq!(faults(&code(good)), Vec::<String>::new(), "{good}");
    }
    assert_eq!(test_modules("mod a;\n#[cfg(all(test, b))]\nmod b;\n#[cfg(test)]\nmod c {\n}"), ["b"]);
}

/// What can be shown by code that must not compile, or read in the documentation.
#[test]
fn rule_24_and_27_are_documented() {
    let mut all = Vec::new();
    files(&root(), &mut all);
    let text: String = all.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    assert!(text.contains("compile_fail"), "a second release that does not compile");
    assert!(text.contains("mem::forget"), "a permit that is forgotten");
    let permit = text.find("pub struct Permit(").unwrap();
    let before = &text[..permit];
    let attributes = &before[before.rfind("\n}\n").unwrap_or(0)..];
    assert!(attributes.contains("#[must_use"), "a permit must be used");
}
