//! R352 and law F3: no globals. State that outlives a run would let two runs of one process see each other.
//!
//! Exceptions: the weak reference to the process's runtime for HTTP, which lives as long as its users,
//! and the process's allocator.

use std::path::Path;

const RUNTIME: &str = "static SHARED: Mutex<Weak<SharedRuntime>> = Mutex::new(Weak::new());";

#[test]
fn the_library_has_no_mutable_state_of_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = ["src", "pipelines/src", "crates"].map(|folder| crate::files(&root.join(folder), "rs")).concat();
    assert!(files.len() > 100, "the sources were found");
    let declares_state = |line: &&str| {
        let line = line.trim_start().trim_start_matches("pub ").trim_start_matches("pub(crate) ");
        line.starts_with("static ") || line.starts_with("thread_local!") || line.starts_with("lazy_static!")
    };
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let runtime = |line: &&str| file.ends_with("crates/net/src/tasks.rs") && *line == RUNTIME;
        if file.ends_with("src/model/allocator.rs") {
            continue;
        }
        let found: Vec<&str> = text.lines().filter(declares_state).filter(|line| !runtime(line)).collect();
        assert!(found.is_empty(), "{}: {found:?}; pass it as a parameter instead", file.display());
    }
}
