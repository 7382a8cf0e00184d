//! The sandbox, behind every kind of walls that this machine has, as whoever runs the tests. What untrusted code tries says `BROKE` where it
//! succeeds, ends within its limits, and leaves nothing behind: `escapes` gets out, `limits` takes too much, `judging` and `hacks` cheat at its tests.

mod escapes;
mod hacks;
mod judging;
mod limits;
mod values;

use std::time::Duration;

use rollflow::sandbox::{Ended, Job, Limits, Ran, Sandbox, SandboxConfig, SandboxError, Walls};

const MIB: u64 = 1 << 20;

/// Little of everything.
fn limits() -> Limits {
    let time = Duration::from_secs(5);
    Limits { wall: time, cpu: time, memory: 256 * MIB, processes: 8, file_size: 2 * MIB, disk: 4 * MIB, output: 16 << 10 }
}

/// For programs that never end by themselves: a test waits for their whole time.
fn brief() -> Limits {
    let time = Duration::from_secs(2);
    Limits { wall: time, cpu: time, ..limits() }
}

fn config() -> SandboxConfig {
    SandboxConfig { limits: limits(), ..SandboxConfig::python("python3").expect("tests of the sandbox need python3") }
}

/// Every kind of walls that can be had here, which is one at least.
fn walls() -> Vec<Sandbox> {
    walls_within(limits())
}

fn walls_within(limits: Limits) -> Vec<Sandbox> {
    let tried = [Walls::Namespaces, Walls::Confined].map(|walls| {
        let behind = |config| Sandbox::new(SandboxConfig { walls: Some(walls), limits, ..config });
        // Without namespaces a root's program has a user of its own, who can't read what is installed in root's home.
        let system = || SandboxConfig::python("/usr/bin/python3").ok().and_then(|system| behind(system).ok());
        behind(config()).or_else(|error| system().ok_or(error))
    });
    let had: Vec<Sandbox> = tried
        .into_iter()
        .filter_map(|sandbox| match sandbox {
            Ok(sandbox) => {
                println!("{}", sandbox.isolation());
                Some(sandbox)
            }
            Err(SandboxError::NoWalls(why)) => {
                println!("not had: {why}");
                None
            }
            Err(other) => panic!("{other}"),
        })
        .collect();
    assert!(!had.is_empty(), "this machine can't hold untrusted code at all");
    had
}

const TRY: &str = r#"
import os, sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, what):
    try:
        if what() is not False: print("BROKE", name, flush=True)
    except BaseException as error:
        print("held", name, type(error).__name__, flush=True)
def syscall(*arguments):
    return libc.syscall(*arguments) >= 0
"#;

/// Runs `code` behind all walls with a mark among its arguments, which no process has afterwards.
fn behind(code: &str, arguments: &[&str], check: impl Fn(&Ran, Walls)) {
    within(limits(), code, arguments, check);
}

fn within(limits: Limits, code: &str, arguments: &[&str], check: impl Fn(&Ran, Walls)) {
    for sandbox in walls_within(limits) {
        let walls = sandbox.walls();
        let mark = format!("mark-{}-{:x}", std::process::id(), std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos());
        let mut job = Job::python(format!("{TRY}\n{code}"));
        job.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()).chain([mark.clone()]));
        let ran = sandbox.run(&job).unwrap();
        println!("{walls}: {}, {} bytes printed\n{ran}", ran.ended, ran.stdout.len());
        assert!(!ran.text().contains("BROKE"), "{walls}: {}\n{}", ran.text(), ran.complaint());
        check(&ran, walls);
        let left: Vec<String> = processes().filter(|line| line.contains(&mark)).collect();
        assert!(left.is_empty(), "{walls}: still alive: {left:?}");
    }
}

/// For code whose attempts all fail, and which then ends well.
fn all_held(code: &str, arguments: &[&str]) {
    behind(code, arguments, |ran, walls| {
        assert!(ran.succeeded(), "{walls}: {ran}\n{}", ran.complaint());
        assert!(ran.text().contains("held"), "{walls}: nothing was tried");
    });
}

/// Tests that passed.
fn passed(results: &[Result<(), String>]) -> usize {
    results.iter().filter(|result| result.is_ok()).count()
}

/// Command lines of all processes.
fn processes() -> impl Iterator<Item = String> {
    let lines = std::fs::read_dir("/proc").unwrap().filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).into_owned())
}

#[test]
fn honest_code_reads_its_input_and_files_and_says_what_it_should() {
    for sandbox in walls() {
        let code =
            "import sys, json\nprint(sys.stdin.read().upper() + open('data.txt').read(), len(json.dumps([1])))\nsys.exit(3)";
        let ran = sandbox.run(&Job::python(code).file("data.txt", "beside").stdin("hello ")).unwrap();
        assert_eq!((ran.ended, ran.text().as_str()), (Ended::Exited(3), "HELLO beside 3\n"), "{ran:?}");
        assert!(ran.cpu > Duration::ZERO && ran.peak_memory > MIB, "{ran:?}");
    }
}

#[test]
fn many_at_the_same_time_do_not_see_each_other() {
    for sandbox in walls() {
        let sandbox = &sandbox;
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..12)
                .map(|at| {
                    let code =
                        format!("import os\nassert os.path.exists('main.py') and not os.path.exists('other-{at}')\nprint({at})");
                    let job = Job::python(code).file(format!("other-{}", at + 1), "");
                    scope.spawn(move || (at, sandbox.run(&job).unwrap()))
                })
                .collect();
            for run in running {
                let (at, ran) = run.join().unwrap();
                assert_eq!((ran.ended, ran.text()), (Ended::Exited(0), format!("{at}\n")), "{ran:?}");
            }
        });
    }
}

#[test]
fn without_walls_nothing_runs_unless_that_was_asked_for() {
    let refused = Sandbox::new(SandboxConfig { walls: Some(Walls::None), ..config() });
    assert!(matches!(&refused, Err(SandboxError::NoWalls(_))), "{refused:?}");
    let sandbox = Sandbox::new(SandboxConfig { walls: Some(Walls::None), unsandboxed: true, ..config() }).unwrap();
    assert_eq!(sandbox.walls(), Walls::None);
    // Its limits hold all the same, and a daemon that it leaves behind is ended.
    let mark = format!("mark-open-{}", std::process::id());
    let mut job = Job::python(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nprint(1)",
    );
    job.arguments.push(mark.clone());
    assert_eq!(sandbox.run(&job).unwrap().text(), "1\n");
    assert!(!processes().any(|line| line.contains(&mark)));
}

#[test]
fn a_program_that_is_not_there_or_fails_its_check_is_refused() {
    assert!(SandboxConfig::python("python-that-is-nowhere").is_err());
    let wrong = Sandbox::new(SandboxConfig::program("/bin/false", &[]));
    assert!(matches!(&wrong, Err(SandboxError::NoWalls(_))), "{wrong:?}");
    let right = Sandbox::new(SandboxConfig::program("/bin/sh", &["-c", "true"])).unwrap();
    assert_eq!(right.run(&Job::new(["-c", "echo $HOME$RUSTUP_HOME$CARGO_HOME"])).unwrap().stderr, b"");
    assert!(matches!(right.run(&Job::default().file("../x", "")), Err(SandboxError::FileName(_))));
}
