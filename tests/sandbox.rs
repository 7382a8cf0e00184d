//! What untrusted code tries, behind every kind of walls that this machine has, as whoever runs the tests. Each attempt says `BROKE` where it
//! succeeds, ends within its limits, and leaves nothing behind.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use rollflow::data::{Prompt, Sample};
use rollflow::env::{Action, Deadline, Environment, Episode, Grade, PythonEnvironment, ToolCall};
use rollflow::sandbox::{CodeJudge, CodeTests, Ended, Job, Limits, Program, Ran, Sandbox, SandboxConfig, SandboxError, Walls};
use rollflow::stages::reward::{CodeReward, CodeScore};

const MIB: u64 = 1 << 20;

/// Little of everything.
fn limits() -> Limits {
    let time = Duration::from_secs(5);
    Limits { wall: time, cpu: time, memory: 256 * MIB, processes: 8, file_size: 2 * MIB, disk: 4 * MIB, output: 16 << 10 }
}

fn config() -> SandboxConfig {
    SandboxConfig { limits: limits(), ..SandboxConfig::python().expect("tests of the sandbox need python3") }
}

/// Every kind of walls that can be had here, which is one at least.
fn walls() -> Vec<Sandbox> {
    let tried = [Walls::Namespaces, Walls::Confined].map(|walls| {
        let behind =
            |program| Sandbox::new(SandboxConfig { walls: Some(walls), limits: limits(), ..SandboxConfig::new(program) });
        // Without namespaces a root's program has a user of its own, who can't read what is installed in root's home.
        let system = || Program::python("/usr/bin/python3").ok().and_then(|system| behind(system).ok());
        behind(config().program).or_else(|error| system().ok_or(error))
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
    for sandbox in walls() {
        let walls = sandbox.isolation().walls;
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

/// Command lines of all processes.
fn processes() -> impl Iterator<Item = String> {
    let lines = std::fs::read_dir("/proc").unwrap().filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).into_owned())
}

/// A process of ours, which must survive.
struct Victim(Child);

impl Victim {
    fn new() -> Self {
        Victim(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
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
fn it_sees_no_variable_no_file_and_no_descriptor_of_ours() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    // Not closed on exec: whoever starts a process by the usual ways hands it on.
    let open = rustix::io::dup(std::fs::File::open(&secret).unwrap()).unwrap();
    let (secret, pid) = (secret.display().to_string(), std::process::id().to_string());
    let code = r#"
secret, pid = sys.argv[1:3]
attempt("environment", lambda: any("CARGO" in name or name == "USER" for name in os.environ))
attempt("descriptors", lambda: any(os.pread(fd, 6, 0) for fd in range(3, 256) if not syscall_fails(fd)))
attempt("file", lambda: open(secret).read())
attempt("upwards", lambda: open("../" * 20 + secret).read())
attempt("through proc", lambda: open(f"/proc/{pid}/root{secret}").read())
attempt("through init", lambda: open(f"/proc/1/root{secret}").read())
attempt("environ of the parent", lambda: open(f"/proc/{pid}/environ").read())
attempt("environ of init", lambda: "CARGO" in open("/proc/1/environ").read())
attempt("command line", lambda: open(f"/proc/{pid}/cmdline").read())
for place in ["/root", "/home", "/var", "/etc/passwd", "/etc/shadow", "/run", "/sys", "/boot", "/dev/shm/x", "/dev/kmsg"]:
    attempt(place, lambda: (os.listdir(place) if os.path.isdir(place) else open(place).read()) and "/.pyenv" not in place
            and not all(inner == ".pyenv" for inner in os.listdir(place)))
"#;
    let fails = "def syscall_fails(fd):\n    try:\n        os.fstat(fd)\n        return False\n    except OSError:\n        return True\n";
    all_held(&format!("{fails}{code}"), &[&secret, &pid]);
    drop(open);
}

#[test]
fn it_reaches_no_network_and_no_loopback() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let code = r#"
import socket
port = int(sys.argv[1])
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", port), 1))
attempt("tcp 6", lambda: socket.socket(socket.AF_INET6))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port)))
attempt("listening", lambda: socket.socket().listen())
attempt("unix", lambda: socket.socket(socket.AF_UNIX))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
attempt("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt("io_uring", lambda: syscall(425, 8, ctypes.create_string_buffer(256)))
attempt("names", lambda: socket.getaddrinfo("example.com", 80))
# A pair of streams is no network: asyncio needs one.
left, right = socket.socketpair()
left.send(b"x"); assert right.recv(1) == b"x"
"#;
    all_held(code, &[&port]);
    assert!(listener.accept().is_err(), "somebody came through");
}

#[test]
fn it_touches_no_other_process() {
    let mut victim = Victim::new();
    let code = r#"
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
victim, tests = int(sys.argv[1]), int(sys.argv[2])
for pid in [victim, tests, os.getppid()]:
    if pid == 0: continue
    attempt(f"kill", lambda: os.kill(pid, signal.SIGTERM))
    attempt("tkill", lambda: syscall(200 if os.uname().machine == "x86_64" else 130, pid, 15))
    attempt("ptrace", lambda: libc.ptrace(16, pid, None, None) >= 0)
    attempt("reading memory", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    attempt("vm_readv", lambda: libc.process_vm_readv(pid, None, 0, None, 0, 0) >= 0)
    attempt("pidfd", lambda: os.pidfd_open(pid) >= 0)
    attempt("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
for pid in [victim, tests]:
    import resource
    attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    attempt("affinity", lambda: os.sched_setaffinity(pid, [0]))
    attempt("limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, 10)))
    import fcntl
    def sigio():
        read, write = os.pipe()
        fcntl.fcntl(read, 8, pid)
        return fcntl.fcntl(read, 9) == pid
    attempt("SIGIO", sigio)
    attempt("its group", lambda: os.killpg(pid, signal.SIGTERM))
"#;
    let pid = std::process::id().to_string();
    all_held(code, &[&victim.pid(), &pid]);
    behind("os.kill(-1, 9)", &[], |_, _| {});
    assert!(victim.lives(), "the victim is dead");
}

#[test]
fn it_writes_nothing_outside_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let outside = folder.path().display().to_string();
    let code = r#"
outside = sys.argv[1]
def write(path):
    with open(path, "w") as file: file.write("x")
for place in [outside + "/x", "/x", "/usr/x", "/usr/lib/x", "/etc/x", "/var/tmp/x", "/dev/x", "/proc/self/oom_score_adj", sys.prefix + "/x",
              os.__file__, "/bin/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/dev/mem", "/dev/sda"]:
    attempt(place, lambda: write(place))
attempt("folder", lambda: os.mkdir("/usr/folder"))
attempt("removing", lambda: os.remove(os.__file__))
attempt("renaming", lambda: os.rename(os.__file__, os.__file__ + "x"))
attempt("permissions", lambda: os.chmod(os.__file__, 0o777))
attempt("truncating", lambda: os.truncate(os.__file__, 0))
attempt("times", lambda: os.utime(os.__file__))
attempt("set-uid", lambda: os.setuid(0))
attempt("device", lambda: os.mknod("device", 0o60666, os.makedev(254, 0)) or open("device", "rb").read(1))
"#;
    all_held(code, &[&outside]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn it_can_not_leave_by_mounts_namespaces_or_the_kernel() {
    let code = r#"
attempt("mount", lambda: libc.mount(b"proc", b"/work", b"proc", 0, None) == 0)
attempt("remount", lambda: libc.mount(None, b"/usr", None, 32 | 4096, None) == 0)
attempt("umount", lambda: libc.umount2(b"/proc", 2) == 0)
attempt("unshare", lambda: libc.unshare(0x10000000) == 0)
attempt("setns", lambda: libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0) == 0)
attempt("chroot", lambda: os.chroot("."))
attempt("open_tree", lambda: syscall(428, -100, b"/", 1))
attempt("fsopen", lambda: syscall(430, b"tmpfs", 0))
attempt("bpf", lambda: syscall(321 if os.uname().machine == "x86_64" else 280, 0, None, 0))
attempt("keyring", lambda: syscall(250 if os.uname().machine == "x86_64" else 219, 0, -3, 0))
attempt("memory file", lambda: os.memfd_create("x"))
attempt("shared memory", lambda: libc.shmget(0, 4096, 0o1600) >= 0)
attempt("the kernel's log", lambda: libc.klogctl(3, ctypes.create_string_buffer(64), 64) >= 0)
attempt("host name", lambda: libc.sethostname(b"x", 1) == 0)
attempt("root of init", lambda: "rollflow-nowhere" in os.listdir("/proc/1/root") or not os.path.samefile("/proc/1/root", "/") )
attempt("all of proc", lambda: len([pid for pid in os.listdir("/proc") if pid.isdigit()]) > 8)
attempt("memory map", lambda: open("/proc/kcore", "rb").read(1))
"#;
    all_held(code, &[]);
}

#[test]
fn a_fork_bomb_is_a_few_processes_and_then_none() {
    let code = r#"
import time
attempt("forking without end", lambda: [os.fork() or time.sleep(60) for _ in range(200)])
while True:
    try: os.fork()
    except OSError: time.sleep(0.01)
"#;
    behind(code, &[], |ran, walls| assert_eq!(ran.ended, Ended::Overdue, "{walls}: {ran}"));
    let threads = "import threading, time\nattempt('threads', lambda: [threading.Thread(target=time.sleep, args=(60,), daemon=True).start() \
                   for _ in range(200)])\nos._exit(0)";
    all_held(threads, &[]);
}

#[test]
fn a_daemon_ends_with_who_started_it() {
    let code = r#"
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("daemon", flush=True)
            time.sleep(600)
        os._exit(0)
    return False
attempt("daemon", daemon)
time.sleep(0.3)
"#;
    behind(code, &[], |ran, walls| {
        assert!(ran.succeeded(), "{walls}: {ran}");
        assert_eq!(ran.text().contains("daemon\n"), walls == Walls::Namespaces, "{walls}: {ran:?}");
    });
}

#[test]
fn who_ignores_every_signal_ends_when_time_is_up() {
    let code = r#"
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(600)
print("BROKE")
"#;
    behind(code, &[], |ran, walls| assert_eq!(ran.ended, Ended::Overdue, "{walls}: {ran}"));
    for sandbox in walls() {
        let busy = Limits { cpu: Duration::from_secs(1), wall: Duration::from_secs(60), ..limits() };
        let busy = Job::python("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass").limits(busy);
        assert_eq!(sandbox.run(&busy).unwrap().ended, Ended::Overdue);
    }
}

#[test]
fn endless_output_is_cut_off_and_ends_its_program() {
    let code = "while True:\n    os.write(1, b'y' * 997)\n    os.write(2, b'n' * 991)";
    behind(code, &[], |ran, walls| {
        assert_eq!(ran.ended, Ended::TooMuchOutput, "{walls}: {ran}");
        assert_eq!((ran.stdout.len() + ran.stderr.len()) as u64, limits().output);
    });
}

#[test]
fn memory_is_bounded_for_one_process_and_for_all_together() {
    let code = r#"
import time
attempt("a gigabyte", lambda: bytearray(1 << 30))
for _ in range(3):
    try:
        if os.fork() == 0: break
    except OSError: pass
held = [bytearray(os.urandom(1 << 20) * 120)]
time.sleep(2)
print("together", flush=True)
"#;
    behind(code, &[], |ran, walls| match walls {
        Walls::Namespaces => assert_eq!(ran.ended, Ended::OutOfMemory, "{ran:?}"),
        _ => assert_eq!(ran.text().matches("together").count(), 1, "{ran:?}"),
    });
}

#[test]
fn the_disk_is_not_filled() {
    let code = r#"
def fill(folder):
    written = 0
    for at in range(5000):
        try:
            with open(f"{folder}/{at}", "wb") as file:
                for _ in range(64): written += file.write(bytes(1 << 16))
                file.flush()
        except OSError: break
    return written > (4 << 20)
for folder in [".", "/tmp", "/dev/shm", "/var/tmp", "/run"]:
    attempt(folder, lambda: fill(folder))
def sparse():
    with open("sparse", "wb") as file: file.truncate(1 << 40)
attempt("sparse", sparse)
print("held, all of it")
"#;
    all_held(code, &[]);
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
    assert_eq!(sandbox.isolation().walls, Walls::None);
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
    assert!(Program::python("python-that-is-nowhere").is_err());
    let wrong = Sandbox::new(SandboxConfig::new(Program::at("/bin/false", &[])));
    assert!(matches!(&wrong, Err(SandboxError::NoWalls(_))), "{wrong:?}");
    let right = Sandbox::new(SandboxConfig::new(Program::at("/bin/sh", &["-c", "true"]))).unwrap();
    assert_eq!(right.run(&Job::new(["-c", "echo $HOME$RUSTUP_HOME$CARGO_HOME"])).unwrap().stderr, b"");
    assert!(matches!(right.run(&Job::default().file("../x", "")), Err(SandboxError::FileName(_))));
}

fn judge() -> CodeJudge {
    CodeJudge::new(Sandbox::new(config()).unwrap())
}

fn asserts(tests: &[&str]) -> CodeTests {
    CodeTests::Asserts(tests.iter().map(|&test| test.to_owned()).collect())
}

#[test]
fn code_passes_the_tests_that_it_passes_and_is_told_what_failed_first() {
    let judge = judge();
    let tests = asserts(&["assert f(1) == 2", "assert f(-1) == 0", "x = f(2)\nassert x == 3, f'f(2) is {x}'"]);
    for (code, passed, complaint) in [
        ("def f(x): return x + 1", 3, None),
        ("print('hello')\ndef f(x): return 2", 1, Some("AssertionError")),
        ("def f(x): return x if x == 2 else x + 1", 2, Some("f(2) is 2")),
        ("def f(x): return y", 0, Some("NameError")),
        ("def f(x) return x", 0, Some("SyntaxError")),
        ("", 0, Some("NameError")),
        ("def f(x):\n    while x == 1: pass\n    return x + 1", 2, Some("too long")),
        ("x = '\\ud800'\ndef f(x): raise ValueError('\\ud800 \\n\\0')", 0, Some("ValueError")),
    ] {
        let verdict = judge.judge(code, &tests).unwrap();
        assert_eq!((verdict.passed, verdict.total), (passed, 3), "{code}: {verdict:?}");
        assert_eq!(verdict.complaint.is_some(), complaint.is_some());
        assert!(verdict.complaint.as_ref().is_none_or(|said| said.contains(complaint.unwrap())), "{code}: {verdict:?}");
    }
}

#[test]
fn code_that_leaves_early_or_says_that_it_passed_has_not() {
    let judge = judge();
    let tests = asserts(&["assert f() == 1", "assert f() == 1"]);
    for code in [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "def f(): import os; os._exit(0)",
        "print('0 passed\\n1 passed')\nfor at in range(2): print('%032x %d passed' % (0, at))",
        "import builtins, sys\nbuiltins.exec = builtins.compile = lambda *_: None",
        "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(60)",
        "import sys\nsys.stdout.write = lambda *_: 1\nraise KeyboardInterrupt",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()",
    ] {
        let verdict = judge.judge(code, &tests).unwrap();
        assert_eq!(verdict.passed, 0, "{code}: {verdict:?}");
    }
}

#[test]
fn programs_are_compared_by_what_they_print() {
    let judge = judge();
    let pairs = [("1 2\n", "3"), ("5 5", "10\n"), ("0 0", "0")].map(|(input, output)| (input.to_owned(), output.to_owned()));
    let tests = CodeTests::Pairs(pairs.to_vec());
    for (code, passed) in [
        ("print(sum(map(int, input().split())), ' ')", 3),
        ("a, b = map(int, input().split())\nprint(a + b if a else 'zero')", 2),
        ("print(3)\nexit(1)", 0),
        ("print(3); print(3)", 0),
        ("if __name__ == '__main__': print(3)", 1),
    ] {
        assert_eq!(judge.judge(code, &tests).unwrap().passed, passed, "{code}");
    }
}

#[test]
fn the_same_code_is_run_once_for_the_same_tests() {
    let judge = judge();
    // No two runs of it come to the same.
    let tests = CodeTests::Asserts((0..40).map(|_| "import random\nassert random.random() < 0.5".to_owned()).collect());
    let first = judge.judge("x = 1", &tests).unwrap();
    std::thread::scope(|scope| {
        let again: Vec<_> = (0..8).map(|_| scope.spawn(|| judge.judge("x = 1", &tests).unwrap())).collect();
        again.into_iter().for_each(|judged| assert_eq!(judged.join().unwrap(), first));
    });
    let others: Vec<_> = (2..6).map(|at| judge.judge(&format!("x = {at}"), &tests).unwrap().passed).collect();
    assert!(others.iter().any(|passed| *passed != first.passed), "{first:?} {others:?}");
}

#[test]
fn a_reward_is_the_share_of_tests_or_all_of_them_and_names_what_is_missing() {
    let reward = CodeReward::new(Sandbox::new(config()).unwrap()).template("def f(x):\n    return {code}\n# {prompt}");
    let sample = |response: &str, tests: serde_json::Value| {
        let metadata = [("tests".to_owned(), tests)].into_iter().collect();
        Sample { response: response.to_owned(), prompt: "add {code}".into(), metadata, ..Sample::default() }
    };
    let tests = serde_json::json!(["assert f(1) == 2", "assert f(2) == 4"]);
    assert_eq!(reward.reward(&sample("```python\nx * 2\n```", tests.clone())), Ok(1.0));
    assert_eq!(reward.reward(&sample("x + 1", tests.clone())), Ok(0.5));
    assert_eq!(reward.clone().score(CodeScore::All).reward(&sample("x + 1", tests.clone())), Ok(0.0));
    assert!(reward.reward(&sample("x", serde_json::json!(7))).unwrap_err().contains("no tests"));
    assert!(reward.reward(&Sample::default()).unwrap_err().contains("metadata[\"tests\"]"));
}

#[test]
fn a_model_tries_code_out_reads_what_it_printed_and_is_graded_by_tests() {
    let make = PythonEnvironment::maker(Arc::new(judge()), "tests");
    let metadata = [("tests".to_owned(), serde_json::json!(["assert f(2) == 4", "assert f(3) == 9"]))].into_iter().collect();
    let episode = Episode { prompt: Prompt { text: "Square x.".into(), metadata, ..Prompt::default() }, ..Episode::default() };
    let deadline = Deadline::within(Duration::from_secs(60));
    let mut env = make();
    assert_eq!(env.reset(&episode, deadline).unwrap()[0].content, "Square x.");
    assert_eq!(env.tools()[0].name, "python");
    let call = |code: &str| {
        let arguments = [("code".to_owned(), code.into())].into_iter().collect();
        Action { calls: vec![ToolCall::new("python", arguments)], ..Action::default() }
    };
    let result = |env: &mut Box<dyn Environment>, code: &str| env.step(&call(code), deadline).unwrap().results.remove(0);
    let printed = result(&mut env, "print(3 ** 2)");
    assert_eq!((printed.content.as_str(), printed.success), ("9\n", true));
    let failed = result(&mut env, "print(1)\n1 / 0");
    assert!(!failed.success && failed.content.contains("1\n") && failed.content.contains("ZeroDivisionError"), "{failed:?}");
    let long = result(&mut env, "print('y' * 100 + 'n' * 12000)");
    assert!(long.content.starts_with("yyy") && long.content.len() < 5000, "{long:?}");
    let slow = env.step(&call("while True: pass"), Deadline::within(Duration::from_secs(1))).unwrap();
    assert!(slow.results[0].content.contains("time was up"), "{slow:?}");
    assert!(env.step(&Action { malformed: 1, ..Action::default() }, deadline).unwrap().results.is_empty());
    let answer = Action { text: "So:\n```python\ndef f(x): return 2 * x\n```".to_owned(), ..Action::default() };
    assert!(env.step(&answer, deadline).unwrap().done);
    // It goes on elsewhere from what was saved.
    let saved = env.save().unwrap();
    let mut other = make();
    other.reset(&episode, deadline).unwrap();
    assert_eq!(other.grade(deadline).unwrap(), Grade::correct(false));
    other.restore(&saved).unwrap();
    let grade = other.grade(deadline).unwrap();
    assert_eq!((grade.reward, grade.correct, &grade.metadata["tests_passed"]), (0.5, Some(false), &serde_json::json!(1)));
}
