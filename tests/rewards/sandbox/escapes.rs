//! Ways out: our files, variables and descriptors, the network, other processes, the file system outside, the kernel.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command};

use rollflow::sandbox::{Sandbox, SandboxConfig, Walls};

use super::{all_held, behind};

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
fn its_environment_is_the_one_that_the_page_lists() {
    let code = r#"
named = {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH"}
attempt("another variable", lambda: bool(set(os.environ) - named))
attempt("another home", lambda: not os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd() == os.path.expanduser("~"))
"#;
    behind(code, &[], |ran, walls| assert!(ran.succeeded(), "{walls}: {ran}"));
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
attempt("pair of another family", lambda: socket.socketpair(30, socket.SOCK_STREAM))
attempt("pair of packets", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
attempt("address for a pair", lambda: socket.socketpair()[0].bind("x") or True)
attempt("another end for a pair", lambda: socket.socketpair()[0].connect("x") or True)
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
    def sigio_of_a_socket():
        import socket, struct
        left, right = socket.socketpair()
        fcntl.ioctl(left, 0x8901, struct.pack("i", pid))
        return fcntl.fcntl(left, 9) == pid
    attempt("SIGIO of a socket", sigio_of_a_socket)
    attempt("another signal for SIGIO", lambda: fcntl.fcntl(os.pipe()[0], 10, 9))
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

/// Where an ordinary user runs the tests without namespaces, a program runs as that user, whose files permissions do not protect. A
/// pipe belongs to the program whoever runs it.
#[test]
fn a_confined_program_changes_no_file_that_its_own_user_may_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.bin");
    std::fs::write(&file, "weights").unwrap();
    let before = std::fs::metadata(&file).unwrap();
    let code = r#"
confined = os.getcwd() != "/work"
read, write = os.pipe()
for name, own in [("file", sys.argv[1])] + [("pipe", read)] * confined:
    attempt(name + " permissions", lambda: os.chmod(own, 0o666))
    attempt(name + " times", lambda: os.utime(own))
    attempt(name + " owner", lambda: os.chown(own, -1, -1))
    attempt(name + " attribute", lambda: os.setxattr(own, "user.x", b"x"))
    attempt(name + " length", lambda: os.truncate(own, 0))
attempt("newer permissions", lambda: syscall(452, -100, sys.argv[1].encode(), 0o666, 0))
if confined:
    attempt("emptying by opening", lambda: os.open("main.py", os.O_RDONLY | os.O_TRUNC))
    import fcntl
    attempt("locking", lambda: fcntl.flock(open(os.__file__), fcntl.LOCK_EX))
"#;
    all_held(code, &[&file.display().to_string()]);
    let after = std::fs::metadata(&file).unwrap();
    assert_eq!((after.permissions(), after.len()), (before.permissions(), before.len()));
    assert_eq!(after.modified().unwrap(), before.modified().unwrap());
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
def is_permitted(function, *arguments):
    return function(*arguments) != -1 or ctypes.get_errno() not in (1, 13)
for name in "shmctl", "msgsnd", "msgrcv", "msgctl", "semop", "semtimedop", "semctl":
    attempt(name, lambda: is_permitted(libc[name], 0, 0, 0, 0, 0))
attempt("a queue's name", lambda: is_permitted(ctypes.CDLL("librt.so.1", use_errno=True).mq_unlink, b"/rollflow-nowhere"))
attempt("huge pages in pipes", lambda: is_permitted(libc.vmsplice, os.pipe()[1], None, 0, 0))
attempt("queues of events", lambda: is_permitted(libc.inotify_init1, 0))
attempt("the kernel's log", lambda: libc.klogctl(3, ctypes.create_string_buffer(64), 64) >= 0)
attempt("host name", lambda: libc.sethostname(b"x", 1) == 0)
attempt("root of init", lambda: "rollflow-nowhere" in os.listdir("/proc/1/root") or not os.path.samefile("/proc/1/root", "/") )
attempt("all of proc", lambda: len([pid for pid in os.listdir("/proc") if pid.isdigit()]) > 8)
attempt("memory map", lambda: open("/proc/kcore", "rb").read(1))
"#;
    all_held(code, &[]);
}

/// Root has another user run programs, who may not read root's own folders. An ordinary user's programs run as that user.
#[test]
fn a_program_that_the_sandbox_s_user_may_not_read_is_named_with_what_to_do() {
    let private = tempfile::tempdir().unwrap();
    let path = private.path().join("true");
    std::fs::copy("/bin/true", &path).unwrap();
    std::fs::set_permissions(private.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let config = SandboxConfig { walls: Some(Walls::Confined), ..SandboxConfig::program(&path, &[]) };
    let error = Sandbox::new(config).err().map_or_else(String::new, |error| error.to_string());
    let told = error.contains(path.to_str().unwrap()) && error.contains("install the program where all users may read it");
    assert_eq!(told, rustix::process::geteuid().is_root(), "{error}");
}
