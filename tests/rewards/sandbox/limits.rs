//! More than there is: processes, time, output, memory, disk.

use std::time::Duration;

use rollflow::sandbox::{Ended, Job, Limits, Walls};

use super::{all_held, behind, brief, limits, walls, within};

#[test]
fn a_fork_bomb_is_a_few_processes_and_then_none() {
    let code = r#"
import time
attempt("forking without end", lambda: [os.fork() or time.sleep(60) for _ in range(200)])
while True:
    try: os.fork()
    except OSError: time.sleep(0.01)
"#;
    within(brief(), code, &[], |ran, walls| assert_eq!(ran.ended, Ended::Overdue, "{walls}: {ran}"));
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
    within(brief(), code, &[], |ran, walls| assert_eq!(ran.ended, Ended::Overdue, "{walls}: {ran}"));
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
import mmap, time
attempt("a gigabyte", lambda: bytearray(1 << 30))
for _ in range(3):
    try:
        if os.fork() == 0: break
    except OSError: pass
HOLD
time.sleep(2)
print("together", flush=True)
"#;
    let shared = "held = mmap.mmap(-1, 120 << 20)\nfor _ in range(120): held.write(bytes(1 << 20))";
    for hold in ["held = [bytearray(os.urandom(1 << 20)) * 120]", shared] {
        behind(&code.replace("HOLD", hold), &[], |ran, walls| match walls {
            Walls::Namespaces => assert_eq!(ran.ended, Ended::OutOfMemory, "{ran:?}"),
            _ => assert_eq!(ran.text().matches("together").count(), 1, "{ran:?}"),
        });
    }
}

/// Memory that the kernel holds for sockets and pipes counts for no process.
#[test]
fn sockets_and_pipes_are_few_and_their_buffers_do_not_grow() {
    let code = r#"
import fcntl, socket
attempt("a gigabyte to send", lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30))
attempt("a gigabyte to receive", lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30))
attempt("a mebibyte in a pipe", lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20))
attempt("many descriptors", lambda: [os.dup(0) for _ in range(64)])
"#;
    all_held(code, &[]);
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
